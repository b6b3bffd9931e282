//! The one table of metrics: every name, kind, unit, label and bucket list. Recorder, documentation and tests are built from it.

use metrics::{counter, gauge, histogram};

/// Prometheus kind of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Counter,
    Gauge,
    Histogram,
}

impl Kind {
    /// The word that Prometheus uses.
    pub fn as_str(self) -> &'static str {
        match self {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
        }
    }
}

/// One row of the table. `labels` gives each label with its known values; an empty list is filled at start-up.
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

/// Seconds that a unit of work or a wait may take: from a queue hop to a large batch on a CPU.
const SECONDS: &[f64] = &[0.001, 0.005, 0.02, 0.1, 0.5, 1.0, 2.0, 5.0, 15.0, 60.0, 300.0];

macro_rules! table {
    ($( $(#[doc = $help:literal])+ $const:ident = $kind:ident $name:literal [$unit:literal] { $($label:ident: [$($value:literal),*]),* } $($buckets:ident)? ;)*) => {
        $( $(#[doc = $help])+ pub const $const: &str = $name; )*
        /// Every metric of Draftmill, in the order in which the documentation lists them.
        pub const TABLE: &[Spec] = &[ $( Spec {
            name: $name, kind: Kind::$kind, unit: $unit, help: concat!($($help),+).trim_ascii(),
            labels: &[$((stringify!($label), &[$($value),*])),*], buckets: table!(@buckets $($buckets)?),
        } ),* ];
    };
    (@buckets) => { &[] };
    (@buckets $buckets:ident) => { $buckets };
}

table! {
    /// Time in which an actor did its work. The sum over a window, divided by the window, is its busy share.
    BUSY_SECONDS = Histogram "draftmill_actor_busy_seconds" ["seconds"] { actor: [], index: [] } SECONDS;
    /// Time in which an actor waited, by what it waited for.
    WAIT_SECONDS = Histogram "draftmill_actor_wait_seconds" ["seconds"] { actor: [], index: [], cause: [] } SECONDS;
    /// Jobs that reached their end, by outcome.
    JOBS = Counter "draftmill_jobs_total" ["jobs"] { outcome: ["trained", "skipped"] };
    /// Jobs that failed and were given back to the queue, or by a drafter to the pool, by why; the last try of a job counts too.
    JOBS_RETURNED = Counter "draftmill_jobs_returned_total" ["jobs"] { cause: ["failed", "non_finite", "wrong_shape", "gone", "drafter_failed"] };
    /// Forwards that took far longer than their like (dispatch.straggler_factor).
    STRAGGLERS = Counter "draftmill_stragglers_total" ["forwards"] {};
    /// Results of stragglers that came after another target's and were dropped.
    LATE_RESULTS = Counter "draftmill_late_results_total" ["batches"] {};
    /// Jobs that wait in the dispatcher's queue.
    QUEUE_JOBS = Gauge "draftmill_queue_jobs" ["jobs"] {};
    /// Jobs that are padded and wait for a target.
    QUEUE_PADDED_JOBS = Gauge "draftmill_queue_padded_jobs" ["jobs"] {};
    /// Epoch whose jobs are being handed out; the first is 0.
    EPOCH = Gauge "draftmill_epoch" ["epochs"] {};
    /// 1 while a target serves, 0 while it is taken out or gone for good.
    TARGET_UP = Gauge "draftmill_target_up" ["bool"] { index: [] };
    /// Restarts of a target after which it answered again.
    TARGET_RESTARTS = Counter "draftmill_target_restarts_total" ["restarts"] { index: [] };
    /// Real tokens that a target extracted.
    TARGET_TOKENS = Counter "draftmill_target_tokens_total" ["tokens"] { index: [] };
    /// Token slots that a target computed, padding included.
    TARGET_PADDED_TOKENS = Counter "draftmill_target_padded_tokens_total" ["tokens"] { index: [] };
    /// Batches that wait in the pool.
    POOL_BATCHES = Gauge "draftmill_pool_batches" ["batches"] {};
    /// Batches that wait in the pool, by length bucket.
    POOL_BUCKET_BATCHES = Gauge "draftmill_pool_bucket_batches" ["batches"] { bucket: [] };
    /// Bytes of the batches that wait in the pool.
    POOL_BYTES = Gauge "draftmill_pool_bytes" ["bytes"] {};
    /// Bytes reserved for batches that are being extracted.
    POOL_RESERVED_BYTES = Gauge "draftmill_pool_reserved_bytes" ["bytes"] {};
    /// Bytes of batches that drafters hold.
    POOL_LOANED_BYTES = Gauge "draftmill_pool_loaned_bytes" ["bytes"] {};
    /// The limit on reserved, waiting and loaned bytes together.
    POOL_MAX_BYTES = Gauge "draftmill_pool_max_bytes" ["bytes"] {};
    /// 1 while the pool gives out its last batches without minding the minimum fill.
    POOL_DRAINING = Gauge "draftmill_pool_draining" ["bool"] {};
    /// Batches that were drawn from the pool, by length bucket.
    POOL_DRAWS = Counter "draftmill_pool_draws_total" ["batches"] { bucket: [] };
    /// Real tokens on which a drafter trained.
    DRAFTER_TOKENS = Counter "draftmill_drafter_tokens_total" ["tokens"] { index: [] };
    /// Micro-batches that a drafter trained.
    DRAFTER_MICRO_BATCHES = Counter "draftmill_drafter_micro_batches_total" ["micro-batches"] { index: [] };
    /// Blocks (anchors) that a drafter trained.
    DRAFTER_ANCHORS = Counter "draftmill_drafter_anchors_total" ["blocks"] { index: [] };
    /// Optimizer steps that are complete.
    STEP = Gauge "draftmill_step" ["steps"] {};
    /// Mean loss of the last step, in nats.
    LOSS = Gauge "draftmill_loss" ["nats"] {};
    /// Share of supervised positions that the last step predicted right.
    ACCURACY = Gauge "draftmill_accuracy" ["ratio"] {};
    /// Learning rate of the last step.
    LEARNING_RATE = Gauge "draftmill_learning_rate" ["1"] {};
    /// Global gradient norm of the last step, before clipping.
    GRAD_NORM = Gauge "draftmill_grad_norm" ["1"] {};
    /// Supervised positions that were predicted right.
    CORRECT = Counter "draftmill_correct_positions_total" ["positions"] {};
    /// Supervised positions that were trained.
    SUPERVISED = Counter "draftmill_supervised_positions_total" ["positions"] {};
    /// Checkpoints by result.
    CHECKPOINTS = Counter "draftmill_checkpoints_total" ["checkpoints"] { result: ["written", "failed"] };
    /// Time from the copy of the weights until a checkpoint exists; training goes on meanwhile.
    CHECKPOINT_SECONDS = Histogram "draftmill_checkpoint_seconds" ["seconds"] {} SECONDS;
    /// Step of the newest checkpoint that exists.
    CHECKPOINT_STEP = Gauge "draftmill_checkpoint_step" ["steps"] {};
    /// Measures beside the steps (section [eval]) by result; one that is due while another is under way, or rests, is skipped.
    EVALS = Counter "draftmill_evals_total" ["measures"] { result: ["done", "skipped", "failed"] };
    /// Time that measures beside the steps took, the decoding of prompts included.
    EVAL_SECONDS = Histogram "draftmill_eval_seconds" ["seconds"] {} SECONDS;
    /// Step of the newest measure.
    EVAL_STEP = Gauge "draftmill_eval_step" ["steps"] {};
    /// Mean loss on held-out samples, in nats.
    EVAL_LOSS = Gauge "draftmill_eval_loss" ["nats"] {};
    /// Share of the supervised positions of held-out samples that were predicted right.
    EVAL_ACCURACY = Gauge "draftmill_eval_accuracy" ["ratio"] {};
    /// The same by the place in the block; the first predicted token is 1.
    EVAL_POSITION_ACCURACY = Gauge "draftmill_eval_position_accuracy" ["ratio"] { position: [] };
    /// Tokens per verification that these accuracies predict.
    EVAL_PREDICTED = Gauge "draftmill_eval_predicted_acceptance" ["tokens"] {};
    /// Tokens per verification in real decoding, all responses together.
    EVAL_ACCEPTANCE = Gauge "draftmill_eval_acceptance" ["tokens"] {};
    /// The best of them so far in this run.
    EVAL_BEST_ACCEPTANCE = Gauge "draftmill_eval_best_acceptance" ["tokens"] {};
    /// Violations of an invariant of ARCHITECTURE.md; always 0 in a healthy program.
    INVARIANT_VIOLATIONS = Counter "draftmill_invariant_violations_total" ["violations"] { id: ["P1", "P2", "D1", "D2", "L1", "L2", "L3", "T1", "T2", "R1", "S1"] };
    /// Build information: always 1.
    BUILD_INFO = Gauge "draftmill_build_info" ["1"] { version: [] };
}

/// Values of the labels that depend on the run.
#[derive(Clone, Debug, Default)]
pub struct Known {
    pub targets: usize,
    pub drafters: usize,
    pub buckets: usize,
    /// Predicted slots of a block.
    pub positions: usize,
    pub version: &'static str,
}

/// Describes every metric and makes every series appear with 0, so that dashboards see it from the first scrape.
pub fn register(known: &Known) {
    for spec in TABLE {
        match spec.kind {
            Kind::Counter => metrics::describe_counter!(spec.name, spec.help),
            Kind::Gauge => metrics::describe_gauge!(spec.name, spec.help),
            Kind::Histogram => metrics::describe_histogram!(spec.name, spec.help),
        }
        match spec.name {
            BUSY_SECONDS | WAIT_SECONDS => {} // an actor registers its own series when it starts (see `Meter::new`)
            BUILD_INFO => gauge!(BUILD_INFO, "version" => known.version).set(1.0),
            name => each_label_set(spec, known, &mut |labels| match spec.kind {
                Kind::Counter => counter!(name, labels).absolute(0),
                Kind::Gauge => gauge!(name, labels).set(0.0),
                Kind::Histogram => drop(histogram!(name, labels)),
            }),
        }
    }
}

fn each_label_set(spec: &Spec, known: &Known, visit: &mut dyn FnMut(Vec<metrics::Label>)) {
    let Some((label, values)) = spec.labels.first() else { return visit(Vec::new()) };
    let count = match *label {
        "bucket" => known.buckets,
        "index" if spec.name.starts_with("draftmill_target") => known.targets,
        "index" => known.drafters,
        "position" => known.positions,
        _ => 0,
    };
    // Positions are counted from the first predicted one.
    let from = usize::from(*label == "position");
    for value in values.iter().map(|v| (*v).to_owned()).chain((from..count + from).map(|i| i.to_string())) {
        visit(vec![metrics::Label::new(*label, value)]);
    }
}

/// The table as Markdown, for the README.
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
            assert!(s.name.starts_with("draftmill_"), "{}", s.name);
            assert!(s.name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_'), "{}", s.name);
            assert_eq!(s.kind == Kind::Counter, s.name.ends_with("_total"), "{}: _total is for counters", s.name);
            assert_eq!(s.kind == Kind::Histogram, !s.buckets.is_empty(), "{}: histograms carry buckets", s.name);
            assert!(s.help.ends_with('.') && !s.help.starts_with(' '), "{}", s.name);
            assert!(TABLE[..i].iter().all(|t| t.name != s.name), "{} stands twice", s.name);
        }
    }
}
