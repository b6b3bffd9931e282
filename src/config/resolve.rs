//! From the wire types to settings with nothing left open, and the rules that every setting has to obey.

use super::{
    load::Written,
    problem::{Problem, Problems},
    values::{Auto, ByteSize, Device, Dtype, Engine, Overlong, UnknownRole},
    wire::{self, Wire},
};
use draftmill_actors::{engine::FeatureDtype, plan::Order};
use std::{num::NonZeroUsize, path::PathBuf};

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
    pub admin: wire::Admin,
    pub log: wire::Log,
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
    pub prefetch: u32,
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
    let mut audit = Audit { written, problems: vec![] };
    audit.ranges();
    audit.data_and_plan();
    audit.pool();
    audit.drafter();
    audit.optimizer();
    audit.rest();
    if !audit.problems.is_empty() {
        return Err(Problems(audit.problems));
    }

    let Wire { run, data, target, plan, drafter, .. } = written.wire.clone();
    let store = data.store.or(|| run.dir.join("data.safetensors"));
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
            layers: drafter.layers,
            block_size: drafter.block_size,
            anchors: drafter.anchors,
            heads: drafter.heads.given().copied(),
            kv_heads: drafter.kv_heads.given().copied(),
            head_dim: drafter.head_dim.given().copied(),
            intermediate_size: drafter.intermediate_size.given().copied(),
            mask_token_id: drafter.mask_token_id.given().copied(),
            loss_decay_gamma: (gamma > 0.0).then_some(gamma),
            prefetch: drafter.prefetch,
        },
        dispatch: written.wire.dispatch.clone(),
        pool: written.wire.pool.clone(),
        optimizer: written.wire.optimizer.clone(),
        checkpoint: written.wire.checkpoint.clone(),
        admin: written.wire.admin.clone(),
        log: written.wire.log.clone(),
        shutdown: written.wire.shutdown.clone(),
        simulate: written.wire.simulate.clone(),
    })
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

// === rules ===

struct Audit<'a> {
    written: &'a Written,
    problems: Vec<Problem>,
}

impl Audit<'_> {
    fn require(&mut self, holds: bool, key: &str, message: impl Into<String>, remedy: impl Into<String>) {
        if !holds {
            self.problems.push(self.written.problem(key, message, remedy));
        }
    }

    /// Rules that look at one number alone.
    fn ranges(&mut self) {
        let w = &self.written.wire;
        let positive: [(&str, u64); 22] = [
            ("run.epochs", w.run.epochs.into()),
            ("run.threads", w.run.threads.or(|| 1).into()),
            ("data.max_length", w.data.max_length.into()),
            ("data.max_row_bytes", w.data.max_row_bytes.0),
            ("plan.job_tokens", w.plan.job_tokens.into()),
            ("plan.buckets", w.plan.buckets.into()),
            ("dispatch.queue_jobs", w.dispatch.queue_jobs.into()),
            ("dispatch.pad_ahead", w.dispatch.pad_ahead.into()),
            ("dispatch.max_attempts", w.dispatch.max_attempts.into()),
            ("pool.max_bytes", w.pool.max_bytes.0),
            ("pool.max_batches", w.pool.max_batches.into()),
            ("pool.min_ready", w.pool.min_ready.into()),
            ("drafter.layers", w.drafter.layers.into()),
            ("drafter.anchors", w.drafter.anchors.into()),
            ("drafter.heads", w.drafter.heads.or(|| 1).into()),
            ("drafter.kv_heads", w.drafter.kv_heads.or(|| 1).into()),
            ("drafter.head_dim", w.drafter.head_dim.or(|| 1).into()),
            ("drafter.intermediate_size", w.drafter.intermediate_size.or(|| 1).into()),
            ("optimizer.accumulation", w.optimizer.accumulation.into()),
            ("checkpoint.every_steps", w.checkpoint.every_steps),
            ("checkpoint.keep_last", w.checkpoint.keep_last.into()),
            ("simulate.feature_bytes_per_token", w.simulate.feature_bytes_per_token.0),
        ];
        for (key, value) in positive {
            self.require(value >= 1, key, "must be at least 1", "leave it out for the default");
        }
        let fractions = [
            ("data.max_reject_fraction", w.data.max_reject_fraction),
            ("dispatch.max_skip_fraction", w.dispatch.max_skip_fraction),
            ("optimizer.warmup_fraction", w.optimizer.warmup_fraction),
        ];
        for (key, value) in fractions {
            self.require((0.0..=1.0).contains(&value), key, "is a share", "choose a number from 0 to 1");
        }
        let below_one = [
            ("data.validation_fraction", w.data.validation_fraction),
            ("optimizer.beta1", w.optimizer.beta1),
            ("optimizer.beta2", w.optimizer.beta2),
        ];
        for (key, value) in below_one {
            self.require((0.0..1.0).contains(&value), key, "is out of range", "choose a number from 0 to below 1");
        }
    }

    fn data_and_plan(&mut self) {
        let Wire { data, plan, target, .. } = &self.written.wire;
        let (longest, budget) = (data.max_length, plan.job_tokens);
        self.require(
            longest <= budget,
            "plan.job_tokens",
            format!("a sample of data.max_length = {longest} tokens does not fit into a job of {budget}"),
            format!("raise it to at least {longest}, or lower data.max_length"),
        );
        self.require(
            data.min_supervised <= longest,
            "data.min_supervised",
            format!("no sample of at most data.max_length = {longest} tokens has that many"),
            "lower it",
        );
        if let Auto::Set(bounds) = &plan.bucket_bounds {
            let ascending = bounds.windows(2).all(|pair| pair[0] < pair[1]) && bounds.first() != Some(&0);
            self.require(
                ascending && !bounds.is_empty(),
                "plan.bucket_bounds",
                "must be a list of lengths that rise, each at least 1",
                "sort it and take out repetitions, or write \"auto\"",
            );
            self.require(
                bounds.last().is_none_or(|&last| last >= longest),
                "plan.bucket_bounds",
                format!("samples longer than the last bound, up to data.max_length = {longest}, have no bucket"),
                format!("append {longest}, or lower data.max_length"),
            );
            self.require(
                bounds.len() <= usize::from(u16::MAX),
                "plan.bucket_bounds",
                format!("{} buckets are too many", bounds.len()),
                "give fewer",
            );
        }
        if let Auto::Set(ids) = &target.layer_ids {
            self.require(
                !ids.is_empty() && ids.windows(2).all(|pair| pair[0] < pair[1]),
                "target.layer_ids",
                "must be a list of layers that rise",
                "sort it and take out repetitions, or write \"auto\"",
            );
        }
        self.require(
            !target.devices.is_empty(),
            "target.devices",
            "there is no target",
            "name at least one device, for example [\"cpu\"]",
        );
    }

    fn pool(&mut self) {
        let pool = &self.written.wire.pool;
        let (ready, most) = (pool.min_ready, pool.max_batches);
        self.require(
            ready <= most,
            "pool.min_ready",
            format!(
                "the run would stop for good: draws wait for {ready} ready batches, and the pool never holds more than \
                 pool.max_batches = {most}"
            ),
            format!("lower it to at most {most}, or raise pool.max_batches to at least {ready}"),
        );
    }

    fn drafter(&mut self) {
        let Wire { drafter, data, .. } = &self.written.wire;
        let block = drafter.block_size;
        self.require(
            (2..=data.max_length.max(2)).contains(&block),
            "drafter.block_size",
            "a block is one known token and at least one predicted, and fits into a sample",
            format!("choose from 2 to data.max_length = {}", data.max_length),
        );
        self.require(
            !drafter.devices.is_empty(),
            "drafter.devices",
            "there is no drafter",
            "name at least one device, for example [\"cpu\"]",
        );
        self.require(
            drafter.head_dim.given().is_none_or(|dim| dim.is_multiple_of(2)),
            "drafter.head_dim",
            "rotary positions need an even number",
            "choose an even number",
        );
        self.require(
            drafter.dtype != Auto::Set(Dtype::F16),
            "drafter.dtype",
            "f16 gradients overflow",
            "choose \"bf16\" or \"f32\"",
        );
        self.require(
            drafter.loss_decay_gamma.or(|| 0.0).is_finite() && drafter.loss_decay_gamma.or(|| 0.0) >= 0.0,
            "drafter.loss_decay_gamma",
            "is out of range",
            "choose a number from 0 (no decay) up, or \"auto\"",
        );
    }

    fn optimizer(&mut self) {
        let optimizer = &self.written.wire.optimizer;
        let positive = [
            ("optimizer.learning_rate", optimizer.learning_rate),
            ("optimizer.eps", optimizer.eps),
            ("optimizer.max_grad_norm", optimizer.max_grad_norm),
        ];
        for (key, value) in positive {
            self.require(value > 0.0 && value.is_finite(), key, "must be above 0", "leave it out for the default");
        }
        self.require(
            optimizer.weight_decay >= 0.0 && optimizer.weight_decay.is_finite(),
            "optimizer.weight_decay",
            "must not be negative",
            "choose 0 for none",
        );
        let (low, peak) = (optimizer.min_learning_rate, optimizer.learning_rate);
        self.require(
            (0.0..=peak.max(0.0)).contains(&low),
            "optimizer.min_learning_rate",
            format!("the cosine falls from optimizer.learning_rate = {peak}, so its end lies between 0 and that"),
            "lower it",
        );
    }

    fn rest(&mut self) {
        let log = &self.written.wire.log;
        self.require(
            tracing_subscriber::EnvFilter::try_new(&log.level).is_ok(),
            "log.level",
            "is no log filter",
            "choose error, warn, info, debug or trace, or \"info,draftmill::data=debug\"",
        );
        self.require(
            log.progress_every > Default::default(),
            "log.progress_every",
            "must be longer than nothing",
            "write for example \"5s\"",
        );
        let tokens = u64::from(self.written.wire.plan.job_tokens);
        let largest = tokens.checked_mul(self.written.wire.simulate.feature_bytes_per_token.0);
        self.require(
            largest.is_some_and(|bytes| bytes < 1 << 50),
            "simulate.feature_bytes_per_token",
            "the hidden states of one job would be larger than any machine",
            format!("lower it, or plan.job_tokens; the default is {}", ByteSize(40 << 10)),
        );
    }
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

    /// Each line breaks one rule and no other.
    #[test]
    fn every_rule_refuses_what_it_names() {
        for (section, line) in [
            ("run", "epochs = 0"),
            ("run", "threads = 0"),
            ("data", "max_length = 20000"),
            ("data", "min_supervised = 4000"),
            ("data", "validation_fraction = 1.0"),
            ("data", "max_reject_fraction = nan"),
            ("data", "max_row_bytes = 0"),
            ("target", "devices = []"),
            ("target", "layer_ids = [3, 3]"),
            ("target", "layer_ids = []"),
            ("plan", "job_tokens = 3071"),
            ("plan", "buckets = 0"),
            ("plan", "bucket_bounds = [1024, 512, 3072]"),
            ("plan", "bucket_bounds = [512, 1024]"),
            ("plan", "bucket_bounds = [0, 3072]"),
            ("plan", "bucket_bounds = []"),
            ("dispatch", "queue_jobs = 0"),
            ("dispatch", "max_attempts = 0"),
            ("dispatch", "max_skip_fraction = -0.1"),
            ("pool", "min_ready = 17"),
            ("pool", "max_bytes = \"0 B\""),
            ("drafter", "devices = []"),
            ("drafter", "block_size = 1"),
            ("drafter", "head_dim = 7"),
            ("drafter", "dtype = \"f16\""),
            ("drafter", "loss_decay_gamma = inf"),
            ("optimizer", "learning_rate = 0.0"),
            ("optimizer", "min_learning_rate = 1e-3"),
            ("optimizer", "beta2 = 1.0"),
            ("optimizer", "weight_decay = -1.0"),
            ("optimizer", "max_grad_norm = nan"),
            ("checkpoint", "keep_last = 0"),
            ("log", "level = \"draftmill=loud\""),
            ("log", "progress_every = \"0s\""),
            ("simulate", "feature_bytes_per_token = \"1 TiB\""),
        ] {
            let problems = load_text(&format!("[{section}]\n{line}"), "x.toml", &[]).unwrap_err().0;
            // Rules that join two keys may stand at the other one; one rule, one finding.
            assert_eq!(problems.len(), 1, "{section}: {line}: {problems:?}");
            assert!(!problems[0].remedy.is_empty() && !problems[0].value.is_empty(), "{problems:?}");
            let named = format!("{section}.{}", line.split(' ').next().unwrap());
            assert!(problems[0].to_string().contains(&named), "{named} is not in {}", problems[0]);
        }
    }

    #[test]
    fn reading_and_resolving_report_together_and_a_bad_key_only_once() {
        let text = "[pool]\nmin_ready = \"x\"\nmax_batches = 2\n[run]\nepochs = 0\n";
        let problems = load_text(text, "x.toml", &[]).unwrap_err().0;
        let keys: Vec<_> = problems.iter().map(|problem| (problem.line, problem.key.as_str())).collect();
        assert_eq!(keys, [(Some(2), "pool.min_ready"), (Some(5), "run.epochs")]);
    }
}
