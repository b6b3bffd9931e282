//! States of an actor: busy, or waiting for one of the named causes.

use serde::Serialize;

/// The state of an actor that works; the others are named by their cause.
pub const BUSY: &str = "busy";

/// Every actor, with all that it may ever wait for.
pub const ACTORS: &[(&str, &[Cause])] = &[
    ("planner", &[Cause::Queue, Cause::Draw, Cause::Barrier, Cause::Outcome]),
    ("dispatcher", &[Cause::Job, Cause::Padding, Cause::Target, Cause::Idle]),
    ("target", &[Cause::Job, Cause::PoolFull, Cause::Down]),
    ("pool", &[Cause::Target, Cause::Drafter, Cause::Idle]),
    ("drafter", &[Cause::Batch, Cause::Step]),
    ("trainer", &[Cause::MicroBatches]),
];

/// What an actor waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// The planner: the dispatcher's queue is full.
    Queue,
    /// The planner: draw `replay` lets no more jobs be under way until one is drawn.
    Draw,
    /// The planner: the epoch before has not left the pool (plan.epoch_barrier).
    Barrier,
    /// The planner: everything is handed out, and what becomes of it is not known yet.
    Outcome,
    /// A target: no job to pull. The dispatcher: a target asks, and its queue is empty.
    Job,
    /// The dispatcher: a target asks, and the next job is still being padded.
    Padding,
    /// The dispatcher: padded jobs wait for a target. The pool: a drafter asks, and too few batches are ready.
    Target,
    /// The pool: a target asks for room, and a drafter has to take a batch first.
    Drafter,
    /// The dispatcher or the pool: nobody asks for anything, and nothing waits.
    Idle,
    /// A target: no room in the pool.
    PoolFull,
    /// A target: taken out, until it answers again.
    Down,
    /// A drafter: no batch that the pool may give.
    Batch,
    /// A drafter: no ticket until the running step is reduced and its weights are out.
    Step,
    /// The trainer: micro-batches of the running step.
    MicroBatches,
}

impl Cause {
    /// The label value.
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
