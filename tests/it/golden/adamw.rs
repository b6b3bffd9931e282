//! Optimizer: five golden AdamW steps, the same update from any split of the gradient (T2), and bit-equal resumes.

use super::{
    drafter::Case,
    files::{LOSS, near, number, open, tensor},
};
use draftmill::{
    config::RetentionPolicy,
    engines::{
        checkpointing::{CheckpointSettings, CheckpointWriter},
        optimizer::TorchOptimizer,
    },
    model::{
        adamw::{AdamW, Hyper},
        params::{Gradient, ParamSet},
    },
    run_dir::checkpoint::{CheckpointError, FIRST_MOMENTS, SECOND_MOMENTS, Verified, WEIGHTS},
};
use draftmill_actors::messages::engine::{Optimizer, StepRequest};
use std::path::Path;
use tch::{Device, Kind, Tensor};
use tokio::sync::watch;

/// Limits of the golden README.
const MAX: f64 = 5e-4;
const P999: f64 = 1e-6;

fn hyper(json: &serde_json::Value) -> Hyper {
    Hyper {
        beta1: number(&json["betas"][0]),
        beta2: number(&json["betas"][1]),
        eps: number(&json["eps"]),
        weight_decay: number(&json["weight_decay"]),
    }
}

/// Limits of the update. Adam's first step is a sign, so a few entries may differ more than most.
fn five_steps_match(prepare: impl FnOnce(AdamW) -> AdamW) {
    let case = Case::load();
    let json = case.json["adamw"].clone();
    let (lr, max_norm) = (number(&json["hyperparameters"]["lr"]), number(&json["hyperparameters"]["max_grad_norm"]));
    let golden = open("adamw_steps.safetensors");
    let mut drafter = case.drafter(case.config(), case.gamma());
    let masters = drafter.params().deep_copy(Device::Cpu, Kind::Float).unwrap();
    let mut adamw = prepare(AdamW::new(masters, hyper(&json["hyperparameters"])).unwrap());
    for want in json["steps"].as_array().unwrap() {
        let step = want["step"].as_u64().unwrap();
        let (report, gradient) = case.step(&drafter);
        near(&format!("loss before step {step}"), report.loss(), number(&want["loss_before"]), 1e-5);
        near(&format!("accuracy before step {step}"), report.accuracy(), number(&want["accuracy_before"]), LOSS);
        let norm = adamw.step(gradient, report.loss_denominator, lr, max_norm).unwrap();
        near(&format!("norm of step {step}"), norm / number(&want["grad_l2_norm_before_clip"]), 1.0, 2e-5);
        let clip = (max_norm / (norm + 1e-6)).min(1.0);
        near(&format!("clip of step {step}"), clip, number(&want["clip_coefficient"]), 2e-5);
        let mut gaps = Vec::new();
        for (name, got) in adamw.masters.iter() {
            let want = tensor(&golden, &format!("step{step}.{name}"));
            gaps.extend(Vec::<f64>::try_from((got - want).abs().to_kind(Kind::Double).flatten(0, -1)).unwrap());
        }
        gaps.sort_by(f64::total_cmp);
        let (p999, max) = (gaps[gaps.len() * 999 / 1000], gaps[gaps.len() - 1]);
        assert!(p999 <= P999 && max <= MAX, "step {step}: p99.9 {p999:e}, max {max:e}");
        drafter.load_weights(adamw.masters.deep_copy(Device::Cpu, Kind::Float).unwrap()).unwrap();
    }
    let (report, _) = case.step(&drafter);
    near("loss after the last step", report.loss(), number(&json["loss_after_step5"]), 1e-5);
}

#[test]
fn five_steps_of_the_fused_kernel_match() {
    five_steps_match(|adamw| adamw);
}

#[test]
fn five_steps_of_plain_operations_match() {
    five_steps_match(AdamW::unfused);
}

fn saving(folder: &Path) -> CheckpointWriter {
    let draft = Case::load().config();
    CheckpointWriter {
        folder: folder.to_owned(),
        settings: watch::channel(CheckpointSettings {
            keep: RetentionPolicy { last: 2, ..RetentionPolicy::default() },
            config: String::new(),
        })
        .1,
        seed: 1,
        run: String::new(),
        draft,
    }
}

fn optimizer(folder: &Path) -> TorchOptimizer {
    let case = Case::load();
    let drafter = case.drafter(case.config(), case.gamma());
    let hyper = hyper(&case.json["adamw"]["hyperparameters"]);
    TorchOptimizer::new(drafter.params(), hyper, None, Device::Cpu, vec![Device::Cpu; 3], saving(folder)).unwrap()
}

fn gradient(scale: f64) -> (f64, Gradient) {
    let case = Case::load();
    let (report, gradient) = case.step(&case.drafter(case.config(), case.gamma()));
    let pairs = gradient.into_pairs().into_iter().map(|(name, t)| (name, t * scale)).collect();
    (report.loss_denominator, ParamSet::new(pairs))
}

fn request(step: u64, denominator: f64) -> StepRequest {
    let weight_decay = number(&Case::load().json["adamw"]["hyperparameters"]["weight_decay"]);
    StepRequest { step, denominator, learning_rate: 1e-3, max_grad_norm: 1.0, weight_decay }
}

fn largest_gap(a: &ParamSet, b: &ParamSet) -> f64 {
    let gap = |(x, y): (&Tensor, &Tensor)| f64::try_from((x - y).abs().max()).unwrap();
    a.tensors().iter().zip(b.tensors()).map(gap).fold(0.0, f64::max)
}

/// verl-SpeCo#29: the update must not depend on how many drafters the gradient came from.
#[tokio::test]
async fn the_update_is_the_same_from_one_drafter_or_three() {
    let dir = tempfile::tempdir().unwrap();
    let (denominator, whole) = gradient(1.0);
    let mut one = optimizer(dir.path());
    one.step(vec![whole], request(1, denominator)).await.unwrap();
    let mut three = optimizer(dir.path());
    let parts = [0.5, 0.25, 0.25].map(|scale| gradient(scale).1);
    three.step(parts.into(), request(1, denominator)).await.unwrap();
    for drafter in 0..3 {
        let gap = largest_gap(&one.weights(drafter).await.unwrap(), &three.weights(drafter).await.unwrap());
        assert!(gap <= 1e-6, "{gap:e}");
    }
}

/// A gradient from another device is one buffer; that of the optimizer's device is unchanged.
#[tokio::test]
async fn gradients_that_travelled_give_the_same_bits_as_those_that_did_not() {
    let dir = tempfile::tempdir().unwrap();
    let mut updated = Vec::new();
    for flat in [[false; 3], [false, true, true], [true; 3]] {
        let mut optimizer = optimizer(dir.path());
        let parts = [0.5, 0.25, 0.125].into_iter().zip(flat).map(|(scale, flat)| {
            let part = gradient(scale).1;
            let part = if flat { part.deep_copy(Device::Cpu, Kind::Float).unwrap() } else { part };
            assert_eq!(part.is_flat(), flat);
            part
        });
        optimizer.step(parts.collect(), request(1, gradient(1.0).0)).await.unwrap();
        let weights = optimizer.weights(2).await.unwrap();
        assert!(weights.is_flat(), "weights travel as one buffer");
        updated.push(weights);
    }
    assert_eq!([1, 2].map(|i| largest_gap(&updated[0], &updated[i])), [0.0; 2]);
}

/// `optimizer.weight_decay` changes during a run: a step decays by the current value, once per step.
#[tokio::test]
async fn a_step_decays_by_what_it_is_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let mut after = Vec::new();
    for weight_decay in [0.0, 0.5] {
        let mut optimizer = optimizer(dir.path());
        let before = optimizer.weights(0).await.unwrap();
        let (denominator, gradient) = gradient(1.0);
        optimizer.step(vec![gradient], StepRequest { weight_decay, ..request(1, denominator) }).await.unwrap();
        after.push((before, optimizer.weights(0).await.unwrap()));
    }
    let (before, plain) = &after[0];
    let decayed = before.tensors().iter().zip(plain.tensors()).zip(after[1].1.tensors());
    for ((before, plain), decayed) in decayed {
        let expected = plain - before * (1e-3 * 0.5);
        assert!(f64::try_from((expected - decayed).abs().max()).unwrap() <= 1e-6);
        assert!(f64::try_from((plain - decayed).abs().max()).unwrap() > 1e-6 || before.numel() == 0);
    }
}

#[tokio::test]
async fn a_step_without_a_gradient_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let mut optimizer = optimizer(dir.path());
    let before = optimizer.weights(0).await.unwrap();
    assert_eq!(optimizer.step(Vec::new(), request(1, 0.0)).await.unwrap().grad_norm, 0.0);
    assert_eq!(largest_gap(&before, &optimizer.weights(0).await.unwrap()), 0.0);
}

/// z-lab#115: one NaN in a gradient must not reach the weights.
#[tokio::test]
async fn zlab_115_a_gradient_that_is_not_finite_is_refused_and_the_weights_stay() {
    let dir = tempfile::tempdir().unwrap();
    let mut optimizer = optimizer(dir.path());
    let before = optimizer.weights(0).await.unwrap();
    let (denominator, broken) = gradient(f64::NAN);
    let error = optimizer.step(vec![broken], request(1, denominator)).await.unwrap_err();
    assert!(error.to_string().contains("optimizer.learning_rate"), "{error}");
    assert_eq!(largest_gap(&before, &optimizer.weights(0).await.unwrap()), 0.0);
}

/// SpecForge#464, #460: moments and masters are restored as well as the step.
#[tokio::test]
async fn specforge_464_a_resumed_optimizer_goes_on_with_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    let mut whole = optimizer(dir.path());
    for step in 1..=4 {
        let (denominator, part) = gradient(step as f64);
        whole.step(vec![part], request(step, denominator)).await.unwrap();
        if step == 2 {
            assert_eq!(whole.save(2).await.unwrap().await.unwrap(), "step-2");
        }
    }
    let from = Verified::open(&dir.path().join("step-2")).unwrap();
    assert_eq!((from.state.step, &from.draft), (2, &Case::load().config()));
    let hyper = hyper(&Case::load().json["adamw"]["hyperparameters"]);
    let mut resumed =
        TorchOptimizer::resume(&from, hyper, None, Device::Cpu, vec![Device::Cpu], saving(dir.path())).unwrap();
    for step in 3..=4 {
        let (denominator, part) = gradient(step as f64);
        resumed.step(vec![part], request(step, denominator)).await.unwrap();
    }
    assert_eq!(largest_gap(&whole.weights(0).await.unwrap(), &resumed.weights(0).await.unwrap()), 0.0);
}

/// SpecForge#587: a resume began with fresh moments without a message. Here they are restored bit by bit, and a checkpoint
/// without them is invalid.
#[tokio::test]
async fn specforge_587_no_resume_without_its_moments() {
    let (dir, again) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut whole = optimizer(dir.path());
    for step in 1..=2 {
        let (denominator, part) = gradient(step as f64);
        whole.step(vec![part], request(step, denominator)).await.unwrap();
    }
    whole.save(2).await.unwrap().await.unwrap();
    let from = Verified::open(&dir.path().join("step-2")).unwrap();
    let hyper = hyper(&Case::load().json["adamw"]["hyperparameters"]);
    let saving = saving(again.path());
    let mut resumed = TorchOptimizer::resume(&from, hyper, None, Device::Cpu, vec![Device::Cpu], saving).unwrap();
    resumed.save(2).await.unwrap().await.unwrap();
    for file in [WEIGHTS, FIRST_MOMENTS, SECOND_MOMENTS] {
        let path = dir.path().join("step-2").join(file);
        let bytes = std::fs::read(&path).unwrap();
        assert!(bytes == std::fs::read(again.path().join("step-2").join(file)).unwrap(), "{file}");
        let half = bytes.len() / 2;
        assert!(bytes[half..].iter().any(|&byte| byte != 0), "{file} holds nothing");
        std::fs::remove_file(&path).unwrap();
        let Err(error) = Verified::open(&dir.path().join("step-2")) else { panic!("{file} is gone") };
        assert!(error.to_string().contains(file), "{error}");
        std::fs::write(path, bytes).unwrap();
    }
}

#[tokio::test]
async fn old_checkpoints_go_and_every_damage_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let mut optimizer = optimizer(dir.path());
    for step in 1..=5 {
        optimizer.save(step).await.unwrap().await.unwrap();
    }
    assert_eq!(draftmill::run_dir::checkpoint::steps(dir.path()).unwrap(), [3, 4, 5]);
    let whole = dir.path().join("step-5");
    for entry in std::fs::read_dir(&whole).unwrap() {
        let path = entry.unwrap().path();
        let bytes = std::fs::read(&path).unwrap();
        let mut flipped = bytes.clone();
        *flipped.last_mut().unwrap() ^= 0x55;
        for broken in [bytes[..bytes.len() / 2].to_vec(), flipped, Vec::new()] {
            std::fs::write(&path, broken).unwrap();
            let Err(error) = Verified::open(&whole) else { panic!("{} is broken, but was taken", path.display()) };
            assert!(matches!(error, CheckpointError::Damaged { .. }), "{}: {error}", path.display());
            assert!(error.to_string().contains("step-5"), "{error}");
        }
        std::fs::write(&path, bytes).unwrap();
    }
    Verified::open(&whole).unwrap();
}
