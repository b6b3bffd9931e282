//! A job on its way: moved from owner to owner, never copied, so that it is at one place by construction (D1).

use super::types::{JobId, JobSpec};
use tokio::sync::mpsc::OwnedPermit;

/// A job between the planner and its outcome. Whoever holds it decides what becomes of it.
#[derive(Debug)]
pub struct Job {
    pub spec: JobSpec,
    /// How often it has failed so far, in targets and drafters together.
    pub attempts: u32,
    pub receipt: Receipt,
}

impl Job {
    pub fn id(&self) -> JobId {
        self.spec.id
    }
}

/// What a receipt tells the planner when no outcome was recorded through it in another way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Settled {
    /// Given up, and why.
    Skipped { job: JobId, reason: String, attempts: u32 },
    /// Dropped on the way, as happens to what is in flight when a run is stopped. The job stays open.
    Unfinished { job: JobId },
}

/// The planner's claim on an answer: settled exactly once, at the latest when it is dropped.
///
/// It carries a reserved slot of the planner's channel, so settling never waits and never fails.
#[derive(Debug)]
pub struct Receipt {
    job: JobId,
    slot: Option<OwnedPermit<Settled>>,
}

impl Receipt {
    pub(crate) fn new(job: JobId, slot: OwnedPermit<Settled>) -> Self {
        Self { job, slot: Some(slot) }
    }

    /// A receipt that nobody waits for, for tests of a `State`.
    pub fn detached(job: JobId) -> Self {
        Self { job, slot: None }
    }

    pub fn job(&self) -> JobId {
        self.job
    }

    /// Gives the job up.
    pub fn skip(mut self, reason: String, attempts: u32) {
        if let Some(slot) = self.slot.take() {
            slot.send(Settled::Skipped { job: self.job, reason, attempts });
        }
    }

    /// Ends the claim without a message: the planner has the outcome by other means.
    pub(crate) fn settle(mut self) -> JobId {
        self.slot = None;
        self.job
    }
}

impl Drop for Receipt {
    fn drop(&mut self) {
        if let Some(slot) = self.slot.take() {
            slot.send(Settled::Unfinished { job: self.job });
        }
    }
}
