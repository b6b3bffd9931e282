//! How far the drafter is from its labels behind a frozen head, with the gradient made in the same pass over the head.

use super::ModelError;
use super::anchors::Slots;
use super::ops::{Span, spans, wide};
use draftmill_shim::rows;
use tch::{Device, Tensor};

/// What the head says of some hidden states.
pub struct HeadLoss {
    /// Gradient of each slot's loss with respect to its hidden state, `[slots, hidden]` in at least fp32.
    pub gradient: Tensor,
    /// Kullback-Leibler divergence of each slot from its labels in nats, `[slots]` in at least fp32; of a single label that is the
    /// cross-entropy.
    pub losses: Tensor,
    /// Cross-entropy of the first label alone.
    pub surprise: Tensor,
    /// Whether no token is more likely than the first label, `[slots]`.
    pub correct: Tensor,
}

/// What slots are to say: tokens, the likeliest first, and how much each of them counts, 1 in sum. `[slots, labels]` each.
pub struct Labels {
    pub ids: Tensor,
    pub shares: Tensor,
}

impl Labels {
    pub fn of(slots: &Slots, device: Device) -> Result<Labels, ModelError> {
        let shape = [slots.places.len() as i64, slots.each as i64];
        let ids = Tensor::f_from_slice(&slots.labels)?.f_reshape(shape)?.f_to(device)?;
        Ok(Labels { ids, shares: Tensor::f_from_slice(&slots.shares)?.f_reshape(shape)?.f_to(device)? })
    }
}

/// How much of the logits is held at once: a tile of slots and tokens. It changes the speed alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    pub slots: usize,
    pub tokens: usize,
}

/// Loss of `hidden [slots, D]` against `labels` behind `head [V, D]`: with the labels' shares `p` and the head's softmax `q`,
/// `sum p (ln p - ln q)` of each slot, whose gradient is `(q - p) W`.
///
/// Only a tile of logits is ever held: maximum, sum and `exp(logits) W` are carried from one part of the vocabulary to
/// the next and shrunk whenever a larger logit appears (the online softmax of FlashAttention, arXiv:2205.14135, with the
/// head as keys and values). Memory does not grow with the vocabulary, and a tile stays in the processor's cache. Grad
/// mode must be off.
pub fn head_loss(hidden: &Tensor, head: &Tensor, labels: &Labels, tile: Tile) -> Result<HeadLoss, ModelError> {
    let (mut gradient, mut losses, mut surprise, mut correct) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for part in spans(hidden.size()[0], tile.slots) {
        let (hidden, ids) = (part.of(hidden, 0)?, part.of(&labels.ids, 0)?);
        let Sums { most, sum, mut product, of_labels } = sums(&hidden, head, &ids, tile.tokens)?;
        let shares = part.of(&labels.shares, 0)?.f_to_kind(sum.f_kind()?)?;
        let surprises = sum.f_log()?.f_add(&most)?.f_sub(&of_labels)?;
        let loss = shares.f_xlogy(&shares)?.f_add(&shares.f_mul(&surprises)?)?;
        losses.push(loss.f_sum_dim_intlist(&[1i64][..], false, loss.f_kind()?)?);
        surprise.push(surprises.f_select(1, 0)?);
        correct.push(of_labels.f_narrow(1, 0, 1)?.f_ge_tensor(&most)?.f_squeeze_dim(1)?);
        product = product.f_div_(&sum)?;
        for label in spans(ids.size()[1], 1) {
            let rows = head.f_index_select(0, &label.of(&ids, 1)?.f_squeeze_dim(1)?)?;
            product = product.f_sub_(&rows.f_mul(&label.of(&shares, 1)?)?)?;
        }
        gradient.push(product);
    }
    let all = |parts: &[Tensor]| Tensor::f_cat(parts, 0);
    Ok(HeadLoss {
        gradient: all(&gradient)?,
        losses: all(&losses)?,
        surprise: all(&surprise)?,
        correct: all(&correct)?,
    })
}

/// Of each slot: the largest logit, and over all tokens the sums of `exp(logit - most)` and of that times the head's row.
struct Sums {
    most: Tensor,
    sum: Tensor,
    product: Tensor,
    /// Logits of the labels, `[slots, labels]`.
    of_labels: Tensor,
}

fn sums(hidden: &Tensor, head: &Tensor, labels: &Tensor, tokens: usize) -> Result<Sums, ModelError> {
    let (kind, device, slots) = (hidden.f_kind()?, hidden.device(), hidden.size()[0]);
    let exact = (wide(kind), device);
    let vocab = head.size()[0];
    let room = Tensor::f_empty([slots * vocab.min(tokens.max(1) as i64)], (kind, device))?;
    let mut most = Tensor::f_full([slots, 1], f64::NEG_INFINITY, exact)?;
    let mut sum = Tensor::f_zeros([slots, 1], exact)?;
    let mut product = Tensor::f_zeros([slots, hidden.size()[1]], exact)?;
    let mut of_labels = Tensor::f_zeros(labels.size(), exact)?;
    for part in spans(vocab, tokens) {
        let Span { start, len: count } = part;
        let rows = part.of(head, 0)?;
        let scores = room.f_narrow(0, 0, slots * count)?.f_view([slots, count])?;
        let mut scores = hidden.f_mm_out(&scores, &rows.f_transpose(0, 1)?)?.f_to_kind(exact.0)?;
        let place = labels.f_sub_scalar(start)?;
        let inside = place.f_ge(0)?.f_logical_and(&place.f_lt(count)?)?;
        of_labels = scores.f_gather(1, &place.f_clamp(0, count - 1)?, false)?.f_where_self(&inside, &of_labels)?;
        let _ = product.f_mul_(&soften(&mut scores, &mut most, &mut sum)?)?;
        product = if kind == exact.0 {
            product.f_addmm_(&scores, &rows)?
        } else {
            product.f_add_(&scores.f_to_kind(kind)?.f_mm(&rows)?)?
        };
    }
    Ok(Sums { most, sum, product, of_labels })
}

/// One part of an online softmax, in place: see [`rows::soften`].
fn soften(scores: &mut Tensor, most: &mut Tensor, sum: &mut Tensor) -> Result<Tensor, ModelError> {
    if let Some(shrink) = rows::soften(scores, most, sum)? {
        return Ok(shrink);
    }
    let larger = most.f_maximum(&scores.f_amax(&[1i64][..], true)?)?;
    let shrink = most.f_sub(&larger)?.f_exp_()?;
    let _ = scores.f_sub_(&larger)?.f_exp_()?;
    let _ = sum.f_mul_(&shrink)?.f_add_(&scores.f_sum_dim_intlist(&[1i64][..], true, sum.f_kind()?)?)?;
    *most = larger;
    Ok(shrink)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Kind;

    const TILES: [Tile; 6] = [
        Tile { slots: 1, tokens: 1 },
        Tile { slots: 2, tokens: 3 },
        Tile { slots: 3, tokens: 11 },
        Tile { slots: 7, tokens: 4 },
        Tile { slots: 0, tokens: 0 },
        Tile { slots: 100, tokens: 100 },
    ];

    fn hard(ids: &[i64]) -> Labels {
        let ids = Tensor::from_slice(ids).unsqueeze(1);
        Labels { shares: Tensor::ones_like(&ids).to_kind(Kind::Float), ids }
    }

    /// Whatever the tile, the numbers are those of autograd over log-softmax.
    #[test]
    fn losses_and_gradient_match_autograd_for_any_tile() {
        let options = (Kind::Float, Device::Cpu);
        let hidden = (Tensor::arange(7 * 5, options) * 0.7).sin().reshape([7, 5]).set_requires_grad(true);
        let head = (Tensor::arange(11 * 5, options) * 1.3).cos().reshape([11, 5]);
        let best = i64::try_from(hidden.linear(&head, None::<Tensor>).argmax(-1, false).get(2)).unwrap();
        let ids = [0i64, 10, best, 3, 7, 1, 9];
        let labels = Tensor::from_slice(&ids);
        let losses = -hidden.linear(&head, None::<Tensor>).log_softmax(-1, Kind::Float);
        let losses = losses.gather(1, &labels.unsqueeze(1), false).squeeze_dim(1);
        losses.sum(Kind::Float).backward();
        let _guard = tch::no_grad_guard();
        let right = hidden.linear(&head, None::<Tensor>).argmax(-1, false).eq_tensor(&labels);
        assert!(Vec::<bool>::try_from(&right).unwrap().contains(&true), "nothing is right");
        for tile in TILES {
            let got = head_loss(&hidden.detach(), &head, &hard(&ids), tile).unwrap();
            assert!(got.losses.allclose(&losses.detach(), 1e-5, 1e-6, false), "{tile:?}");
            assert_eq!(got.surprise, got.losses, "{tile:?}");
            assert!(got.gradient.allclose(&hidden.grad(), 1e-5, 1e-6, false), "{tile:?}");
            assert_eq!(got.correct, right, "{tile:?}");
        }
    }

    /// Labels with shares, one of them 0: the divergence by definition, and its gradient by autograd.
    #[test]
    fn of_several_labels_it_is_the_divergence_from_their_shares() {
        let options = (Kind::Double, Device::Cpu);
        let hidden = (Tensor::arange(4 * 5, options) * 0.7).sin().reshape([4, 5]).set_requires_grad(true);
        let head = (Tensor::arange(11 * 5, options) * 1.3).cos().reshape([11, 5]);
        let ids = Tensor::from_slice(&[0i64, 10, 4, 3, 9, 1, 5, 6, 7, 8, 0, 2]).reshape([4, 3]);
        let shares = [[0.5, 0.3, 0.2], [1.0, 0.0, 0.0], [0.9, 0.1, 0.0], [0.4, 0.3, 0.3]].concat();
        let shares = Tensor::from_slice(&shares).reshape([4, 3]);
        let spoken = hidden.linear(&head, None::<Tensor>).log_softmax(-1, Kind::Double);
        let terms = shares.xlogy(&shares) - &shares * spoken.gather(1, &ids, false);
        let losses = terms.sum_dim_intlist([1i64].as_slice(), false, Kind::Double);
        losses.sum(Kind::Double).backward();
        let _guard = tch::no_grad_guard();
        let surprise = -spoken.gather(1, &ids.narrow(1, 0, 1), false).squeeze_dim(1);
        let labels = Labels { ids, shares };
        for tile in TILES {
            let got = head_loss(&hidden.detach(), &head, &labels, tile).unwrap();
            assert!(got.losses.allclose(&losses.detach(), 1e-12, 1e-12, false), "{tile:?}");
            assert!(got.surprise.allclose(&surprise.detach(), 1e-12, 1e-12, false), "{tile:?}");
            assert!(got.gradient.allclose(&hidden.grad(), 1e-12, 1e-12, false), "{tile:?}");
        }
    }

    #[test]
    fn huge_logits_stay_finite() {
        let hidden = Tensor::from_slice(&[3e4f32, -3e4]).reshape([2, 1]);
        let head = Tensor::from_slice(&[1.0f32, -1.0, 0.0]).reshape([3, 1]);
        for tile in TILES {
            let got = head_loss(&hidden, &head, &hard(&[0, 0]), tile).unwrap();
            assert_eq!(Vec::<f32>::try_from(got.losses).unwrap(), [0.0, 6e4]);
            assert_eq!(i64::try_from(got.gradient.isfinite().all()).unwrap(), 1);
        }
    }
}
