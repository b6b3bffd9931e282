//! Messages of the pool: its handle, reservations, checked-out batches, and the planner's notices.

use super::{settings::Settings, state::Entry};
use crate::{
    messages::{job::Job, types::JobId},
    runtime::fault::Gone,
};
use std::sync::Arc;
use thiserror::Error;
use tokio::sync::{
    mpsc::{self, OwnedPermit},
    oneshot, watch,
};

/// Limit on waiting requests: one of each target, one of each drafter, and the dispatcher's.
const INBOX: usize = 256;

/// Slots for reservations and checked-out batches. `max_batches` and the drafters' prefetch limit these further.
pub(super) const RETURNS: usize = 1 << 16;

/// Limit on waiting notices: one message per epoch, and one per skipped job.
const PLAN_NOTICES: usize = 64;

/// Batch in the pool: its job and the features that the target produced.
#[derive(Debug)]
pub struct Batch<F> {
    pub job: Job,
    pub features: F,
}

pub(super) enum Msg<F> {
    Reserve { bytes: u64, reply: oneshot::Sender<Result<Reservation<F>, TooLarge>> },
    Draw { reply: oneshot::Sender<Option<CheckedOutBatch<F>>> },
    Drain { last: bool, late: usize, done: Option<oneshot::Sender<()>> },
}

pub(super) enum Return<F> {
    /// A reservation is filled.
    Filled { bytes: u64, batch: Batch<F> },
    /// A reservation is cancelled.
    Cancelled { bytes: u64 },
    /// A drafter is done with a batch.
    Done { bytes: u64 },
    /// A drafter returns a batch that it could not train.
    Returned(Entry<Batch<F>>),
}

/// Error of a batch that can never fit.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("a batch of {bytes} bytes cannot fit into pool.max_bytes = {max_bytes}; raise it, or lower plan.job_tokens")]
pub struct TooLarge {
    pub bytes: u64,
    pub max_bytes: u64,
}

/// Reserved bytes for one batch. Dropping it frees the bytes.
#[derive(Debug)]
pub struct Reservation<F> {
    pub(super) bytes: u64,
    pub(super) slot: Option<OwnedPermit<Return<F>>>,
}

impl<F> Reservation<F> {
    /// Moves a batch into the pool. It never waits: the slot was reserved with the bytes.
    pub fn fill(mut self, job: Job, features: F) {
        if let Some(slot) = self.slot.take() {
            slot.send(Return::Filled { bytes: self.bytes, batch: Batch { job, features } });
        }
    }
}

impl<F> Drop for Reservation<F> {
    fn drop(&mut self) {
        if let Some(slot) = self.slot.take() {
            slot.send(Return::Cancelled { bytes: self.bytes });
        }
    }
}

/// Drawn batch. Dropping `permit` frees its bytes.
#[derive(Debug)]
pub struct CheckedOutBatch<F> {
    pub batch: Batch<F>,
    /// Position in the draw order, with draw policy `replay`. It determines the step of the batch.
    pub position: Option<u64>,
    pub permit: BytePermit<F>,
}

/// Permit for the bytes that a drafter holds.
#[derive(Debug)]
pub struct BytePermit<F> {
    pub(super) bytes: u64,
    pub(super) position: Option<u64>,
    pub(super) slot: Option<OwnedPermit<Return<F>>>,
}

impl<F> BytePermit<F> {
    /// Returns the batch of this permit to the pool, for another draw.
    pub fn return_batch(mut self, batch: Batch<F>) {
        if let Some(slot) = self.slot.take() {
            slot.send(Return::Returned(self.entry(batch, true)));
        }
    }

    pub(super) fn entry(&self, batch: Batch<F>, returned: bool) -> Entry<Batch<F>> {
        let (job, bucket) = (batch.job.id(), batch.job.spec.bucket);
        Entry { job, bucket, bytes: self.bytes, position: self.position, returned, batch }
    }
}

impl<F> Drop for BytePermit<F> {
    fn drop(&mut self) {
        if let Some(slot) = self.slot.take() {
            slot.send(Return::Done { bytes: self.bytes });
        }
    }
}

/// Sender of requests to the pool.
pub struct Handle<F> {
    inbox: mpsc::Sender<Msg<F>>,
}

impl<F> Clone for Handle<F> {
    fn clone(&self) -> Self {
        Self { inbox: self.inbox.clone() }
    }
}

impl<F> Handle<F> {
    /// Waits until exactly `bytes` are free, and reserves them.
    ///
    /// # Errors
    ///
    /// The outer error reports that the pool is gone. The inner one reports a batch that is larger than the pool.
    pub async fn reserve(&self, bytes: u64) -> Result<Result<Reservation<F>, TooLarge>, Gone> {
        let (reply, granted) = oneshot::channel();
        self.inbox.send(Msg::Reserve { bytes, reply }).await.map_err(|_| Gone("pool"))?;
        granted.await.map_err(|_| Gone("pool"))
    }

    /// Requests a batch. The receiver yields it, or `None` if no further batch follows.
    ///
    /// # Errors
    ///
    /// Fails if the pool is gone.
    pub async fn draw(&self) -> Result<oneshot::Receiver<Option<CheckedOutBatch<F>>>, Gone> {
        let (reply, batch) = oneshot::channel();
        self.inbox.send(Msg::Draw { reply }).await.map_err(|_| Gone("pool"))?;
        Ok(batch)
    }

    /// Reports that all batches have arrived: the pool gives them all out. `late` forwards, whose results are not
    /// needed, may still hold reservations. `done` is answered when the pool is empty.
    ///
    /// # Errors
    ///
    /// Fails if the pool is gone.
    pub async fn drain(&self, last: bool, late: usize, done: Option<oneshot::Sender<()>>) -> Result<(), Gone> {
        self.inbox.send(Msg::Drain { last, late, done }).await.map_err(|_| Gone("pool"))
    }
}

pub(super) enum PlanNotice {
    Epoch { epoch: u32, open_of_bucket: Vec<u64>, ended: Arc<[bool]> },
    Skipped(JobId),
}

/// Sender of the planner's notices: it announces jobs to the pool, and reads how many draws have passed.
pub struct PlanNotices {
    notices: mpsc::Sender<PlanNotice>,
    passed: watch::Receiver<u64>,
    window: Option<u64>,
}

impl PlanNotices {
    /// Announces the open jobs of an epoch, as a number per bucket. `ended[i]` is true if job `i` already has an
    /// outcome.
    pub async fn epoch(&self, epoch: u32, open_of_bucket: Vec<u64>, ended: Arc<[bool]>) {
        // A pool that is gone needs no notice; its own fault is reported elsewhere.
        let _ = self.notices.send(PlanNotice::Epoch { epoch, open_of_bucket, ended }).await;
    }

    /// Announces that this job is skipped.
    pub async fn skipped(&self, job: JobId) {
        let _ = self.notices.send(PlanNotice::Skipped(job)).await;
    }

    /// Returns true if a job may leave after `handed_out` others. Draw policy `replay` limits the jobs in flight to its
    /// window, so that the job it waits for always finds a target and free bytes.
    pub fn may_leave(&self, handed_out: u64) -> bool {
        self.window.is_none_or(|window| handed_out < *self.passed.borrow() + window)
    }

    /// Waits until the result of `may_leave` may have changed.
    pub async fn window_moved(&mut self) {
        if self.passed.changed().await.is_err() {
            std::future::pending().await
        }
    }
}

/// Receiver of the planner's notices.
pub struct PlanNoticeInbox {
    pub(super) notices: mpsc::Receiver<PlanNotice>,
    pub(super) passed: watch::Sender<u64>,
}

/// Creates the channel from the planner to the pool.
pub fn plan_notices(settings: &Settings) -> (PlanNotices, PlanNoticeInbox) {
    let (notices, inbox) = mpsc::channel(PLAN_NOTICES);
    let (passed, seen) = watch::channel(0);
    let window = settings.window().map(|window| window as u64);
    (PlanNotices { notices, passed: seen, window }, PlanNoticeInbox { notices: inbox, passed })
}

/// Creates the pool's channels; the second value is for [`run`](super::run).
pub fn channel<F>() -> (Handle<F>, Inbox<F>) {
    let (tx, inbox) = mpsc::channel(INBOX);
    let (slots, returns) = mpsc::channel(RETURNS);
    (Handle { inbox: tx }, Inbox { inbox, slots, returns })
}

/// Receivers of the pool.
pub struct Inbox<F> {
    pub(super) inbox: mpsc::Receiver<Msg<F>>,
    pub(super) slots: mpsc::Sender<Return<F>>,
    pub(super) returns: mpsc::Receiver<Return<F>>,
}
