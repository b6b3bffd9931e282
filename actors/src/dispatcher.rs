//! The dispatcher is the central queue: it pads a few jobs ahead on CPU threads and hands the next one to whichever target asks.
//!
//! In: jobs in plan order, pulls, and leases that end. Out: leases; at the end of an epoch or plan, the order to the pool to
//! drain. It takes no new job while its queue is full. A failed job returns to the head of the queue, goes rather to another
//! target, and is given up after `max_attempts`. A straggler's job may be offered to a second target: the job itself stays
//! here until the first result claims it. At a stop it drops what it holds (the jobs stay open) and answers every pull
//! with "no more"; at a close it does the same, but waits for the forwards in hand before the pool drains. Invariants: D1, D2, L3. The decisions are in `State`; `dispatcher_state.rs` has them.

use crate::{
    ask::{changed, until},
    dispatcher_state::{Action, State},
    fault::{Fault, Gone, Stops},
    job::Job,
    meter::{Cause, Meter},
    metrics as m, pool,
    types::{BatchSource, JobId, PaddedBatch},
};
use metrics::gauge;
use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};
use tokio::{
    sync::{
        mpsc::{self, OwnedPermit},
        oneshot, watch,
    },
    task::JoinSet,
    time::Instant,
};

/// Messages wait here: at most one of each target.
const INBOX: usize = 64;
/// One slot for each lease; there are as many as targets.
const LEASES: usize = 1024;

/// What shapes the dispatcher's work.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Jobs that may wait in the queue.
    pub queue_jobs: usize,
    /// Jobs that are padded before a target asks.
    pub pad_ahead: usize,
    /// Tries of a job before it is skipped.
    pub max_attempts: u32,
    /// A forward that takes this many times longer than its like is a straggler and is reported; 0 never.
    pub straggler_factor: f64,
    /// Offer a straggler's job to another target; the first result counts.
    pub offer_stragglers: bool,
    pub policy: Policy,
    /// Hand out nothing for now; what is under way goes on.
    pub paused: bool,
    /// Targets that get nothing for now.
    pub paused_targets: Vec<usize>,
}

/// Who gets the next job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// Whichever target asks.
    #[default]
    Pull,
    /// Target `i` of `targets` gets every `targets`-th job, through a queue of `depth` of its own. Only for comparison: the
    /// next job waits for its own target while others idle.
    RoundRobin { targets: usize, depth: usize },
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
enum Msg {
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
    id: LeaseId,
    job: JobId,
    batch: Arc<PaddedBatch>,
    slot: Option<OwnedPermit<Return>>,
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

// === the loop ===

/// Starts the dispatcher's channels. `run` with the second value.
pub fn channel() -> (Handle, Inbox) {
    let (tx, inbox) = mpsc::channel(INBOX);
    let (leases, returns) = mpsc::channel(LEASES);
    (Handle { inbox: tx }, Inbox { inbox, leases, returns })
}

/// What the dispatcher listens to.
pub struct Inbox {
    inbox: mpsc::Receiver<Msg>,
    leases: mpsc::Sender<Return>,
    returns: mpsc::Receiver<Return>,
}

struct Dispatcher<B, F> {
    state: State,
    source: Arc<B>,
    pool: pool::Handle<F>,
    leases: mpsc::Sender<Return>,
    replies: BTreeMap<PullId, oneshot::Sender<Option<Lease>>>,
    padding: JoinSet<(JobId, Result<PaddedBatch, String>)>,
    barrier: Option<oneshot::Sender<()>>,
}

/// Runs until the plan has ended or was stopped, and every target is gone. Changed `settings` are in force at once.
pub async fn run<B: BatchSource, F: Send + 'static>(
    mut settings: watch::Receiver<Settings>,
    source: Arc<B>,
    mut inbox: Inbox,
    mut feed: mpsc::Receiver<Feed>,
    pool: pool::Handle<F>,
    stops: Stops,
) -> Result<(), Fault> {
    let mut d = Dispatcher {
        state: State::new(settings.borrow_and_update().clone()),
        source,
        pool,
        leases: inbox.leases,
        replies: BTreeMap::new(),
        padding: JoinSet::new(),
        barrier: None,
    };
    let (mut feeding, mut closing, mut stopping) = (true, false, false);
    let mut pulls: PullId = 0;
    let mut meter = Meter::new("dispatcher", 0);
    loop {
        let (queued, padded) = d.state.depth();
        gauge!(m::QUEUE_JOBS).set(queued as f64);
        gauge!(m::QUEUE_PADDED_JOBS).set(padded as f64);
        let actions = tokio::select! {
            // Returns come first: a job that comes back goes before a new one.
            biased;
            never = meter.rest(cause(d.state.pulls(), queued, padded)) => match never {},
            () = stops.abort.cancelled() => return Err(Fault::aborted("dispatcher")),
            () = stops.stop.cancelled(), if !stopping => {
                (stopping, feeding) = (true, false);
                feed = no_feed();
                d.state.on_stop()
            }
            () = stops.close.cancelled(), if !closing => {
                (closing, feeding) = (true, false);
                feed = no_feed();
                d.state.on_close()
            }
            () = changed(&mut settings) => d.state.reconfigure(settings.borrow_and_update().clone()),
            Some(back) = inbox.returns.recv() => d.state.on_return(back),
            Some(done) = d.padding.join_next(), if B::BLOCKING => match done {
                Ok((job, result)) => d.state.on_padded(job, result),
                Err(e) => return Err(Fault::new("dispatcher", format!("padding a job panicked: {e}"))),
            },
            msg = inbox.inbox.recv() => match msg {
                Some(Msg::Pull { target, reply }) => {
                    pulls += 1;
                    d.replies.insert(pulls, reply);
                    d.state.on_pull(pulls, target)
                }
                Some(Msg::Started { lease }) => {
                    d.state.on_started(lease, Instant::now());
                    Vec::new()
                }
                Some(Msg::Claim { lease, reply }) => {
                    // A target that is gone by now drops its lease as well: the job is then unfinished.
                    let _ = reply.send(d.state.on_claim(lease, Instant::now()));
                    Vec::new()
                }
                None => break,
            },
            () = until(d.state.next_due()) => d.state.on_time(Instant::now()),
            item = feed.recv(), if feeding && d.state.has_room() => match item {
                Some(Feed::Job(job)) => d.state.on_job(job),
                Some(Feed::Barrier(reply)) => {
                    d.barrier = Some(reply);
                    d.state.on_barrier()
                }
                None => {
                    feeding = false;
                    d.state.on_end()
                }
            },
        };
        d.apply(actions).await?;
    }
    Ok(())
}

/// In the place of a feed whose jobs are wanted no longer: they go with it, so that the planner hears of them at once.
fn no_feed() -> mpsc::Receiver<Feed> {
    mpsc::channel(1).1
}

/// What everything waits for, with so many pulls that wait, jobs that are queued, and jobs of these that are padded.
fn cause(pulls: usize, queued: usize, padded: usize) -> Cause {
    match (pulls, queued, padded) {
        (0, _, 0) => Cause::Idle,
        (_, 0, _) => Cause::Job,
        (0, ..) => Cause::Target,
        (_, _, 0) => Cause::Padding,
        // Both wait: for a target that is not paused, or whose turn it is.
        _ => Cause::Target,
    }
}

impl<B: BatchSource, F: Send + 'static> Dispatcher<B, F> {
    async fn apply(&mut self, actions: Vec<Action>) -> Result<(), Fault> {
        let mut actions: VecDeque<Action> = actions.into();
        while let Some(action) = actions.pop_front() {
            match action {
                Action::Pad(spec) if !B::BLOCKING => {
                    let padded = self.source.pad(&spec);
                    actions.extend(self.state.on_padded(spec.id, padded));
                }
                Action::Pad(spec) => {
                    let source = self.source.clone();
                    self.padding.spawn_blocking(move || (spec.id, source.pad(&spec)));
                }
                Action::Lease { pull, lease: id, job, batch } => {
                    let slot = self.leases.clone().try_reserve_owned().map_err(|_| {
                        Fault::new("dispatcher", format!("more than {LEASES} leases are out; run fewer targets"))
                    })?;
                    let lease = Lease { id, job, batch, slot: Some(slot) };
                    let undelivered = match self.replies.remove(&pull) {
                        Some(reply) => reply.send(Some(lease)).err().flatten(),
                        None => Some(lease),
                    };
                    if let Some(mut lease) = undelivered {
                        lease.slot = None;
                        actions.extend(self.state.on_return(Return::Unused { lease: id }));
                    }
                }
                Action::NoMore { pull } => {
                    if let Some(reply) = self.replies.remove(&pull) {
                        // A target that is gone needs no answer.
                        let _ = reply.send(None);
                    }
                }
                Action::Drain { last, late } => {
                    let done = self.barrier.take();
                    self.pool.drain(last, late, done).await.map_err(|gone| Fault::gone("dispatcher", gone))?;
                }
            }
        }
        Ok(())
    }
}
