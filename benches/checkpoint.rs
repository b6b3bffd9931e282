//! Cost of a checkpoint for the steps: the real optimizer on the CPU, 1 GiB of weights, written to a real disk.

use crate::machine::{Failed, Outcome, median};
use draftmill::{
    config::RetentionPolicy,
    engines::{
        checkpointing::{CheckpointSettings, CheckpointWriter},
        optimizer::TorchOptimizer,
        simulated::placeholder_draft,
    },
    model::{
        adamw::Hyper,
        ops::GradGuard,
        params::{Gradient, ParamSet},
    },
};
use draftmill_actors::messages::engine::{Optimizer, StepRequest};
use std::path::Path;
use tch::{Device, Kind, Tensor};
use tokio::{runtime::Runtime, sync::watch, time::Instant};

/// 16 tensors of 64 MiB: 1 GiB of weights, and twice that of moments.
const TENSORS: i64 = 16;
const ROWS: i64 = 1 << 12;
/// Slots of one micro-batch: 32 blocks of 16, far fewer than the recipe's 512 blocks.
const SLOTS: i64 = 512;
const CHECKPOINTS: u64 = 3;

/// Median times in seconds.
pub struct Costs {
    /// Forward and backward of one micro-batch, the update, and the copy of the weights for one drafter.
    pub step: f64,
    /// Update and copy of the weights alone.
    pub update: f64,
    /// Copy of weights and moments, during which training is blocked.
    pub stall: f64,
    /// Step while a checkpoint is being written.
    pub step_beside: f64,
    /// Time from the copy to the complete checkpoint.
    pub written: f64,
}

pub fn run(runtime: &Runtime, folder: &Path) -> Outcome<Costs> {
    let saving = CheckpointWriter {
        folder: folder.to_owned(),
        settings: watch::channel(CheckpointSettings {
            keep: RetentionPolicy { last: 1, ..RetentionPolicy::default() },
            config: String::new(),
        })
        .1,
        seed: 1,
        run: String::new(),
        draft: placeholder_draft(),
    };
    let hyper = Hyper { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0 };
    let devices = vec![Device::Cpu];
    let mut optimizer =
        TorchOptimizer::new(&gigabyte(), hyper, None, Device::Cpu, devices, saving).failed("make an optimizer")?;
    let mut weights = gigabyte();
    let (mut steps, mut updates, mut beside) = (Vec::new(), Vec::new(), Vec::new());
    let (mut stalls, mut written) = (Vec::new(), Vec::new());
    runtime.block_on(async {
        step(&mut optimizer, &mut weights).await?;
        for number in 1..=CHECKPOINTS {
            let (whole, update) = step(&mut optimizer, &mut weights).await?;
            steps.push(whole);
            updates.push(update);
            let born = Instant::now();
            let writing = optimizer.save(number).await.failed("copy a checkpoint")?;
            stalls.push(born.elapsed().as_secs_f64());
            let writing = tokio::spawn(writing);
            while !writing.is_finished() {
                beside.push(step(&mut optimizer, &mut weights).await?.0);
            }
            writing.await.failed("write a checkpoint")?.failed("write a checkpoint")?;
            written.push(born.elapsed().as_secs_f64());
        }
        Ok::<_, String>(())
    })?;
    Ok(Costs {
        step: median(steps),
        update: median(updates),
        stall: median(stalls),
        step_beside: median(beside),
        written: median(written),
    })
}

fn gigabyte() -> ParamSet {
    let tensor = |i: i64| (format!("layers.{i}"), Tensor::randn([ROWS, ROWS], (Kind::Float, Device::Cpu)));
    ParamSet::new((0..TENSORS).map(tensor).collect())
}

/// Returns the seconds of one step, and of its update alone.
async fn step(optimizer: &mut TorchOptimizer, weights: &mut ParamSet) -> Outcome<(f64, f64)> {
    let born = Instant::now();
    let gradient = gradient(weights).failed("compute a gradient")?;
    let computed = Instant::now();
    let request = StepRequest { step: 1, denominator: 1.0, learning_rate: 1e-4, max_grad_norm: 1.0, weight_decay: 0.0 };
    optimizer.step(vec![gradient], request).await.failed("take a step")?;
    *weights = optimizer.weights(0).await.failed("publish the weights")?;
    Ok((born.elapsed().as_secs_f64(), computed.elapsed().as_secs_f64()))
}

/// Runs forward and backward of one micro-batch through every weight.
fn gradient(weights: &ParamSet) -> Result<Gradient, tch::TchError> {
    let _grad = GradGuard::enable();
    let leaves: Vec<Tensor> = weights.tensors().iter().map(|weight| weight.detach().set_requires_grad(true)).collect();
    let mut x = Tensor::f_randn([SLOTS, ROWS], (Kind::Float, Device::Cpu))?;
    for leaf in &leaves {
        x = x.f_mm(leaf)?.f_tanh()?;
    }
    let gradients = Tensor::f_run_backward(&[x.f_sum(Kind::Float)?], &leaves, false, false)?;
    Ok(ParamSet::new(weights.names().iter().cloned().zip(gradients).collect()))
}
