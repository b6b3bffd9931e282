//! Messages of the dispatcher: its settings, its handle, and the leases that it grants to targets.

use crate::{
    messages::{
        job::Job,
        types::{JobId, PaddedBatch},
    },
    pool,
    runtime::fault::Gone,
};
use std::sync::Arc;
use tokio::sync::{
    mpsc::{self, OwnedPermit},
    oneshot,
};

/// Limit on waiting messages: one of each target.
const INBOX: usize = 64;

/// Slots for leases: one of each target.
pub(super) const LEASES: usize = 1024;

/// Settings of the dispatcher.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Limit on jobs in the queue.
    pub queue_jobs: usize,
    /// Jobs that are padded before a target pulls.
    pub pad_ahead: usize,
    /// Attempts of a job before it is skipped.
    pub max_attempts: u32,
    /// Factor over the forward-time estimate beyond which a forward is reported as a straggler; 0 disables the report.
    pub straggler_factor: f64,
    /// Offers a straggler's job to another target; the first result counts.
    pub offer_stragglers: bool,
    /// Hands out nothing for now; running forwards continue.
    pub paused: bool,
    /// Targets that get nothing for now.
    pub paused_targets: Vec<usize>,
}

/// Item of the planner's stream.
pub enum Feed {
    Job(Job),
    /// Drains the pool once everything before this is in it; answered when it is empty.
    Barrier(oneshot::Sender<()>),
}

/// Identifier of a waiting pull.
pub type PullId = u64;

/// Identifier of a lease.
pub type LeaseId = u64;

/// Message of a target.
pub(super) enum Msg {
    Pull { target: usize, reply: oneshot::Sender<Option<Lease>> },
    Started { lease: LeaseId },
    Claim { lease: LeaseId, reply: oneshot::Sender<Option<Job>> },
}

/// Reason why a job returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    Failed,
    NonFinite,
    WrongShape,
    /// The target ended while it held the job.
    Gone,
}

impl Failure {
    /// Returns the label value.
    pub fn as_str(self) -> &'static str {
        match self {
            Failure::Failed => "failed",
            Failure::NonFinite => "non_finite",
            Failure::WrongShape => "wrong_shape",
            Failure::Gone => "gone",
        }
    }
}

/// End of a lease.
#[derive(Debug)]
pub enum Return {
    /// The job is in the pool.
    Done { lease: LeaseId },
    /// The target ends and has not begun the job.
    Unused { lease: LeaseId },
    /// Another target's result was first; this one was dropped.
    Late { lease: LeaseId },
    /// There is no result.
    Failed { lease: LeaseId, failure: Failure, message: String },
}

impl Return {
    pub fn lease(&self) -> LeaseId {
        match self {
            Return::Done { lease }
            | Return::Unused { lease }
            | Return::Late { lease }
            | Return::Failed { lease, .. } => *lease,
        }
    }
}

/// Right of one target to extract a job. Dropping it returns the right.
#[derive(Debug)]
pub struct Lease {
    pub(super) id: LeaseId,
    pub(super) job: JobId,
    pub(super) batch: Arc<PaddedBatch>,
    pub(super) slot: Option<OwnedPermit<Return>>,
}

impl Lease {
    pub fn job(&self) -> JobId {
        self.job
    }

    pub fn batch(&self) -> &Arc<PaddedBatch> {
        &self.batch
    }

    /// Moves the claimed job into the pool, then ends the lease: the pool has the batch before the dispatcher learns of
    /// it (L3).
    pub fn deliver<F>(mut self, job: Job, reservation: pool::Reservation<F>, features: F) {
        reservation.fill(job, features);
        self.end(Return::Done { lease: self.id });
    }

    /// Ends the lease as if it had not been given: the target ends before it began.
    pub fn unused(mut self) {
        self.end(Return::Unused { lease: self.id });
    }

    /// Ends the lease of a late result: another target was first.
    pub fn late(mut self) {
        self.end(Return::Late { lease: self.id });
    }

    /// Ends the lease without a result, for this reason.
    pub fn fail(mut self, failure: Failure, message: String) {
        self.end(Return::Failed { lease: self.id, failure, message });
    }

    fn end(&mut self, back: Return) {
        if let Some(slot) = self.slot.take() {
            slot.send(back);
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let message = "the target ended while it held the job".into();
        self.end(Return::Failed { lease: self.id, failure: Failure::Gone, message });
    }
}

/// Sender of messages to the dispatcher.
#[derive(Clone)]
pub struct Handle {
    inbox: mpsc::Sender<Msg>,
}

impl Handle {
    /// Waits for the next job. Returns `None` if no further job follows.
    ///
    /// # Errors
    ///
    /// Fails if the dispatcher is gone.
    pub async fn pull(&self, target: usize) -> Result<Option<Lease>, Gone> {
        let (reply, lease) = oneshot::channel();
        self.send(Msg::Pull { target, reply }).await?;
        lease.await.map_err(|_| Gone("dispatcher"))
    }

    /// Reports that the forward of a lease begins.
    ///
    /// # Errors
    ///
    /// Fails if the dispatcher is gone.
    pub async fn started(&self, lease: &Lease) -> Result<(), Gone> {
        self.send(Msg::Started { lease: lease.id }).await
    }

    /// Claims the job of a lease whose result is complete. Returns `None` if another target's result was first.
    ///
    /// # Errors
    ///
    /// Fails if the dispatcher is gone.
    pub async fn claim(&self, lease: &Lease) -> Result<Option<Job>, Gone> {
        let (reply, job) = oneshot::channel();
        self.send(Msg::Claim { lease: lease.id, reply }).await?;
        job.await.map_err(|_| Gone("dispatcher"))
    }

    async fn send(&self, msg: Msg) -> Result<(), Gone> {
        self.inbox.send(msg).await.map_err(|_| Gone("dispatcher"))
    }
}

/// Creates the dispatcher's channels; the second value is for [`run`](super::run).
pub fn channel() -> (Handle, Inbox) {
    let (tx, inbox) = mpsc::channel(INBOX);
    let (leases, returns) = mpsc::channel(LEASES);
    (Handle { inbox: tx }, Inbox { inbox, leases, returns })
}

/// Receivers of the dispatcher.
pub struct Inbox {
    pub(super) inbox: mpsc::Receiver<Msg>,
    pub(super) leases: mpsc::Sender<Return>,
    pub(super) returns: mpsc::Receiver<Return>,
}
