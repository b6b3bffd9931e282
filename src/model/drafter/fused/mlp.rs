//! SwiGLU MLP after its first product: `y = (silu(gate) up) W^T`, some slots at a time, so that intermediate results
//! stay in the cache.

use super::products::product;
use super::weights::LayerWeights;
use crate::model::ModelError;
use crate::model::ops::{spans, wide};
use draftmill_torch_ext::row_kernels;
use tch::Tensor;

/// Slots per chunk.
const SLOTS: usize = 2048;

/// Gradients of the input `[slots, hidden]` and of the weights.
pub struct MlpGrads {
    pub inner: Tensor,
    pub gate_up: Tensor,
    pub down: Tensor,
}

/// `[slots, hidden]` from `gate_up [slots, 2 * intermediate]`.
pub fn forward(gate_up: &Tensor, down: &Tensor) -> Result<Tensor, ModelError> {
    let (slots, down) = (gate_up.size()[0], down.f_transpose(0, 1)?);
    let out = Tensor::f_empty([slots, down.size()[1]], (gate_up.f_kind()?, gate_up.device()))?;
    for part in spans(slots, SLOTS) {
        let _ = swiglu(&part.of(gate_up, 0)?)?.f_mm_out(&part.of(&out, 0)?, &down)?;
    }
    Ok(out)
}

/// Gradients from that of `y`; `inner` is the input from which `gate_up` was computed.
pub fn backward(d_out: &Tensor, gate_up: &Tensor, inner: &Tensor, w: &LayerWeights) -> Result<MlpGrads, ModelError> {
    let kind = gate_up.f_kind()?;
    let zeros = |like: &Tensor| Tensor::f_zeros(like.size(), (wide(kind), like.device()));
    let mut grads = MlpGrads { inner: inner.f_empty_like()?, gate_up: zeros(&w.gate_up)?, down: zeros(&w.down)? };
    for part in spans(gate_up.size()[0], SLOTS) {
        let (d_out, gate_up) = (part.of(d_out, 0)?, part.of(gate_up, 0)?);
        let (swiglu, d_gate_up) = swiglu_backward(&d_out.f_mm(&w.down)?, &gate_up)?;
        add_product(&mut grads.down, &d_out, &swiglu)?;
        add_product(&mut grads.gate_up, &d_gate_up, &part.of(inner, 0)?)?;
        let _ = d_gate_up.f_mm_out(&part.of(&grads.inner, 0)?, &w.gate_up)?;
    }
    Ok(grads)
}

/// `silu(gate) up`.
fn swiglu(gate_up: &Tensor) -> Result<Tensor, ModelError> {
    if let Some(done) = row_kernels::swiglu(gate_up)? {
        return Ok(done);
    }
    let (gate, up) = halves(gate_up)?;
    Ok(gate.f_silu()?.f_mul_(&up)?)
}

/// Recomputes `silu(gate) up`, and returns the gradient of `gate_up` as well.
fn swiglu_backward(d_gated: &Tensor, gate_up: &Tensor) -> Result<(Tensor, Tensor), ModelError> {
    if let Some(done) = row_kernels::swiglu_backward(d_gated, gate_up)? {
        return Ok(done);
    }
    let (gate, up) = halves(gate_up)?;
    let opened = gate.f_silu()?;
    let d_gate_up = gate_up.f_empty_like()?;
    let (d_gate, d_up) = halves(&d_gate_up)?;
    let _ = d_gated.f_mul_out(&d_up, &opened)?;
    let _ = gate.f_silu_backward_grad_input(&d_gate, &d_gated.f_mul(&up)?)?;
    Ok((opened.f_mul(&up)?, d_gate_up))
}

/// Gate and up.
fn halves(x: &Tensor) -> Result<(Tensor, Tensor), ModelError> {
    let half = x.size()[1] / 2;
    Ok((x.f_narrow(1, 0, half)?, x.f_narrow(1, half, half)?))
}

/// Adds `dy^T x` to a sum in at least fp32.
fn add_product(sum: &mut Tensor, dy: &Tensor, x: &Tensor) -> Result<(), ModelError> {
    let _ = match sum.f_kind()? == x.f_kind()? {
        true => sum.f_addmm_(&dy.f_transpose(0, 1)?, x)?,
        false => sum.f_add_(&product(dy, x)?)?,
    };
    Ok(())
}
