//! Dispatcher actor: the central queue. It pads a few jobs ahead on CPU threads and gives the next one to the target
//! that pulls.
//!
//! In: jobs in plan order, pulls, and ended leases. Out: leases; at the end of an epoch or plan, a drain request to the
//! pool.
//!
//! The dispatcher takes no new job while its queue is full. A failed job returns to the head of the queue, prefers
//! another target, and is skipped after `max_attempts`. A straggler's job may be offered to a second target; the job
//! itself stays here until the first result claims it. On `Shutdown::stop` the dispatcher drops its jobs, which stay
//! open, and answers every pull with "no more". On `Shutdown::drain` it does the same, but waits for running forwards
//! before the pool drains.
//!
//! Invariants: D1, D2, L3.

use super::messages::{Feed, Inbox, LEASES, Lease, Msg, PullId, Return, Settings};
use super::state::{Action, State};
use crate::{
    messages::types::{BatchSource, JobId, PaddedBatch},
    pool,
    runtime::{
        causes::Cause,
        fault::{Fault, Shutdown},
        meter::Meter,
        metrics as m,
        util::{changed, until},
    },
};
use metrics::gauge;
use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};
use tokio::{
    sync::{
        mpsc::{self},
        oneshot, watch,
    },
    task::JoinSet,
    time::Instant,
};

struct Dispatcher<B, F> {
    state: State,
    source: Arc<B>,
    pool: pool::Handle<F>,
    leases: mpsc::Sender<Return>,
    replies: BTreeMap<PullId, oneshot::Sender<Option<Lease>>>,
    padding: JoinSet<(JobId, Result<PaddedBatch, String>)>,
    barrier: Option<oneshot::Sender<()>>,
}

/// Runs until the plan has ended or was stopped, and every target is gone. Changed `settings` apply at once.
///
/// # Errors
///
/// Fails if padding panics, if the pool is gone, if there are more leases than slots, or if the run is aborted.
pub async fn run<B: BatchSource, F: Send + 'static>(
    mut settings: watch::Receiver<Settings>,
    source: Arc<B>,
    mut inbox: Inbox,
    mut feed: mpsc::Receiver<Feed>,
    pool: pool::Handle<F>,
    shutdown: Shutdown,
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
            // Returns come first: a returned job precedes a new one.
            biased;
            never = meter.rest(cause(d.state.pulls(), queued, padded)) => match never {},
            () = shutdown.abort.cancelled() => return Err(Fault::aborted("dispatcher")),
            () = shutdown.stop.cancelled(), if !stopping => {
                (stopping, feeding) = (true, false);
                feed = no_feed();
                d.state.on_stop()
            }
            () = shutdown.drain.cancelled(), if !closing => {
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
                    // A target that is gone drops its lease as well: the job then stays open.
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

/// Returns an empty feed to replace one whose jobs are not needed: they are dropped with it, which informs the planner
/// at once.
fn no_feed() -> mpsc::Receiver<Feed> {
    mpsc::channel(1).1
}

/// Returns the cause of the dispatcher's wait, from the waiting pulls, the queued jobs, and the padded ones among
/// these.
fn cause(pulls: usize, queued: usize, padded: usize) -> Cause {
    match (pulls, queued, padded) {
        (0, _, 0) => Cause::Idle,
        (_, 0, _) => Cause::Job,
        (0, ..) => Cause::Target,
        (_, _, 0) => Cause::Padding,
        // Pulls and padded jobs: the pulling targets are paused.
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
                        Fault::new("dispatcher", format!("more than {LEASES} leases are active; run fewer targets"))
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
