//! Status of a run, as `/status`, `/events` and the status page show it.

use super::recent_warnings::Faults;
use super::run_info::Reload;
use crate::common::gpu_memory::Memory;
use serde::Serialize;
use std::collections::{BTreeMap, VecDeque};

/// Status of a run. Shares are in 0..=1, durations in seconds, times in seconds since 1970.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Status {
    /// Time of the sample.
    pub at: f64,
    pub version: &'static str,
    pub run: Run,
    pub state: State,
    /// Sentence about state and bottleneck.
    pub sentence: String,
    pub progress: Progress,
    pub training: Training,
    pub jobs: Jobs,
    pub queue: Queue,
    /// Actors in pipeline order.
    pub actors: Vec<Actor>,
    pub pool: Pool,
    /// GPUs that the run uses.
    pub gpus: Vec<Gpu>,
    pub checkpoint: Checkpoint,
    pub config: Config,
    /// Warnings and errors, newest last.
    pub faults: Faults,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Run {
    pub dir: String,
    /// Number of this start in the run folder.
    pub number: u64,
    pub engine: String,
    pub started: f64,
    pub paused: bool,
}

/// State of the run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// No measurements yet.
    #[default]
    Starting,
    /// No step of this start is complete yet.
    Filling,
    Training,
    /// A command paused the plan; jobs in progress are finished.
    Paused,
    /// The plan has ended; drafters train the last batches of the pool.
    Draining,
    /// No target is in service.
    NoTarget,
    /// A signal requested the shutdown.
    Stopping,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Progress {
    pub step: u64,
    /// Steps of the plan.
    pub planned_steps: u64,
    pub steps_per_second: f64,
    /// Estimated seconds until the last step; `None` without a rate.
    pub eta: Option<f64>,
    /// Epoch of the jobs that targets receive; the first is 0.
    pub epoch: u64,
    pub epochs: u64,
}

/// Results of the last step; `None` before the first one of this start.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Training {
    pub loss: Option<f64>,
    pub accuracy: Option<f64>,
    /// Mean leading correct run of a block, in tokens.
    pub leading_run: Option<f64>,
    /// Tokens per verification of the last evaluation.
    pub acceptance: Option<f64>,
    /// Tokens per verification by step.
    pub acceptance_curve: Vec<(u64, f64)>,
    pub learning_rate: Option<f64>,
    pub grad_norm: Option<f64>,
    /// Real tokens per second of all drafters.
    pub tokens_per_second: f64,
    /// Real tokens per second of all targets.
    pub extracted_tokens_per_second: f64,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Jobs {
    pub trained: u64,
    pub skipped: u64,
    pub returned: u64,
}

/// Queue of the dispatcher.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Queue {
    pub jobs: u64,
    pub padded: u64,
    pub stragglers: u64,
}

/// Actor over the last 10 s.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Actor {
    pub actor: String,
    pub index: u64,
    /// `busy`, a wait cause, or `idle` between two units of work and after the end.
    pub state: String,
    pub busy: f64,
    /// Share of time by wait cause.
    pub waits: BTreeMap<String, f64>,
    /// Real tokens per second of a target or drafter.
    pub tokens_per_second: Option<f64>,
    /// True if this target is in service.
    pub up: Option<bool>,
    /// Number of restarts of this target.
    pub restarts: Option<u64>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Pool {
    pub batches: u64,
    pub min_ready: u64,
    pub max_batches: u64,
    /// Bytes of waiting batches.
    pub bytes: u64,
    pub reserved_bytes: u64,
    /// Bytes of batches that drafters have checked out.
    pub checked_out_bytes: u64,
    pub max_bytes: u64,
    pub draining: bool,
    pub buckets: Vec<Bucket>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Bucket {
    pub bucket: u64,
    /// Longest sample of the bucket, in tokens.
    pub longest: u32,
    pub batches: u64,
    pub drawn: u64,
}

/// GPU with its memory.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Gpu {
    pub device: String,
    #[serde(flatten)]
    pub memory: Memory,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Checkpoint {
    /// Step of the newest checkpoint; 0 before the first.
    pub step: u64,
    /// Time of the newest checkpoint.
    pub at: Option<f64>,
    pub written: u64,
    pub failed: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Config {
    pub hash: String,
    pub since: f64,
    /// Newest last.
    pub reloads: VecDeque<Reload>,
}

impl Status {
    /// True if anything but the time differs from `other`.
    pub fn differs(&self, other: &Status) -> bool {
        Status { at: other.at, ..self.clone() } != *other
    }

    /// Reason why the run is not ready; `None` if it is.
    pub fn not_ready(&self) -> Option<&'static str> {
        match self.state {
            State::Starting => Some("the run is starting: no measurements yet"),
            State::NoTarget => Some("no target is in service"),
            State::Stopping => Some("the run is ending"),
            State::Filling | State::Training | State::Paused | State::Draining => None,
        }
    }

    /// Mean share of time that actors of this name waited for this cause.
    pub fn mean_wait(&self, actor: &str, cause: &str) -> f64 {
        let waits: Vec<_> = self.actors.iter().filter(|a| a.actor == actor).map(|a| a.waits.get(cause)).collect();
        waits.iter().filter_map(|wait| wait.copied()).sum::<f64>() / waits.len().max(1) as f64
    }
}
