//! Tensor operations of target and drafter, in fallible form.

use super::ModelError;
use draftmill_torch_ext::row_kernels;
use tch::{Device, Kind, Tensor};

/// Value of a masked score: large but finite, so that a fully masked row gives no NaN.
pub const MASKED: f64 = -1e9;

/// Limit on rows whose logits are in memory at once without gradients; all logits could exceed every other tensor.
pub const HEAD_ROWS: usize = 256;

/// Contiguous range of indices of a dimension.
#[derive(Clone, Copy)]
pub struct Span {
    pub start: i64,
    pub len: i64,
}

impl Span {
    /// Narrows `x` to this range, as a view.
    ///
    /// # Errors
    /// Returns an error if the range is out of bounds.
    pub fn of(&self, x: &Tensor, dim: i64) -> Result<Tensor, ModelError> {
        Ok(x.f_narrow(dim, self.start, self.len)?)
    }
}

/// Splits `0..count` into ranges of at most `limit` indices, in order.
pub fn spans(count: i64, limit: usize) -> impl Iterator<Item = Span> {
    let limit = limit.max(1);
    (0..count).step_by(limit).map(move |start| Span { start, len: (limit as i64).min(count - start) })
}

/// Enables grad mode until dropped. Every differentiating job sets it at its start, because a blocking thread keeps the
/// mode of its last job.
pub struct GradGuard {
    before: bool,
}

impl GradGuard {
    pub fn enable() -> GradGuard {
        // SAFETY: sets a thread-local flag of libtorch and returns its previous value.
        GradGuard { before: unsafe { torch_sys::at_grad_set_enabled(1) } != 0 }
    }
}

impl Drop for GradGuard {
    fn drop(&mut self) {
        // SAFETY: as above.
        unsafe { torch_sys::at_grad_set_enabled(self.before.into()) };
    }
}

/// Dtype of statistics and sums: fp32, or fp64 for tests that compute in fp64.
pub fn wide(kind: Kind) -> Kind {
    if kind == Kind::Double { kind } else { Kind::Float }
}

/// RMS norm over the last dimension as in Qwen3 and Llama: statistics in at least fp32, weight applied after the cast
/// back.
///
/// # Errors
/// Returns an error if libtorch fails.
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor, ModelError> {
    let accurate = x.f_to_kind(wide(x.f_kind()?))?;
    let mean = accurate.f_square()?.f_mean_dim(&[-1i64][..], true, accurate.f_kind()?)?;
    let unit = accurate.f_mul(&mean.f_add_scalar(eps)?.f_rsqrt()?)?;
    Ok(unit.f_to_kind(x.f_kind()?)?.f_mul(weight)?)
}

/// `x W^T + b`; `W` is `[out, in]`.
///
/// # Errors
/// Returns an error if libtorch fails.
pub fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor, ModelError> {
    Ok(x.f_linear(weight, bias)?)
}

/// Index of the largest value of each row, the first one of equals. Uses `max`: libtorch's `argmax` takes three times
/// as long on CPUs.
///
/// # Errors
/// Returns an error if libtorch fails.
pub fn argmax(x: &Tensor) -> Result<Tensor, ModelError> {
    Ok(x.f_max_dim(-1, false)?.1)
}

/// Online softmax step, in place: see [`row_kernels::online_softmax`].
///
/// # Errors
/// Returns an error if libtorch fails.
pub fn online_softmax(scores: &mut Tensor, max: &mut Tensor, sum: &mut Tensor) -> Result<Tensor, ModelError> {
    if let Some(rescale) = row_kernels::online_softmax(scores, max, sum)? {
        return Ok(rescale);
    }
    let larger = max.f_maximum(&scores.f_amax(&[-1i64][..], true)?)?;
    let rescale = max.f_sub(&larger)?.f_exp_()?;
    let _ = scores.f_sub_(&larger)?.f_exp_()?;
    let _ = sum.f_mul_(&rescale)?.f_add_(&scores.f_sum_dim_intlist(&[-1i64][..], true, sum.f_kind()?)?)?;
    *max = larger;
    Ok(rescale)
}

/// Turns scores into weights and gradients of weights into gradients of scores, in place: see
/// [`row_kernels::softmax_backward`].
///
/// # Errors
/// Returns an error if libtorch fails.
pub fn softmax_backward(
    scores: &mut Tensor,
    d_weights: &mut Tensor,
    log_sum: &Tensor,
    delta: &Tensor,
) -> Result<(), ModelError> {
    if !row_kernels::softmax_backward(scores, d_weights, log_sum, delta)? {
        let _ = scores.f_sub_(log_sum)?.f_exp_()?;
        let _ = d_weights.f_sub_(delta)?.f_mul_(scores)?;
    }
    Ok(())
}

/// Attention of `q [B, heads, Lq, head_dim]` over `k`, `v [B, kv_heads, Lk, head_dim]`. Each key/value head serves
/// `heads / kv_heads` query heads. `mask` is additive and broadcasts to `[B, heads, Lq, Lk]`.
///
/// # Errors
/// Returns an error if libtorch fails.
pub fn attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    mask: Option<&Tensor>,
    causal: bool,
) -> Result<Tensor, ModelError> {
    let grouped = q.size()[1] != k.size()[1];
    // On CUDA, only kernels without a mask support shared key/value heads. With a mask, libtorch would fall back to
    // plain operations, which store every score.
    if grouped && mask.is_some() && q.device() != Device::Cpu {
        let (k, v) = (repeat_heads(k, q.size()[1])?, repeat_heads(v, q.size()[1])?);
        return Ok(Tensor::f_scaled_dot_product_attention(q, &k, &v, mask, 0.0, causal, None, false)?);
    }
    Ok(Tensor::f_scaled_dot_product_attention(q, k, v, mask, 0.0, causal, None, grouped)?)
}

/// Repeats heads: `[B, kv_heads, L, D]` to `[B, heads, L, D]`, copies of a head next to each other.
fn repeat_heads(x: &Tensor, heads: i64) -> Result<Tensor, ModelError> {
    let size = x.size();
    let (batch, kv_heads, len, dim) = (size[0], size[1], size[2], size[3]);
    let spread = x.f_unsqueeze(2)?.f_expand([batch, kv_heads, heads / kv_heads, len, dim], true)?;
    Ok(spread.f_reshape([batch, heads, len, dim])?)
}

/// Additive mask: zero if `allowed`, else [`MASKED`].
///
/// # Errors
/// Returns an error if libtorch fails.
pub fn additive_mask(allowed: &Tensor, kind: Kind) -> Result<Tensor, ModelError> {
    let zeros = Tensor::f_zeros(allowed.size(), (kind, allowed.device()))?;
    Ok(zeros.f_masked_fill(&allowed.f_logical_not()?, MASKED)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_heads_match_shared_heads() {
        let options = (Kind::Float, Device::Cpu);
        let q = Tensor::arange(2 * 4 * 3 * 8, options).sin().reshape([2, 4, 3, 8]);
        let k = Tensor::arange(2 * 2 * 5 * 8, options).cos().reshape([2, 2, 5, 8]);
        let v = Tensor::arange(2 * 2 * 5 * 8, options).sin().reshape([2, 2, 5, 8]);
        let shared = attention(&q, &k, &v, None, false).unwrap();
        let repeated = attention(&q, &repeat_heads(&k, 4).unwrap(), &repeat_heads(&v, 4).unwrap(), None, false);
        assert!(shared.allclose(&repeated.unwrap(), 1e-6, 1e-6, false));
    }

    /// Automodel#2826: rows without a visible key became NaN.
    #[test]
    fn automodel_2826_a_fully_masked_row_stays_finite() {
        for kind in [Kind::Float, Kind::BFloat16] {
            let q = Tensor::ones([1, 2, 3, 8], (kind, Device::Cpu));
            let allowed = Tensor::zeros([3, 4], (Kind::Bool, Device::Cpu));
            let mask = additive_mask(&allowed, kind).unwrap().unsqueeze(0).unsqueeze(0);
            let k = Tensor::ones([1, 1, 4, 8], (kind, Device::Cpu));
            let out = attention(&q, &k, &k, Some(&mask), false).unwrap();
            assert_eq!(i64::try_from(out.isfinite().all()).unwrap(), 1, "{kind:?}");
        }
    }

    /// speculators#686 and #691: a boolean mask was added to the scores as 0 and 1, so it masked nothing.
    #[test]
    fn speculators_686_masked_keys_have_no_weight() {
        let options = (Kind::Float, Device::Cpu);
        let q = Tensor::arange(2 * 3 * 8, options).sin().reshape([1, 2, 3, 8]);
        let k = Tensor::arange(2 * 5 * 8, options).cos().reshape([1, 2, 5, 8]);
        let v = Tensor::arange(2 * 5 * 8, options).sin().reshape([1, 2, 5, 8]);
        let allowed = Tensor::from_slice(&[true, true, true, false, false]).reshape([1, 1, 1, 5]);
        let mask = additive_mask(&allowed.expand([1, 1, 3, 5], false), Kind::Float).unwrap();
        let masked = attention(&q, &k, &v, Some(&mask), false).unwrap();
        let alone = attention(&q, &k.narrow(2, 0, 3), &v.narrow(2, 0, 3), None, false).unwrap();
        assert!(masked.allclose(&alone, 1e-6, 1e-6, false));
    }

    #[test]
    fn the_guard_sets_and_restores_grad_mode() {
        let _off = tch::no_grad_guard();
        let tracked = || (Tensor::ones([1], (Kind::Float, Device::Cpu)).set_requires_grad(true) * 2.0).requires_grad();
        assert!(!tracked());
        {
            let _on = GradGuard::enable();
            assert!(tracked());
        }
        assert!(!tracked());
    }
}
