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

/// Requests wait here: at most one of each target, one of each drafter, and the dispatcher's.
const INBOX: usize = 256;

/// One slot for each reservation and each batch; what really bounds these is `max_batches` and the drafters' prefetch.
pub(super) const RETURNS: usize = 1 << 16;

/// What the planner tells waits here: one message an epoch, and one for each skipped job.
const PLAN_NOTICES: usize = 64;

/// Names a waiting reservation or draw.
pub type RequestId = u64;

/// A batch that waits: its job and what the target made of it.
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
    /// A reservation is given up.
    Cancelled { bytes: u64 },
    /// A drafter is done with a batch.
    Done { bytes: u64 },
    /// A drafter could not train a batch.
    Returned(Entry<Batch<F>>),
}

/// The batch can never fit.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("a batch of {bytes} bytes cannot fit into pool.max_bytes = {max_bytes}; raise it, or lower plan.job_tokens")]
pub struct TooLarge {
    pub bytes: u64,
    pub max_bytes: u64,
}

/// BytePermit for one batch. Dropping it gives the room back.
#[derive(Debug)]
pub struct Reservation<F> {
    pub(super) bytes: u64,
    pub(super) slot: Option<OwnedPermit<Return<F>>>,
}

impl<F> Reservation<F> {
    /// Moves a batch into the pool. Never waits: its slot was reserved with the room.
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

/// A drawn batch. Its room returns when `room` is dropped.
#[derive(Debug)]
pub struct CheckedOutBatch<F> {
    pub batch: Batch<F>,
    /// Draw `replay`: its place in the order of all draws. Decides to which step it belongs.
    pub position: Option<u64>,
    pub permit: BytePermit<F>,
}

/// The bytes that a drafter holds.
#[derive(Debug)]
pub struct BytePermit<F> {
    pub(super) bytes: u64,
    pub(super) position: Option<u64>,
    pub(super) slot: Option<OwnedPermit<Return<F>>>,
}

impl<F> BytePermit<F> {
    /// Moves the batch of this room back into the pool, for another draw.
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

/// Speaks to the pool.
pub struct Handle<F> {
    inbox: mpsc::Sender<Msg<F>>,
}

impl<F> Clone for Handle<F> {
    fn clone(&self) -> Self {
        Self { inbox: self.inbox.clone() }
    }
}

impl<F> Handle<F> {
    /// Waits for room of exactly `bytes`.
    pub async fn reserve(&self, bytes: u64) -> Result<Result<Reservation<F>, TooLarge>, Gone> {
        let (reply, granted) = oneshot::channel();
        self.inbox.send(Msg::Reserve { bytes, reply }).await.map_err(|_| Gone("pool"))?;
        granted.await.map_err(|_| Gone("pool"))
    }

    /// Asks for a batch. The receiver yields it, or `None` when there will be no more.
    pub async fn draw(&self) -> Result<oneshot::Receiver<Option<CheckedOutBatch<F>>>, Gone> {
        let (reply, batch) = oneshot::channel();
        self.inbox.send(Msg::Draw { reply }).await.map_err(|_| Gone("pool"))?;
        Ok(batch)
    }

    /// Everything that will come is here: give it all out. `late` reservations may still be held by forwards whose results
    /// nobody wants. `done` is answered when the pool is empty.
    pub async fn drain(&self, last: bool, late: usize, done: Option<oneshot::Sender<()>>) -> Result<(), Gone> {
        self.inbox.send(Msg::Drain { last, late, done }).await.map_err(|_| Gone("pool"))
    }
}

/// What the pool held at most, and typically.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Reserved, waiting and checked_out bytes together.
    pub peak_bytes: u64,
    pub peak_batches: usize,
    /// Half of the time from the first batch to the last, no more batches than this were ready.
    pub ready_p50: usize,
    /// The same for 95 % of that time.
    pub ready_p95: usize,
}

pub(super) enum PlanNotice {
    Epoch { epoch: u32, open_of_bucket: Vec<u64>, ended: Arc<[bool]> },
    Skipped(JobId),
}

/// The planner's line to the pool: what is to come, and in return how far the draws have got.
pub struct PlanNotices {
    notices: mpsc::Sender<PlanNotice>,
    passed: watch::Receiver<u64>,
    window: Option<u64>,
}

impl PlanNotices {
    /// The open jobs of this epoch follow: so many of each bucket; `ended[i]` says whether job `i` already has an outcome.
    pub async fn epoch(&self, epoch: u32, open_of_bucket: Vec<u64>, ended: Arc<[bool]>) {
        // A pool that is gone needs nothing any more; whoever ended it is heard of elsewhere.
        let _ = self.notices.send(PlanNotice::Epoch { epoch, open_of_bucket, ended }).await;
    }

    /// This job was given up.
    pub async fn skipped(&self, job: JobId) {
        let _ = self.notices.send(PlanNotice::Skipped(job)).await;
    }

    /// Whether a job may leave after `handed_out` others did. Draw `replay` lets no more than its window be under way, so
    /// that the job it waits for always finds a target and room.
    pub fn may_leave(&self, handed_out: u64) -> bool {
        self.window.is_none_or(|window| handed_out < *self.passed.borrow() + window)
    }

    /// Waits until `may_leave` may have another answer.
    pub async fn window_moved(&mut self) {
        if self.passed.changed().await.is_err() {
            std::future::pending().await
        }
    }
}

/// The pool's end of the line.
pub struct PlanNoticeInbox {
    pub(super) notices: mpsc::Receiver<PlanNotice>,
    pub(super) passed: watch::Sender<u64>,
}

/// Starts the line from the planner to the pool.
pub fn plan_notices(settings: &Settings) -> (PlanNotices, PlanNoticeInbox) {
    let (notices, inbox) = mpsc::channel(PLAN_NOTICES);
    let (passed, seen) = watch::channel(0);
    let window = settings.window().map(|window| window as u64);
    (PlanNotices { notices, passed: seen, window }, PlanNoticeInbox { notices: inbox, passed })
}

/// Starts the pool's channels. `run` with the second value.
pub fn channel<F>() -> (Handle<F>, Inbox<F>) {
    let (tx, inbox) = mpsc::channel(INBOX);
    let (slots, returns) = mpsc::channel(RETURNS);
    (Handle { inbox: tx }, Inbox { inbox, slots, returns })
}

/// What the pool listens to.
pub struct Inbox<F> {
    pub(super) inbox: mpsc::Receiver<Msg<F>>,
    pub(super) slots: mpsc::Sender<Return<F>>,
    pub(super) returns: mpsc::Receiver<Return<F>>,
}
