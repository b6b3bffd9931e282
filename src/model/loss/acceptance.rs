//! Total variation from end to end: loss of a block, and its slope by the acceptance of each slot.

use crate::model::ModelError;
use tch::Tensor;

/// Loss of some blocks.
pub struct BlockLoss {
    /// `1 - (1 / n) sum_j m_j prod_(i <= j) alpha_i` of each block with `n > 0` trained slots, `[blocks]`; else 0.
    pub losses: Tensor,
    /// Slope of the block's loss by `-alpha` of each slot, `[slots]`, never negative.
    pub slopes: Tensor,
}

/// Computes the loss from `alpha [slots]`; slot `j` of block `n` has the index `n * block_size + j`. Slots that are not
/// trained have `alpha = 1` and do not count.
///
/// # Errors
/// Returns an error if libtorch fails.
pub fn block_loss(alpha: &Tensor, indices: &Tensor, blocks: i64, block_size: i64) -> Result<BlockLoss, ModelError> {
    let (kind, device) = (alpha.f_kind()?, alpha.device());
    let slots = |value: f64| Tensor::f_full([blocks * block_size], value, (kind, device));
    let trained = slots(0.0)?.f_index_fill_(0, indices, 1.0)?.f_view([blocks, block_size])?;
    let alpha = slots(1.0)?.f_index_copy_(0, indices, alpha)?.f_view([blocks, block_size])?;
    let prefix = alpha.f_cumprod(1, kind)?;
    let count = trained.f_sum_dim_intlist(&[1i64][..], true, kind)?.f_clamp_min(1.0)?;
    let accepted = prefix.f_mul(&trained)?.f_sum_dim_intlist(&[1i64][..], true, kind)?.f_div(&count)?;
    let any = trained.f_amax(&[1i64][..], true)?;
    let losses = any.f_sub(&accepted)?.f_squeeze_dim(1)?;
    // after_i = m_i + alpha_(i+1) after_(i+1), so that no product is divided by an alpha of zero.
    let mut after: Vec<Tensor> = Vec::new();
    for slot in (0..block_size).rev() {
        let own = trained.f_narrow(1, slot, 1)?;
        let next = match after.last() {
            Some(next) => own.f_add(&alpha.f_narrow(1, slot + 1, 1)?.f_mul(next)?)?,
            None => own,
        };
        after.push(next);
    }
    after.reverse();
    let before =
        Tensor::f_cat(&[Tensor::f_ones([blocks, 1], (kind, device))?, prefix.f_narrow(1, 0, block_size - 1)?], 1)?;
    let slopes = before.f_mul(&Tensor::f_cat(&after, 1)?)?.f_div(&count)?;
    Ok(BlockLoss { losses, slopes: slopes.f_reshape([-1])?.f_index_select(0, indices)? })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tch::{Device, Kind};

    proptest! {
        /// Matches the definition, and autograd of it, also with an acceptance of zero.
        #[test]
        fn losses_and_slopes_match_autograd(
            blocks in prop::collection::vec(prop::collection::vec(prop::option::of(prop_oneof![Just(0.0f64), 0.01..1.0]), 5), 1..5),
        ) {
            let (mut alphas, mut indices) = (Vec::new(), Vec::new());
            for (index, alpha) in blocks.concat().into_iter().enumerate() {
                if let Some(alpha) = alpha {
                    alphas.push(alpha);
                    indices.push(index as i64);
                }
            }
            prop_assume!(!indices.is_empty());
            let alpha = Tensor::from_slice(&alphas).set_requires_grad(true);
            let mut want = Vec::new();
            for block in 0..blocks.len() as i64 {
                let of_block: Vec<i64> = (0..indices.len() as i64).filter(|&i| indices[i as usize] / 5 == block).collect();
                let (mut product, mut sum) = (Tensor::from(1.0f64), Tensor::from(0.0f64));
                for &slot in &of_block {
                    product *= alpha.get(slot);
                    sum += &product;
                }
                want.push(match of_block.len() {
                    0 => Tensor::from(0.0f64),
                    n => 1.0 - sum / n as f64,
                });
            }
            let want = Tensor::stack(&want, 0);
            want.sum(Kind::Double).backward();
            let _guard = tch::no_grad_guard();
            let got = block_loss(&alpha.detach(), &Tensor::from_slice(&indices), blocks.len() as i64, 5).unwrap();
            prop_assert!(got.losses.allclose(&want.detach().to_device(Device::Cpu), 1e-12, 1e-12, false));
            prop_assert!((-got.slopes).allclose(&alpha.grad(), 1e-12, 1e-12, false));
        }
    }
}
