//! Cross-entropy behind a frozen head, with its gradient made in the same pass.

use super::ModelError;
use tch::{Kind, Tensor};

/// What the head says of some hidden states.
pub struct HeadLoss {
    /// Gradient of the sum of `weight * loss` with respect to the hidden states, `[slots, hidden]` in fp32.
    pub gradient: Tensor,
    /// Cross-entropy of each slot in nats, `[slots]` in fp32.
    pub losses: Tensor,
    /// Most likely token of each slot, `[slots]`.
    pub predicted: Tensor,
}

/// Cross-entropy of `hidden [slots, D]` against `labels [slots]` behind `head [V, D]`, `rows` slots at a time: logits of
/// more slots are never held, and nothing is kept for a backward pass. The gradient of one slot is
/// `weight * (softmax - onehot) W`. Grad mode must be off.
pub fn head_loss(
    hidden: &Tensor,
    head: &Tensor,
    labels: &Tensor,
    weights: &Tensor,
    rows: i64,
) -> Result<HeadLoss, ModelError> {
    let slots = hidden.size()[0];
    let transposed = head.f_transpose(0, 1)?;
    let (mut gradient, mut losses, mut predicted) = (Vec::new(), Vec::new(), Vec::new());
    for start in (0..slots).step_by(rows.max(1) as usize) {
        let part = |x: &Tensor| x.f_narrow(0, start, rows.max(1).min(slots - start));
        let (label, weight) = (part(labels)?.f_unsqueeze(1)?, part(weights)?.f_unsqueeze(1)?);
        let mut scores = part(hidden)?.f_mm(&transposed)?.f_to_kind(Kind::Float)?;
        let (most, best) = scores.f_max_dim(1, true)?;
        let of_label = scores.f_gather(1, &label, false)?;
        // From here on `scores` is written in place: shifted, exponentials, then weighted softmax minus one-hot.
        let _ = scores.f_sub_(&most)?.f_exp_()?;
        let sum = scores.f_sum_dim_intlist(&[1i64][..], true, Kind::Float)?;
        losses.push(sum.f_log()?.f_add(&most)?.f_sub(&of_label)?.f_squeeze_dim(1)?);
        predicted.push(best.f_squeeze_dim(1)?);
        let _ = scores.f_mul_(&weight.f_div(&sum)?)?.f_scatter_add_(1, &label, &weight.f_neg()?)?;
        gradient.push(scores.f_to_kind(head.f_kind()?)?.f_mm(head)?.f_to_kind(Kind::Float)?);
    }
    Ok(HeadLoss {
        gradient: Tensor::f_cat(&gradient, 0)?,
        losses: Tensor::f_cat(&losses, 0)?,
        predicted: Tensor::f_cat(&predicted, 0)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Device;

    /// Whatever the chunk, the numbers are those of autograd over log-softmax.
    #[test]
    fn losses_and_gradient_match_autograd_for_any_chunk() {
        let options = (Kind::Float, Device::Cpu);
        let hidden = (Tensor::arange(7 * 5, options) * 0.7).sin().reshape([7, 5]).set_requires_grad(true);
        let head = (Tensor::arange(11 * 5, options) * 1.3).cos().reshape([11, 5]);
        let labels = Tensor::from_slice(&[0i64, 10, 3, 3, 7, 1, 9]);
        let weights = Tensor::from_slice(&[1.0f32, 0.5, 0.25, 2.0, 1.0, 0.125, 3.0]);
        let losses = -hidden.linear(&head, None::<Tensor>).log_softmax(-1, Kind::Float);
        let losses = losses.gather(1, &labels.unsqueeze(1), false).squeeze_dim(1);
        (&losses * &weights).sum(Kind::Float).backward();
        let _guard = tch::no_grad_guard();
        for rows in [1, 2, 3, 7, 100] {
            let got = head_loss(&hidden.detach(), &head, &labels, &weights, rows).unwrap();
            assert!(got.losses.allclose(&losses.detach(), 1e-5, 1e-6, false), "{rows}");
            assert!(got.gradient.allclose(&hidden.grad(), 1e-5, 1e-6, false), "{rows}");
            let best = hidden.linear(&head, None::<Tensor>).argmax(-1, false);
            assert_eq!(got.predicted, best, "{rows}");
        }
    }

    #[test]
    fn huge_logits_stay_finite() {
        let hidden = Tensor::from_slice(&[3e4f32, -3e4]).reshape([2, 1]);
        let head = Tensor::from_slice(&[1.0f32, -1.0, 0.0]).reshape([3, 1]);
        let labels = Tensor::from_slice(&[0i64, 0]);
        let weights = Tensor::ones([2], (Kind::Float, Device::Cpu));
        let got = head_loss(&hidden, &head, &labels, &weights, 8).unwrap();
        assert_eq!(Vec::<f32>::try_from(got.losses).unwrap(), [0.0, 6e4]);
        assert_eq!(i64::try_from(got.gradient.isfinite().all()).unwrap(), 1);
    }
}
