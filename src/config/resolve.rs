//! From the wire types to settings with nothing left open, or everything that cannot work.

use super::Keep;
use super::{
    load::Written,
    problem::Problems,
    rules::broken_rules,
    values::{Dtype, Engine, Collectives, Labels, Overlong, SlotWeights, InitMethod, TopK, UnknownRole},
    wire::{self, Wire},
};
use crate::common::device::Device;
use crate::common::token::Token;
use draftmill_actors::{messages::engine::FeatureDtype, planner::plan::Order};
use std::{collections::BTreeSet, num::NonZeroUsize, path::PathBuf};

/// The settings of a run. Sections that the file already writes without gaps are taken as they are.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    pub run: Run,
    pub data: Data,
    pub target: Target,
    pub plan: Plan,
    pub dispatch: wire::Dispatch,
    pub pool: wire::Pool,
    pub drafter: Drafter,
    pub optimizer: wire::Optimizer,
    pub checkpoint: wire::Checkpoint,
    pub eval: Eval,
    pub admin: wire::Admin,
    pub log: wire::Log,
    pub reload: wire::Reload,
    pub shutdown: wire::Shutdown,
    pub simulate: wire::Simulate,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Run {
    pub dir: PathBuf,
    pub seed: u64,
    pub epochs: u32,
    /// `None`: only the epochs end the run.
    pub max_steps: Option<u64>,
    pub engine: Engine,
    /// CPU threads of one libtorch operation.
    pub threads: usize,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Data {
    pub inputs: Vec<PathBuf>,
    pub store: PathBuf,
    pub max_length: u32,
    pub overlong: Overlong,
    pub unknown_role: UnknownRole,
    pub min_supervised: u32,
    pub validation_fraction: f64,
    pub max_reject_fraction: f64,
    pub max_row_bytes: u64,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Target {
    pub dir: PathBuf,
    pub devices: Vec<Device>,
    /// Those that get no jobs for now.
    pub paused: Vec<usize>,
    pub dtype: Dtype,
    /// `None`: by the formula, once the number of layers is known ([`super::shape::draft_config`]).
    pub layer_ids: Option<Vec<u32>>,
    pub feature_dtype: FeatureDtype,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    pub job_tokens: u32,
    pub buckets: u16,
    /// `None`: computed from the lengths.
    pub bucket_bounds: Option<Vec<u32>>,
    pub order: Order,
    pub epoch_barrier: bool,
}

/// What is `None` follows the target: [`super::shape::draft_config`] fills it in.
#[derive(Clone, Debug, PartialEq)]
pub struct Drafter {
    pub devices: Vec<Device>,
    /// Folder of a drafter to start from.
    pub init_from: Option<PathBuf>,
    /// What new weights are.
    pub init_method: InitMethod,
    /// Those that draw nothing for now.
    pub paused: Vec<usize>,
    pub layers: u32,
    pub block_size: u32,
    pub anchors: u32,
    pub heads: Option<u32>,
    pub kv_heads: Option<u32>,
    pub head_dim: Option<u32>,
    pub intermediate_size: Option<u32>,
    pub mask_token_id: Option<u32>,
    pub dtype: Dtype,
    /// `None`: all slots weigh the same.
    pub loss_decay_gamma: Option<f64>,
    /// D-PACE's alpha where slots are weighed by it.
    pub d_pace: Option<f64>,
    pub recompute_layers: bool,
    /// What the target says of each place; `None`: the data's tokens are the labels.
    pub labels: Option<TopK>,
    pub prefetch: u32,
    /// How gradients and weights travel where there are several.
    pub collectives: Collectives,
    /// 0: never.
    pub replica_check_every: u64,
}

/// Measures beside the steps.
#[derive(Clone, Debug, PartialEq)]
pub struct Eval {
    /// `None`: nothing is measured on held-out samples.
    pub every_steps: Option<u64>,
    pub samples: u32,
    /// `None`: nothing is decoded.
    pub decode_every_steps: Option<u64>,
    pub prompts: u32,
    /// `None`: the beginnings of held-out samples.
    pub prompt_file: Option<PathBuf>,
    pub max_new_tokens: u32,
    pub device: Device,
    /// In 0..=1.
    pub max_share: f64,
}

impl Config {
    /// Whether anything is measured beside the steps, where `held_out` samples are kept apart.
    pub fn measures(&self, held_out: bool) -> bool {
        let eval = &self.eval;
        let any =
            held_out && eval.every_steps.is_some() || eval.can_decode(held_out) && eval.decode_every_steps.is_some();
        any && self.run.engine == Engine::Torch
    }
}

impl Eval {
    /// Whether there are prompts to decode, where `held_out` samples are kept apart.
    pub fn can_decode(&self, held_out: bool) -> bool {
        held_out || self.prompt_file.is_some()
    }
}

impl From<Dtype> for FeatureDtype {
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => FeatureDtype::F32,
            Dtype::F16 => FeatureDtype::F16,
            Dtype::Bf16 => FeatureDtype::Bf16,
        }
    }
}

/// Fills in what does not depend on a model, or tells everything that cannot work.
pub fn resolve(written: &Written) -> Result<Config, Problems> {
    let problems = broken_rules(written);
    if !problems.0.is_empty() {
        return Err(problems);
    }

    let Wire { run, data, target, plan, drafter, eval, .. } = written.wire.clone();
    let store = data.store.or(|| run.dir.join("data.safetensors"));
    let first = target.devices.first().copied().unwrap_or(Device::Cpu);
    let often = |steps: u64| (steps > 0).then_some(steps);
    let target_dtype = target.dtype.or(|| natural_dtype(&target.devices));
    let gamma = drafter.loss_decay_gamma.or(|| published_gamma(drafter.block_size));
    let threads = run.threads.given().map(|&threads| threads as usize);
    Ok(Config {
        run: Run {
            dir: run.dir,
            seed: run.seed,
            epochs: run.epochs,
            max_steps: (run.max_steps > 0).then_some(run.max_steps),
            engine: run.engine,
            threads: threads.unwrap_or_else(|| threads_per_worker(&target.devices, &drafter.devices)),
        },
        data: Data {
            inputs: data.inputs,
            store,
            max_length: data.max_length,
            overlong: data.overlong,
            unknown_role: data.unknown_role,
            min_supervised: data.min_supervised,
            validation_fraction: data.validation_fraction,
            max_reject_fraction: data.max_reject_fraction,
            max_row_bytes: data.max_row_bytes.0,
        },
        target: Target {
            dir: target.dir,
            devices: target.devices,
            paused: places(&target.paused),
            dtype: target_dtype,
            layer_ids: target.layer_ids.given().cloned(),
            feature_dtype: target.feature_dtype.or(|| target_dtype).into(),
        },
        plan: Plan {
            job_tokens: plan.job_tokens,
            buckets: plan.buckets,
            bucket_bounds: plan.bucket_bounds.given().cloned(),
            order: plan.order,
            epoch_barrier: plan.epoch_barrier,
        },
        drafter: Drafter {
            dtype: drafter.dtype.or(|| natural_dtype(&drafter.devices)),
            devices: drafter.devices,
            init_from: drafter.init_from.given().cloned(),
            init_method: drafter.init_method,
            paused: places(&drafter.paused),
            layers: drafter.layers,
            block_size: drafter.block_size,
            anchors: drafter.anchors,
            heads: drafter.heads.given().copied(),
            kv_heads: drafter.kv_heads.given().copied(),
            head_dim: drafter.head_dim.given().copied(),
            intermediate_size: drafter.intermediate_size.given().copied(),
            mask_token_id: drafter.mask_token_id.given().copied(),
            loss_decay_gamma: (gamma > 0.0).then_some(gamma),
            d_pace: (drafter.slot_weights == SlotWeights::DPace).then_some(drafter.d_pace_alpha),
            recompute_layers: drafter.recompute_layers,
            labels: (drafter.labels == Labels::Target).then_some(drafter.label_top_k),
            prefetch: drafter.prefetch,
            collectives: drafter.collectives,
            replica_check_every: drafter.replica_check_every,
        },
        dispatch: written.wire.dispatch.clone(),
        pool: written.wire.pool.clone(),
        optimizer: written.wire.optimizer.clone(),
        checkpoint: written.wire.checkpoint.clone(),
        eval: Eval {
            every_steps: often(eval.every_steps),
            samples: eval.samples,
            decode_every_steps: often(eval.decode_every_steps.or(|| written.wire.checkpoint.every_steps)),
            prompts: eval.prompts,
            prompt_file: eval.prompt_file.given().cloned(),
            max_new_tokens: eval.max_new_tokens,
            device: eval.device.or(|| first),
            max_share: eval.max_share,
        },
        admin: written.wire.admin.clone(),
        log: written.wire.log.clone(),
        reload: written.wire.reload.clone(),
        shutdown: written.wire.shutdown.clone(),
        simulate: written.wire.simulate.clone(),
    })
}

impl wire::Admin {
    /// The token that orders must carry, where a file is named, or why there is none.
    pub fn token(&self) -> Option<Result<Token, String>> {
        (!self.token_file.as_os_str().is_empty()).then(|| Token::read(&self.token_file))
    }
}

impl Config {
    /// Micro-batches of a step.
    pub fn micro_batches_per_step(&self) -> u64 {
        u64::from(self.optimizer.accumulation) * (self.drafter.devices.len() - self.drafter.paused.len()) as u64
    }
}

/// Each once, in order.
fn places(paused: &[u32]) -> Vec<usize> {
    let places: BTreeSet<usize> = paused.iter().map(|&index| index as usize).collect();
    places.into_iter().collect()
}

impl wire::Checkpoint {
    /// What is kept when a run ends.
    pub fn keep(&self) -> Keep {
        Keep { last: self.keep_last as usize, every: self.keep_every, best: self.keep_best as usize }
    }
}

/// bf16 where every device has it in hardware.
fn natural_dtype(devices: &[Device]) -> Dtype {
    if devices.contains(&Device::Cpu) { Dtype::F32 } else { Dtype::Bf16 }
}

/// The paper's decay for the block sizes that it gives (4 at 8, 5 at 10, 7 at 16); the nearest one otherwise.
fn published_gamma(block_size: u32) -> f64 {
    match block_size {
        ..=8 => 4.0,
        9..=12 => 5.0,
        _ => 7.0,
    }
}

/// All cores for one worker on the CPU; an equal share each for several, because they compute at the same time.
fn threads_per_worker(targets: &[Device], drafters: &[Device]) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let workers = targets.iter().chain(drafters).filter(|device| **device == Device::Cpu).count();
    (cores / workers.max(1)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::load_text;

    fn config(text: &str) -> Config {
        load_text(text, "x.toml", &[]).unwrap().config
    }

    #[test]
    fn the_defaults_are_the_papers_recipe_and_leave_nothing_open() {
        let config = config("");
        assert_eq!(config.run.max_steps, None);
        assert_eq!(config.data.store, PathBuf::from("runs/run/data.safetensors"));
        assert_eq!((config.run.epochs, config.drafter.anchors, config.drafter.block_size), (6, 512, 16));
        assert_eq!((config.optimizer.learning_rate, config.optimizer.warmup_fraction), (6e-4, 0.04));
        assert_eq!(config.drafter.loss_decay_gamma, Some(7.0));
        assert_eq!((config.target.dtype, config.target.feature_dtype), (Dtype::F32, FeatureDtype::F32));
        assert!(config.run.threads >= 1);
    }

    #[test]
    fn auto_follows_the_device_and_the_block() {
        let config = config("[target]\ndevices = [\"cuda\", \"cuda:1\"]\n[drafter]\nblock_size = 10\n");
        assert_eq!(config.target.devices, [Device::Cuda(0), Device::Cuda(1)]);
        assert_eq!((config.target.dtype, config.drafter.dtype), (Dtype::Bf16, Dtype::F32));
        assert_eq!(config.target.feature_dtype, FeatureDtype::Bf16);
        assert_eq!(config.drafter.loss_decay_gamma, Some(5.0));
        assert_eq!(self::config("[drafter]\nloss_decay_gamma = 0.0").drafter.loss_decay_gamma, None);
    }

    #[test]
    fn reading_and_resolving_report_together_and_a_bad_key_only_once() {
        let text = "[pool]\nmin_ready = \"x\"\nmax_batches = 2\n[run]\nepochs = 0\n";
        let problems = load_text(text, "x.toml", &[]).unwrap_err().0;
        let keys: Vec<_> = problems.iter().map(|problem| (problem.line, problem.key.as_str())).collect();
        assert_eq!(keys, [(Some(2), "pool.min_ready"), (Some(5), "run.epochs")]);
    }
}
