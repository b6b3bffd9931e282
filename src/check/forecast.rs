//! Forecast of a run from lengths, settings and shapes: jobs, steps, bytes, device memory and disk.

use crate::{
    config::{self, Config, Device, ROW_BYTES, feature_bytes_per_token, replay_window},
    hf::{config::TargetConfig, draft::DraftConfig},
};
use draftmill_actors::{
    messages::types::JobSpec,
    planner::{
        buckets::optimal_bounds,
        plan::{Plan, PlanError, PlanSettings, plan_epoch},
    },
    pool::DrawPolicy,
};
use serde::Serialize;
use std::collections::BTreeMap;

/// Numbers of the first epoch's plan, and the needs that follow from them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Forecast {
    pub samples: usize,
    pub tokens: u64,
    pub buckets: Vec<Bucket>,
    /// Fraction of token slots that are padding, in `0..1`.
    pub padding_share: f64,
    pub jobs_per_epoch: usize,
    pub micro_batches_per_step: u64,
    pub steps_per_epoch: f64,
    /// Optimizer steps of the whole run.
    pub steps: u64,
    /// Bytes of hidden states, id, loss mask and labels per real token.
    pub bytes_per_token: u64,
    pub mean_job_bytes: u64,
    pub largest_job_bytes: u64,
    pub pool: PoolForecast,
    /// Trained parameters; `None` with the simulated engine.
    pub drafter_parameters: Option<u64>,
    /// Memory of each device that is known before the run.
    pub devices: Vec<DeviceMemory>,
    pub disk: Disk,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Bucket {
    /// Maximum sample length, in tokens.
    pub bound: u32,
    pub samples: usize,
    pub jobs: usize,
    pub tokens: u64,
    pub padding_share: f64,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PoolForecast {
    pub max_bytes: u64,
    /// `min_ready` times the largest job. The pool must hold these bytes, or it deadlocks.
    pub min_ready_bytes: u64,
    /// Jobs of mean size that fit, at most `max_batches`.
    pub typical_batches: u64,
    /// Window of draw policy `replay`, in jobs.
    pub replay_window: Option<u32>,
}

/// Bytes of a run on one device. Temporary buffers of single operations are not counted.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct DeviceMemory {
    pub device: String,
    pub targets: usize,
    pub drafters: usize,
    /// Target weights: embedding and layers up to the last tapped one; all weights with labels from the target.
    pub target_weights: u64,
    /// Hidden states of the largest job, once per target, and once per batch that a drafter holds on a GPU.
    pub features: u64,
    /// Drafter weights and gradients, and the target's frozen embedding and head.
    pub drafter_weights: u64,
    /// f32 weights and both moments, on the device of the first drafter.
    pub optimizer: u64,
    /// Values that a drafter keeps from forward to backward for the largest micro-batch, with `drafter.anchors` blocks
    /// in each row. A GPU splits a micro-batch that does not fit; the host has no such error.
    pub activations: u64,
    /// Whole target and drafter of the evaluation.
    pub evaluation: u64,
    /// Pool, on the host.
    pub pool: u64,
    pub total: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Disk {
    /// f32 weights and both moments.
    pub checkpoint: u64,
    /// All checkpoints of `keep_last`, `keep_every` and `keep_best`, and the one in progress.
    pub checkpoints: u64,
    pub export: u64,
    pub total: u64,
}

impl Forecast {
    /// Returns the memory of the host: of the CPU's workers, and the pool.
    pub fn host(&self) -> DeviceMemory {
        let name = Device::Cpu.to_string();
        let pool = self.pool.max_bytes;
        let pool_alone = || DeviceMemory { device: name.clone(), pool, total: pool, ..DeviceMemory::default() };
        self.devices.iter().find(|memory| memory.device == name).cloned().unwrap_or_else(pool_alone)
    }

    /// Returns the names of the run's GPUs.
    pub fn gpus(&self) -> Vec<String> {
        let names = self.devices.iter().map(|memory| memory.device.clone());
        names.filter(|name| *name != Device::Cpu.to_string()).collect()
    }
}

/// Plans the first epoch and computes the forecast. `models` are target and drafter; `None` with the simulated engine.
///
/// # Errors
/// If the plan is impossible, for example without samples.
pub fn forecast(
    config: &Config,
    lengths: &[u32],
    models: Option<(&TargetConfig, &DraftConfig)>,
) -> Result<Forecast, PlanError> {
    let bounds = config.plan.bucket_bounds.clone();
    let bounds = bounds.unwrap_or_else(|| optimal_bounds(lengths, config.plan.buckets.into()));
    let settings =
        PlanSettings { seed: config.run.seed, job_tokens: config.plan.job_tokens, order: config.plan.order, bounds };
    let plan = plan_epoch(lengths, &settings, 0)?;

    let tokens: u64 = lengths.iter().map(|&length| u64::from(length)).sum();
    let bytes_per_token = match models {
        Some((target, drafter)) => {
            let taps = drafter.target_layer_ids.len();
            feature_bytes_per_token(taps, target.hidden_size, config.target.feature_dtype, config.drafter.labels)
        }
        None => config.simulate.feature_bytes_per_token.0,
    };
    let row_bytes = if models.is_some() { ROW_BYTES } else { 0 };
    let bytes = |tokens: u64, rows: usize| tokens.saturating_mul(bytes_per_token) + rows as u64 * row_bytes;
    let jobs = plan.jobs.len();
    let full = full_jobs(&plan, settings.job_tokens);
    let largest_job_bytes = full.iter().map(|&(rows, width)| bytes(width * rows, rows as usize)).max().unwrap_or(0);
    let mean_job_bytes = bytes(tokens, lengths.len()) / (jobs.max(1) as u64);
    let micro_batches_per_step = config.micro_batches_per_step();
    let steps = (jobs as u64 * u64::from(config.run.epochs)).div_ceil(micro_batches_per_step);
    Ok(Forecast {
        samples: lengths.len(),
        tokens,
        buckets: buckets(&plan),
        padding_share: plan.padding_share().unwrap_or(0.0),
        jobs_per_epoch: jobs,
        micro_batches_per_step,
        steps_per_epoch: jobs as f64 / micro_batches_per_step as f64,
        steps: config.run.max_steps.map_or(steps, |most| steps.min(most)),
        bytes_per_token,
        mean_job_bytes,
        largest_job_bytes,
        pool: PoolForecast {
            max_bytes: config.pool.max_bytes.0,
            min_ready_bytes: largest_job_bytes.saturating_mul(config.pool.min_ready.into()),
            typical_batches: (config.pool.max_bytes.0 / mean_job_bytes.max(1)).min(config.pool.max_batches.into()),
            replay_window: (config.pool.draw_policy == DrawPolicy::Replay)
                .then(|| replay_window(&config.pool, largest_job_bytes)),
        },
        drafter_parameters: models.map(|(_, drafter)| count(&drafter.tensor_shapes(), |_| true)),
        devices: models.map_or_else(Vec::new, |(target, drafter)| {
            let kept = activation_bytes(config, drafter, most_anchors(&full, config.drafter.anchors));
            devices(config, target, drafter, largest_job_bytes, kept)
        }),
        disk: models.map_or_else(Disk::default, |(_, drafter)| disk(config, drafter, steps)),
    })
}

fn buckets(plan: &Plan) -> Vec<Bucket> {
    let mut buckets: Vec<_> =
        plan.bounds.iter().map(|&bound| Bucket { bound, samples: 0, jobs: 0, tokens: 0, padding_share: 0.0 }).collect();
    let mut slots = vec![0u64; buckets.len()];
    for job in &plan.jobs {
        let index = usize::from(job.bucket);
        if let (Some(bucket), Some(slots)) = (buckets.get_mut(index), slots.get_mut(index)) {
            bucket.samples += job.samples.len();
            bucket.jobs += 1;
            bucket.tokens += u64::from(job.tokens);
            *slots += job.padded_tokens();
        }
    }
    for (bucket, slots) in buckets.iter_mut().zip(slots) {
        bucket.padding_share = if slots == 0 { 0.0 } else { 1.0 - bucket.tokens as f64 / slots as f64 };
    }
    buckets
}

/// Returns rows and width of a full job for each job of the first epoch. A job of another epoch may use the whole
/// budget, as far as its bucket has samples.
fn full_jobs(plan: &Plan, job_tokens: u32) -> Vec<(u64, u64)> {
    let mut samples = BTreeMap::<_, u64>::new();
    for job in &plan.jobs {
        *samples.entry(job.bucket).or_default() += job.samples.len() as u64;
    }
    let rows =
        |job: &JobSpec| u64::from(job_tokens / job.width.max(1)).min(samples.get(&job.bucket).copied().unwrap_or(0));
    plan.jobs.iter().map(|job| (rows(job), job.width.into())).collect()
}

/// Returns the largest number of anchors in one job. A row has at most one for each token.
fn most_anchors(full: &[(u64, u64)], limit: u32) -> u64 {
    full.iter().map(|&(rows, width)| rows * width.min(limit.into())).max().unwrap_or(0)
}

/// Returns a lower bound of the bytes that the backward pass needs of `anchors` blocks: per slot and layer the input,
/// queries, keys, values, and both products of the MLP. With `drafter.recompute_layers` only one layer has more than
/// its input.
fn activation_bytes(config: &Config, drafter: &DraftConfig, anchors: u64) -> u64 {
    let DraftConfig { hidden_size, num_attention_heads: heads, num_key_value_heads: shared, .. } = *drafter;
    let inner = (heads + 2 * shared) * drafter.head_dim + 2 * drafter.intermediate_size;
    let layers = drafter.num_hidden_layers;
    let whole = if config.drafter.recompute_layers { layers.min(1) } else { layers };
    let values = (layers * hidden_size + whole * inner) as u64;
    anchors.saturating_mul(drafter.block_size as u64).saturating_mul(values * config.drafter.dtype.bytes())
}

fn devices(
    config: &Config,
    target: &TargetConfig,
    drafter: &DraftConfig,
    job_bytes: u64,
    activations: u64,
) -> Vec<DeviceMemory> {
    let shapes = target.tensor_shapes();
    let last_tap = drafter.target_layer_ids.iter().max().copied().unwrap_or(0);
    let frozen = count(&shapes, |name| name == EMBEDDING || name == HEAD);
    let forward = match config.drafter.labels {
        None => count(&shapes, |name| name == EMBEDDING || layer_of(name).is_some_and(|l| l <= last_tap)),
        Some(_) => count(&shapes, |_| true),
    };
    let trained = count(&drafter.tensor_shapes(), |_| true);

    let mut devices: BTreeMap<Device, DeviceMemory> = BTreeMap::new();
    for device in &config.target.devices {
        let memory = devices.entry(*device).or_default();
        memory.targets += 1;
        memory.target_weights += forward * config.target.dtype.bytes();
        memory.features += job_bytes;
    }
    for (index, device) in config.drafter.devices.iter().enumerate() {
        let memory = devices.entry(*device).or_default();
        memory.drafters += 1;
        memory.drafter_weights += (trained + frozen) * config.drafter.dtype.bytes() + trained * F32;
        if *device != Device::Cpu {
            // A drafter on the CPU reads the pool's memory.
            memory.features += job_bytes * (1 + u64::from(config.drafter.prefetch));
        }
        memory.optimizer += if index == 0 { trained * 3 * F32 } else { 0 };
        memory.activations = memory.activations.saturating_add(activations);
    }
    if config.evaluates(config.data.validation_fraction > 0.0) {
        let whole = count(&shapes, |_| true);
        // The drafter's weights, and a copy of the next ones.
        devices.entry(config.eval.device).or_default().evaluation =
            whole * config.target.dtype.bytes() + trained * 2 * F32;
    }
    devices.entry(Device::Cpu).or_default().pool = config.pool.max_bytes.0;
    let named = devices.into_iter().map(|(device, memory)| DeviceMemory {
        device: device.to_string(),
        total: [
            memory.target_weights,
            memory.features,
            memory.drafter_weights,
            memory.optimizer,
            memory.activations,
            memory.evaluation,
            memory.pool,
        ]
        .into_iter()
        .fold(0, u64::saturating_add),
        ..memory
    });
    named.collect()
}

fn disk(config: &Config, drafter: &DraftConfig, steps: u64) -> Disk {
    let trained = count(&drafter.tensor_shapes(), |_| true);
    let checkpoint = trained * 3 * F32;
    let config::Checkpoint { every_steps, keep_last, keep_every, keep_best, .. } = config.checkpoint;
    let permanent = if keep_every > 0 { steps / keep_every.max(every_steps) } else { 0 };
    let checkpoints = checkpoint * (u64::from(keep_last) + permanent + u64::from(keep_best) + 1);
    let export = trained * config.checkpoint.export_dtype.bytes();
    Disk { checkpoint, checkpoints, export, total: checkpoints + export }
}

/// Bytes of an f32 value.
const F32: u64 = 4;
const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";

/// Returns the layer of a target's tensor.
fn layer_of(name: &str) -> Option<usize> {
    name.strip_prefix("model.layers.")?.split('.').next()?.parse().ok()
}

/// Counts the values of the tensors whose names are `wanted`.
fn count(shapes: &BTreeMap<String, Vec<usize>>, wanted: impl Fn(&str) -> bool) -> u64 {
    let values = |shape: &Vec<usize>| shape.iter().map(|&dim| dim as u64).product::<u64>();
    shapes.iter().filter(|(name, _)| wanted(name)).map(|(_, shape)| values(shape)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{ByteSize, draft_config, load_text};
    use proptest::prelude::*;
    use serde_json::json;

    /// Target with round sizes, for sums by hand.
    fn target() -> TargetConfig {
        TargetConfig::from_json(&json!({
            "model_type": "llama", "hidden_size": 100, "intermediate_size": 200, "num_hidden_layers": 4,
            "num_attention_heads": 10, "num_key_value_heads": 5, "head_dim": 10, "vocab_size": 1000,
            "max_position_embeddings": 512, "rope_theta": 1e4, "rms_norm_eps": 1e-5, "hidden_act": "silu",
            "tie_word_embeddings": true, "eos_token_id": 2
        }))
        .unwrap()
    }

    const TEXT: &str = "
        [run]\nepochs = 3
        [plan]\njob_tokens = 40\nbucket_bounds = [10, 20]
        [data]\nmax_length = 20\nmin_supervised = 1
        [target]\nlayer_ids = [0, 1]\ndevices = [\"cpu\", \"cuda:0\"]
        [drafter]\nlayers = 1\nblock_size = 4\ndevices = [\"cuda:0\", \"cuda:1\"]\ndtype = \"bf16\"
        [optimizer]\naccumulation = 2
        [checkpoint]\nkeep_last = 2\nkeep_best = 0
        [eval]\ndecode_every_steps = 0\nevery_steps = 0
        [pool]\nmax_bytes = \"1 MB\"\nmax_batches = 9";

    #[test]
    fn numbers_agree_with_sums_by_hand() {
        let loaded = load_text(TEXT, "x.toml", &[]).unwrap();
        let (config, target) = (&loaded.config, target());
        let drafter = draft_config(config, &loaded.written, &target, 7).unwrap();
        // 8 rows of 10 make 2 jobs of 4, 4 rows of up to 20 make 2 jobs of 2.
        let lengths = [10, 10, 10, 10, 10, 10, 10, 10, 20, 20, 20, 20];
        let seen = forecast(config, &lengths, Some((&target, &drafter))).unwrap();
        assert_eq!((seen.samples, seen.tokens, seen.jobs_per_epoch, seen.padding_share), (12, 160, 4, 0.0));
        // 4 micro-batches make a step: 2 accumulated on 2 drafters; 3 epochs of 4 jobs.
        assert_eq!((seen.micro_batches_per_step, seen.steps_per_epoch, seen.steps), (4, 1.0, 3));
        // 2 taps of 100 values in f32, an id and a mask.
        assert_eq!((seen.bytes_per_token, seen.largest_job_bytes, seen.mean_job_bytes), (805, 32_216, 32_212));
        assert_eq!((seen.pool.min_ready_bytes, seen.pool.typical_batches), (4 * 32_216, 9));
        let buckets: Vec<_> = seen.buckets.iter().map(|b| (b.bound, b.samples, b.jobs, b.tokens)).collect();
        assert_eq!(buckets, [(10, 8, 2, 80), (20, 4, 2, 80)]);

        // Layer of the drafter: q, o 2 x 100x100; k, v 2 x 100x50; mlp 3 x 100x200; norms 2 x 100 + 2 x 10. And fc, 2 norms.
        let trained = 20_000 + 10_000 + 60_000 + 220 + 20_000 + 200;
        assert_eq!(seen.drafter_parameters, Some(trained));
        let checkpoint = trained * 12;
        let disk =
            Disk { checkpoint, checkpoints: 3 * checkpoint, export: 2 * trained, total: 3 * checkpoint + 2 * trained };
        assert_eq!(seen.disk, disk);
        // Issue 17, C7: the backward pass needs its inputs; with recomputation one layer of two is kept.
        assert_eq!(seen.devices[2].activations, 40 * 4 * 700 * 2);
        let sets = ["drafter.layers=2".into(), "drafter.recompute_layers=true".into()];
        let recomputed = load_text(TEXT, "x.toml", &sets).unwrap();
        let two = draft_config(&recomputed.config, &recomputed.written, &target, 7).unwrap();
        assert_eq!(activation_bytes(&recomputed.config, &two, 40), 40 * 4 * (2 * 100 + 600) * 2);
        // One of 3 steps is a multiple of 2 and is kept permanently.
        let sets = ["checkpoint.every_steps=1".into(), "checkpoint.keep_every=2".into()];
        let config = load_text(TEXT, "x.toml", &sets).unwrap().config;
        let more = forecast(&config, &lengths, Some((&target, &drafter))).unwrap();
        assert_eq!(more.disk.checkpoints, 4 * checkpoint);
        // One more state than the taps, and the whole target.
        let sets = ["drafter.labels=target".into(), "drafter.label_top_k=all".into()];
        let labelled = load_text(TEXT, "x.toml", &sets).unwrap().config;
        let labelled = forecast(&labelled, &lengths, Some((&target, &drafter))).unwrap();
        assert_eq!((labelled.bytes_per_token, labelled.largest_job_bytes), (1205, 40 * 1205 + 4 * 4));
        assert_eq!(labelled.devices[1].target_weights, (100_000 + 4 * 90_200 + 100) * 4);
        let shape = drafter;

        // Target up to layer 1 in f32 on either device (one is the CPU); tied head, so the frozen part is the embedding.
        let (weights, drafter) = ((100_000 + 2 * 90_200) * 4, (trained + 100_000) * 2 + trained * 4);
        let devices: Vec<_> = seen.devices.iter().map(|d| (d.device.as_str(), d.total)).collect();
        // A drafter holds the current batch and one prefetched batch.
        // 40 anchors of 4 slots, and 700 values of 2 bytes for each slot.
        let drafter = drafter + 2 * 32_216 + 40 * 4 * 700 * 2;
        let cuda0 = weights + 32_216 + drafter + trained * 12;
        assert_eq!(devices, [("cpu", weights + 32_216 + 1_000_000), ("cuda:0", cuda0), ("cuda:1", drafter)]);

        // Evaluation needs the whole target: 4 layers and the final norm.
        let sets = ["eval.every_steps=9".into(), "eval.device=cuda:1".into()];
        let config = load_text(TEXT, "x.toml", &sets).unwrap().config;
        let more = forecast(&config, &lengths, Some((&target, &shape))).unwrap();
        let evaluation = (100_000 + 4 * 90_200 + 100) * 4 + trained * 8;
        assert_eq!((more.devices[2].evaluation, more.devices[2].total), (evaluation, drafter + evaluation));
    }

    /// Bytes and anchors follow one rule: a full job of the bucket, but never more rows than the bucket has samples.
    #[test]
    fn a_full_job_has_no_more_rows_than_its_bucket() {
        let plan = |lengths: &[u32]| {
            let settings = PlanSettings { seed: 1, job_tokens: 40, order: Default::default(), bounds: vec![10, 20] };
            plan_epoch(lengths, &settings, 0).unwrap()
        };
        // Five rows of 10 make jobs of 4 and 1; a single row of 20 stays alone, though the budget holds two.
        let full = full_jobs(&plan(&[10, 10, 10, 10, 10, 20]), 40);
        assert_eq!(full.iter().copied().collect::<std::collections::BTreeSet<_>>(), [(1, 20), (4, 10)].into());
        assert_eq!((most_anchors(&full, 512), most_anchors(&full, 3)), (40, 12));
    }

    #[test]
    fn a_simulated_engine_needs_no_model() {
        let config = load_text("[simulate]\nfeature_bytes_per_token = 100", "x.toml", &[]).unwrap().config;
        let seen = forecast(&config, &[5, 7, 9], None).unwrap();
        assert_eq!((seen.bytes_per_token, seen.drafter_parameters), (100, None));
        assert!(seen.devices.is_empty());
        assert_eq!(forecast(&config, &[], None), Err(PlanError::NoSamples));
    }

    #[test]
    fn max_steps_bounds_the_steps() {
        let config = load_text("[run]\nmax_steps = 2\n[plan]\njob_tokens = 3072", "x.toml", &[]).unwrap().config;
        assert_eq!(forecast(&config, &[3000; 9], None).unwrap().steps, 2);
    }

    proptest! {
        /// No sample is lost, and no job exceeds the budget.
        #[test]
        fn totals_agree_with_the_samples(lengths in prop::collection::vec(1u32..=3072, 1..200), buckets in 1u16..9) {
            let config = load_text("", "x.toml", &[format!("plan.buckets={buckets}")]).unwrap().config;
            let seen = forecast(&config, &lengths, None).unwrap();
            prop_assert_eq!(seen.buckets.iter().map(|b| b.samples).sum::<usize>(), lengths.len());
            prop_assert_eq!(seen.buckets.iter().map(|b| b.jobs).sum::<usize>(), seen.jobs_per_epoch);
            prop_assert_eq!(seen.buckets.iter().map(|b| b.tokens).sum::<u64>(), seen.tokens);
            let most = u64::from(config.plan.job_tokens) * seen.bytes_per_token;
            prop_assert!(seen.largest_job_bytes <= most, "{} > {}", ByteSize(seen.largest_job_bytes), ByteSize(most));
        }
    }
}
