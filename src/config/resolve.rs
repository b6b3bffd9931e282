//! Resolution of the wire values: replaces every "auto" that does not depend on a model.

use super::{
    RetentionPolicy,
    load::Written,
    loss::LossTerms,
    problem::Problems,
    rules::broken_rules,
    values::{
        CeLabel, Collectives, ConfidenceHead, Dtype, Engine, Head, HiddenFields, InitMethod, Labels, LayerAttention,
        LeadingAssistant, MarkovHead, MissingLabel, Overlong, SlotWeights, TopK, UnknownRole, WindowStart,
    },
    wire::{self, Wire},
};
use crate::common::{device::Device, token::Token};
use crate::hf::head::{ConfidenceInput, Dflash2Config, DsparkConfig, HeadConfig, MarkovKind};
use draftmill_actors::{messages::engine::FeatureDtype, planner::plan::JobOrder};
use std::{collections::BTreeSet, path::PathBuf};

/// Resolved settings of a run. Sections without "auto" keys keep their wire type.
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
    /// `None`: no limit but the epochs.
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
    pub hidden_fields: HiddenFields,
    pub leading_assistant: LeadingAssistant,
    pub allow_truncated: bool,
    pub min_supervised: u32,
    pub validation_fraction: f64,
    pub max_reject_fraction: f64,
    pub max_row_bytes: u64,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Target {
    pub dir: PathBuf,
    pub devices: Vec<Device>,
    /// Indices of targets that get no jobs.
    pub paused: Vec<usize>,
    pub dtype: Dtype,
    /// `None`: [`super::shape::draft_config`] computes them from the number of layers.
    pub layer_ids: Option<Vec<u32>>,
    pub feature_dtype: FeatureDtype,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    pub job_tokens: u32,
    pub buckets: u16,
    /// `None`: the planner computes them from the lengths.
    pub bucket_bounds: Option<Vec<u32>>,
    pub order: JobOrder,
    pub epoch_barrier: bool,
}

/// Drafter settings. [`super::shape::draft_config`] replaces a `None` by the target's value.
#[derive(Clone, Debug, PartialEq)]
pub struct Drafter {
    pub devices: Vec<Device>,
    /// Folder of a drafter to start from.
    pub init_from: Option<PathBuf>,
    /// Initialisation of new weights.
    pub init_method: InitMethod,
    /// Indices of drafters that draw no batches.
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
    /// `None`: equal weights.
    pub loss_decay_gamma: Option<f64>,
    /// Alpha of D-PACE; `None`: D-PACE is off.
    pub d_pace: Option<f64>,
    pub head: HeadConfig,
    /// `None`: full attention in all layers.
    pub layer_types: Option<Vec<LayerAttention>>,
    pub sliding_window: u32,
    pub sliding_causal: bool,
    pub sliding_start: WindowStart,
    /// With `lk_eta`.
    pub loss: LossTerms,
    pub ce_label: CeLabel,
    pub confidence_loss_weight: f64,
    pub selector_loss_weight: f64,
    pub selector_missing_label: MissingLabel,
    pub recompute_layers: bool,
    /// Labels from the target; `None`: the tokens of the data are the labels.
    pub labels: Option<TopK>,
    pub prefetch: u32,
    /// Collectives of several drafters.
    pub collectives: Collectives,
    /// Steps; 0: never.
    pub replica_check_every: u64,
}

/// Evaluation during training.
#[derive(Clone, Debug, PartialEq)]
pub struct Eval {
    /// `None`: no evaluation on held-out samples.
    pub every_steps: Option<u64>,
    pub samples: u32,
    /// `None`: no evaluation by decoding.
    pub decode_every_steps: Option<u64>,
    pub prompts: u32,
    /// `None`: the beginnings of held-out samples are the prompts.
    pub prompt_file: Option<PathBuf>,
    pub max_new_tokens: u32,
    pub device: Device,
    /// Fraction of the run's time, in `0..=1`.
    pub max_share: f64,
}

impl Config {
    /// Returns true if the run evaluates. `held_out`: the store has held-out samples.
    pub fn evaluates(&self, held_out: bool) -> bool {
        let eval = &self.eval;
        let any =
            held_out && eval.every_steps.is_some() || eval.can_decode(held_out) && eval.decode_every_steps.is_some();
        any && self.run.engine == Engine::Torch
    }
}

impl Eval {
    /// Returns true if there are prompts to decode. `held_out`: the store has held-out samples.
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

/// Resolves all values that do not depend on a model.
///
/// # Errors
/// All broken rules ([`broken_rules`]).
pub fn resolve(written: &Written) -> Result<Config, Problems> {
    let problems = broken_rules(written);
    if !problems.0.is_empty() {
        return Err(problems);
    }

    let Wire { run, data, target, plan, drafter, eval, .. } = written.wire.clone();
    let store = data.store.or(|| run.dir.join("data.safetensors"));
    let first = target.devices.first().copied().unwrap_or(Device::Cpu);
    let every = |steps: u64| (steps > 0).then_some(steps);
    let target_dtype = target.dtype.or(|| default_dtype(&target.devices));
    let (head, ce_label) = (head(&drafter), ce_label(&drafter));
    let loss = LossTerms { lk_eta: drafter.lk_eta, ..loss(&drafter) };
    let gamma = match drafter.slot_weights {
        SlotWeights::None => 0.0,
        _ => drafter.loss_decay_gamma.or(|| published_gamma(drafter.block_size)),
    };
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
            hidden_fields: data.hidden_fields,
            leading_assistant: data.leading_assistant,
            allow_truncated: data.allow_truncated,
            min_supervised: data.min_supervised,
            validation_fraction: data.validation_fraction,
            max_reject_fraction: data.max_reject_fraction,
            max_row_bytes: data.max_row_bytes.0,
        },
        target: Target {
            dir: target.dir,
            devices: target.devices,
            paused: unique(&target.paused),
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
            dtype: drafter.dtype.or(|| default_dtype(&drafter.devices)),
            devices: drafter.devices,
            init_from: drafter.init_from.given().cloned(),
            init_method: drafter.init_method,
            paused: unique(&drafter.paused),
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
            head,
            layer_types: drafter.layer_types.given().cloned(),
            sliding_window: drafter.sliding_window,
            sliding_causal: drafter.sliding_causal,
            sliding_start: drafter.sliding_start,
            loss,
            ce_label,
            confidence_loss_weight: drafter.confidence_loss_weight,
            selector_loss_weight: drafter.selector_loss_weight,
            selector_missing_label: drafter.selector_missing_label,
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
            every_steps: every(eval.every_steps),
            samples: eval.samples,
            decode_every_steps: every(eval.decode_every_steps.or(|| written.wire.checkpoint.every_steps)),
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
    /// Reads the token that commands must carry; `None` if no file is configured.
    ///
    /// # Errors
    /// The inner result holds the reason why the file has no valid token.
    pub fn token(&self) -> Option<Result<Token, String>> {
        (!self.token_file.as_os_str().is_empty()).then(|| Token::read(&self.token_file))
    }
}

impl Config {
    /// Returns the micro-batches of a step.
    pub fn micro_batches_per_step(&self) -> u64 {
        u64::from(self.optimizer.accumulation) * (self.drafter.devices.len() - self.drafter.paused.len()) as u64
    }
}

/// Sorts indices and removes duplicates.
fn unique(paused: &[u32]) -> Vec<usize> {
    let unique: BTreeSet<usize> = paused.iter().map(|&index| index as usize).collect();
    unique.into_iter().collect()
}

impl wire::Checkpoint {
    /// Returns the retention policy at the end of a run.
    pub fn retention(&self) -> RetentionPolicy {
        RetentionPolicy { last: self.keep_last as usize, every: self.keep_every, best: self.keep_best as usize }
    }
}

/// Returns bf16 if all devices are GPUs, else f32.
fn default_dtype(devices: &[Device]) -> Dtype {
    if devices.contains(&Device::Cpu) { Dtype::F32 } else { Dtype::Bf16 }
}

/// Returns the draft head with its settings.
fn head(drafter: &wire::Drafter) -> HeadConfig {
    match drafter.head {
        Head::Dflash => HeadConfig::Dflash,
        Head::Dspark => HeadConfig::Dspark(DsparkConfig {
            markov: match drafter.markov_head {
                MarkovHead::Vanilla => MarkovKind::Vanilla,
                MarkovHead::Gated => MarkovKind::Gated,
                MarkovHead::Rnn => MarkovKind::Rnn,
            },
            rank: drafter.markov_rank as usize,
            confidence: match drafter.confidence_head {
                ConfidenceHead::Markov => Some(ConfidenceInput::HiddenAndMarkov),
                ConfidenceHead::Hidden => Some(ConfidenceInput::Hidden),
                ConfidenceHead::None => None,
            },
        }),
        Head::Dflash2 => HeadConfig::Dflash2(Dflash2Config {
            conv_taps: drafter.conv_taps as usize,
            conv_group: drafter.conv_group as usize,
            selector_rank: drafter.selector_rank as usize,
            selector_top_k: drafter.selector_top_k as usize,
        }),
    }
}

/// Returns the loss; "auto" is DSpark's recipe for its head, else the divergence.
fn loss(drafter: &wire::Drafter) -> LossTerms {
    drafter.loss.or(|| if drafter.head == Head::Dspark { LossTerms::DSPARK } else { LossTerms::KL })
}

/// Returns the token of the cross-entropy; "auto" is the data's for DSpark, as in its recipe.
fn ce_label(drafter: &wire::Drafter) -> CeLabel {
    drafter.ce_label.or(|| if drafter.head == Head::Dspark { CeLabel::Data } else { CeLabel::Labels })
}

/// Returns gamma of the DFlash paper (4 at block size 8, 5 at 10, 7 at 16), or that of the nearest published size.
fn published_gamma(block_size: u32) -> f64 {
    match block_size {
        ..=8 => 4.0,
        9..=12 => 5.0,
        _ => 7.0,
    }
}

/// Divides the cores by the number of CPU workers, because all of them compute at the same time.
fn threads_per_worker(targets: &[Device], drafters: &[Device]) -> usize {
    let cores = crate::common::host::cores();
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
    fn defaults_are_the_published_recipe() {
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
    fn a_bad_key_is_reported_once() {
        let text = "[pool]\nmin_ready = \"x\"\nmax_batches = 2\n[run]\nepochs = 0\n";
        let problems = load_text(text, "x.toml", &[]).unwrap_err().0;
        let keys: Vec<_> = problems.iter().map(|problem| (problem.line, problem.key.as_str())).collect();
        assert_eq!(keys, [(Some(2), "pool.min_ready"), (Some(5), "run.epochs")]);
    }
}
