//! What `/status`, `/events` and the page tell of a run: one value, of which everything on the page is a part.

use super::recent_warnings::Faults;
use super::run_info::Reload;
use crate::common::gpu_memory::Memory;
use serde::Serialize;
use std::collections::{BTreeMap, VecDeque};

/// A run at one moment. Shares are in 0..=1, times in seconds, moments in seconds since 1970.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Status {
    /// When this was so.
    pub at: f64,
    pub version: &'static str,
    pub run: Run,
    pub state: State,
    /// State and bottleneck in a sentence.
    pub sentence: String,
    pub progress: Progress,
    pub training: Training,
    pub jobs: Jobs,
    pub queue: Queue,
    /// In the order in which a batch passes them.
    pub actors: Vec<Actor>,
    pub pool: Pool,
    /// Those that the run computes on.
    pub gpus: Vec<Gpu>,
    pub checkpoint: Checkpoint,
    pub config: Config,
    /// Warnings and errors, the newest last.
    pub faults: Faults,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Run {
    pub dir: String,
    /// Number of this start in its folder.
    pub number: u64,
    pub engine: String,
    pub started: f64,
    pub paused: bool,
}

/// What the run as a whole does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// Nothing was measured yet.
    #[default]
    Starting,
    /// No step of this start is complete yet.
    Filling,
    Training,
    /// An order stopped the plan; what was under way is finished.
    Paused,
    /// The plan has ended: the pool gives out its last batches.
    Draining,
    /// Every target is taken out or gone.
    NoTarget,
    /// A signal asked for the end.
    Stopping,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Progress {
    pub step: u64,
    /// Of the whole plan.
    pub planned_steps: u64,
    pub steps_per_second: f64,
    /// Until the last step at this rate; absent while there is no rate.
    pub eta: Option<f64>,
    /// The one whose jobs are handed out; the first is 0.
    pub epoch: u64,
    pub epochs: u64,
}

/// Of the last step; absent before the first one of this start.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Training {
    pub loss: Option<f64>,
    pub accuracy: Option<f64>,
    /// Tokens per verification, where a run measures it: of the last measure, and of each by its step.
    pub acceptance: Option<f64>,
    pub acceptance_curve: Vec<(u64, f64)>,
    pub learning_rate: Option<f64>,
    pub grad_norm: Option<f64>,
    /// Real tokens per second of all drafters, and of all targets.
    pub tokens_per_second: f64,
    pub extracted_tokens_per_second: f64,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Jobs {
    pub trained: u64,
    pub skipped: u64,
    pub returned: u64,
}

/// The dispatcher's.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Queue {
    pub jobs: u64,
    pub padded: u64,
    pub stragglers: u64,
}

/// One actor over the last seconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Actor {
    pub actor: String,
    pub index: u64,
    /// "busy", what it waits for, or "idle" between the two and after its end.
    pub state: String,
    pub busy: f64,
    /// By what it waited for.
    pub waits: BTreeMap<String, f64>,
    /// Real tokens of a target or drafter.
    pub tokens_per_second: Option<f64>,
    /// Of a target: whether it serves, and how often it came back.
    pub up: Option<bool>,
    pub restarts: Option<u64>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Pool {
    pub batches: u64,
    pub min_ready: u64,
    pub max_batches: u64,
    /// Of the batches that wait.
    pub bytes: u64,
    pub reserved_bytes: u64,
    pub loaned_bytes: u64,
    pub max_bytes: u64,
    pub draining: bool,
    pub buckets: Vec<Bucket>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Bucket {
    pub bucket: u64,
    /// Its longest sample, in tokens.
    pub longest: u32,
    pub batches: u64,
    pub drawn: u64,
}

/// A GPU and its memory.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Gpu {
    pub device: String,
    #[serde(flatten)]
    pub memory: Memory,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Checkpoint {
    /// Of the newest one; 0 before the first.
    pub step: u64,
    /// When it came to exist.
    pub at: Option<f64>,
    pub written: u64,
    pub failed: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Config {
    pub hash: String,
    pub since: f64,
    /// The newest last.
    pub reloads: VecDeque<Reload>,
}

impl Status {
    /// Whether it tells something else than `other`, the moment apart.
    pub fn differs(&self, other: &Status) -> bool {
        Status { at: other.at, ..self.clone() } != *other
    }

    /// Why the run cannot be counted on now; `None` where it can.
    pub fn not_ready(&self) -> Option<&'static str> {
        match self.state {
            State::Starting => Some("the run is starting: nothing was measured yet"),
            State::NoTarget => Some("no target answers: all are taken out or gone"),
            State::Stopping => Some("the run is ending"),
            State::Filling | State::Training | State::Paused | State::Draining => None,
        }
    }

    /// Mean share of the time in which actors of this name waited for this.
    pub fn mean_wait(&self, actor: &str, cause: &str) -> f64 {
        let waits: Vec<_> = self.actors.iter().filter(|a| a.actor == actor).map(|a| a.waits.get(cause)).collect();
        waits.iter().filter_map(|wait| wait.copied()).sum::<f64>() / waits.len().max(1) as f64
    }
}
