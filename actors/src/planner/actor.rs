//! Planner actor: writes each epoch's plan, streams its jobs, and records the outcome of each. It owns the plan and the
//! ledger.
//!
//! In: outcomes, from the trainer as one message per step and from the other actors through receipts. Out: jobs, in
//! plan order.
//!
//! The planner waits while the dispatcher's queue is full, but continues to record outcomes. While the disk is busy,
//! jobs still leave, and arriving outcomes form the next transaction. On `Shutdown::drain` it hands out no further job
//! and ends when every receipt is settled.
//!
//! Invariants: P1, P2, D1.

use super::{
    ledger::{Ledger, Note},
    messages::{Inbox, Msg, Settings},
    outlet::Outlet,
    plan::{PlanError, plan_epoch},
    state::{Counts, State},
};
use crate::{
    dispatcher::Feed,
    invariant,
    messages::{
        job::Settled,
        types::{JobId, Outcome},
    },
    pool::PlanNotices,
    runtime::{
        fault::{Fault, Gone, Shutdown},
        meter::Meter,
        metrics as m,
        trace::lifecycle,
        util::{changed, off_thread, reply},
    },
};
use metrics::{Counter, counter, gauge};
use std::future::pending;
use tokio::{
    sync::{
        mpsc::{self},
        watch,
    },
    task::{JoinError, JoinHandle, spawn_blocking},
};

/// Limit on the outcomes that wait for the disk, exceeded by one step at most. It limits the size of a transaction.
const RECORD_AT_ONCE: usize = 4096;

/// Ledger that returns from a blocking thread, with the outcomes that it recorded.
type Recorded<L> = (L, Result<Vec<(JobId, Outcome)>, String>);

struct Planner<L> {
    settings: Settings,
    state: State,
    /// `None` while a blocking thread uses the ledger.
    ledger: Option<L>,
    plan_notices: PlanNotices,
    recording: Option<JoinHandle<Recorded<L>>>,
    /// Outcomes of the next transaction.
    outcomes: Vec<(JobId, Outcome)>,
    trained: Counter,
    skipped: Counter,
}

/// Runs until every job has an outcome, or until every receipt is settled after a shutdown. Returns the counts and the
/// ledger.
///
/// `plan_notices` announces the jobs to the pool and limits how far ahead of the draws jobs may leave. Of changed
/// `settings` only `max_skip_fraction` takes effect. `notes` are written to the ledger.
///
/// # Errors
///
/// Fails if the ledger fails, if no plan can be made, if too many jobs are skipped, or if another actor is gone.
pub async fn run<L: Ledger>(
    mut changing: watch::Receiver<Settings>,
    ledger: L,
    mut inbox: Inbox,
    feed: mpsc::Sender<Feed>,
    plan_notices: PlanNotices,
    mut notes: mpsc::Receiver<Note>,
    shutdown: Shutdown,
) -> Result<(Counts, L), Fault> {
    let settings = changing.borrow_and_update().clone();
    let state = State::new(settings.epochs, settings.epoch_barrier, settings.max_skip_fraction);
    let mut planner = Planner {
        settings,
        state,
        ledger: Some(ledger),
        plan_notices,
        recording: None,
        outcomes: Vec::new(),
        trained: counter!(m::JOBS, "outcome" => "trained"),
        skipped: counter!(m::JOBS, "outcome" => "skipped"),
    };
    let mut meter = Meter::new("planner", 0);
    let mut outlet = Outlet::new(feed, inbox.receipts.take());
    let (mut requests, mut settled) = (Vec::new(), Vec::new());
    let (mut requesting, mut returning) = (true, true);

    // Ends when every receipt is settled, the trainer (which may request a checkpoint) is gone, and everything is on
    // disk. Waiting for the dispatcher never blocks recording: the dispatcher's queue may wait for the trainer.
    while requesting || returning || planner.recording.is_some() {
        if let Some(epoch) = outlet.advance(&mut planner.state, &planner.plan_notices) {
            planner.begin(epoch).await?;
            continue;
        }
        let listening = planner.outcomes.len() < RECORD_AT_ONCE;
        tokio::select! {
            biased;
            never = meter.rest(outlet.cause()) => match never {},
            () = shutdown.abort.cancelled() => {
                // The next opener of the ledger must not find it in use.
                if let Some(recording) = planner.recording.take() {
                    let _ = recording.await;
                }
                return Err(Fault::aborted("planner"));
            }
            () = shutdown.drain.cancelled(), if outlet.is_open() => outlet.close(&mut planner.state),
            recorded = recorded(&mut planner.recording), if planner.recording.is_some() => {
                planner.recording = None;
                planner.on_recorded(recorded.map_err(fault)?).await?;
            }
            () = changed(&mut changing) => {
                planner.state.allow_skips(changing.borrow_and_update().max_skip_fraction);
            }
            Some(note) = notes.recv() => planner.with_ledger(move |ledger| ledger.note(&note)).await?,
            n = inbox.inbox.recv_many(&mut requests, RECORD_AT_ONCE), if requesting && listening => {
                requesting = n > 0;
                // Jobs that were skipped before a checkpoint was requested are recorded before it.
                while let Ok(back) = inbox.returns.try_recv() {
                    settled.push(back);
                }
                planner.on_settled(&mut settled);
                planner.on_requests(&mut requests).await?;
            }
            n = inbox.returns.recv_many(&mut settled, RECORD_AT_ONCE), if returning && listening => {
                returning = n > 0;
                planner.on_settled(&mut settled);
            }
            () = planner.plan_notices.window_moved(), if outlet.early => {}
            permit = outlet.reserve(), if outlet.may_leave() => {
                outlet.send(permit.map_err(gone)?, &mut planner.state);
            }
            drained = reply(&mut outlet.barrier), if outlet.barrier.is_some() => {
                drained.map_err(|_| gone(Gone("dispatcher")))?;
                outlet.barrier = None;
            }
        }
        planner.record().await?;
    }
    while let Ok(note) = notes.try_recv() {
        planner.with_ledger(move |ledger| ledger.note(&note)).await?;
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
        self.plan_notices.epoch(epoch, open_of_bucket, ended.into()).await;
        Ok(())
    }

    async fn on_requests(&mut self, requests: &mut Vec<Msg>) -> Result<(), Fault> {
        for msg in requests.drain(..) {
            match msg {
                Msg::Trained { step, receipts } => {
                    self.outcomes.extend(receipts.into_iter().map(|r| (r.settle(), Outcome::Trained { step })));
                }
                Msg::Checkpoint { step, name, reply } => {
                    self.with_ledger(move |ledger| ledger.checkpoint(step, &name)).await?;
                    // The trainer may have stopped waiting; the checkpoint exists nevertheless.
                    let _ = reply.send(());
                }
            }
        }
        Ok(())
    }

    fn on_settled(&mut self, settled: &mut Vec<Settled>) {
        for s in settled.drain(..) {
            match s {
                Settled::Unfinished { job } => {
                    lifecycle!("unfinished", job = %job);
                    self.state.on_unfinished();
                }
                Settled::Skipped { job, reason, attempts } => {
                    tracing::warn!(%job, reason, attempts, "job skipped");
                    self.outcomes.push((job, Outcome::Skipped { reason, attempts }));
                }
            }
        }
    }

    /// Starts a transaction with the waiting outcomes, unless one is running. Later outcomes belong to the next one.
    async fn record(&mut self) -> Result<(), Fault> {
        if self.outcomes.is_empty() || self.recording.is_some() {
            return Ok(());
        }
        let mut ledger = self.ledger.take().ok_or_else(|| fault("the ledger was lost"))?;
        let outcomes = std::mem::take(&mut self.outcomes);
        let work = move || {
            let result = ledger.record(&outcomes).map(|()| outcomes);
            (ledger, result)
        };
        if !L::BLOCKING {
            return self.on_recorded(work()).await;
        }
        self.recording = Some(spawn_blocking(work));
        Ok(())
    }

    async fn on_recorded(&mut self, (ledger, result): Recorded<L>) -> Result<(), Fault> {
        self.ledger = Some(ledger);
        for (job, outcome) in &result.map_err(fault)? {
            match outcome {
                Outcome::Trained { step } => {
                    lifecycle!("trained", job = %job, step);
                    self.trained.increment(1);
                }
                Outcome::Skipped { .. } => {
                    lifecycle!("skipped", job = %job);
                    self.skipped.increment(1);
                }
            }
            self.state.on_outcome(*job, outcome).map_err(fault)?;
            if matches!(outcome, Outcome::Skipped { .. }) {
                self.plan_notices.skipped(*job).await;
            }
        }
        Ok(())
    }

    /// Waits until every outcome so far is recorded.
    async fn flush(&mut self) -> Result<(), Fault> {
        self.record().await?;
        while let Some(recording) = self.recording.take() {
            self.on_recorded(recording.await.map_err(fault)?).await?;
            self.record().await?;
        }
        Ok(())
    }

    /// Runs work on the ledger after everything before is recorded, on a blocking thread if the ledger waits for the
    /// disk.
    async fn with_ledger<T: Send + 'static>(
        &mut self,
        work: impl FnOnce(&mut L) -> Result<T, String> + Send + 'static,
    ) -> Result<T, Fault> {
        self.flush().await?;
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

/// Waits for the end of the transaction; pends forever without one.
async fn recorded<L>(recording: &mut Option<JoinHandle<Recorded<L>>>) -> Result<Recorded<L>, JoinError> {
    match recording {
        Some(recording) => recording.await,
        None => pending().await,
    }
}

fn fault(message: impl std::fmt::Display) -> Fault {
    Fault::new("planner", message)
}

fn gone(gone: Gone) -> Fault {
    Fault::gone("planner", gone)
}
