//! Weight of each trained slot of a block in the loss.

use crate::model::ModelError;
use crate::model::ops::wide;
use tch::Tensor;

/// Slot weighting of the loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Weighting {
    /// `exp(-max(j - 1, 0) / gamma)` by distance from the anchor; `None` or 0 gives equal weights.
    Decay(Option<f64>),
    /// D-PACE (arXiv:2605.18810) with this `alpha`: weight by the expected contribution of a slot to accepted tokens.
    DPace(f64),
}

impl Weighting {
    /// Gamma of the decay, which is known before the loss; `None` for D-PACE.
    pub fn gamma(&self) -> Option<f64> {
        match self {
            Weighting::Decay(gamma) => *gamma,
            Weighting::DPace(_) => None,
        }
    }
}

/// D-PACE weight of every trained slot, `[slots]` (`docs/dflash.md#d-pace`). `losses [slots]` are the cross-entropies
/// of the first labels; slot `j` of block `n` has the index `n * block_size + j`.
///
/// With `q = exp(-loss)` and `s = (1 - alpha) q + alpha`, or 1 for a slot that is not trained, the first `j` slots are
/// accepted with probability of about `C_j = s_1 ... s_j`. A slot weighs the sum of `C_m` over the trained slots `m >=
/// j`.
///
/// # Errors
/// Returns an error if libtorch fails.
pub fn d_pace(losses: &Tensor, indices: &Tensor, block_size: i64, alpha: f64) -> Result<Tensor, ModelError> {
    let (kind, device) = (wide(losses.f_kind()?), losses.device());
    let blocks = match losses.numel() {
        0 => return Ok(losses.shallow_clone()),
        _ => indices.f_max()?.f_int64_value(&[])? / block_size + 1,
    };
    let slots = |value: f64| Tensor::f_full([blocks * block_size], value, (kind, device));
    let acceptance = losses.f_neg()?.f_exp()?.f_mul_scalar(1.0 - alpha)?.f_add_scalar(alpha)?.f_to_kind(kind)?;
    let trained = slots(0.0)?.f_index_fill_(0, indices, 1.0)?;
    let accepted =
        slots(1.0)?.f_index_copy_(0, indices, &acceptance)?.f_view([blocks, block_size])?.f_cumprod(1, kind)?;
    let worth = accepted.f_mul(&trained.f_view([blocks, block_size])?)?;
    let after = worth.f_flip([1])?.f_cumsum(1, kind)?.f_flip([1])?;
    Ok(after.f_reshape([-1])?.f_index_select(0, indices)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tch::{Device, Kind};

    proptest! {
        /// Matches the definition, block by block and slot by slot.
        #[test]
        fn d_pace_weights_match_the_definition(
            blocks in prop::collection::vec(prop::collection::vec(prop::option::of(0.0f64..9.0), 4), 1..6), alpha in 0.0f64..1.0,
        ) {
            let (mut losses, mut indices, mut want) = (Vec::new(), Vec::new(), Vec::new());
            for (block, slots) in blocks.iter().enumerate() {
                // Slot 0 is the anchor, which is never trained.
                let mut accepted = 1.0;
                let worth: Vec<f64> = slots.iter().skip(1).map(|loss| match loss {
                    Some(loss) => { accepted *= (1.0 - alpha) * (-loss).exp() + alpha; accepted }
                    None => 0.0,
                }).collect();
                for (slot, loss) in slots.iter().enumerate().skip(1) {
                    let Some(loss) = loss else { continue };
                    losses.push(*loss);
                    indices.push((block * 4 + slot) as i64);
                    want.push(worth[slot - 1..].iter().sum::<f64>());
                }
            }
            let got = d_pace(&Tensor::from_slice(&losses), &Tensor::from_slice(&indices), 4, alpha).unwrap();
            let got = Vec::<f64>::try_from(got.to_kind(Kind::Double).to_device(Device::Cpu)).unwrap();
            prop_assert_eq!(got.len(), want.len());
            for (got, want) in got.iter().zip(&want) {
                prop_assert!((got - want).abs() < 1e-9, "{} and {}", got, want);
            }
        }
    }
}
