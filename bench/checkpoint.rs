//! What a checkpoint of a drafter of one gigabyte costs the steps: the real optimizer on the CPU, written to a real disk.

use crate::machine::{Failed, Outcome, median};
use draftmill::{
    engines::{
        optimizer::TorchOptimizer,
        saving::{Kept, Saving},
        simulated::stand_in,
    },
    model::{adamw::Hyper, params::ParamSet},
    retention::Keep,
};
use draftmill_actors::engine::{Optimizer, StepRequest};
use std::path::Path;
use tch::{Device, Kind, Tensor};
use tokio::{runtime::Runtime, sync::watch, time::Instant};

/// 16 tensors of 64 MiB: 1 GiB of weights, and twice that of moments.
const TENSORS: i64 = 16;
const ROWS: i64 = 1 << 12;
const CHECKPOINTS: u64 = 3;

/// Seconds; medians.
pub struct Costs {
    /// An update and the copy of its weights for one drafter. Forward and backward come on top and are not counted.
    pub step: f64,
    /// The copy of weights and moments: training stands still.
    pub stall: f64,
    /// A step while a checkpoint is being written.
    pub step_beside: f64,
    /// From the copy to a checkpoint that is complete.
    pub written: f64,
}

pub fn run(runtime: &Runtime, folder: &Path) -> Outcome<Costs> {
    let saving = Saving {
        folder: folder.to_owned(),
        kept: watch::channel(Kept { keep: Keep { last: 1, ..Keep::default() }, config: String::new() }).1,
        seed: 1,
        draft: stand_in(),
    };
    let hyper = Hyper { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0 };
    let devices = vec![Device::Cpu];
    let mut optimizer =
        TorchOptimizer::new(&gigabyte(), hyper, Device::Cpu, devices, saving).failed("make an optimizer")?;
    let (mut steps, mut stalls, mut beside, mut written) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    runtime.block_on(async {
        steps.push(step(&mut optimizer).await?);
        for number in 1..=CHECKPOINTS {
            steps.push(step(&mut optimizer).await?);
            let born = Instant::now();
            let writing = optimizer.save(number).await.failed("copy a checkpoint")?;
            stalls.push(born.elapsed().as_secs_f64());
            let writing = tokio::spawn(writing);
            while !writing.is_finished() {
                beside.push(step(&mut optimizer).await?);
            }
            writing.await.failed("write a checkpoint")?.failed("write a checkpoint")?;
            written.push(born.elapsed().as_secs_f64());
        }
        Ok::<_, String>(())
    })?;
    Ok(Costs { step: median(steps), stall: median(stalls), step_beside: median(beside), written: median(written) })
}

fn gigabyte() -> ParamSet {
    let tensor = |i: i64| (format!("layers.{i}"), Tensor::randn([ROWS, ROWS], (Kind::Float, Device::Cpu)));
    ParamSet::new((0..TENSORS).map(tensor).collect())
}

/// Seconds of one step, without the making of its gradient.
async fn step(optimizer: &mut TorchOptimizer) -> Outcome<f64> {
    let gradient = gigabyte();
    let born = Instant::now();
    let request = StepRequest { step: 1, denominator: 1.0, learning_rate: 1e-4, max_grad_norm: 1.0, weight_decay: 0.0 };
    optimizer.step(vec![gradient], request).await.failed("take a step")?;
    drop(optimizer.weights(0).await.failed("publish the weights")?);
    Ok(born.elapsed().as_secs_f64())
}
