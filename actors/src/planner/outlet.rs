//! Outlet of the planner: the item that leaves next for the dispatcher's queue, and its receipt slot.

use super::state::{Next, State};
use crate::{
    dispatcher::Feed,
    messages::{
        job::{Job, Receipt, Settled},
        types::JobSpec,
    },
    pool::PlanNotices,
    runtime::{causes::Cause, fault::Gone, trace::lifecycle},
};
use tokio::sync::{
    mpsc::{self, OwnedPermit},
    oneshot,
};

/// Item that waits for a free position in the dispatcher's queue.
enum Outgoing {
    Job(JobSpec),
    Barrier,
}

/// Sending side of the planner towards the dispatcher.
pub(super) struct Outlet {
    /// `None` after the plan has ended. Dropping it reports that to the dispatcher.
    feed: Option<mpsc::Sender<Feed>>,
    /// Dropped with the feed: `returns` then ends once every receipt is settled.
    receipts: Option<mpsc::Sender<Settled>>,
    next: Option<Outgoing>,
    slot: Option<OwnedPermit<Settled>>,
    /// Reply of a barrier that was sent.
    pub(super) barrier: Option<oneshot::Receiver<()>>,
    /// The next job has to wait until the pool's draws advance.
    pub(super) early: bool,
}

impl Outlet {
    pub(super) fn new(feed: mpsc::Sender<Feed>, receipts: Option<mpsc::Sender<Settled>>) -> Self {
        Self { feed: Some(feed), receipts, next: None, slot: None, barrier: None, early: false }
    }

    /// Takes the next item from the state and reserves its receipt slot. Returns an epoch that must be planned first.
    pub(super) fn advance(&mut self, state: &mut State, notices: &PlanNotices) -> Option<u32> {
        if self.next.is_none() && self.barrier.is_none() && self.feed.is_some() {
            match state.take_next() {
                Next::Plan(epoch) => return Some(epoch),
                Next::Job(job) => self.next = Some(Outgoing::Job(job)),
                Next::Barrier => self.next = Some(Outgoing::Barrier),
                Next::Ended => (self.feed, self.receipts) = (None, None),
            }
        }
        let job = matches!(self.next, Some(Outgoing::Job(_)));
        self.early = job && !notices.may_leave(state.counts().planned);
        if let (None, true, Some(receipts)) = (&self.slot, job && !self.early, &self.receipts) {
            self.slot = receipts.clone().try_reserve_owned().ok();
        }
        None
    }

    /// True until the plan has ended.
    pub(super) fn is_open(&self) -> bool {
        self.feed.is_some()
    }

    /// True if the next item only waits for the dispatcher's queue.
    pub(super) fn may_leave(&self) -> bool {
        self.slot.is_some() || matches!(self.next, Some(Outgoing::Barrier))
    }

    /// Cause of the planner's waiting.
    pub(super) fn cause(&self) -> Cause {
        match (self.early, self.barrier.is_some(), self.feed.is_some()) {
            (true, ..) => Cause::Draw,
            (_, true, _) => Cause::Barrier,
            (_, _, true) => Cause::Queue,
            (_, _, false) => Cause::Outcome,
        }
    }

    /// Waits for a free position in the dispatcher's queue.
    ///
    /// # Errors
    /// The dispatcher is gone.
    pub(super) fn reserve(&self) -> impl Future<Output = Result<OwnedPermit<Feed>, Gone>> + use<> {
        let feed = self.feed.clone();
        async move { feed.ok_or(Gone("dispatcher"))?.reserve_owned().await.map_err(|_| Gone("dispatcher")) }
    }

    /// Sends the next item. The dispatcher has room for it.
    pub(super) fn send(&mut self, permit: OwnedPermit<Feed>, state: &mut State) {
        match (self.next.take(), self.slot.take()) {
            (Some(Outgoing::Job(spec)), Some(slot)) => {
                state.on_handed_out(&spec);
                lifecycle!("handed_out", job = %spec.id);
                let receipt = Receipt::new(spec.id, slot);
                permit.send(Feed::Job(Job { spec, attempts: 0, receipt }));
            }
            (Some(Outgoing::Barrier), _) => {
                let (reply, drained) = oneshot::channel();
                permit.send(Feed::Barrier(reply));
                self.barrier = Some(drained);
            }
            // Excluded by `may_leave`.
            (other, _) => self.next = other,
        }
    }

    /// Sends nothing more: the plan ends here.
    pub(super) fn close(&mut self, state: &mut State) {
        state.stop();
        *self = Self { feed: None, receipts: None, next: None, slot: None, barrier: None, early: false };
    }
}
