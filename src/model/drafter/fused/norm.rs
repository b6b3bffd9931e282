//! RMS norm with its gradient: `y = x r w` with `r = 1 / sqrt(mean(x^2) + eps)` over the last dimension.

use crate::model::ModelError;
use crate::model::ops::wide;
use draftmill_torch_ext::row_kernels;
use tch::Tensor;

/// `y` in the dtype of `x`, and `r [.., 1]` in at least fp32.
pub fn forward(x: &Tensor, weight: &Tensor, eps: f64) -> Result<(Tensor, Tensor), ModelError> {
    if let Some(done) = row_kernels::rms_norm(x, weight, eps)? {
        return Ok(done);
    }
    let exact = wide(x.f_kind()?);
    let width = x.size().last().copied().unwrap_or(1) as f64;
    let length = x.f_to_kind(exact)?.f_norm_scalaropt_dim_dtype(2.0, &[-1i64][..], true, exact)?;
    let scale = length.f_square()?.f_mul_scalar_(1.0 / width)?.f_add_scalar_(eps)?.f_rsqrt_()?;
    Ok((apply(x, &scale, weight)?, scale))
}

/// `y` from a known `r`.
pub fn apply(x: &Tensor, scale: &Tensor, weight: &Tensor) -> Result<Tensor, ModelError> {
    if let Some(done) = row_kernels::rms_norm_from_scale(x, scale, weight)? {
        return Ok(done);
    }
    let mut unit = x.f_to_kind(scale.f_kind()?)?.f_mul(scale)?.f_to_kind(x.f_kind()?)?;
    Ok(unit.f_mul_(weight)?)
}

/// Gradients of `x` and of the weight from that of `y`, in at least fp32. With `u = x r`: `dx = r (dy w - u mean(dy w
/// u))`, `dw = sum(dy u)`.
pub fn backward(dy: &Tensor, x: &Tensor, scale: &Tensor, weight: &Tensor) -> Result<(Tensor, Tensor), ModelError> {
    let dx = Tensor::f_empty(x.size(), (scale.f_kind()?, x.device()))?;
    match row_kernels::rms_norm_backward(dy, x, scale, weight, &dx)? {
        Some(d_weight) => Ok((dx, d_weight)),
        None => unfused(dy, x, scale, weight),
    }
}

/// Writes the gradient of `x` to `dx`, in its dtype and layout, and returns that of the weight.
pub fn backward_to(
    dx: &Tensor,
    dy: &Tensor,
    x: &Tensor,
    scale: &Tensor,
    weight: &Tensor,
) -> Result<Tensor, ModelError> {
    if let Some(d_weight) = row_kernels::rms_norm_backward(dy, x, scale, weight, dx)? {
        return Ok(d_weight);
    }
    let (gradient, d_weight) = unfused(dy, x, scale, weight)?;
    dx.shallow_clone().f_copy_(&gradient)?;
    Ok(d_weight)
}

fn unfused(dy: &Tensor, x: &Tensor, scale: &Tensor, weight: &Tensor) -> Result<(Tensor, Tensor), ModelError> {
    let exact = scale.f_kind()?;
    let (dy, weight) = (dy.f_to_kind(exact)?, weight.f_to_kind(exact)?);
    let mut unit = x.f_to_kind(exact)?.f_mul(scale)?;
    let product = dy.f_mul(&unit)?;
    let width = weight.size()[0];
    let d_weight = product.f_reshape([-1, width])?.f_sum_dim_intlist(&[0i64][..], false, exact)?;
    let mean = product.f_matmul(&weight)?.f_mul_scalar_(1.0 / width as f64)?.f_unsqueeze(-1)?;
    let dx = dy.f_mul(&weight)?.f_sub_(&unit.f_mul_(&mean)?)?.f_mul_(scale)?;
    Ok((dx, d_weight))
}
