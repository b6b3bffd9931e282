//! Job in flight: moved from owner to owner and never copied, so it has exactly one owner (D1).

use super::types::{JobId, JobSpec};
use tokio::sync::mpsc::OwnedPermit;

/// Job between the planner and its outcome. Its owner decides how it ends.
#[derive(Debug)]
pub struct Job {
    pub spec: JobSpec,
    /// Failures so far, in targets and drafters together.
    pub attempts: u32,
    pub receipt: Receipt,
}

impl Job {
    pub fn id(&self) -> JobId {
        self.spec.id
    }
}

/// Message of a receipt to the planner, if the outcome is not recorded in another way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Settled {
    /// The job is skipped, for this reason.
    Skipped { job: JobId, reason: String, attempts: u32 },
    /// The job was dropped in flight, for example because the run was stopped. It stays open.
    Unfinished { job: JobId },
}

/// Claim of the planner on an outcome. It is settled exactly once, at the latest when it is dropped.
///
/// A receipt holds a reserved slot of the planner's channel, so settling never waits and never fails.
#[derive(Debug)]
pub struct Receipt {
    job: JobId,
    slot: Option<OwnedPermit<Settled>>,
}

impl Receipt {
    pub(crate) fn new(job: JobId, slot: OwnedPermit<Settled>) -> Self {
        Self { job, slot: Some(slot) }
    }

    /// Returns a receipt that is connected to no planner, for tests of a `State`.
    pub fn detached(job: JobId) -> Self {
        Self { job, slot: None }
    }

    pub fn job(&self) -> JobId {
        self.job
    }

    /// Skips the job.
    pub fn skip(mut self, reason: String, attempts: u32) {
        if let Some(slot) = self.slot.take() {
            slot.send(Settled::Skipped { job: self.job, reason, attempts });
        }
    }

    /// Ends the claim without a message, because the planner has the outcome already.
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
