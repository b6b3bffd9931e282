//! The planner owns the plan and the ledger: it writes each epoch's plan, streams its jobs, and records what became of each.
//!
//! In: outcomes (from the trainer as one message a step, from everyone else through receipts). Out: jobs, in plan order.
//! When the dispatcher's queue is full it waits; outcomes are still recorded. At a stop it hands out no further job and
//! ends when every receipt has come home. Invariants: P1, P2, D1.

use crate::{
    ask::{answer, off_thread},
    dispatcher::Feed,
    fault::{Fault, Gone, Stops},
    invariant,
    job::{Job, Receipt, Settled},
    journal::journal,
    ledger::Ledger,
    metrics as m,
    plan::{Plan, PlanError, PlanSettings, plan_epoch},
    pool::Course,
    types::{JobId, JobSpec, Outcome},
};
use metrics::{counter, gauge};
use std::{collections::VecDeque, sync::Arc};
use tokio::sync::{
    mpsc::{self, OwnedPermit},
    oneshot,
};

/// Requests wait here: the trainer's, one a step.
const INBOX: usize = 16;
/// One slot for each job between planner and outcome. What really bounds these is the queue and the pool.
pub const IN_FLIGHT: usize = 1 << 16;
/// Outcomes that are recorded in one transaction at most.
const RECORD_AT_ONCE: usize = 4096;

/// What shapes the planner's work.
#[derive(Clone, Debug)]
pub struct Settings {
    pub plan: PlanSettings,
    /// Tokens of each sample; the index is the sample's id.
    pub lengths: Arc<[u32]>,
    /// Epochs to train; the first is 0.
    pub epochs: u32,
    /// Wait between epochs until the pool is empty.
    pub epoch_barrier: bool,
    /// Skipped jobs above this share of an epoch stop the run.
    pub max_skip_fraction: f64,
}

/// What the planner is asked to do.
pub enum Msg {
    /// These jobs are part of the update of `step`.
    Trained { step: u64, receipts: Vec<Receipt> },
    /// A checkpoint of `step` lies complete under `name`; answered when the ledger has it.
    Checkpoint { step: u64, name: String, reply: oneshot::Sender<()> },
}

/// Speaks to the planner.
#[derive(Clone)]
pub struct Handle {
    inbox: mpsc::Sender<Msg>,
}

impl Handle {
    /// Reports that the jobs of these receipts were trained by `step` (the first step is 1).
    pub async fn trained(&self, step: u64, receipts: Vec<Receipt>) -> Result<(), Gone> {
        self.inbox.send(Msg::Trained { step, receipts }).await.map_err(|_| Gone("planner"))
    }

    /// Makes a checkpoint exist in the ledger, after the outcomes that were reported before it.
    pub async fn checkpoint(&self, step: u64, name: String) -> Result<(), Gone> {
        let (reply, done) = oneshot::channel();
        self.inbox.send(Msg::Checkpoint { step, name, reply }).await.map_err(|_| Gone("planner"))?;
        done.await.map_err(|_| Gone("planner"))
    }
}

/// What the planner did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Jobs that this run handed out.
    pub planned: u64,
    pub trained: u64,
    pub skipped: u64,
    /// Jobs that came back without an outcome; they stay open.
    pub unfinished: u64,
    pub real_tokens: u64,
    pub padded_tokens: u64,
    /// Every job of every epoch was handed out; false where a stop came first.
    pub plan_ended: bool,
}

/// What to do next, decided by `State`.
#[derive(Debug, PartialEq)]
pub enum Next {
    /// Plan this epoch and give the plan to `State::begin`.
    Plan(u32),
    /// Hand this job out.
    Job(JobSpec),
    /// Wait until everything that was handed out has left the pool.
    Barrier,
    /// Nothing is left to hand out.
    Ended,
}

/// Every decision of the planner, without waiting for anything.
#[derive(Debug)]
pub struct State {
    epochs: u32,
    barrier: bool,
    max_skip_fraction: f64,
    epoch: u32,
    open: Option<VecDeque<JobSpec>>,
    barrier_due: bool,
    jobs_in_epoch: u64,
    skipped_in_epoch: u64,
    stopped: bool,
    counts: Counts,
}

impl State {
    pub fn new(epochs: u32, barrier: bool, max_skip_fraction: f64) -> Self {
        Self {
            epochs,
            barrier,
            max_skip_fraction,
            epoch: 0,
            open: None,
            barrier_due: false,
            jobs_in_epoch: 0,
            skipped_in_epoch: 0,
            stopped: false,
            counts: Counts::default(),
        }
    }

    /// What comes next; a job is taken out by this call.
    pub fn take_next(&mut self) -> Next {
        if self.stopped || self.epoch >= self.epochs {
            self.counts.plan_ended = !self.stopped;
            return Next::Ended;
        }
        let Some(open) = &mut self.open else {
            if std::mem::take(&mut self.barrier_due) {
                return Next::Barrier;
            }
            return Next::Plan(self.epoch);
        };
        match open.pop_front() {
            Some(job) => Next::Job(job),
            None => {
                self.open = None;
                self.epoch += 1;
                self.barrier_due = self.barrier;
                self.take_next()
            }
        }
    }

    /// Starts the epoch that `Next::Plan` named. `ended[i]` says whether job `i` already has an outcome.
    pub fn begin(&mut self, plan: Plan, ended: &[bool]) {
        self.jobs_in_epoch = plan.jobs.len() as u64;
        self.skipped_in_epoch = 0;
        let jobs = plan.jobs.into_iter().zip(ended).filter(|(_, ended)| !**ended).map(|(job, _)| job);
        self.open = Some(jobs.collect());
    }

    /// Counts a job that leaves.
    pub fn on_handed_out(&mut self, job: &JobSpec) {
        self.counts.planned += 1;
        self.counts.real_tokens += u64::from(job.tokens);
        self.counts.padded_tokens += job.padded_tokens();
    }

    /// Counts what became of a job. `Err` when too many were skipped.
    pub fn on_outcome(&mut self, job: JobId, outcome: &Outcome) -> Result<(), String> {
        let Outcome::Skipped { reason, .. } = outcome else {
            self.counts.trained += 1;
            return Ok(());
        };
        self.counts.skipped += 1;
        self.skipped_in_epoch += 1;
        let share = self.skipped_in_epoch as f64 / self.jobs_in_epoch.max(1) as f64;
        if share <= self.max_skip_fraction {
            return Ok(());
        }
        Err(format!(
            "{} of the {} jobs of epoch {} were skipped, more than dispatch.max_skip_fraction = {} allows; the last one, {job}: {reason}",
            self.skipped_in_epoch, self.jobs_in_epoch, job.epoch, self.max_skip_fraction
        ))
    }

    pub fn on_unfinished(&mut self) {
        self.counts.unfinished += 1;
    }

    /// Hands out nothing more.
    pub fn stop(&mut self) {
        self.stopped = true;
    }

    pub fn counts(&self) -> &Counts {
        &self.counts
    }
}

// === the loop ===

/// What waits for room in the dispatcher's queue.
enum Outgoing {
    Job(JobSpec),
    Barrier,
}

/// Starts the planner's channels. `run` with the second value.
pub fn channel() -> (Handle, Inbox) {
    let (tx, inbox) = mpsc::channel(INBOX);
    let (receipts, returns) = mpsc::channel(IN_FLIGHT);
    (Handle { inbox: tx }, Inbox { inbox, receipts: Some(receipts), returns })
}

/// What the planner listens to.
pub struct Inbox {
    inbox: mpsc::Receiver<Msg>,
    receipts: Option<mpsc::Sender<Settled>>,
    returns: mpsc::Receiver<Settled>,
}

struct Planner<L> {
    settings: Settings,
    state: State,
    /// Away while a blocking thread uses it.
    ledger: Option<L>,
    course: Course,
}

/// Runs until every job has ended, or a stop brought every receipt home. Returns the counts and the ledger.
///
/// `course` tells the pool what is to come, and says how far ahead of the draws jobs may leave.
pub async fn run<L: Ledger>(
    settings: Settings,
    ledger: L,
    mut inbox: Inbox,
    feed: mpsc::Sender<Feed>,
    course: Course,
    stops: Stops,
) -> Result<(Counts, L), Fault> {
    let state = State::new(settings.epochs, settings.epoch_barrier, settings.max_skip_fraction);
    let mut planner = Planner { settings, state, ledger: Some(ledger), course };
    let mut feed = Some(feed);
    let mut next: Option<Outgoing> = None;
    let mut barrier: Option<oneshot::Receiver<()>> = None;
    let (mut asked, mut settled) = (Vec::new(), Vec::new());
    let (mut asking, mut returning) = (true, true);

    // Until every receipt is home and the trainer, which may still ask for a checkpoint, is gone.
    while asking || returning {
        if next.is_none() && barrier.is_none() && feed.is_some() {
            match planner.state.take_next() {
                Next::Plan(epoch) => {
                    planner.begin(epoch).await?;
                    continue;
                }
                Next::Job(job) => next = Some(Outgoing::Job(job)),
                Next::Barrier => next = Some(Outgoing::Barrier),
                // Dropping the feed tells the dispatcher that the plan has ended; dropping the last sender of
                // receipts lets `returns` end when every receipt has come home.
                Next::Ended => (feed, inbox.receipts) = (None, None),
            }
        }
        // What waits to leave, and for a job the slot of its receipt. Waiting for the dispatcher never keeps the planner
        // from recording: the trainer may be what the dispatcher's queue waits for.
        let early = matches!(next, Some(Outgoing::Job(_))) && !planner.course.may_leave(planner.state.counts().planned);
        let slot = match (&inbox.receipts, &next) {
            (Some(receipts), Some(Outgoing::Job(_))) if !early => receipts.clone().try_reserve_owned().ok(),
            _ => None,
        };
        let may_leave = slot.is_some() || matches!(next, Some(Outgoing::Barrier));
        tokio::select! {
            biased;
            () = stops.abort.cancelled() => return Err(Fault::aborted("planner")),
            () = stops.stop.cancelled(), if feed.is_some() => {
                planner.state.stop();
                (feed, inbox.receipts, next, barrier) = (None, None, None, None);
            }
            n = inbox.inbox.recv_many(&mut asked, RECORD_AT_ONCE), if asking => {
                asking = n > 0;
                // What was given up before a checkpoint was asked for is recorded before it.
                while let Ok(back) = inbox.returns.try_recv() {
                    settled.push(back);
                }
                planner.on_settled(&mut settled).await?;
                planner.on_asked(&mut asked).await?;
            }
            n = inbox.returns.recv_many(&mut settled, RECORD_AT_ONCE), if returning => {
                returning = n > 0;
                planner.on_settled(&mut settled).await?;
            }
            () = planner.course.moved(), if early => {}
            permit = reserve(feed.clone()), if may_leave => {
                let permit = permit.ok_or_else(|| gone("dispatcher"))?;
                match (next.take(), slot) {
                    (Some(Outgoing::Job(spec)), Some(slot)) => {
                        planner.state.on_handed_out(&spec);
                        journal!("handed_out", job = %spec.id);
                        let receipt = Receipt::new(spec.id, slot);
                        permit.send(Feed::Job(Job { spec, attempts: 0, receipt }));
                    }
                    (Some(Outgoing::Barrier), _) => {
                        let (reply, drained) = oneshot::channel();
                        permit.send(Feed::Barrier(reply));
                        barrier = Some(drained);
                    }
                    // Excluded by `may_leave`.
                    (other, _) => next = other,
                }
            }
            drained = answer(&mut barrier), if barrier.is_some() => {
                drained.map_err(|_| gone("dispatcher"))?;
                barrier = None;
            }
        }
    }
    let counts = planner.state.counts().clone();
    let ledger = planner.ledger.ok_or_else(|| fault("the ledger was lost"))?;
    Ok((counts, ledger))
}

impl<L: Ledger> Planner<L> {
    async fn begin(&mut self, epoch: u32) -> Result<(), Fault> {
        let Settings { plan: settings, lengths, .. } = self.settings.clone();
        let planned = off_thread(L::BLOCKING, move || {
            let plan = plan_epoch(&lengths, &settings, epoch)?;
            let broken = plan.p1_violation(&lengths, settings.job_tokens);
            Ok::<_, PlanError>((plan, broken))
        });
        let (plan, broken) = planned.await.map_err(fault)?.map_err(fault)?;
        invariant!("P1", broken.is_none(), "epoch {epoch}: {}", broken.unwrap_or_default());
        let (ended, plan) = self.with_ledger(move |ledger| Ok((ledger.begin_epoch(&plan)?, plan))).await?;
        gauge!(m::EPOCH).set(f64::from(epoch));
        tracing::info!(epoch, jobs = plan.jobs.len(), open = ended.iter().filter(|e| !**e).count(), "epoch planned");
        let mut open_of_bucket = vec![0; plan.bounds.len()];
        for (job, _) in plan.jobs.iter().zip(&ended).filter(|(_, ended)| !**ended) {
            open_of_bucket[usize::from(job.bucket)] += 1;
        }
        self.state.begin(plan, &ended);
        self.course.epoch(epoch, open_of_bucket, ended.into()).await;
        Ok(())
    }

    async fn on_asked(&mut self, asked: &mut Vec<Msg>) -> Result<(), Fault> {
        let mut outcomes = Vec::new();
        for msg in asked.drain(..) {
            match msg {
                Msg::Trained { step, receipts } => {
                    outcomes.extend(receipts.into_iter().map(|r| (r.settle(), Outcome::Trained { step })));
                }
                Msg::Checkpoint { step, name, reply } => {
                    self.record(std::mem::take(&mut outcomes)).await?;
                    self.with_ledger(move |ledger| ledger.checkpoint(step, &name)).await?;
                    // The trainer may have given up waiting; the checkpoint exists all the same.
                    let _ = reply.send(());
                }
            }
        }
        self.record(outcomes).await
    }

    async fn on_settled(&mut self, settled: &mut Vec<Settled>) -> Result<(), Fault> {
        let mut outcomes = Vec::new();
        for s in settled.drain(..) {
            match s {
                Settled::Unfinished { job } => {
                    journal!("unfinished", job = %job);
                    self.state.on_unfinished();
                }
                Settled::Skipped { job, reason, attempts } => {
                    tracing::warn!(%job, reason, attempts, "job skipped");
                    outcomes.push((job, Outcome::Skipped { reason, attempts }));
                }
            }
        }
        self.record(outcomes).await
    }

    async fn record(&mut self, outcomes: Vec<(JobId, Outcome)>) -> Result<(), Fault> {
        if outcomes.is_empty() {
            return Ok(());
        }
        let outcomes = self.with_ledger(move |ledger| ledger.record(&outcomes).map(|()| outcomes)).await?;
        for (job, outcome) in &outcomes {
            let label = if matches!(outcome, Outcome::Trained { .. }) { "trained" } else { "skipped" };
            counter!(m::JOBS, "outcome" => label).increment(1);
            match outcome {
                Outcome::Trained { step } => journal!("trained", job = %job, step),
                Outcome::Skipped { .. } => journal!("skipped", job = %job),
            }
            self.state.on_outcome(*job, outcome).map_err(fault)?;
            if matches!(outcome, Outcome::Skipped { .. }) {
                self.course.skipped(*job).await;
            }
        }
        Ok(())
    }

    /// Uses the ledger, on a blocking thread where it waits for the disk.
    async fn with_ledger<T: Send + 'static>(
        &mut self,
        work: impl FnOnce(&mut L) -> Result<T, String> + Send + 'static,
    ) -> Result<T, Fault> {
        let mut ledger = self.ledger.take().ok_or_else(|| fault("the ledger was lost"))?;
        let (ledger, result) = off_thread(L::BLOCKING, move || {
            let result = work(&mut ledger);
            (ledger, result)
        })
        .await
        .map_err(fault)?;
        self.ledger = Some(ledger);
        result.map_err(fault)
    }
}

async fn reserve(feed: Option<mpsc::Sender<Feed>>) -> Option<OwnedPermit<Feed>> {
    feed?.reserve_owned().await.ok()
}

fn fault(message: impl std::fmt::Display) -> Fault {
    Fault::new("planner", message)
}

fn gone(who: &'static str) -> Fault {
    Fault::gone("planner", Gone(who))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn skips_are_counted_against_their_epoch_and_exactly_the_fraction_is_allowed() {
        let jobs = |epoch| -> Vec<JobSpec> {
            let id = |index| JobId { epoch, index };
            (0..10).map(|i| JobSpec { id: id(i), bucket: 0, samples: vec![i], tokens: 1, width: 1 }).collect()
        };
        let skip = Outcome::Skipped { reason: "why".into(), attempts: 1 };
        let mut state = State::new(2, false, 0.2);
        for epoch in 0..2 {
            assert_eq!(state.take_next(), Next::Plan(epoch));
            state.begin(Plan { epoch, bounds: vec![1], jobs: jobs(epoch) }, &[false; 10]);
            for index in 0..10 {
                let id = JobId { epoch, index };
                assert!(matches!(state.take_next(), Next::Job(job) if job.id == id));
                if index < 2 {
                    assert_eq!(state.on_outcome(id, &skip), Ok(()), "two of ten are allowed in each epoch");
                }
            }
        }
        let message = state.on_outcome(JobId { epoch: 1, index: 2 }, &skip).unwrap_err();
        assert!(message.starts_with("3 of the 10 jobs of epoch 1 were skipped"), "{message}");
    }
}
