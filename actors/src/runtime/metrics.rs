//! Metrics table: every name, kind, unit, label and bucket list. Recorder, documentation and tests are built from it.

use super::causes::{ACTORS, BUSY};
use metrics::{Label, counter, gauge, histogram};

/// Prometheus kind of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Counter,
    Gauge,
    Histogram,
}

impl Kind {
    /// Returns the word that Prometheus uses.
    pub fn as_str(self) -> &'static str {
        match self {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
        }
    }
}

/// Row of the table. `labels` holds each label with its known values; an empty list is filled at startup.
#[derive(Clone, Copy, Debug)]
pub struct Spec {
    pub name: &'static str,
    pub kind: Kind,
    pub unit: &'static str,
    pub help: &'static str,
    pub labels: &'static [(&'static str, &'static [&'static str])],
    /// Upper bounds of a histogram's buckets; empty for other kinds.
    pub buckets: &'static [f64],
}

/// Bucket bounds for the duration of work and waits, in seconds: from a queue hop to a large batch on a CPU.
const SECONDS: &[f64] = &[0.001, 0.005, 0.02, 0.1, 0.5, 1.0, 2.0, 5.0, 15.0, 60.0, 300.0];

macro_rules! table {
    ($( $(#[doc = $help:literal])+ $const:ident = $kind:ident $name:literal [$unit:literal] { $($label:ident: [$($value:literal),*]),* } $($buckets:ident)? ;)*) => {
        $( $(#[doc = $help])+ pub const $const: &str = $name; )*
        /// Every metric of Draftmill, in the order of the documentation.
        pub const TABLE: &[Spec] = &[ $( Spec {
            name: $name, kind: Kind::$kind, unit: $unit, help: concat!($($help),+).trim_ascii(),
            labels: &[$((stringify!($label), &[$($value),*])),*], buckets: table!(@buckets $($buckets)?),
        } ),* ];
    };
    (@buckets) => { &[] };
    (@buckets $buckets:ident) => { $buckets };
}

table! {
    /// Time in which an actor worked. The increase over a window, divided by the window, is its busy fraction.
    BUSY_SECONDS = Histogram "draftmill_actor_busy_seconds" ["seconds"] { actor: [], index: [] } SECONDS;
    /// Time in which an actor waited, by cause.
    WAIT_SECONDS = Histogram "draftmill_actor_wait_seconds" ["seconds"] { actor: [], index: [], cause: [] } SECONDS;
    /// 1 for the current state of an actor: busy, or the cause of its wait. All are 0 between two states and after its
    /// end.
    ACTOR_STATE = Gauge "draftmill_actor_state" ["bool"] { actor: [], index: [], state: [] };
    /// Jobs with an outcome, by outcome.
    JOBS = Counter "draftmill_jobs_total" ["jobs"] { outcome: ["trained", "skipped"] };
    /// Skipped jobs, by cause of the last failure.
    JOBS_SKIPPED = Counter "draftmill_jobs_skipped_total" ["jobs"] { cause: ["failed", "non_finite", "wrong_shape", "gone", "padding", "drafter_failed", "features_lost"] };
    /// Failed attempts of jobs, by cause; the last attempt of a job counts too.
    JOBS_RETURNED = Counter "draftmill_jobs_returned_total" ["jobs"] { cause: ["failed", "non_finite", "wrong_shape", "gone", "drafter_failed"] };
    /// Forwards that exceeded the straggler deadline (dispatch.straggler_factor).
    STRAGGLERS = Counter "draftmill_stragglers_total" ["forwards"] {};
    /// Results of stragglers that arrived after another target's result and were dropped.
    LATE_RESULTS = Counter "draftmill_late_results_total" ["batches"] {};
    /// Jobs in the dispatcher's queue.
    QUEUE_JOBS = Gauge "draftmill_queue_jobs" ["jobs"] {};
    /// Padded jobs that wait for a target.
    QUEUE_PADDED_JOBS = Gauge "draftmill_queue_padded_jobs" ["jobs"] {};
    /// Epoch whose jobs are being handed out; the first is 0.
    EPOCH = Gauge "draftmill_epoch" ["epochs"] {};
    /// 1 while a target serves; 0 while it is out of service or has failed permanently.
    TARGET_UP = Gauge "draftmill_target_up" ["bool"] { index: [] };
    /// Successful restarts of a target.
    TARGET_RESTARTS = Counter "draftmill_target_restarts_total" ["restarts"] { index: [] };
    /// Forwards of a target whose result went into the pool.
    TARGET_JOBS = Counter "draftmill_target_jobs_total" ["forwards"] { index: [] };
    /// Forwards of a target without a usable result.
    TARGET_FAILURES = Counter "draftmill_target_failures_total" ["forwards"] { index: [] };
    /// 1 while a target is paused (target.paused).
    TARGET_PAUSED = Gauge "draftmill_target_paused" ["bool"] { index: [] };
    /// Real tokens that a target extracted.
    TARGET_TOKENS = Counter "draftmill_target_tokens_total" ["tokens"] { index: [] };
    /// Token slots that a target computed, padding included.
    TARGET_PADDED_TOKENS = Counter "draftmill_target_padded_tokens_total" ["tokens"] { index: [] };
    /// Longest sample of a length bucket.
    BUCKET_MAX_TOKENS = Gauge "draftmill_bucket_max_tokens" ["tokens"] { bucket: [] };
    /// Batches that wait in the pool.
    POOL_BATCHES = Gauge "draftmill_pool_batches" ["batches"] {};
    /// Batches with reserved bytes: they are being extracted.
    POOL_RESERVED_BATCHES = Gauge "draftmill_pool_reserved_batches" ["batches"] {};
    /// Batches that drafters hold.
    POOL_CHECKED_OUT_BATCHES = Gauge "draftmill_pool_checked_out_batches" ["batches"] {};
    /// Batches that wait in the pool, by length bucket.
    POOL_BUCKET_BATCHES = Gauge "draftmill_pool_bucket_batches" ["batches"] { bucket: [] };
    /// Bytes of the batches that wait in the pool.
    POOL_BYTES = Gauge "draftmill_pool_bytes" ["bytes"] {};
    /// Bytes reserved for batches that are being extracted.
    POOL_RESERVED_BYTES = Gauge "draftmill_pool_reserved_bytes" ["bytes"] {};
    /// Bytes of the batches that drafters hold.
    POOL_CHECKED_OUT_BYTES = Gauge "draftmill_pool_checked_out_bytes" ["bytes"] {};
    /// Limit on reserved, waiting and checked-out bytes together.
    POOL_MAX_BYTES = Gauge "draftmill_pool_max_bytes" ["bytes"] {};
    /// Limit on reserved and waiting batches together.
    POOL_MAX_BATCHES = Gauge "draftmill_pool_max_batches" ["batches"] {};
    /// Batches that must be ready before a draw is answered.
    POOL_MIN_READY = Gauge "draftmill_pool_min_ready" ["batches"] {};
    /// 1 while the pool drains: it gives out its last batches regardless of the minimum fill.
    POOL_DRAINING = Gauge "draftmill_pool_draining" ["bool"] {};
    /// Batches drawn from the pool, by length bucket.
    POOL_DRAWS = Counter "draftmill_pool_draws_total" ["batches"] { bucket: [] };
    /// Real tokens that a drafter trained.
    DRAFTER_TOKENS = Counter "draftmill_drafter_tokens_total" ["tokens"] { index: [] };
    /// Micro-batches that a drafter trained.
    DRAFTER_MICRO_BATCHES = Counter "draftmill_drafter_micro_batches_total" ["micro-batches"] { index: [] };
    /// Blocks (anchors) that a drafter trained.
    DRAFTER_ANCHORS = Counter "draftmill_drafter_anchors_total" ["blocks"] { index: [] };
    /// 1 while a drafter is paused (drafter.paused).
    DRAFTER_PAUSED = Gauge "draftmill_drafter_paused" ["bool"] { index: [] };
    /// Micro-batches with a NaN or infinite loss; such a loss ends the run.
    NON_FINITE_LOSSES = Counter "draftmill_non_finite_losses_total" ["micro-batches"] {};
    /// Comparisons of a drafter's weights with the published weights (drafter.replica_check_every), by result. A
    /// difference means that a device or a copy between devices corrupts values.
    REPLICA_CHECKS = Counter "draftmill_replica_checks_total" ["checks"] { result: ["same", "different"] };
    /// Optimizer steps in the weights, those of earlier starts included.
    STEP = Gauge "draftmill_step" ["steps"] {};
    /// Optimizer steps of this start.
    STEPS = Counter "draftmill_steps_total" ["steps"] {};
    /// Forecast of the steps after which the whole plan is trained.
    PLANNED_STEPS = Gauge "draftmill_planned_steps" ["steps"] {};
    /// Time from the end of one optimizer step to the end of the next.
    STEP_SECONDS = Histogram "draftmill_step_seconds" ["seconds"] {} SECONDS;
    /// Distinct length buckets among the micro-batches of the last step.
    STEP_BUCKETS = Gauge "draftmill_step_buckets" ["buckets"] {};
    /// Mean loss of the last step, in nats.
    LOSS = Gauge "draftmill_loss" ["nats"] {};
    /// Fraction of supervised positions that the last step predicted correctly.
    ACCURACY = Gauge "draftmill_accuracy" ["ratio"] {};
    /// Mean leading correct run of the blocks of the last step: predictions from the first one on that are right without a gap.
    LEADING_RUN = Gauge "draftmill_leading_run" ["tokens"] {};
    /// Fraction of supervised positions of the last step whose label is a candidate of DFlash 2's selector; 0 without one.
    CANDIDATE_RECALL = Gauge "draftmill_candidate_recall" ["ratio"] {};
    /// Tokens by which DFlash 2's selector lengthens the leading run of a block in the last step; 0 without one.
    SELECTOR_GAIN = Gauge "draftmill_selector_gain" ["tokens"] {};
    /// Learning rate of the last step.
    LEARNING_RATE = Gauge "draftmill_learning_rate" ["1"] {};
    /// Global gradient norm of the last step, before clipping.
    GRAD_NORM = Gauge "draftmill_grad_norm" ["1"] {};
    /// Gradient norm above which gradients are scaled down (optimizer.max_grad_norm).
    MAX_GRAD_NORM = Gauge "draftmill_max_grad_norm" ["1"] {};
    /// Supervised positions that were predicted correctly.
    CORRECT = Counter "draftmill_correct_positions_total" ["positions"] {};
    /// Supervised positions that were trained.
    SUPERVISED = Counter "draftmill_supervised_positions_total" ["positions"] {};
    /// Checkpoints by result.
    CHECKPOINTS = Counter "draftmill_checkpoints_total" ["checkpoints"] { result: ["written", "failed"] };
    /// Time from the copy of the weights until a checkpoint exists. Training continues meanwhile.
    CHECKPOINT_SECONDS = Histogram "draftmill_checkpoint_seconds" ["seconds"] {} SECONDS;
    /// Step of the newest checkpoint; 0 before the first.
    CHECKPOINT_STEP = Gauge "draftmill_checkpoint_step" ["steps"] {};
    /// Time at which the newest checkpoint was completed, in seconds since 1970; 0 before the first.
    CHECKPOINT_TIME = Gauge "draftmill_checkpoint_timestamp_seconds" ["seconds"] {};
    /// Steps between checkpoints (checkpoint.every_steps); 0 writes only the one at the end.
    CHECKPOINT_EVERY = Gauge "draftmill_checkpoint_every_steps" ["steps"] {};
    /// Faults that end the run, by failed actor. Faults that only follow from another one do not count.
    FAULTS = Counter "draftmill_faults_total" ["faults"] { actor: ["planner", "dispatcher", "target", "pool", "drafter", "trainer"] };
    /// Requests and connections that the admin port refused, by reason.
    ADMIN_REFUSED = Counter "draftmill_admin_refused_total" ["requests"] { reason: ["connections", "streams", "origin", "host", "token", "body"] };
    /// 1 while the run is paused by command: no job is handed out.
    PAUSED = Gauge "draftmill_paused" ["bool"] {};
    /// Attempts to change the configuration of the running service, by result.
    CONFIG_RELOADS = Counter "draftmill_config_reloads_total" ["reloads"] { result: ["applied", "refused", "unchanged"] };
    /// First 48 bits of the SHA-256 of the active configuration, as a number: equal numbers mean equal configurations.
    CONFIG_HASH = Gauge "draftmill_config_hash" ["1"] {};
    /// Time at which the active configuration was applied, in seconds since 1970.
    CONFIG_APPLIED = Gauge "draftmill_config_applied_timestamp_seconds" ["seconds"] {};
    /// Evaluations during training (configuration section eval) by result. An evaluation is skipped if it is due while another one
    /// runs or rests.
    EVALS = Counter "draftmill_evals_total" ["evaluations"] { result: ["done", "skipped", "failed"] };
    /// Duration of evaluations during training, the decoding of prompts included.
    EVAL_SECONDS = Histogram "draftmill_eval_seconds" ["seconds"] {} SECONDS;
    /// Step of the newest evaluation.
    EVAL_STEP = Gauge "draftmill_eval_step" ["steps"] {};
    /// Mean loss on held-out samples, in nats.
    EVAL_LOSS = Gauge "draftmill_eval_loss" ["nats"] {};
    /// Fraction of supervised positions of held-out samples that were predicted correctly.
    EVAL_ACCURACY = Gauge "draftmill_eval_accuracy" ["ratio"] {};
    /// Mean leading correct run of the blocks of held-out samples.
    EVAL_LEADING_RUN = Gauge "draftmill_eval_leading_run" ["tokens"] {};
    /// The same fraction by position in the block; the first predicted token is 1.
    EVAL_POSITION_ACCURACY = Gauge "draftmill_eval_position_accuracy" ["ratio"] { position: [] };
    /// Tokens per verification that these accuracies predict.
    EVAL_PREDICTED = Gauge "draftmill_eval_predicted_acceptance" ["tokens"] {};
    /// Tokens per verification in real decoding, over all responses.
    EVAL_ACCEPTANCE = Gauge "draftmill_eval_acceptance" ["tokens"] {};
    /// Highest tokens per verification in real decoding so far in this run.
    EVAL_BEST_ACCEPTANCE = Gauge "draftmill_eval_best_acceptance" ["tokens"] {};
    /// Violations of an invariant of ARCHITECTURE.md; always 0 in a healthy program.
    INVARIANT_VIOLATIONS = Counter "draftmill_invariant_violations_total" ["violations"] { id: ["P1", "P2", "D1", "D2", "L1", "L2", "L3", "T1", "T2", "R1", "S1"] };
    /// Worker threads of the runtime that the actors share. Blocking work such as forwards runs on other threads.
    RUNTIME_WORKERS = Gauge "draftmill_runtime_workers" ["threads"] {};
    /// Busy fraction of these workers over the last five seconds.
    RUNTIME_BUSY = Gauge "draftmill_runtime_busy_ratio" ["ratio"] {};
    /// Live tasks: actors, connections, and the work that they await. A steady increase is a leak.
    RUNTIME_TASKS = Gauge "draftmill_runtime_tasks" ["tasks"] {};
    /// Memory limit of this process: the tightest limit of its control groups, or the memory of the machine.
    MEMORY_LIMIT = Gauge "draftmill_memory_limit_bytes" ["bytes"] {};
    /// Memory of a GPU of this run: held by tensors now (allocated) and at most so far (peak), held by libtorch's
    /// allocator (reserved), free for any process (free), and in total (total). No series exist without a GPU.
    DEVICE_MEMORY = Gauge "draftmill_device_memory_bytes" ["bytes"] { device: [], kind: ["allocated", "reserved", "peak", "free", "total"] };
    /// Resident memory of this process.
    PROCESS_MEMORY = Gauge "process_resident_memory_bytes" ["bytes"] {};
    /// Virtual memory of this process, mapped models and store included.
    PROCESS_VIRTUAL_MEMORY = Gauge "process_virtual_memory_bytes" ["bytes"] {};
    /// Processor time of this process, user and system, in whole seconds.
    PROCESS_CPU_SECONDS = Counter "process_cpu_seconds_total" ["seconds"] {};
    /// Threads of this process.
    PROCESS_THREADS = Gauge "process_threads" ["threads"] {};
    /// Open file descriptors of this process.
    PROCESS_OPEN_FDS = Gauge "process_open_fds" ["files"] {};
    /// Limit on open file descriptors of this process.
    PROCESS_MAX_FDS = Gauge "process_max_fds" ["files"] {};
    /// Start time of this process, in seconds since 1970.
    PROCESS_START_TIME = Gauge "process_start_time_seconds" ["seconds"] {};
    /// Build information; always 1.
    BUILD_INFO = Gauge "draftmill_build_info" ["1"] { version: [] };
}

/// Facts about a run that determine its series.
#[derive(Clone, Debug, Default)]
pub struct Known {
    pub targets: usize,
    pub drafters: usize,
    /// Predicted slots of a block.
    pub positions: usize,
    /// Longest sample of each length bucket, in tokens.
    pub buckets: Vec<u32>,
    /// GPUs of the run, by name.
    pub gpus: Vec<String>,
    pub version: &'static str,
    pub planned_steps: u64,
    /// Time of the newest checkpoint, in seconds since 1970; 0 without one.
    pub checkpoint_time: f64,
}

/// Describes every metric and creates every series with 0, so that dashboards see it from the first scrape.
pub fn register(known: &Known) {
    for spec in TABLE {
        let name = spec.name;
        match spec.kind {
            Kind::Counter => metrics::describe_counter!(name, spec.help),
            Kind::Gauge => metrics::describe_gauge!(name, spec.help),
            Kind::Histogram => metrics::describe_histogram!(name, spec.help),
        }
        for labels in series(spec, known) {
            match spec.kind {
                Kind::Counter => counter!(name, labels).absolute(0),
                Kind::Gauge => gauge!(name, labels).set(0.0),
                Kind::Histogram => drop(histogram!(name, labels)),
            }
        }
    }
    gauge!(BUILD_INFO, "version" => known.version).set(1.0);
    gauge!(PLANNED_STEPS).set(known.planned_steps as f64);
    gauge!(CHECKPOINT_TIME).set(known.checkpoint_time);
    for (bucket, &bound) in known.buckets.iter().enumerate() {
        gauge!(BUCKET_MAX_TOKENS, "bucket" => bucket.to_string()).set(f64::from(bound));
    }
}

/// Returns the labels of every series that a metric has in this run. The run creates no others.
pub fn series(spec: &Spec, known: &Known) -> Vec<Vec<Label>> {
    let numbers = |count: usize| (0..count).map(|i| i.to_string());
    match *spec.labels {
        [] => vec![Vec::new()],
        [("actor", []), ("index", []), ref more @ ..] => {
            let mut all = Vec::new();
            for &(actor, causes) in ACTORS {
                let last: Vec<Option<Label>> = match more {
                    [] => vec![None],
                    [(label, _), ..] => {
                        let busy = (*label == "state").then_some(BUSY);
                        busy.into_iter()
                            .chain(causes.iter().map(|cause| cause.as_str()))
                            .map(|value| Some(Label::new(*label, value)))
                            .collect()
                    }
                };
                let count = match actor {
                    "target" => known.targets,
                    "drafter" => known.drafters,
                    _ => 1,
                };
                for index in numbers(count) {
                    let named = [Label::new("actor", actor), Label::new("index", index)];
                    all.extend(last.iter().map(|last| named.iter().cloned().chain(last.clone()).collect()));
                }
            }
            all
        }
        [("device", []), (label, values)] => {
            let named = |gpu: &String| {
                let gpu = gpu.clone();
                values.iter().map(move |value| vec![Label::new("device", gpu.clone()), Label::new(label, *value)])
            };
            known.gpus.iter().flat_map(named).collect()
        }
        [(label, values), ..] => {
            let count = match label {
                "bucket" => known.buckets.len(),
                "index" if spec.name.starts_with("draftmill_target") => known.targets,
                "index" => known.drafters,
                "position" => known.positions,
                _ => 0,
            };
            // Positions are counted from the first predicted one.
            let from = usize::from(label == "position");
            let numbers = |count: usize| (from..count + from).map(|i| i.to_string());
            let version = (label == "version").then(|| known.version.to_owned());
            let values = values.iter().map(|value| (*value).to_owned()).chain(numbers(count)).chain(version);
            values.map(|value| vec![Label::new(label, value)]).collect()
        }
    }
}

/// Returns the table as Markdown, for the documentation.
pub fn markdown() -> String {
    let mut text = String::from("| metric | kind | unit | labels | meaning |\n| --- | --- | --- | --- | --- |\n");
    for s in TABLE {
        let labels = s.labels.iter().map(|(l, _)| format!("`{l}`")).collect::<Vec<_>>().join(", ");
        text += &format!("| `{}` | {} | {} | {labels} | {} |\n", s.name, s.kind.as_str(), s.unit, s.help);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_follow_the_rules_of_prometheus() {
        for (i, s) in TABLE.iter().enumerate() {
            // Process metrics use the names of all Prometheus exporters.
            assert!(s.name.starts_with("draftmill_") || s.name.starts_with("process_"), "{}", s.name);
            assert!(s.name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_'), "{}", s.name);
            assert_eq!(s.kind == Kind::Counter, s.name.ends_with("_total"), "{}: _total is for counters", s.name);
            assert_eq!(s.kind == Kind::Histogram, !s.buckets.is_empty(), "{}: histograms carry buckets", s.name);
            assert!(s.help.ends_with('.') && !s.help.starts_with(' '), "{}", s.name);
            assert!(TABLE[..i].iter().all(|t| t.name != s.name), "{} stands twice", s.name);
        }
    }
    #[test]
    fn a_gpu_has_a_series_of_each_kind_and_a_run_without_one_has_none() {
        let spec = TABLE.iter().find(|spec| spec.name == DEVICE_MEMORY).unwrap();
        assert!(series(spec, &Known::default()).is_empty());
        let gpus = vec!["cuda:0".to_owned(), "cuda:2".to_owned()];
        let all = series(spec, &Known { gpus, ..Known::default() });
        assert_eq!(all.len(), 2 * spec.labels[1].1.len());
        assert_eq!(all[5], [Label::new("device", "cuda:2"), Label::new("kind", "allocated")]);
    }
}
