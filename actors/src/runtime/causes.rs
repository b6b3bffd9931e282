//! States of an actor: busy, or waiting for one of the named causes.

use serde::Serialize;

/// State label of a working actor. Waiting states are named by their cause.
pub const BUSY: &str = "busy";

/// Every actor with the causes that it may wait for.
pub const ACTORS: &[(&str, &[Cause])] = &[
    ("planner", &[Cause::Queue, Cause::Draw, Cause::Barrier, Cause::Outcome]),
    ("dispatcher", &[Cause::Job, Cause::Padding, Cause::Target, Cause::Idle]),
    ("target", &[Cause::Job, Cause::PoolFull, Cause::Down]),
    ("pool", &[Cause::Target, Cause::Drafter, Cause::Idle]),
    ("drafter", &[Cause::Batch, Cause::Step]),
    ("trainer", &[Cause::MicroBatches]),
];

/// Cause of a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// Planner: the dispatcher's queue is full.
    Queue,
    /// Planner: draw policy `replay` allows no more jobs in flight until one is drawn.
    Draw,
    /// Planner: jobs of the previous epoch have not left the pool (plan.epoch_barrier).
    Barrier,
    /// Planner: all jobs are handed out, and some outcomes are still unknown.
    Outcome,
    /// Target: no job to pull. Dispatcher: a target pulls, and the queue is empty.
    Job,
    /// Dispatcher: a target pulls, and the next job is still being padded.
    Padding,
    /// Dispatcher: padded jobs wait for a target. Pool: a drafter draws, and too few batches are ready.
    Target,
    /// Pool: a target requests bytes, and a drafter must take a batch first.
    Drafter,
    /// Dispatcher or pool: no request and no job is waiting.
    Idle,
    /// Target: the pool is full.
    PoolFull,
    /// Target: out of service until a restart succeeds.
    Down,
    /// Drafter: the pool may not give out a batch yet.
    Batch,
    /// Drafter: no ticket until the running step is reduced and its weights are published.
    Step,
    /// Trainer: micro-batches of the running step are missing.
    MicroBatches,
}

impl Cause {
    /// Returns the label value.
    pub fn as_str(self) -> &'static str {
        match self {
            Cause::Queue => "queue",
            Cause::Draw => "draw",
            Cause::Barrier => "barrier",
            Cause::Outcome => "outcome",
            Cause::Job => "job",
            Cause::Padding => "padding",
            Cause::Target => "target",
            Cause::Drafter => "drafter",
            Cause::Idle => "idle",
            Cause::PoolFull => "pool_full",
            Cause::Down => "down",
            Cause::Batch => "batch",
            Cause::Step => "step",
            Cause::MicroBatches => "micro_batches",
        }
    }
}
