//! The pool holds features between targets and drafters, within a promise: bytes and batches never exceed their limits.
//!
//! In: reservations (before a forward), features (moved), draws. Out: grants and loans. A reservation waits while there is
//! no room; a draw waits until `min_ready` batches are ready, or the pool is draining. A batch's bytes count from its
//! reservation until its drafter is done with it; a drafter that fails gives its batch back, so "no more" is said only when
//! nothing is on loan. At a stop it answers every draw with "no more"; at a close it gives out what it has once it is told that
//! everything is here.
//! Invariants: L1, L2, L3. The decisions are in `State`; `pool_state.rs` has them.

use crate::{
    ask::changed,
    fault::{Fault, Gone, Stops},
    job::Job,
    meter::Meter,
    metrics as m,
    pool_figures::{Depths, Series, cause},
    pool_state::{Action, Entry, Settings, State},
    types::JobId,
};
use metrics::gauge;
use std::{collections::BTreeMap, sync::Arc};
use thiserror::Error;
use tokio::{
    sync::{
        mpsc::{self, OwnedPermit},
        oneshot, watch,
    },
    time::Instant,
};

/// Requests wait here: at most one of each target, one of each drafter, and the dispatcher's.
const INBOX: usize = 256;
/// One slot for each reservation and each loan; what really bounds these is `max_batches` and the drafters' prefetch.
const RETURNS: usize = 1 << 16;
/// What the planner tells waits here: one message an epoch, and one for each skipped job.
const COURSE: usize = 64;

/// Names a waiting reservation or draw.
pub type RequestId = u64;

/// A batch that waits: its job and what the target made of it.
#[derive(Debug)]
pub struct Batch<F> {
    pub job: Job,
    pub features: F,
}

enum Msg<F> {
    Reserve { bytes: u64, reply: oneshot::Sender<Result<Reservation<F>, TooLarge>> },
    Draw { reply: oneshot::Sender<Option<Loan<F>>> },
    Drain { last: bool, late: usize, done: Option<oneshot::Sender<()>> },
}

enum Return<F> {
    /// A reservation is filled.
    Filled { bytes: u64, batch: Batch<F> },
    /// A reservation is given up.
    Cancelled { bytes: u64 },
    /// A drafter is done with a batch.
    Done { bytes: u64 },
    /// A drafter could not train a batch.
    GivenBack(Entry<Batch<F>>),
}

/// The batch can never fit.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("a batch of {bytes} bytes cannot fit into pool.max_bytes = {max_bytes}; raise it, or lower plan.job_tokens")]
pub struct TooLarge {
    pub bytes: u64,
    pub max_bytes: u64,
}

/// Room for one batch. Dropping it gives the room back.
#[derive(Debug)]
pub struct Reservation<F> {
    bytes: u64,
    slot: Option<OwnedPermit<Return<F>>>,
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
pub struct Loan<F> {
    pub batch: Batch<F>,
    /// Draw `replay`: its place in the order of all draws. Decides to which step it belongs.
    pub order: Option<u64>,
    pub room: Room<F>,
}

/// The bytes that a drafter holds.
#[derive(Debug)]
pub struct Room<F> {
    bytes: u64,
    order: Option<u64>,
    slot: Option<OwnedPermit<Return<F>>>,
}

impl<F> Room<F> {
    /// Moves the batch of this room back into the pool, for another draw.
    pub fn give_back(mut self, batch: Batch<F>) {
        if let Some(slot) = self.slot.take() {
            slot.send(Return::GivenBack(self.entry(batch, true)));
        }
    }

    fn entry(&self, batch: Batch<F>, returned: bool) -> Entry<Batch<F>> {
        let (job, bucket) = (batch.job.id(), batch.job.spec.bucket);
        Entry { job, bucket, bytes: self.bytes, order: self.order, returned, batch }
    }
}

impl<F> Drop for Room<F> {
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
    pub async fn draw(&self) -> Result<oneshot::Receiver<Option<Loan<F>>>, Gone> {
        let (reply, loan) = oneshot::channel();
        self.inbox.send(Msg::Draw { reply }).await.map_err(|_| Gone("pool"))?;
        Ok(loan)
    }

    /// Everything that will come is here: give it all out. `late` reservations may still be held by forwards whose results
    /// nobody wants. `done` is answered when the pool is empty.
    pub async fn drain(&self, last: bool, late: usize, done: Option<oneshot::Sender<()>>) -> Result<(), Gone> {
        self.inbox.send(Msg::Drain { last, late, done }).await.map_err(|_| Gone("pool"))
    }
}

/// What the pool held at most, and typically.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Peaks {
    /// Reserved, waiting and loaned bytes together.
    pub bytes: u64,
    pub batches: usize,
    /// Half of the time from the first batch to the last, no more batches than this were ready.
    pub ready_p50: usize,
    /// The same for 95 % of that time.
    pub ready_p95: usize,
}

enum Told {
    Epoch { epoch: u32, open_of_bucket: Vec<u64>, ended: Arc<[bool]> },
    Skipped(JobId),
}

/// The planner's line to the pool: what is to come, and in return how far the draws have got.
pub struct Course {
    tell: mpsc::Sender<Told>,
    passed: watch::Receiver<u64>,
    window: Option<u64>,
}

impl Course {
    /// The open jobs of this epoch follow: so many of each bucket; `ended[i]` says whether job `i` already has an outcome.
    pub async fn epoch(&self, epoch: u32, open_of_bucket: Vec<u64>, ended: Arc<[bool]>) {
        // A pool that is gone needs nothing any more; whoever ended it is heard of elsewhere.
        let _ = self.tell.send(Told::Epoch { epoch, open_of_bucket, ended }).await;
    }

    /// This job was given up.
    pub async fn skipped(&self, job: JobId) {
        let _ = self.tell.send(Told::Skipped(job)).await;
    }

    /// Whether a job may leave after `handed_out` others did. Draw `replay` lets no more than its window be under way, so
    /// that the job it waits for always finds a target and room.
    pub fn may_leave(&self, handed_out: u64) -> bool {
        self.window.is_none_or(|window| handed_out < *self.passed.borrow() + window)
    }

    /// Waits until `may_leave` may have another answer.
    pub async fn moved(&mut self) {
        if self.passed.changed().await.is_err() {
            std::future::pending().await
        }
    }
}

/// The pool's end of the line.
pub struct CourseInbox {
    told: mpsc::Receiver<Told>,
    passed: watch::Sender<u64>,
}

/// Starts the line from the planner to the pool.
pub fn course(settings: &Settings) -> (Course, CourseInbox) {
    let (tell, told) = mpsc::channel(COURSE);
    let (passed, seen) = watch::channel(0);
    let window = settings.window().map(|window| window as u64);
    (Course { tell, passed: seen, window }, CourseInbox { told, passed })
}

/// Starts the pool's channels. `run` with the second value.
pub fn channel<F>() -> (Handle<F>, Inbox<F>) {
    let (tx, inbox) = mpsc::channel(INBOX);
    let (slots, returns) = mpsc::channel(RETURNS);
    (Handle { inbox: tx }, Inbox { inbox, slots, returns })
}

/// What the pool listens to.
pub struct Inbox<F> {
    inbox: mpsc::Receiver<Msg<F>>,
    slots: mpsc::Sender<Return<F>>,
    returns: mpsc::Receiver<Return<F>>,
}

struct Pool<F> {
    state: State<Batch<F>>,
    slots: mpsc::Sender<Return<F>>,
    reserving: BTreeMap<RequestId, oneshot::Sender<Result<Reservation<F>, TooLarge>>>,
    drawing: BTreeMap<RequestId, oneshot::Sender<Option<Loan<F>>>>,
    drained: Vec<oneshot::Sender<()>>,
    peaks: Peaks,
    depths: Depths,
    series: Series,
}

/// Runs until nobody can ask any more. Changed `settings` are in force at once, for whoever waits, too.
pub async fn run<F: Send + 'static>(
    mut settings: watch::Receiver<Settings>,
    mut inbox: Inbox<F>,
    mut course: CourseInbox,
    stops: Stops,
) -> Result<Peaks, Fault> {
    let first = *settings.borrow_and_update();
    show(&first);
    let mut pool = Pool {
        state: State::new(first),
        slots: inbox.slots,
        reserving: BTreeMap::new(),
        drawing: BTreeMap::new(),
        drained: Vec::new(),
        peaks: Peaks::default(),
        depths: Depths::new(Instant::now()),
        series: Series::new(),
    };
    let mut requests: RequestId = 0;
    let (mut closing, mut stopping) = (false, false);
    let mut meter = Meter::new("pool", 0);
    loop {
        let actions = tokio::select! {
            // What is to come, and returns, come first: room that is free serves the oldest request.
            biased;
            never = meter.rest(cause(pool.state.waiting())) => match never {},
            () = stops.abort.cancelled() => return Err(Fault::aborted("pool")),
            () = stops.stop.cancelled(), if !stopping => {
                stopping = true;
                pool.state.on_stop()
            }
            () = stops.close.cancelled(), if !closing => {
                closing = true;
                pool.state.on_close()
            }
            Some(told) = course.told.recv() => match told {
                Told::Epoch { epoch, open_of_bucket, ended } => pool.state.on_epoch(epoch, &open_of_bucket, ended),
                Told::Skipped(job) => pool.state.on_skipped(job),
            },
            () = changed(&mut settings) => {
                let new = *settings.borrow_and_update();
                show(&new);
                pool.state.reconfigure(new)
            }
            Some(back) = inbox.returns.recv() => pool.on_return(back),
            msg = inbox.inbox.recv() => {
                requests += 1;
                match msg {
                    Some(Msg::Reserve { bytes, reply }) => {
                        pool.reserving.insert(requests, reply);
                        pool.state.on_reserve(requests, bytes)
                    }
                    Some(Msg::Draw { reply }) => {
                        pool.drawing.insert(requests, reply);
                        pool.state.on_draw(requests)
                    }
                    Some(Msg::Drain { last, late, done }) => {
                        pool.drained.extend(done);
                        let mut actions = pool.forget_waiting();
                        // What was moved in before the order to drain was sent is already in this channel.
                        while let Ok(back) = inbox.returns.try_recv() {
                            actions.extend(pool.on_return(back));
                        }
                        actions.extend(pool.state.on_drain(last, late));
                        actions
                    }
                    None => break,
                }
            }
        };
        pool.apply(actions)?;
        pool.observe();
        let passed = pool.state.passed();
        course.passed.send_if_modified(|seen| std::mem::replace(seen, passed) != passed);
    }
    let Pool { peaks, depths, .. } = pool;
    Ok(Peaks { ready_p50: depths.percentile(50), ready_p95: depths.percentile(95), ..peaks })
}

/// What holds now, as metrics.
fn show(settings: &Settings) {
    gauge!(m::POOL_MAX_BYTES).set(settings.max_bytes as f64);
    gauge!(m::POOL_MAX_BATCHES).set(settings.max_batches as f64);
    gauge!(m::POOL_MIN_READY).set(settings.min_ready as f64);
}

impl<F> Pool<F> {
    fn on_return(&mut self, back: Return<F>) -> Vec<Action<Batch<F>>> {
        match back {
            Return::Filled { bytes, batch } => {
                let (job, bucket) = (batch.job.id(), batch.job.spec.bucket);
                self.state.on_filled(job, bucket, bytes, batch)
            }
            Return::Cancelled { bytes } => self.state.on_cancelled(bytes),
            Return::Done { bytes } => self.state.on_done(bytes),
            Return::GivenBack(entry) => self.state.on_given_back(entry),
        }
    }

    /// Nobody waits any more for the room that a target asked for before it ended.
    fn forget_waiting(&mut self) -> Vec<Action<Batch<F>>> {
        let gone: Vec<_> = self.reserving.extract_if(.., |_, reply| reply.is_closed()).map(|(id, _)| id).collect();
        self.state.on_withdrawn(&gone)
    }

    fn apply(&mut self, actions: Vec<Action<Batch<F>>>) -> Result<(), Fault> {
        let mut actions: std::collections::VecDeque<_> = actions.into();
        while let Some(action) = actions.pop_front() {
            match action {
                Action::Grant { request, bytes } => {
                    let reservation = Reservation { bytes, slot: Some(self.slot()?) };
                    // If the target is gone, the reservation comes back as it is dropped.
                    if let Some(reply) = self.reserving.remove(&request) {
                        let _ = reply.send(Ok(reservation));
                    }
                }
                Action::Refuse { request, bytes, max_bytes } => {
                    if let Some(reply) = self.reserving.remove(&request) {
                        let _ = reply.send(Err(TooLarge { bytes, max_bytes }));
                    }
                }
                Action::Give { request, entry } => {
                    let Entry { bucket, bytes, order, returned, batch, .. } = entry;
                    let loan = Loan { batch, order, room: Room { bytes, order, slot: Some(self.slot()?) } };
                    let undelivered = match self.drawing.remove(&request) {
                        Some(reply) => reply.send(Some(loan)).err().flatten(),
                        None => Some(loan),
                    };
                    match undelivered {
                        None => {
                            self.series.bucket(usize::from(bucket)).draws.increment(1);
                            actions.extend(self.state.on_delivered());
                        }
                        Some(Loan { batch, mut room, .. }) => {
                            room.slot = None;
                            actions.extend(self.state.on_undelivered(room.entry(batch, returned)));
                        }
                    }
                }
                Action::NoMore { request } => {
                    if let Some(reply) = self.drawing.remove(&request) {
                        let _ = reply.send(None);
                    }
                }
                Action::Drained => {
                    for done in self.drained.drain(..) {
                        let _ = done.send(());
                    }
                }
            }
        }
        Ok(())
    }

    fn slot(&self) -> Result<OwnedPermit<Return<F>>, Fault> {
        self.slots.clone().try_reserve_owned().map_err(|_| {
            Fault::new(
                "pool",
                format!("more than {RETURNS} batches are under way; lower pool.max_batches or drafter.prefetch"),
            )
        })
    }

    fn observe(&mut self) {
        let held = self.state.held();
        self.series.batches.set(held.ready_batches as f64);
        self.series.reserved_batches.set(held.reserved_batches as f64);
        self.series.loaned_batches.set((held.loaned_batches + held.leaving_batches) as f64);
        self.series.bytes.set(held.ready_bytes as f64);
        self.series.reserved_bytes.set(held.reserved_bytes as f64);
        self.series.loaned_bytes.set(held.loaned_bytes as f64);
        self.series.draining.set(f64::from(u8::from(self.state.is_draining())));
        for (bucket, depth) in self.state.depths().enumerate() {
            self.series.bucket(bucket).batches.set(depth as f64);
        }
        self.peaks.bytes = self.peaks.bytes.max(held.bytes());
        self.peaks.batches = self.peaks.batches.max(held.batches());
        self.depths.observe(Instant::now(), held.ready_batches);
    }
}
