//! The fused backward does not use autograd, so its gradient is checked in fp64 against the dense reference implementation
//! and against finite differences, where rounding cannot hide a wrong formula, and over many training steps.

use super::files::{close_to_largest, largest};
use super::ladder::any_way;
use super::random::scene;
use draftmill::model::adamw::{AdamW, Hyper};
use draftmill::model::batch::{Packed, TargetLabels, TopKLabels};
use draftmill::model::drafter::anchors::Anchors;
use draftmill::model::drafter::reference::Dense;
use draftmill::model::drafter::{AttentionBackend, Drafter};
use draftmill::model::params::ParamSet;
use proptest::prelude::*;
use tch::{Device, Kind, Tensor};

/// Limit relative to a tensor's largest entry, in fp64.
const LIMIT: f64 = 1e-10;

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    /// Random widths, ragged rows, holes in the loss mask, anchors at 0, at the second last and at the last position,
    /// rows without a block, blocks past the end, sliding windows, groups of few blocks and of many: to eleven digits, by
    /// plain products and by the kernel, whose backward gets the joined result.
    #[test]
    fn in_fp64_the_path_that_trains_equals_the_dense_oracle(seed: u64, group_slots in 1usize..200, by in any_way()) {
        let scene = scene(seed);
        let drafter = scene.drafter_with(|options| {
            (options.kind, options.group_slots, options.attention) = (Kind::Double, group_slots, by);
        });
        let (report, gradient) = drafter.loss_and_gradient(&scene.packed(), &scene.anchors).unwrap();
        let Some(gradient) = gradient else { return Ok(()) };
        let trace = drafter.trace(&Dense::pad(&scene.packed(), &scene.anchors).unwrap()).unwrap();
        prop_assert!((report.loss_numerator / trace.numerator - 1.0).abs() < LIMIT);
        for ((name, got), want) in gradient.iter().zip(trace.gradient.tensors()) {
            prop_assert_eq!(got.kind(), Kind::Double);
            if largest(want) > 0.0 {
                close_to_largest(name, got, want, LIMIT);
            } else {
                prop_assert_eq!(largest(got), 0.0);
            }
        }
    }

    /// Any number of threads gives the same result to eleven digits, also if a row is split between two.
    #[test]
    fn in_fp64_shares_of_blocks_add_up_to_the_whole(seed: u64, threads in 2_i32..6, recompute: bool) {
        let scene = scene(seed);
        let whole = scene.drafter_in(Kind::Double);
        let shared = scene.drafter_with(|options| {
            (options.kind, options.group_slots, options.recompute) = (Kind::Double, 1, recompute);
        });
        tch::set_num_threads(threads);
        let blocks = scene.anchors.count();
        prop_assert_eq!(shared.thread_count(&scene.anchors), blocks.min(threads as usize).max(1));
        let (one, first) = whole.loss_and_gradient(&scene.packed(), &scene.anchors).unwrap();
        let (two, second) = shared.loss_and_gradient(&scene.packed(), &scene.anchors).unwrap();
        prop_assert!((one.loss_numerator - two.loss_numerator).abs() <= LIMIT * one.loss_numerator);
        prop_assert!((one.loss_denominator - two.loss_denominator).abs() <= LIMIT * one.loss_denominator);
        prop_assert_eq!((one.correct, one.supervised), (two.correct, two.supervised));
        prop_assert_eq!((one.anchors, one.tokens), (two.anchors, two.tokens));
        prop_assert_eq!(first.is_some(), second.is_some());
        for (first, second) in first.iter().zip(&second) {
            for ((name, first), second) in first.iter().zip(second.tensors()) {
                if largest(second) > 0.0 {
                    close_to_largest(name, first, second, LIMIT);
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 8, ..ProptestConfig::default() })]

    /// Compares with the loss at both ends of a short step along a random direction, without a gradient formula.
    #[test]
    fn finite_differences_of_the_loss_are_the_gradient(seed in 0u64..1 << 32, by in any_way()) {
        let scene = scene(seed);
        let mut drafter = scene.drafter_with(|options| (options.kind, options.attention) = (Kind::Double, by));
        let (_, gradient) = drafter.loss_and_gradient(&scene.packed(), &scene.anchors).unwrap();
        let Some(gradient) = gradient else { return Ok(()) };
        slopes_agree(&mut drafter, &scene.packed(), &scene.anchors, &gradient, seed as i64);
    }
}

/// The bf16 error of the gradient is close to that of the dense reference implementation, whose autograd includes every
/// rounding: as a root mean square over many scenes, and within a small factor for each tensor.
#[test]
fn in_bf16_the_path_that_trains_is_as_close_to_fp64_as_the_oracle() {
    let strayed = |got: &ParamSet, want: &ParamSet| -> Vec<f64> {
        let pairs = got.tensors().iter().zip(want.tensors()).filter(|(_, want)| largest(want) > 0.0);
        pairs.map(|(got, want)| f64::try_from((got - want).norm() / want.norm()).unwrap()).collect()
    };
    for attention in [AttentionBackend::Plain, AttentionBackend::Kernel] {
        let (mut path, mut oracle) = (Vec::new(), Vec::new());
        for seed in 0..25 {
            let scene = scene(seed);
            let (_, Some(exact)) =
                scene.drafter_in(Kind::Double).loss_and_gradient(&scene.packed(), &scene.anchors).unwrap()
            else {
                continue;
            };
            let drafter = scene.drafter_with(|options| (options.kind, options.attention) = (Kind::BFloat16, attention));
            let (_, gradient) = drafter.loss_and_gradient(&scene.packed(), &scene.anchors).unwrap();
            path.extend(strayed(&gradient.unwrap(), &exact));
            let dense = Dense::pad(&scene.packed(), &scene.anchors).unwrap();
            oracle.extend(strayed(&drafter.trace(&dense).unwrap().gradient, &exact));
        }
        assert!(path.len() > 100 && path.len() == oracle.len(), "{} tensors", path.len());
        let mean = |errors: &[f64]| (errors.iter().map(|x| x * x).sum::<f64>() / errors.len() as f64).sqrt();
        let worst = path.iter().zip(&oracle).map(|(a, b)| a / b.max(1.0 / 256.0)).fold(0.0, f64::max);
        println!("{attention:?}: {} beside the oracle's {}, at worst {worst} times", mean(&path), mean(&oracle));
        assert!(mean(&oracle) > 1.0 / 1024.0, "nothing was rounded");
        assert!(mean(&path) <= 1.2 * mean(&oracle) && worst < 6.0, "{attention:?}");
    }
}

fn slopes_agree(drafter: &mut Drafter, batch: &Packed<'_>, anchors: &Anchors, gradient: &ParamSet, seed: i64) {
    let weights = drafter.params().deep_copy(Device::Cpu, Kind::Double).unwrap();
    tch::manual_seed(seed);
    for (place, (name, slope)) in gradient.iter().enumerate() {
        let direction = Tensor::randn(slope.size(), (Kind::Double, Device::Cpu));
        let step = 1e-5 / f64::try_from(direction.norm()).unwrap();
        let mut loss_at = |distance: f64| {
            let mut moved = weights.deep_copy(Device::Cpu, Kind::Double).unwrap();
            let _ = moved.tensors_mut()[place].f_add_(&(&direction * distance)).unwrap();
            drafter.load_weights(moved).unwrap();
            drafter.loss_and_gradient(batch, anchors).unwrap().0.loss_numerator
        };
        let measured = (loss_at(step) - loss_at(-step)) / (2.0 * step);
        let expected = f64::try_from((slope * &direction).sum(Kind::Double)).unwrap();
        let scale = f64::try_from(slope.norm() * direction.norm()).unwrap() / (slope.numel() as f64).sqrt();
        assert!((measured - expected).abs() <= 1e-4 * scale + 1e-6, "{name}: {measured} and {expected}");
    }
}

/// The same check for the divergence from top-k labels, some with probability 0, and from a target's states. With
/// `target_labels` of the data's tokens the result is unchanged.
#[test]
fn finite_differences_hold_with_a_teacher() {
    let scene = scene(3);
    let mut drafter = scene.drafter_in(Kind::Double);
    let (tokens, vocab) = (scene.ids.len() as i32, drafter.config().vocab_size as i32);
    let own =
        TargetLabels::TopK(TopKLabels { k: 1, ids: scene.ids.clone(), probabilities: vec![1.0; scene.ids.len()] });
    let several = TargetLabels::TopK(TopKLabels {
        k: 3,
        ids: (0..3 * tokens).map(|i| i * 7 % vocab).collect(),
        probabilities: [0.75, 0.25, 0.0].repeat(scene.ids.len()),
    });
    let weights = drafter.params().deep_copy(Device::Cpu, Kind::Double).unwrap();
    let (plain, _) = drafter.loss_and_gradient(&scene.packed(), &scene.anchors).unwrap();
    let taught = Packed { target_labels: Some(&own), ..scene.packed() };
    assert_eq!(drafter.loss_and_gradient(&taught, &scene.anchors).unwrap().0, plain);

    for target_labels in [several, scene.states()] {
        drafter.load_weights(weights.deep_copy(Device::Cpu, Kind::Double).unwrap()).unwrap();
        let taught = Packed { target_labels: Some(&target_labels), ..scene.packed() };
        let (report, gradient) = drafter.loss_and_gradient(&taught, &scene.anchors).unwrap();
        let (held_out, _) = drafter.held_out(&taught, &scene.anchors, scene.gamma).unwrap();
        assert!((held_out.loss() / report.loss() - 1.0).abs() < 1e-6 && held_out.correct == report.correct);
        slopes_agree(&mut drafter, &taught, &scene.anchors, &gradient.unwrap(), 3);
    }
}

/// Two hundred updates of both sides with separate gradients: the curves stay together and fall.
#[test]
fn loss_curves_of_oracle_and_path_stay_together_over_200_steps() {
    let mut scene = scene(8);
    scene.fresh(8);
    let dense = Dense::pad(&scene.packed(), &scene.anchors).unwrap();
    let by_path = |drafter: &Drafter| {
        let (report, gradient) = drafter.loss_and_gradient(&scene.packed(), &scene.anchors).unwrap();
        (report.loss_numerator / report.loss_denominator, gradient.unwrap())
    };
    let by_oracle = |drafter: &Drafter| {
        let trace = drafter.trace(&dense).unwrap();
        (trace.numerator / trace.denominator, trace.gradient)
    };
    let (path, oracle) = (curve(scene.drafter(), by_path), curve(scene.drafter(), by_oracle));
    for (step, (path, oracle)) in path.iter().zip(&oracle).enumerate() {
        assert!((path / oracle - 1.0).abs() < 2e-2, "step {step}: {path} and {oracle}");
    }
    assert!(path[199] < 0.95 * path[0], "nothing was learnt: {} -> {}", path[0], path[199]);
}

/// Returns the loss before each of 200 updates.
fn curve(mut drafter: Drafter, compute: impl Fn(&Drafter) -> (f64, ParamSet)) -> Vec<f64> {
    let hyper = Hyper { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0 };
    let mut adamw = AdamW::new(drafter.params().deep_copy(Device::Cpu, Kind::Float).unwrap(), hyper).unwrap();
    let step = |_| {
        let (loss, gradient) = compute(&drafter);
        adamw.step(gradient, 1.0, 3e-3, 1.0).unwrap();
        drafter.load_weights(adamw.masters.deep_copy(Device::Cpu, Kind::Float).unwrap()).unwrap();
        loss
    };
    (0..200).map(step).collect()
}
