//! Any sum of terms against a plain definition with autograd, for all kinds of labels, weights and tiles.

use super::*;
use proptest::prelude::*;
use tch::Device;

/// Random problem; `kind` fp64 takes plain operations, fp32 the row kernels.
struct Scene {
    hidden: Tensor,
    head: Tensor,
    codes: Tensor,
    rows: Tensor,
    labels: Labels,
    slots: Slots,
    block_size: usize,
    vocab: i64,
}

#[derive(Clone, Copy, Debug)]
enum LabelKind {
    One,
    TopK,
    States,
}

impl Scene {
    fn new(seed: i64, kind: Kind, labels: LabelKind, trained: &[bool], block_size: usize, scale: f64) -> Scene {
        tch::manual_seed(seed);
        let options = (Kind::Double, Device::Cpu);
        let random = |rows: i64, columns: i64| (Tensor::randn([rows, columns], options) * scale).to_kind(kind);
        let (vocab, width, rank) = (11, 5, 3);
        let indices: Vec<i64> = (0..trained.len() as i64).filter(|&at| trained[at as usize]).collect();
        let count = indices.len() as i64;
        let ids = |columns: i64| Tensor::rand([count, vocab], options).topk(columns, -1, true, true).1;
        let labels = match labels {
            LabelKind::One => {
                Labels::Tokens { ids: ids(1), probabilities: Tensor::ones([count, 1], (Kind::Float, Device::Cpu)) }
            }
            LabelKind::TopK => {
                let p = Tensor::randn([count, 4], options).softmax(-1, Kind::Double).sort(-1, true).0;
                Labels::Tokens { ids: ids(4), probabilities: p }
            }
            LabelKind::States => {
                let index = Tensor::randint(4, [count], (Kind::Int64, Device::Cpu));
                Labels::States { states: random(4, width), index }
            }
        };
        let tokens = Vec::<i64>::try_from(Tensor::randint(vocab, [count], (Kind::Int64, Device::Cpu))).unwrap();
        let weights = (0..count).map(|at| 1.0 / (1 + at % 3) as f32).collect();
        Scene {
            hidden: random(count, width),
            head: random(vocab, width),
            codes: random(count, rank),
            rows: random(vocab, rank),
            labels,
            slots: Slots { indices, tokens, weights, ..Slots::default() },
            block_size,
            vocab,
        }
    }

    fn loss(&self, settings: &LossSettings, tile: Tile, bias: bool) -> WeightedLoss {
        let _guard = tch::no_grad_guard();
        let bias = bias.then_some(LowRank { codes: &self.codes, rows: &self.rows });
        let input = LossInput {
            hidden: &self.hidden,
            projection: Projection { head: &self.head, bias },
            labels: &self.labels,
            slots: &self.slots,
            block_size: self.block_size,
        };
        // Without the acceptance, the divergence alone takes the tiled path, which `head_loss` tests.
        weighted_loss(&input, settings, tile, true).unwrap()
    }

    /// Numerator by the definitions in docs/dflash.md#loss, in fp64 with autograd.
    fn definition(&self, settings: &LossSettings, [hidden, codes, rows]: [&Tensor; 3], bias: bool) -> Tensor {
        let wide = |x: &Tensor| x.to_kind(Kind::Double);
        let mut logits = wide(hidden).linear(&wide(&self.head), None::<Tensor>);
        if bias {
            logits += wide(codes).linear(&wide(rows), None::<Tensor>);
        }
        let log_q = logits.log_softmax(-1, Kind::Double);
        let q = log_q.exp();
        let (p, first) = match &self.labels {
            Labels::Tokens { ids, probabilities } => {
                let p = Tensor::zeros([ids.size()[0], self.vocab], (Kind::Double, Device::Cpu));
                (p.scatter_add(1, ids, &wide(probabilities)), ids.narrow(1, 0, 1))
            }
            Labels::States { states, index } => {
                let p = wide(states).linear(&wide(&self.head), None::<Tensor>).softmax(-1, Kind::Double);
                let p = p.index_select(0, index);
                let first = p.argmax(-1, true);
                (p, first)
            }
        };
        let total = |x: &Tensor| x.sum_dim_intlist([1i64].as_slice(), false, Kind::Double);
        let LossTerms { ce, kl, reverse_kl, tv, lk, e2e_tv, lk_eta } = settings.terms;
        let label = match settings.ce_label {
            CeLabel::Labels => first,
            CeLabel::Data => Tensor::from_slice(&self.slots.tokens).unsqueeze(1),
        };
        let cross = -log_q.gather(1, &label, false).squeeze_dim(1);
        let divergence = total(&(p.xlogy(&p) - &p * &log_q));
        let alpha = total(&p.minimum(&q));
        let lambda = (alpha.detach() * -lk_eta).exp();
        let mut losses = &cross * ce + &divergence * kl + (1.0 - &alpha) * tv;
        losses += (&lambda * &divergence + (1.0 - &lambda) * (1.0 - &alpha)) * lk;
        if reverse_kl > 0.0 {
            losses += total(&(&q * (&log_q - p.log()))) * reverse_kl;
        }
        let indices = Tensor::from_slice(&self.slots.indices);
        let decay = wide(&Tensor::from_slice(&self.slots.weights));
        let weights = match settings.weighting {
            Weighting::Decay(_) => decay.shallow_clone(),
            Weighting::DPace(a) => d_pace(&cross.detach(), &indices, self.block_size as i64, a).unwrap(),
        };
        let mut numerator = (&losses * &weights).sum(Kind::Double);
        let mut start = 0;
        for len in blocks_of(&self.slots.indices, self.block_size) {
            let part = |x: &Tensor| x.narrow(0, start, len as i64);
            let block = 1.0 - part(&alpha).cumprod(0, Kind::Double).mean(Kind::Double);
            let weight = if settings.terms.by_block() { 1.0 } else { part(&decay).sum(Kind::Double).double_value(&[]) };
            numerator += block * (e2e_tv * weight);
            start += len as i64;
        }
        numerator
    }
}

fn terms() -> impl Strategy<Value = LossTerms> {
    let weight = || prop_oneof![2 => Just(0.0), 1 => 0.1..2.0f64];
    let all = (weight(), weight(), weight(), weight(), weight(), weight(), 0.0..4.0f64);
    all.prop_map(|(ce, kl, reverse_kl, tv, lk, e2e_tv, lk_eta)| LossTerms {
        ce,
        kl,
        reverse_kl,
        tv,
        lk,
        e2e_tv,
        lk_eta,
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 120, ..ProptestConfig::default() })]

    #[test]
    fn numerator_and_gradients_match_autograd(
        seed: u16, terms in terms(), d_pace in prop::option::of(0.1..1.0f64), data: bool, bias: bool, wide: bool,
        labels in prop_oneof![Just(LabelKind::One), Just(LabelKind::TopK), Just(LabelKind::States)],
        trained in prop::collection::vec(prop::bool::weighted(0.7), 4..24), block_size in 1usize..7,
        tile in (1usize..30, 1usize..30), scale in 0.2..2.0f64,
    ) {
        prop_assume!(trained.contains(&true));
        let full = matches!(labels, LabelKind::States);
        let terms = if full { terms } else { LossTerms { reverse_kl: 0.0, ..terms } };
        prop_assume!(terms.by_slot() || terms.by_block());
        let settings = LossSettings {
            terms,
            ce_label: if data { CeLabel::Data } else { CeLabel::Labels },
            weighting: d_pace.map_or(Weighting::Decay(None), Weighting::DPace),
        };
        let kind = if wide { Kind::Double } else { Kind::Float };
        let scene = Scene::new(seed.into(), kind, labels, &trained, block_size, scale);
        let got = scene.loss(&settings, Tile { slots: tile.0, tokens: tile.1 }, bias);
        let leaves = [&scene.hidden, &scene.codes, &scene.rows]
            .map(|x| x.to_kind(Kind::Double).set_requires_grad(true));
        let want = scene.definition(&settings, [&leaves[0], &leaves[1], &leaves[2]], bias);
        want.backward();
        let limit = if wide { 1e-9 } else { 2e-4 };
        let want = want.detach().double_value(&[]);
        prop_assert!((got.numerator - want).abs() <= limit * (1.0 + want.abs()), "{} and {}", got.numerator, want);
        let same = |got: &Tensor, leaf: &Tensor| {
            got.to_kind(Kind::Double).allclose(&leaf.grad(), limit, limit * (1.0 + want.abs()), false)
        };
        prop_assert!(same(&got.gradient, &leaves[0]));
        prop_assert_eq!(got.bias.is_some(), bias);
        if let Some(LowRankGradient { codes, rows }) = &got.bias {
            prop_assert!(same(codes, &leaves[1]) && same(rows, &leaves[2]));
        }
        let blocks = blocks_of(&scene.slots.indices, block_size).len() as f64;
        let weights: f64 = scene.slots.weights.iter().map(|&weight| f64::from(weight)).sum();
        prop_assert_eq!(got.denominator, if terms.by_block() { blocks } else { weights });
    }
}

/// bf16 hidden states and head give the loss of the same values in fp64 within rounding.
#[test]
fn bf16_agrees_with_fp64_within_rounding() {
    let settings =
        LossSettings { terms: LossTerms::DSPARK, ce_label: CeLabel::Labels, weighting: Weighting::Decay(None) };
    let tile = Tile { slots: 16, tokens: 16 };
    let mut scene = Scene::new(3, Kind::BFloat16, LabelKind::States, &[true; 40], 8, 0.7);
    let small = scene.loss(&settings, tile, true);
    for x in [&mut scene.hidden, &mut scene.head, &mut scene.codes, &mut scene.rows] {
        *x = x.to_kind(Kind::Double);
    }
    if let Labels::States { states, .. } = &mut scene.labels {
        *states = states.to_kind(Kind::Double);
    }
    let exact = scene.loss(&settings, tile, true);
    assert!((small.numerator / exact.numerator - 1.0).abs() < 0.02, "{} and {}", small.numerator, exact.numerator);
    // Rounding moves single tokens across `q < p`, where the slope of the total variation jumps.
    let gap = (small.gradient.to_kind(Kind::Double) - &exact.gradient).norm() / exact.gradient.norm();
    assert!(gap.double_value(&[]) < 0.1, "{gap}");
}

/// Logits far apart: the acceptance is exactly 0 or 1, and nothing is infinite.
#[test]
fn huge_logits_stay_finite() {
    let hidden = Tensor::from_slice(&[3e4f32, -3e4]).reshape([2, 1]);
    let head = Tensor::from_slice(&[1.0f32, -1.0, 0.0]).reshape([3, 1]);
    let ids = Tensor::from_slice(&[0i64, 0]).unsqueeze(1);
    let labels = Labels::Tokens { probabilities: Tensor::ones_like(&ids).to_kind(Kind::Float), ids };
    let slots = Slots { indices: vec![1, 2], tokens: vec![0, 0], weights: vec![1.0; 2], ..Slots::default() };
    let input = LossInput {
        hidden: &hidden,
        projection: Projection { head: &head, bias: None },
        labels: &labels,
        slots: &slots,
        block_size: 4,
    };
    for terms in [LossTerms::DSPARK, LossTerms::only(|t| t.lk = 1.0), LossTerms::only(|t| t.e2e_tv = 1.0)] {
        let settings = LossSettings { terms, ce_label: CeLabel::Labels, weighting: Weighting::Decay(None) };
        let _guard = tch::no_grad_guard();
        let got = weighted_loss(&input, &settings, Tile { slots: 2, tokens: 2 }, true).unwrap();
        assert_eq!(Vec::<f32>::try_from(got.acceptance.unwrap()).unwrap(), [1.0, 0.0]);
        assert!(got.numerator.is_finite() && i64::try_from(got.gradient.isfinite().all()).unwrap() == 1, "{terms:?}");
    }
}
