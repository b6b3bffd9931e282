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

/// Messages wait here: at most one of each target.
const INBOX: usize = 64;

/// One slot for each lease; there are as many as targets.
pub(super) const LEASES: usize = 1024;

/// What shapes the dispatcher's work.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Jobs that may wait in the queue.
    pub queue_jobs: usize,
    /// Jobs that are padded before a target asks.
    pub pad_ahead: usize,
    /// AttemptCounters of a job before it is skipped.
    pub max_attempts: u32,
    /// A forward that takes this many times longer than its like is a straggler and is reported; 0 never.
    pub straggler_factor: f64,
    /// Offer a straggler's job to another target; the first result counts.
    pub offer_stragglers: bool,
    /// Hand out nothing for now; what is under way goes on.
    pub paused: bool,
    /// Targets that get nothing for now.
    pub paused_targets: Vec<usize>,
}

/// What the planner streams.
pub enum Feed {
    Job(Job),
    /// Drain the pool once everything before this is in it; answered when it is empty.
    Barrier(oneshot::Sender<()>),
}

/// Names a waiting pull.
pub type PullId = u64;

/// Names a lease.
pub type LeaseId = u64;

/// What targets ask.
pub(super) enum Msg {
    Pull { target: usize, reply: oneshot::Sender<Option<Lease>> },
    Started { lease: LeaseId },
    Claim { lease: LeaseId, reply: oneshot::Sender<Option<Job>> },
}

/// Why a job comes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    Failed,
    NonFinite,
    WrongShape,
    /// The target went away while it held the job.
    Gone,
}

impl Failure {
    /// The label value.
    pub fn as_str(self) -> &'static str {
        match self {
            Failure::Failed => "failed",
            Failure::NonFinite => "non_finite",
            Failure::WrongShape => "wrong_shape",
            Failure::Gone => "gone",
        }
    }
}

/// How a lease ended.
#[derive(Debug)]
pub enum Return {
    /// The job is in the pool.
    Done { lease: LeaseId },
    /// The target serves no more and has not begun.
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

/// The right of one target to extract a job. Dropping it gives the right back.
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

    /// Moves the claimed job into the pool, then ends the lease: the pool has it before the dispatcher hears of it (L3).
    pub fn deliver<F>(mut self, job: Job, reservation: pool::Reservation<F>, features: F) {
        reservation.fill(job, features);
        self.end(Return::Done { lease: self.id });
    }

    /// The target ends before it began: as if the lease had never been given.
    pub fn unused(mut self) {
        self.end(Return::Unused { lease: self.id });
    }

    /// Another target was first.
    pub fn late(mut self) {
        self.end(Return::Late { lease: self.id });
    }

    /// There is no result, and why.
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
        let message = "the target went away while it held the job".into();
        self.end(Return::Failed { lease: self.id, failure: Failure::Gone, message });
    }
}

/// Speaks to the dispatcher.
#[derive(Clone)]
pub struct Handle {
    inbox: mpsc::Sender<Msg>,
}

impl Handle {
    /// Waits for the next job. `None` when there will be no more.
    pub async fn pull(&self, target: usize) -> Result<Option<Lease>, Gone> {
        let (reply, lease) = oneshot::channel();
        self.send(Msg::Pull { target, reply }).await?;
        lease.await.map_err(|_| Gone("dispatcher"))
    }

    /// Says that the forward of a lease begins.
    pub async fn started(&self, lease: &Lease) -> Result<(), Gone> {
        self.send(Msg::Started { lease: lease.id }).await
    }

    /// Asks for the job of a lease whose result is there. `None` when another target's result was first.
    pub async fn claim(&self, lease: &Lease) -> Result<Option<Job>, Gone> {
        let (reply, job) = oneshot::channel();
        self.send(Msg::Claim { lease: lease.id, reply }).await?;
        job.await.map_err(|_| Gone("dispatcher"))
    }

    async fn send(&self, msg: Msg) -> Result<(), Gone> {
        self.inbox.send(msg).await.map_err(|_| Gone("dispatcher"))
    }
}

/// Starts the dispatcher's channels. `run` with the second value.
pub fn channel() -> (Handle, Inbox) {
    let (tx, inbox) = mpsc::channel(INBOX);
    let (leases, returns) = mpsc::channel(LEASES);
    (Handle { inbox: tx }, Inbox { inbox, leases, returns })
}

/// What the dispatcher listens to.
pub struct Inbox {
    pub(super) inbox: mpsc::Receiver<Msg>,
    pub(super) leases: mpsc::Sender<Return>,
    pub(super) returns: mpsc::Receiver<Return>,
}
