//! Loss of the drafter through a frozen head, computed together with its gradient in tiles of the vocabulary.

use crate::model::ModelError;
use crate::model::batch::TargetLabels;
use crate::model::drafter::anchors::Slots;
use crate::model::ops::{Span, online_softmax, spans, wide};
use tch::{Kind, Tensor};

/// Loss and gradient of some slots.
pub struct HeadLoss {
    /// Gradient of each slot's loss with respect to its hidden state, `[slots, hidden]` in at least fp32.
    pub gradient: Tensor,
    /// Kullback-Leibler divergence of each slot from its labels in nats, `[slots]` in at least fp32; with a single
    /// label, the cross-entropy.
    pub losses: Tensor,
    /// Cross-entropy of the first label, `[slots]`.
    pub cross_entropy: Tensor,
    /// True if no token is more likely than the first label, `[slots]`.
    pub correct: Tensor,
    /// First label, `[slots]`.
    pub label: Tensor,
}

/// Labels of slots.
pub enum Labels {
    /// Token labels, most likely first, with probabilities that sum to 1. `[slots, labels]` each.
    Tokens { ids: Tensor, probabilities: Tensor },
    /// Target states `[states, hidden]`, whose logits are the labels, and the state of each slot, `[slots]`. The first
    /// label is the most likely token.
    States { states: Tensor, index: Tensor },
}

impl Labels {
    /// Labels of `slots` from `target_labels`, on the device of `head`.
    ///
    /// # Errors
    /// Returns an error if libtorch fails.
    pub fn for_slots(slots: &Slots, target_labels: Option<&TargetLabels>, head: &Tensor) -> Result<Labels, ModelError> {
        let device = head.device();
        if let Some(TargetLabels::States(states)) = target_labels {
            // Blocks overlap, so several slots may have the same state.
            let mut needed = slots.previous_tokens.clone();
            needed.sort_unstable();
            needed.dedup();
            let index: Vec<i64> = slots
                .previous_tokens
                .iter()
                .map(|token| needed.partition_point(|other| other < token) as i64)
                .collect();
            let states = states.f_index_select(0, &Tensor::f_from_slice(&needed)?.f_to(states.device())?)?;
            let states = states.f_to_device(device)?.f_to_kind(head.f_kind()?)?;
            return Ok(Labels::States { states, index: Tensor::f_from_slice(&index)?.f_to(device)? });
        }
        let shape = [slots.indices.len() as i64, slots.labels_per_slot as i64];
        let ids = Tensor::f_from_slice(&slots.labels)?.f_reshape(shape)?.f_to(device)?;
        Ok(Labels::Tokens {
            ids,
            probabilities: Tensor::f_from_slice(&slots.probabilities)?.f_reshape(shape)?.f_to(device)?,
        })
    }
}

/// Size of a tile of logits, the part held at once. It affects speed only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    pub slots: usize,
    pub tokens: usize,
}

impl Tile {
    /// Number of slots, at least 1, whose logits over the whole vocabulary fit into `tiles` tiles.
    pub fn whole_rows(&self, vocab: i64, tiles: usize) -> usize {
        (tiles * self.slots * self.tokens / vocab.max(1) as usize).max(1)
    }
}

/// Loss of `hidden [slots, D]` against `labels` through `head [V, D]`. With label probabilities `p` and the head's
/// softmax `q`, a slot's loss is `sum p (ln p - ln q)` and its gradient `(q - p) W` (`docs/dflash.md#loss`).
///
/// Only one tile of logits is held at a time. Maximum, sum and `exp(logits) W` are carried from tile to tile and
/// rescaled whenever a larger logit appears: the online softmax of FlashAttention, arXiv:2205.14135, with the head as
/// keys and values. Memory does not grow with the vocabulary, and a tile stays in the processor's cache. Each target
/// state passes through the tiles once, even if several slots use it. Grad mode must be off.
///
/// # Errors
/// Returns an error if libtorch fails.
pub fn head_loss(hidden: &Tensor, head: &Tensor, labels: &Labels, tile: Tile) -> Result<HeadLoss, ModelError> {
    let mut parts = Vec::new();
    match labels {
        Labels::Tokens { ids, probabilities } => {
            for part in spans(hidden.size()[0], tile.slots) {
                let (ids, probabilities) = (part.of(ids, 0)?, part.of(probabilities, 0)?);
                parts.push(loss_from_tokens(&part.of(hidden, 0)?, head, &ids, &probabilities, tile.tokens)?);
            }
        }
        Labels::States { states, index } => {
            let stats = TargetStats::of(states, head, tile)?;
            for part in spans(hidden.size()[0], tile.slots) {
                let index = part.of(index, 0)?;
                let states = states.f_index_select(0, &index)?;
                parts.push(loss_from_states(&part.of(hidden, 0)?, head, &states, &stats.at(&index)?, tile.tokens)?);
            }
        }
    }
    let all = |of: fn(&HeadLoss) -> &Tensor| Tensor::f_cat(&parts.iter().map(of).collect::<Vec<_>>(), 0);
    Ok(HeadLoss {
        gradient: all(|part| &part.gradient)?,
        losses: all(|part| &part.losses)?,
        cross_entropy: all(|part| &part.cross_entropy)?,
        correct: all(|part| &part.correct)?,
        label: all(|part| &part.label)?,
    })
}

fn loss_from_tokens(
    hidden: &Tensor,
    head: &Tensor,
    ids: &Tensor,
    probabilities: &Tensor,
    tokens: usize,
) -> Result<HeadLoss, ModelError> {
    let (Sums { max, sum, mut product }, label_logits) = sums_and_logits(hidden, head, ids, tokens)?;
    let probabilities = probabilities.f_to_kind(sum.f_kind()?)?;
    let cross_entropies = sum.f_log()?.f_add(&max)?.f_sub(&label_logits)?;
    let loss = probabilities.f_xlogy(&probabilities)?.f_add(&probabilities.f_mul(&cross_entropies)?)?;
    product = product.f_div_(&sum)?;
    for label in spans(ids.size()[1], 1) {
        let rows = head.f_index_select(0, &label.of(ids, 1)?.f_squeeze_dim(1)?)?;
        product = product.f_sub_(&rows.f_mul(&label.of(&probabilities, 1)?)?)?;
    }
    Ok(HeadLoss {
        gradient: product,
        losses: loss.f_sum_dim_intlist(&[1i64][..], false, loss.f_kind()?)?,
        cross_entropy: cross_entropies.f_select(1, 0)?,
        correct: label_logits.f_narrow(1, 0, 1)?.f_ge_tensor(&max)?.f_squeeze_dim(1)?,
        label: ids.f_select(1, 0)?,
    })
}

/// Loss against target states, which relies on logits being linear in the state.
///
/// With `b` the target's most likely token, `t` its state, `h` the slot's state and `ce` the cross-entropy of `b`: `sum
/// p (ln p - ln q) = ce(h) - ce(t) + (t - h) (p W - W_b)`. If the target is certain, the last term is zero; otherwise
/// both subtracted terms round alike.
fn loss_from_states(
    hidden: &Tensor,
    head: &Tensor,
    states: &Tensor,
    stats: &TargetStats,
    tokens: usize,
) -> Result<HeadLoss, ModelError> {
    let (Sums { max, sum, mut product }, best_logits) = sums_and_logits(hidden, head, &stats.best, tokens)?;
    let cross_entropy = sum.f_log()?.f_add(&max)?.f_sub(&best_logits)?;
    let exact = sum.f_kind()?;
    let offset = stats.mean.f_sub(&head.f_index_select(0, &stats.best.f_squeeze_dim(1)?)?)?;
    let correction =
        states.f_to_kind(exact)?.f_sub(hidden)?.f_mul_(&offset)?.f_sum_dim_intlist(&[1i64][..], true, exact)?;
    Ok(HeadLoss {
        gradient: product.f_div_(&sum)?.f_sub_(&stats.mean)?,
        losses: cross_entropy.f_sub(&stats.cross_entropy)?.f_add_(&correction)?.f_squeeze_dim(1)?,
        correct: best_logits.f_ge_tensor(&max)?.f_squeeze_dim(1)?,
        label: stats.best.f_squeeze_dim(1)?,
        cross_entropy: cross_entropy.f_squeeze_dim(1)?,
    })
}

/// Statistics of the head's softmax over target states, without the logits.
struct TargetStats {
    /// Most likely token, the first one of equals, `[states, 1]`.
    best: Tensor,
    /// Cross-entropy of that token, `[states, 1]`.
    cross_entropy: Tensor,
    /// Mean of the head's rows under the target's probabilities, `p W`, `[states, D]`.
    mean: Tensor,
}

impl TargetStats {
    fn of(states: &Tensor, head: &Tensor, tile: Tile) -> Result<TargetStats, ModelError> {
        let (mut best, mut cross_entropy, mut mean) = (Vec::new(), Vec::new(), Vec::new());
        for part in spans(states.size()[0], tile.slots) {
            let states = part.of(states, 0)?;
            let mut first = Tensor::f_zeros([part.len, 1], (Kind::Int64, states.device()))?;
            let sums = sums(&states, head, tile.tokens, |scores, tile, max| {
                let (largest, index) = scores.f_max_dim(1, true)?;
                first = index.f_add_scalar(tile.start)?.f_where_self(&largest.f_gt_tensor(max)?, &first)?;
                Ok(())
            })?;
            best.push(first);
            // The most likely token has the largest logit.
            cross_entropy.push(sums.sum.f_log()?);
            mean.push(sums.product.f_div(&sums.sum)?);
        }
        let all = |parts: &[Tensor]| Tensor::f_cat(parts, 0);
        Ok(TargetStats { best: all(&best)?, cross_entropy: all(&cross_entropy)?, mean: all(&mean)? })
    }

    /// Statistics of the states at `index [slots]`.
    fn at(&self, index: &Tensor) -> Result<TargetStats, ModelError> {
        let at = |x: &Tensor| x.f_index_select(0, index);
        Ok(TargetStats { best: at(&self.best)?, cross_entropy: at(&self.cross_entropy)?, mean: at(&self.mean)? })
    }
}

/// Largest logit of each slot, and the sums over all tokens of `exp(logit - max)` and of that times the head's row.
struct Sums {
    max: Tensor,
    sum: Tensor,
    product: Tensor,
}

/// Computes the sums and the logits of `labels [slots, labels]`.
fn sums_and_logits(
    hidden: &Tensor,
    head: &Tensor,
    labels: &Tensor,
    tokens: usize,
) -> Result<(Sums, Tensor), ModelError> {
    let mut label_logits = Tensor::f_zeros(labels.size(), (wide(hidden.f_kind()?), hidden.device()))?;
    let sums = sums(hidden, head, tokens, |scores, tile, _| {
        let offset = labels.f_sub_scalar(tile.start)?;
        let inside = offset.f_ge(0)?.f_logical_and(&offset.f_lt(tile.len)?)?;
        let logits = scores.f_gather(1, &offset.f_clamp(0, tile.len - 1)?, false)?;
        label_logits = logits.f_where_self(&inside, &label_logits)?;
        Ok(())
    })?;
    Ok((sums, label_logits))
}

/// Computes the sums. `visit` receives each tile of logits `[slots, tokens]`, its tokens, and the largest logits before
/// it, `[slots, 1]`.
fn sums(
    hidden: &Tensor,
    head: &Tensor,
    tokens: usize,
    mut visit: impl FnMut(&Tensor, Span, &Tensor) -> Result<(), ModelError>,
) -> Result<Sums, ModelError> {
    let (kind, device, slots) = (hidden.f_kind()?, hidden.device(), hidden.size()[0]);
    let exact = (wide(kind), device);
    let vocab = head.size()[0];
    let buffer = Tensor::f_empty([slots * vocab.min(tokens.max(1) as i64)], (kind, device))?;
    let mut max = Tensor::f_full([slots, 1], f64::NEG_INFINITY, exact)?;
    let mut sum = Tensor::f_zeros([slots, 1], exact)?;
    let mut product = Tensor::f_zeros([slots, hidden.size()[1]], exact)?;
    for part in spans(vocab, tokens) {
        let rows = part.of(head, 0)?;
        let scores = buffer.f_narrow(0, 0, slots * part.len)?.f_view([slots, part.len])?;
        let mut scores = hidden.f_mm_out(&scores, &rows.f_transpose(0, 1)?)?.f_to_kind(exact.0)?;
        visit(&scores, part, &max)?;
        let _ = product.f_mul_(&online_softmax(&mut scores, &mut max, &mut sum)?)?;
        product = if kind == exact.0 {
            product.f_addmm_(&scores, &rows)?
        } else {
            product.f_add_(&scores.f_to_kind(kind)?.f_mm(&rows)?)?
        };
    }
    Ok(Sums { max, sum, product })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tch::Device;

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
        Labels::Tokens { probabilities: Tensor::ones_like(&ids).to_kind(Kind::Float), ids }
    }

    /// Every tile size matches autograd over log-softmax.
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
            assert_eq!(got.cross_entropy, got.losses, "{tile:?}");
            assert!(got.gradient.allclose(&hidden.grad(), 1e-5, 1e-6, false), "{tile:?}");
            assert_eq!(got.correct, right, "{tile:?}");
        }
    }

    /// Labels with probabilities, one of them 0: divergence by definition, and gradient by autograd.
    #[test]
    fn several_labels_give_the_divergence_from_their_probabilities() {
        let options = (Kind::Double, Device::Cpu);
        let hidden = (Tensor::arange(4 * 5, options) * 0.7).sin().reshape([4, 5]).set_requires_grad(true);
        let head = (Tensor::arange(11 * 5, options) * 1.3).cos().reshape([11, 5]);
        let ids = Tensor::from_slice(&[0i64, 10, 4, 3, 9, 1, 5, 6, 7, 8, 0, 2]).reshape([4, 3]);
        let probabilities = [[0.5, 0.3, 0.2], [1.0, 0.0, 0.0], [0.9, 0.1, 0.0], [0.4, 0.3, 0.3]].concat();
        let probabilities = Tensor::from_slice(&probabilities).reshape([4, 3]);
        let log_q = hidden.linear(&head, None::<Tensor>).log_softmax(-1, Kind::Double);
        let terms = probabilities.xlogy(&probabilities) - &probabilities * log_q.gather(1, &ids, false);
        let losses = terms.sum_dim_intlist([1i64].as_slice(), false, Kind::Double);
        losses.sum(Kind::Double).backward();
        let _guard = tch::no_grad_guard();
        let cross_entropy = -log_q.gather(1, &ids.narrow(1, 0, 1), false).squeeze_dim(1);
        let labels = Labels::Tokens { ids, probabilities };
        for tile in TILES {
            let got = head_loss(&hidden.detach(), &head, &labels, tile).unwrap();
            assert!(got.losses.allclose(&losses.detach(), 1e-12, 1e-12, false), "{tile:?}");
            assert!(got.cross_entropy.allclose(&cross_entropy.detach(), 1e-12, 1e-12, false), "{tile:?}");
            assert!(got.gradient.allclose(&hidden.grad(), 1e-12, 1e-12, false), "{tile:?}");
        }
    }

    /// Hidden states of slots, a head, target states, and the state of each slot.
    struct Scene {
        hidden: Tensor,
        head: Tensor,
        states: Tensor,
        index: Tensor,
    }

    impl Scene {
        fn random(seed: i64, [slots, states, vocab, width]: [i64; 4], scale: f64) -> Scene {
            tch::manual_seed(seed);
            let random = |rows: i64| Tensor::randn([rows, width], (Kind::Double, Device::Cpu)) * scale;
            let index = Tensor::randint(states, [slots], (Kind::Int64, Device::Cpu));
            Scene { hidden: random(slots), head: random(vocab), states: random(states), index }
        }

        fn log_p(&self) -> Tensor {
            self.states.index_select(0, &self.index).linear(&self.head, None::<Tensor>).log_softmax(-1, Kind::Double)
        }

        /// Divergence by its definition.
        fn divergence(&self, hidden: &Tensor) -> Tensor {
            let (log_p, log_q) = (self.log_p(), hidden.linear(&self.head, None::<Tensor>));
            let terms = log_p.exp() * (&log_p - log_q.log_softmax(-1, Kind::Double));
            terms.sum_dim_intlist([1i64].as_slice(), false, Kind::Double)
        }

        fn loss(&self, hidden: &Tensor, tile: Tile) -> HeadLoss {
            let labels = Labels::States { states: self.states.shallow_clone(), index: self.index.shallow_clone() };
            head_loss(hidden, &self.head, &labels, tile).unwrap()
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

        /// Any shape and tile matches the definition with autograd, the path of token labels over the whole vocabulary,
        /// and the slope along a random direction.
        #[test]
        fn target_states_give_the_divergence_over_the_whole_vocabulary(
            seed: u16, slots in 1i64..14, states in 1i64..6, vocab in 1i64..24, width in 1i64..9, scale in 0.1f64..2.5,
            tile_slots in 0usize..16, tile_tokens in 0usize..26,
        ) {
            let scene = Scene::random(seed.into(), [slots, states, vocab, width], scale);
            let tile = Tile { slots: tile_slots, tokens: tile_tokens };
            let hidden = scene.hidden.copy().set_requires_grad(true);
            let losses = scene.divergence(&hidden);
            losses.sum(Kind::Double).backward();
            let _guard = tch::no_grad_guard();
            let got = scene.loss(&scene.hidden, tile);
            let same = |one: &Tensor, two: &Tensor| one.allclose(two, 1e-9, 1e-9, false);
            prop_assert!(same(&got.losses, &losses.detach()), "{} and {}", got.losses, losses);
            prop_assert!(same(&got.gradient, &hidden.grad()));

            let (probabilities, ids) = scene.log_p().exp().topk(vocab, -1, true, true);
            let by_labels = head_loss(&scene.hidden, &scene.head, &Labels::Tokens { ids, probabilities }, tile).unwrap();
            prop_assert!(same(&got.losses, &by_labels.losses) && same(&got.gradient, &by_labels.gradient));
            prop_assert!(same(&got.cross_entropy, &by_labels.cross_entropy));
            prop_assert_eq!(&got.correct, &by_labels.correct);

            let step = scene.hidden.randn_like() * 1e-5;
            let along = |sign: f64| scene.loss(&(&scene.hidden + &step * sign), tile).losses.sum(Kind::Double);
            let (slope, expected) = ((along(1.0) - along(-1.0)) / 2.0, (&got.gradient * &step).sum(Kind::Double));
            prop_assert!(slope.allclose(&expected, 1e-6, 1e-9 * scale, false), "{slope} and {expected}");
        }
    }

    /// bf16 agrees with fp64 of the same states within rounding; the loss is exactly zero if drafter and target agree.
    #[test]
    fn bf16_states_agree_with_fp64_within_rounding() {
        let _guard = tch::no_grad_guard();
        for seed in 0..8 {
            let mut scene = Scene::random(seed, [40, 9, 300, 64], 0.5);
            let round = |x: &Tensor| x.to_kind(Kind::BFloat16).to_kind(Kind::Double);
            scene =
                Scene { head: round(&scene.head), states: round(&scene.states), hidden: round(&scene.hidden), ..scene };
            let tile = Tile { slots: 16, tokens: 128 };
            let exact = scene.loss(&scene.hidden, tile);
            let states = scene.states.index_select(0, &scene.index);
            let half = |x: &Tensor| x.to_kind(Kind::BFloat16);
            let small =
                Scene { head: half(&scene.head), states: half(&scene.states), hidden: half(&scene.hidden), ..scene };
            let got = small.loss(&small.hidden, tile);
            assert_eq!((got.losses.kind(), got.gradient.kind()), (Kind::Float, Kind::Float));
            let gap =
                |one: &Tensor, two: &Tensor| f64::try_from((one.to_kind(Kind::Double) - two).abs().max()).unwrap();
            let (loss, slope) = (gap(&got.losses, &exact.losses), gap(&got.gradient, &exact.gradient));
            assert!(loss < 0.02 * f64::try_from(exact.losses.max()).unwrap(), "{seed}: loss off by {loss}");
            assert!(
                slope < 0.02 * f64::try_from(exact.gradient.abs().max()).unwrap(),
                "{seed}: gradient off by {slope}"
            );

            let agreed = small.loss(&half(&states), Tile { slots: 9, ..tile });
            assert!(f64::try_from(agreed.losses.abs().max()).unwrap() < 1e-6, "{seed}: {}", agreed.losses);
            assert!(f64::try_from(agreed.gradient.abs().max()).unwrap() < 1e-6, "{seed}");
            assert!(Vec::<bool>::try_from(&agreed.correct).unwrap().iter().all(|&right| right), "{seed}");
        }
    }

    #[test]
    fn huge_logits_stay_finite() {
        let hidden = Tensor::from_slice(&[3e4f32, -3e4]).reshape([2, 1]);
        let head = Tensor::from_slice(&[1.0f32, -1.0, 0.0]).reshape([3, 1]);
        for tile in TILES {
            let (states, index) = (hidden.narrow(0, 0, 1), Tensor::from_slice(&[0i64, 0]));
            let got = head_loss(&hidden, &head, &Labels::States { states, index }, tile).unwrap();
            assert_eq!(Vec::<f32>::try_from(got.losses).unwrap(), [0.0, 6e4]);
            assert_eq!(Vec::<f32>::try_from(got.gradient.flatten(0, -1)).unwrap(), [0.0, -2.0]);
            let got = head_loss(&hidden, &head, &hard(&[0, 0]), tile).unwrap();
            assert_eq!(Vec::<f32>::try_from(got.losses).unwrap(), [0.0, 6e4]);
            assert_eq!(i64::try_from(got.gradient.isfinite().all()).unwrap(), 1);
        }
    }
}
