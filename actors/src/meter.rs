//! Busy and waiting time of one actor, as metrics while it runs and as totals at its end.

use crate::metrics::{ACTOR_STATE, BUSY_SECONDS, WAIT_SECONDS};
use metrics::{Gauge, Histogram, gauge, histogram};
use serde::Serialize;
use std::{future::Future, time::Duration};
use tokio::time::Instant;

/// The state of an actor that works; the others are named by their cause.
pub const BUSY: &str = "busy";

/// What an actor waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// A target: no job to pull.
    Job,
    /// A target: no room in the pool.
    Room,
    /// A target: taken out, until it answers again.
    Out,
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
            Cause::Job => "job",
            Cause::Room => "room",
            Cause::Out => "out",
            Cause::Batch => "batch",
            Cause::Step => "step",
            Cause::MicroBatches => "micro_batches",
        }
    }
}

/// What one actor did with its time.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Totals {
    pub actor: String,
    pub index: usize,
    pub busy: Duration,
    pub waits: Vec<(Cause, Duration)>,
    /// From start to end.
    pub alive: Duration,
}

/// Measures one actor. Owned by its loop.
pub struct Meter {
    totals: Totals,
    born: Instant,
    busy: Histogram,
    waits: Vec<Histogram>,
    /// Busy first, then the causes: 1 for what the actor does now. A histogram hears of it only when it is over.
    now: Vec<Gauge>,
}

/// Sets a state back when the work or the wait is over, also where it was given up.
struct Doing<'a>(&'a Gauge);

impl<'a> Doing<'a> {
    fn new(state: &'a Gauge) -> Self {
        state.set(1.0);
        Doing(state)
    }
}

impl Drop for Doing<'_> {
    fn drop(&mut self) {
        self.0.set(0.0);
    }
}

impl Meter {
    /// `causes` are all that this actor may ever wait for; their series exist from now on.
    pub fn new(actor: &'static str, index: usize, causes: &[Cause]) -> Self {
        let label = index.to_string();
        let states = [BUSY].into_iter().chain(causes.iter().map(|c| c.as_str()));
        Self {
            now: states
                .map(|state| gauge!(ACTOR_STATE, "actor" => actor, "index" => label.clone(), "state" => state))
                .collect(),
            busy: histogram!(BUSY_SECONDS, "actor" => actor, "index" => label.clone()),
            waits: causes
                .iter()
                .map(|c| histogram!(WAIT_SECONDS, "actor" => actor, "index" => label.clone(), "cause" => c.as_str()))
                .collect(),
            totals: Totals {
                actor: actor.to_owned(),
                index,
                waits: causes.iter().map(|&c| (c, Duration::ZERO)).collect(),
                ..Totals::default()
            },
            born: Instant::now(),
        }
    }

    /// Runs a piece of work and counts its time as busy.
    pub async fn busy<F: Future>(&mut self, work: F) -> F::Output {
        let start = Instant::now();
        let doing = Doing::new(&self.now[0]);
        let out = work.await;
        drop(doing);
        let took = start.elapsed();
        self.totals.busy += took;
        self.busy.record(took.as_secs_f64());
        out
    }

    /// Runs a wait and counts its time under its cause.
    pub async fn wait<F: Future>(&mut self, cause: Cause, wait: F) -> F::Output {
        let start = Instant::now();
        let index = self.totals.waits.iter().position(|(c, _)| *c == cause);
        let doing = index.map(|i| Doing::new(&self.now[i + 1]));
        let out = wait.await;
        drop(doing);
        let took = start.elapsed();
        if let Some(i) = index {
            self.totals.waits[i].1 += took;
            self.waits[i].record(took.as_secs_f64());
        }
        out
    }

    /// The totals up to now.
    pub fn totals(&self) -> Totals {
        Totals { alive: self.born.elapsed(), ..self.totals.clone() }
    }
}
