//! The dispatcher is the central queue: it pads a few jobs ahead on CPU threads and hands the next one to whichever target asks.
//!
//! In: jobs in plan order, pulls, and leases that end. Out: leases; at the end of an epoch or plan, the order to the pool to
//! drain. It takes no new job while its queue is full. A failed job returns to the head of the queue and is given up
//! after `max_attempts`. At a stop it drops what it holds (the jobs stay open) and answers every pull with "no more".
//! Invariants: D1, D2, L3.

use crate::{
    fault::{Fault, Gone, Stops},
    invariant,
    job::Job,
    metrics as m, pool,
    types::{BatchSource, JobId, JobSpec, PaddedBatch},
};
use metrics::{counter, gauge};
use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
};
use tokio::{
    sync::{
        mpsc::{self, OwnedPermit},
        oneshot,
    },
    task::JoinSet,
};

/// Pulls wait here: one of each target.
const INBOX: usize = 64;
/// One slot for each lease; there are as many as targets.
const LEASES: usize = 1024;

/// What shapes the dispatcher's work.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Jobs that may wait in the queue.
    pub queue_jobs: usize,
    /// Jobs that are padded before a target asks.
    pub pad_ahead: usize,
    /// Tries of a job before it is skipped.
    pub max_attempts: u32,
    pub policy: Policy,
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

/// What targets ask.
pub enum Msg {
    Pull { target: usize, reply: oneshot::Sender<Option<Lease>> },
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
    Done { job: JobId },
    /// The job comes back to be tried again.
    Failed { job: Job, batch: Arc<PaddedBatch>, failure: Failure, message: String },
}

/// A job in the hands of one target. Dropping it gives the job back.
#[derive(Debug)]
pub struct Lease {
    job: Option<Job>,
    batch: Arc<PaddedBatch>,
    slot: Option<OwnedPermit<Return>>,
}

impl Lease {
    pub fn batch(&self) -> &Arc<PaddedBatch> {
        &self.batch
    }

    pub fn spec(&self) -> Option<&JobSpec> {
        self.job.as_ref().map(|job| &job.spec)
    }

    /// Moves the job into the pool, then ends the lease: the pool has it before the dispatcher hears of it (L3).
    pub fn deliver<F>(mut self, reservation: pool::Reservation<F>, features: F) {
        let Some(job) = self.job.take() else { return };
        let id = job.id();
        reservation.fill(job, features);
        if let Some(slot) = self.slot.take() {
            slot.send(Return::Done { job: id });
        }
    }

    /// Gives the job back because it failed.
    pub fn fail(mut self, failure: Failure, message: String) {
        self.give_back(failure, message);
    }

    fn give_back(&mut self, failure: Failure, message: String) {
        if let (Some(job), Some(slot)) = (self.job.take(), self.slot.take()) {
            slot.send(Return::Failed { job, batch: self.batch.clone(), failure, message });
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.give_back(Failure::Gone, "the target went away while it held the job".into());
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
        self.inbox.send(Msg::Pull { target, reply }).await.map_err(|_| Gone("dispatcher"))?;
        lease.await.map_err(|_| Gone("dispatcher"))
    }
}

/// Names a waiting pull.
pub type PullId = u64;

/// What the loop must do.
#[derive(Debug)]
pub enum Action {
    Pad(JobSpec),
    Lease {
        pull: PullId,
        job: Job,
        batch: Arc<PaddedBatch>,
    },
    NoMore {
        pull: PullId,
    },
    /// Everything up to here is in the pool: drain it.
    Drain {
        last: bool,
    },
}

#[derive(Debug)]
enum Padding {
    Wanted,
    Running,
    Ready(Arc<PaddedBatch>),
}

#[derive(Debug)]
struct Entry {
    job: Job,
    padding: Padding,
    /// The one target that may have it; any, where there is none.
    only: Option<usize>,
}

#[derive(Clone, Copy, Debug)]
struct Pull {
    id: PullId,
    target: usize,
}

/// Every decision of the dispatcher, without waiting for anything.
#[derive(Debug)]
pub struct State {
    settings: Settings,
    queue: VecDeque<Entry>,
    pulls: VecDeque<Pull>,
    leased: BTreeSet<JobId>,
    /// Jobs that came from the planner so far.
    arrived: u64,
    barrier: bool,
    ended: bool,
    stopped: bool,
    drained: bool,
}

impl State {
    pub fn new(settings: Settings) -> Self {
        Self {
            settings,
            queue: VecDeque::new(),
            pulls: VecDeque::new(),
            leased: BTreeSet::new(),
            arrived: 0,
            barrier: false,
            ended: false,
            stopped: false,
            drained: false,
        }
    }

    /// Whether another job may come in.
    pub fn has_room(&self) -> bool {
        let room = match self.settings.policy {
            Policy::Pull => self.queue.len() < self.settings.queue_jobs,
            Policy::RoundRobin { depth, .. } => {
                let turn = self.turn();
                self.queue.iter().filter(|e| e.only == turn).count() < depth
            }
        };
        room && !self.barrier && !self.stopped
    }

    pub fn on_job(&mut self, job: Job) -> Vec<Action> {
        self.drained = false;
        let only = self.turn();
        self.arrived += 1;
        self.queue.push_back(Entry { job, padding: Padding::Wanted, only });
        self.decide()
    }

    /// Whose turn the next job is.
    fn turn(&self) -> Option<usize> {
        match self.settings.policy {
            Policy::Pull => None,
            Policy::RoundRobin { targets, .. } => Some((self.arrived % targets as u64) as usize),
        }
    }

    pub fn on_barrier(&mut self) -> Vec<Action> {
        self.barrier = true;
        // Two barriers may follow each other without a job between them: each wants its answer.
        self.drained = false;
        self.decide()
    }

    /// The plan has ended: no job will come any more.
    pub fn on_end(&mut self) -> Vec<Action> {
        self.ended = true;
        self.drained = false;
        self.decide()
    }

    pub fn on_pull(&mut self, id: PullId, target: usize) -> Vec<Action> {
        self.pulls.push_back(Pull { id, target });
        self.decide()
    }

    pub fn on_padded(&mut self, job: JobId, result: Result<PaddedBatch, String>) -> Vec<Action> {
        if let Some(at) = self.queue.iter().position(|e| e.job.id() == job) {
            match result {
                Ok(batch) => self.queue[at].padding = Padding::Ready(Arc::new(batch)),
                Err(message) => {
                    if let Some(mut entry) = self.queue.remove(at) {
                        entry.padding = Padding::Wanted;
                        self.retry(entry, Failure::Failed, message);
                    }
                }
            }
        }
        self.decide()
    }

    pub fn on_return(&mut self, back: Return) -> Vec<Action> {
        let id = match &back {
            Return::Done { job } => *job,
            Return::Failed { job, .. } => job.id(),
        };
        invariant!("D1", self.leased.remove(&id), "job {id} came back, but nobody had it");
        if let Return::Failed { job, batch, failure, message } = back
            && !self.stopped
        {
            self.retry(Entry { job, padding: Padding::Ready(batch), only: None }, failure, message);
        }
        self.decide()
    }

    /// The lease did not reach its target: as if it had never been given.
    pub fn on_undelivered(&mut self, job: Job, batch: Arc<PaddedBatch>) -> Vec<Action> {
        self.leased.remove(&job.id());
        self.queue.push_front(Entry { job, padding: Padding::Ready(batch), only: None });
        self.decide()
    }

    /// Hands out nothing more. What waits is dropped; its jobs stay open.
    pub fn on_stop(&mut self) -> Vec<Action> {
        self.stopped = true;
        self.queue.clear();
        self.decide()
    }

    /// Jobs that wait, and how many of them are padded.
    pub fn depth(&self) -> (usize, usize) {
        (self.queue.len(), self.queue.iter().filter(|e| matches!(e.padding, Padding::Ready(_))).count())
    }

    fn retry(&mut self, mut entry: Entry, failure: Failure, message: String) {
        counter!(m::JOBS_RETURNED, "cause" => failure.as_str()).increment(1);
        entry.job.attempts += 1;
        let attempts = entry.job.attempts;
        tracing::warn!(job = %entry.job.id(), attempts, message, "job failed");
        if attempts >= self.settings.max_attempts {
            entry.job.receipt.skip(message, attempts);
        } else {
            self.queue.push_front(entry);
        }
    }

    fn decide(&mut self) -> Vec<Action> {
        let mut actions = Vec::new();
        self.lease(&mut actions);
        self.pad(&mut actions);
        invariant!(
            "D2",
            self.settings.policy != Policy::Pull || self.pulls.is_empty() || self.depth().1 == 0,
            "{} targets wait while padded jobs are ready",
            self.pulls.len()
        );
        let idle = self.queue.is_empty() && self.leased.is_empty();
        let finished = self.ended || self.stopped;
        if idle && !self.drained && (finished || std::mem::take(&mut self.barrier)) {
            self.drained = true;
            actions.push(Action::Drain { last: finished });
        }
        if self.stopped || (finished && idle) {
            actions.extend(self.pulls.drain(..).map(|pull| Action::NoMore { pull: pull.id }));
        }
        actions
    }

    fn lease(&mut self, actions: &mut Vec<Action>) {
        while let Some((pull, at)) = self.next_pair() {
            let Some(Entry { job, padding: Padding::Ready(batch), .. }) = self.queue.remove(at) else { break };
            let Some(pull) = self.pulls.remove(pull) else { break };
            invariant!("D1", self.leased.insert(job.id()), "job {} is leased twice", job.id());
            actions.push(Action::Lease { pull: pull.id, job, batch });
        }
    }

    /// The places of a waiting pull and of the padded job that it gets.
    fn next_pair(&self) -> Option<(usize, usize)> {
        let may = |entry: &Entry, pull: &Pull| {
            matches!(entry.padding, Padding::Ready(_)) && entry.only.is_none_or(|only| only == pull.target)
        };
        let job_for = |pull: &Pull| self.queue.iter().position(|entry| may(entry, pull));
        self.pulls.iter().enumerate().find_map(|(i, pull)| Some((i, job_for(pull)?)))
    }

    fn pad(&mut self, actions: &mut Vec<Action>) {
        let under_way = self.queue.iter().filter(|e| !matches!(e.padding, Padding::Wanted)).count();
        let wanted = (self.settings.pad_ahead + self.pulls.len()).saturating_sub(under_way);
        let waiting = self.queue.iter_mut().filter(|e| matches!(e.padding, Padding::Wanted)).take(wanted);
        for entry in waiting {
            entry.padding = Padding::Running;
            actions.push(Action::Pad(entry.job.spec.clone()));
        }
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

/// Runs until the plan has ended or was stopped, and every target is gone.
pub async fn run<B: BatchSource, F: Send + 'static>(
    settings: Settings,
    source: Arc<B>,
    mut inbox: Inbox,
    mut feed: mpsc::Receiver<Feed>,
    pool: pool::Handle<F>,
    stops: Stops,
) -> Result<(), Fault> {
    let mut d = Dispatcher {
        state: State::new(settings),
        source,
        pool,
        leases: inbox.leases,
        replies: BTreeMap::new(),
        padding: JoinSet::new(),
        barrier: None,
    };
    let (mut feeding, mut stopping) = (true, false);
    let mut pulls: PullId = 0;
    loop {
        let (queued, padded) = d.state.depth();
        gauge!(m::QUEUE_JOBS).set(queued as f64);
        gauge!(m::QUEUE_PADDED_JOBS).set(padded as f64);
        let actions = tokio::select! {
            // Returns come first: a job that comes back goes before a new one.
            biased;
            () = stops.abort.cancelled() => return Err(Fault::aborted("dispatcher")),
            () = stops.stop.cancelled(), if !stopping => {
                (stopping, feeding) = (true, false);
                feed.close();
                d.state.on_stop()
            }
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
                None => break,
            },
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
                Action::Lease { pull, job, batch } => {
                    let slot = self.leases.clone().try_reserve_owned().map_err(|_| {
                        Fault::new("dispatcher", format!("more than {LEASES} leases are out; run fewer targets"))
                    })?;
                    let lease = Lease { job: Some(job), batch, slot: Some(slot) };
                    let undelivered = match self.replies.remove(&pull) {
                        Some(reply) => reply.send(Some(lease)).err().flatten(),
                        None => Some(lease),
                    };
                    if let Some(mut lease) = undelivered
                        && let Some(job) = lease.job.take()
                    {
                        actions.extend(self.state.on_undelivered(job, lease.batch.clone()));
                    }
                }
                Action::NoMore { pull } => {
                    if let Some(reply) = self.replies.remove(&pull) {
                        // A target that is gone needs no answer.
                        let _ = reply.send(None);
                    }
                }
                Action::Drain { last } => {
                    let done = self.barrier.take();
                    self.pool.drain(last, done).await.map_err(|gone| Fault::gone("dispatcher", gone))?;
                }
            }
        }
        Ok(())
    }
}
