//! How far the drafter is from its labels behind a frozen head, with the gradient made in the same pass over the head.

use crate::model::ModelError;
use crate::model::batch::Teacher;
use crate::model::drafter::anchors::Slots;
use crate::model::ops::{Span, soften, spans, wide};
use tch::{Kind, Tensor};

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

/// What slots are to say.
pub enum Labels {
    /// Tokens, the likeliest first, and how much each of them counts, 1 in sum. `[slots, labels]` each.
    Tokens { ids: Tensor, shares: Tensor },
    /// All that the head says of the target's states `[states, hidden]`; which of them each slot has, `[slots]`. Of these the
    /// first label is the likeliest token.
    States { states: Tensor, of: Tensor },
}

impl Labels {
    /// Labels of slots that `teacher` taught, for `head`.
    pub fn of(slots: &Slots, teacher: Option<&Teacher>, head: &Tensor) -> Result<Labels, ModelError> {
        let device = head.device();
        if let Some(Teacher::States(states)) = teacher {
            // Blocks overlap, so that several slots have one state.
            let mut needed = slots.before.clone();
            needed.sort_unstable();
            needed.dedup();
            let of: Vec<i64> =
                slots.before.iter().map(|token| needed.partition_point(|other| other < token) as i64).collect();
            let states = states.f_index_select(0, &Tensor::f_from_slice(&needed)?.f_to(states.device())?)?;
            let states = states.f_to_device(device)?.f_to_kind(head.f_kind()?)?;
            return Ok(Labels::States { states, of: Tensor::f_from_slice(&of)?.f_to(device)? });
        }
        let shape = [slots.places.len() as i64, slots.each as i64];
        let ids = Tensor::f_from_slice(&slots.labels)?.f_reshape(shape)?.f_to(device)?;
        Ok(Labels::Tokens { ids, shares: Tensor::f_from_slice(&slots.shares)?.f_reshape(shape)?.f_to(device)? })
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
/// head as keys and values). Memory does not grow with the vocabulary, and a tile stays in the processor's cache. The
/// target's states go through the same tiles, each once however many slots have it. Grad mode must be off.
pub fn head_loss(hidden: &Tensor, head: &Tensor, labels: &Labels, tile: Tile) -> Result<HeadLoss, ModelError> {
    let mut parts = Vec::new();
    match labels {
        Labels::Tokens { ids, shares } => {
            for part in spans(hidden.size()[0], tile.slots) {
                let (ids, shares) = (part.of(ids, 0)?, part.of(shares, 0)?);
                parts.push(from_tokens(&part.of(hidden, 0)?, head, &ids, &shares, tile.tokens)?);
            }
        }
        Labels::States { states, of } => {
            let said = Said::of(states, head, tile)?;
            for part in spans(hidden.size()[0], tile.slots) {
                let of = part.of(of, 0)?;
                let states = states.f_index_select(0, &of)?;
                parts.push(from_said(&part.of(hidden, 0)?, head, &states, &said.at(&of)?, tile.tokens)?);
            }
        }
    }
    let all = |of: fn(&HeadLoss) -> &Tensor| Tensor::f_cat(&parts.iter().map(of).collect::<Vec<_>>(), 0);
    Ok(HeadLoss {
        gradient: all(|part| &part.gradient)?,
        losses: all(|part| &part.losses)?,
        surprise: all(|part| &part.surprise)?,
        correct: all(|part| &part.correct)?,
    })
}

fn from_tokens(
    hidden: &Tensor,
    head: &Tensor,
    ids: &Tensor,
    shares: &Tensor,
    tokens: usize,
) -> Result<HeadLoss, ModelError> {
    let (Sums { most, sum, mut product }, of_labels) = sums_and_logits(hidden, head, ids, tokens)?;
    let shares = shares.f_to_kind(sum.f_kind()?)?;
    let surprises = sum.f_log()?.f_add(&most)?.f_sub(&of_labels)?;
    let loss = shares.f_xlogy(&shares)?.f_add(&shares.f_mul(&surprises)?)?;
    product = product.f_div_(&sum)?;
    for label in spans(ids.size()[1], 1) {
        let rows = head.f_index_select(0, &label.of(ids, 1)?.f_squeeze_dim(1)?)?;
        product = product.f_sub_(&rows.f_mul(&label.of(&shares, 1)?)?)?;
    }
    Ok(HeadLoss {
        gradient: product,
        losses: loss.f_sum_dim_intlist(&[1i64][..], false, loss.f_kind()?)?,
        surprise: surprises.f_select(1, 0)?,
        correct: of_labels.f_narrow(1, 0, 1)?.f_ge_tensor(&most)?.f_squeeze_dim(1)?,
    })
}

/// With `b` the target's likeliest token, `t` its state, `h` the slot's, and `surprise` the cross-entropy of `b`: logits are linear
/// in the state, so `sum p (ln p - ln q) = surprise(h) - surprise(t) + (t - h) (p W - W_b)`. Where the target is sure, the last
/// term is nothing; what is subtracted elsewhere is rounded alike.
fn from_said(
    hidden: &Tensor,
    head: &Tensor,
    states: &Tensor,
    said: &Said,
    tokens: usize,
) -> Result<HeadLoss, ModelError> {
    let (Sums { most, sum, mut product }, of_best) = sums_and_logits(hidden, head, &said.best, tokens)?;
    let surprise = sum.f_log()?.f_add(&most)?.f_sub(&of_best)?;
    let exact = sum.f_kind()?;
    let away = said.mean.f_sub(&head.f_index_select(0, &said.best.f_squeeze_dim(1)?)?)?;
    let apart = states.f_to_kind(exact)?.f_sub(hidden)?.f_mul_(&away)?.f_sum_dim_intlist(&[1i64][..], true, exact)?;
    Ok(HeadLoss {
        gradient: product.f_div_(&sum)?.f_sub_(&said.mean)?,
        losses: surprise.f_sub(&said.surprise)?.f_add_(&apart)?.f_squeeze_dim(1)?,
        correct: of_best.f_ge_tensor(&most)?.f_squeeze_dim(1)?,
        surprise: surprise.f_squeeze_dim(1)?,
    })
}

/// What the head says of the target's states, without their logits.
struct Said {
    /// The likeliest token, the first one where several are alike, `[states, 1]`.
    best: Tensor,
    /// Its cross-entropy, `[states, 1]`.
    surprise: Tensor,
    /// The head's rows in the shares that the target gives them: `p W`, `[states, D]`.
    mean: Tensor,
}

impl Said {
    fn of(states: &Tensor, head: &Tensor, tile: Tile) -> Result<Said, ModelError> {
        let (mut best, mut surprise, mut mean) = (Vec::new(), Vec::new(), Vec::new());
        for part in spans(states.size()[0], tile.slots) {
            let states = part.of(states, 0)?;
            let mut first = Tensor::f_zeros([part.len, 1], (Kind::Int64, states.device()))?;
            let sums = sums(&states, head, tile.tokens, |scores, tile, most| {
                let (largest, place) = scores.f_max_dim(1, true)?;
                first = place.f_add_scalar(tile.start)?.f_where_self(&largest.f_gt_tensor(most)?, &first)?;
                Ok(())
            })?;
            best.push(first);
            // The likeliest token's logit is the largest one.
            surprise.push(sums.sum.f_log()?);
            mean.push(sums.product.f_div(&sums.sum)?);
        }
        let all = |parts: &[Tensor]| Tensor::f_cat(parts, 0);
        Ok(Said { best: all(&best)?, surprise: all(&surprise)?, mean: all(&mean)? })
    }

    /// That of slots which have these states.
    fn at(&self, of: &Tensor) -> Result<Said, ModelError> {
        let at = |x: &Tensor| x.f_index_select(0, of);
        Ok(Said { best: at(&self.best)?, surprise: at(&self.surprise)?, mean: at(&self.mean)? })
    }
}

/// Of each slot: the largest logit, and over all tokens the sums of `exp(logit - most)` and of that times the head's row.
struct Sums {
    most: Tensor,
    sum: Tensor,
    product: Tensor,
}

/// The sums, and the logits of `labels [slots, labels]`.
fn sums_and_logits(
    hidden: &Tensor,
    head: &Tensor,
    labels: &Tensor,
    tokens: usize,
) -> Result<(Sums, Tensor), ModelError> {
    let mut of_labels = Tensor::f_zeros(labels.size(), (wide(hidden.f_kind()?), hidden.device()))?;
    let sums = sums(hidden, head, tokens, |scores, tile, _| {
        let place = labels.f_sub_scalar(tile.start)?;
        let inside = place.f_ge(0)?.f_logical_and(&place.f_lt(tile.len)?)?;
        let logits = scores.f_gather(1, &place.f_clamp(0, tile.len - 1)?, false)?;
        of_labels = logits.f_where_self(&inside, &of_labels)?;
        Ok(())
    })?;
    Ok((sums, of_labels))
}

/// `look` is shown each tile of logits, `[slots, tokens]`, which tokens they are of, and the largest logits before, `[slots, 1]`.
fn sums(
    hidden: &Tensor,
    head: &Tensor,
    tokens: usize,
    mut look: impl FnMut(&Tensor, Span, &Tensor) -> Result<(), ModelError>,
) -> Result<Sums, ModelError> {
    let (kind, device, slots) = (hidden.f_kind()?, hidden.device(), hidden.size()[0]);
    let exact = (wide(kind), device);
    let vocab = head.size()[0];
    let room = Tensor::f_empty([slots * vocab.min(tokens.max(1) as i64)], (kind, device))?;
    let mut most = Tensor::f_full([slots, 1], f64::NEG_INFINITY, exact)?;
    let mut sum = Tensor::f_zeros([slots, 1], exact)?;
    let mut product = Tensor::f_zeros([slots, hidden.size()[1]], exact)?;
    for part in spans(vocab, tokens) {
        let rows = part.of(head, 0)?;
        let scores = room.f_narrow(0, 0, slots * part.len)?.f_view([slots, part.len])?;
        let mut scores = hidden.f_mm_out(&scores, &rows.f_transpose(0, 1)?)?.f_to_kind(exact.0)?;
        look(&scores, part, &most)?;
        let _ = product.f_mul_(&soften(&mut scores, &mut most, &mut sum)?)?;
        product = if kind == exact.0 {
            product.f_addmm_(&scores, &rows)?
        } else {
            product.f_add_(&scores.f_to_kind(kind)?.f_mm(&rows)?)?
        };
    }
    Ok(Sums { most, sum, product })
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
        Labels::Tokens { shares: Tensor::ones_like(&ids).to_kind(Kind::Float), ids }
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
        let labels = Labels::Tokens { ids, shares };
        for tile in TILES {
            let got = head_loss(&hidden.detach(), &head, &labels, tile).unwrap();
            assert!(got.losses.allclose(&losses.detach(), 1e-12, 1e-12, false), "{tile:?}");
            assert!(got.surprise.allclose(&surprise.detach(), 1e-12, 1e-12, false), "{tile:?}");
            assert!(got.gradient.allclose(&hidden.grad(), 1e-12, 1e-12, false), "{tile:?}");
        }
    }

    /// Hidden states of slots, a head, the target's states, and which of them each slot has.
    struct Scene {
        hidden: Tensor,
        head: Tensor,
        states: Tensor,
        of: Tensor,
    }

    impl Scene {
        fn random(seed: i64, [slots, states, vocab, width]: [i64; 4], scale: f64) -> Scene {
            tch::manual_seed(seed);
            let random = |rows: i64| Tensor::randn([rows, width], (Kind::Double, Device::Cpu)) * scale;
            let of = Tensor::randint(states, [slots], (Kind::Int64, Device::Cpu));
            Scene { hidden: random(slots), head: random(vocab), states: random(states), of }
        }

        fn wanted(&self) -> Tensor {
            self.states.index_select(0, &self.of).linear(&self.head, None::<Tensor>).log_softmax(-1, Kind::Double)
        }

        /// The divergence as it is written in books.
        fn plainly(&self, hidden: &Tensor) -> Tensor {
            let (wanted, spoken) = (self.wanted(), hidden.linear(&self.head, None::<Tensor>));
            let terms = wanted.exp() * (&wanted - spoken.log_softmax(-1, Kind::Double));
            terms.sum_dim_intlist([1i64].as_slice(), false, Kind::Double)
        }

        fn loss(&self, hidden: &Tensor, tile: Tile) -> HeadLoss {
            let labels = Labels::States { states: self.states.shallow_clone(), of: self.of.shallow_clone() };
            head_loss(hidden, &self.head, &labels, tile).unwrap()
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

        /// Whatever the shapes and the tile: by definition with autograd, by the path of single labels with the whole vocabulary
        /// as labels, and by the slope along a random direction.
        #[test]
        fn of_the_targets_states_it_is_the_divergence_from_all_that_they_say(
            seed: u16, slots in 1i64..14, states in 1i64..6, vocab in 1i64..24, width in 1i64..9, scale in 0.1f64..2.5,
            tile_slots in 0usize..16, tile_tokens in 0usize..26,
        ) {
            let scene = Scene::random(seed.into(), [slots, states, vocab, width], scale);
            let tile = Tile { slots: tile_slots, tokens: tile_tokens };
            let hidden = scene.hidden.copy().set_requires_grad(true);
            let losses = scene.plainly(&hidden);
            losses.sum(Kind::Double).backward();
            let _guard = tch::no_grad_guard();
            let got = scene.loss(&scene.hidden, tile);
            let same = |one: &Tensor, two: &Tensor| one.allclose(two, 1e-9, 1e-9, false);
            prop_assert!(same(&got.losses, &losses.detach()), "{} and {}", got.losses, losses);
            prop_assert!(same(&got.gradient, &hidden.grad()));

            let (shares, ids) = scene.wanted().exp().topk(vocab, -1, true, true);
            let by_labels = head_loss(&scene.hidden, &scene.head, &Labels::Tokens { ids, shares }, tile).unwrap();
            prop_assert!(same(&got.losses, &by_labels.losses) && same(&got.gradient, &by_labels.gradient));
            prop_assert!(same(&got.surprise, &by_labels.surprise));
            prop_assert_eq!(&got.correct, &by_labels.correct);

            let step = scene.hidden.randn_like() * 1e-5;
            let along = |sign: f64| scene.loss(&(&scene.hidden + &step * sign), tile).losses.sum(Kind::Double);
            let (slope, expected) = ((along(1.0) - along(-1.0)) / 2.0, (&got.gradient * &step).sum(Kind::Double));
            prop_assert!(slope.allclose(&expected, 1e-6, 1e-9 * scale, false), "{slope} and {expected}");
        }
    }

    /// In bf16 within its rounding of the same states in fp64; and where a drafter says what the target says, exactly nothing.
    #[test]
    fn of_states_in_bf16_it_is_the_same_within_their_rounding() {
        let _guard = tch::no_grad_guard();
        for seed in 0..8 {
            let mut scene = Scene::random(seed, [40, 9, 300, 64], 0.5);
            let round = |x: &Tensor| x.to_kind(Kind::BFloat16).to_kind(Kind::Double);
            scene =
                Scene { head: round(&scene.head), states: round(&scene.states), hidden: round(&scene.hidden), ..scene };
            let tile = Tile { slots: 16, tokens: 128 };
            let exact = scene.loss(&scene.hidden, tile);
            let states = scene.states.index_select(0, &scene.of);
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
            let (states, of) = (hidden.narrow(0, 0, 1), Tensor::from_slice(&[0i64, 0]));
            let got = head_loss(&hidden, &head, &Labels::States { states, of }, tile).unwrap();
            assert_eq!(Vec::<f32>::try_from(got.losses).unwrap(), [0.0, 6e4]);
            assert_eq!(Vec::<f32>::try_from(got.gradient.flatten(0, -1)).unwrap(), [0.0, -2.0]);
            let got = head_loss(&hidden, &head, &hard(&[0, 0]), tile).unwrap();
            assert_eq!(Vec::<f32>::try_from(got.losses).unwrap(), [0.0, 6e4]);
            assert_eq!(i64::try_from(got.gradient.isfinite().all()).unwrap(), 1);
        }
    }
}
