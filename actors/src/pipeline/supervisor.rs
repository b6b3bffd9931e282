//! Supervisor: wires and starts every actor, sink to source, and waits for them. The whole pipeline is visible here.

use super::control::{ControlHandle, ControlInbox};
use super::settings::Settings;
use crate::{
    dispatcher, drafter,
    messages::{
        engine::{DraftEngine, Optimizer, TargetEngine},
        types::BatchSource,
    },
    planner::{self, ledger::Ledger},
    pool,
    runtime::{
        fault::{FailAtPoll, Fault, Shutdown, panic_text},
        metrics as m,
        util::until,
    },
    target,
    trainer::{self, StepRecord},
};
use metrics::counter;
use std::{collections::HashMap, sync::Arc, time::Duration};
use tokio::{
    sync::{mpsc, watch},
    task::{Id, JoinSet},
    time::Instant,
};

/// Jobs between planner and dispatcher. The dispatcher's queue is the intended buffer.
const FEED: usize = 2;
/// Interval of the log lines that name the running actors, once the end has begun.
const REMIND: Duration = Duration::from_secs(5);

/// Engines and stores of the actors. The index in a list is the index of the actor.
pub struct Parts<T, D, O, S, L> {
    pub targets: Vec<T>,
    pub drafters: Vec<D>,
    pub optimizer: O,
    pub source: Arc<S>,
    pub ledger: L,
    /// Receiver of one record per step.
    pub records: mpsc::Sender<StepRecord>,
}

/// Report of a whole run.
#[derive(Debug, Default)]
pub struct Report<L> {
    pub jobs: planner::Counts,
    pub targets: Vec<target::Stats>,
    pub drafters: Vec<drafter::Stats>,
    pub trainer: trainer::Stats,
    pub pool: pool::Stats,
    pub ledger: Option<L>,
}

enum Ended<L> {
    Planner(planner::Counts, L),
    Dispatcher,
    Target(usize, target::Stats),
    Pool(pool::Stats),
    Drafter(usize, drafter::Stats),
    Trainer(trainer::Stats),
}

/// Runs the pipeline until the plan is trained or `shutdown` ends it.
///
/// # Errors
///
/// Returns the fault that ended the run, or the abort.
pub async fn run<T, D, O, S, L>(
    settings: Settings,
    parts: Parts<T, D, O, S, L>,
    shutdown: Shutdown,
) -> Result<Report<L>, Fault>
where
    T: TargetEngine,
    D: DraftEngine<Features = T::Features>,
    O: Optimizer<Gradient = D::Gradient, Weights = D::Weights>,
    S: BatchSource,
    L: Ledger,
{
    let (_nobody, control) = ControlHandle::new(&settings);
    run_with_control(settings, parts, control, shutdown).await
}

/// Runs the pipeline as [`run`] does, under external control.
///
/// # Errors
///
/// Returns the fault that ended the run, or the abort.
pub async fn run_with_control<T, D, O, S, L>(
    settings: Settings,
    parts: Parts<T, D, O, S, L>,
    control: ControlInbox,
    shutdown: Shutdown,
) -> Result<Report<L>, Fault>
where
    T: TargetEngine,
    D: DraftEngine<Features = T::Features>,
    O: Optimizer<Gradient = D::Gradient, Weights = D::Weights>,
    S: BatchSource,
    L: Ledger,
{
    let dispatcher_settings = control.dispatcher.clone();
    let mut supervisor =
        Supervisor { tasks: JoinSet::new(), names: HashMap::new(), fail_at_poll: settings.fail_at_poll };
    let (n_targets, n_drafters) = (parts.targets.len(), parts.drafters.len());

    let (planner, planner_inbox) = planner::channel();
    let (trainer, trainer_inbox) = trainer::channel(&settings.trainer);
    let (pool, pool_inbox) = pool::channel();
    let (dispatcher, dispatcher_inbox) = dispatcher::channel();
    let (plan_notices, plan_notice_inbox) = pool::plan_notices(&settings.pool);
    let (feed, fed) = mpsc::channel(FEED);

    let work = trainer::run(control.trainer, parts.optimizer, trainer_inbox, planner, parts.records, shutdown.clone());
    supervisor.start("trainer".into(), async { work.await.map(Ended::Trainer) });
    for (index, engine) in parts.drafters.into_iter().enumerate() {
        let work =
            drafter::run(index, control.drafters.clone(), engine, pool.clone(), trainer.clone(), shutdown.clone());
        supervisor.start(format!("drafter {index}"), async move { work.await.map(|w| Ended::Drafter(index, w)) });
    }
    drop(trainer);
    let work = pool::run(control.pool, pool_inbox, plan_notice_inbox, shutdown.clone());
    supervisor.start("pool".into(), async { work.await.map(Ended::Pool) });
    for (index, engine) in parts.targets.into_iter().enumerate() {
        let work =
            target::run(index, control.targets.clone(), engine, dispatcher.clone(), pool.clone(), shutdown.clone());
        supervisor.start(format!("target {index}"), async move { work.await.map(|w| Ended::Target(index, w)) });
    }
    drop(dispatcher);
    let work = dispatcher::run(control.dispatcher, parts.source, dispatcher_inbox, fed, pool, shutdown.clone());
    supervisor.start("dispatcher".into(), async { work.await.map(|()| Ended::Dispatcher) });
    let work =
        planner::run(control.planner, parts.ledger, planner_inbox, feed, plan_notices, control.notes, shutdown.clone());
    supervisor.start("planner".into(), async { work.await.map(|(counts, ledger)| Ended::Planner(counts, ledger)) });

    let mut report = Report {
        targets: vec![target::Stats::default(); n_targets],
        drafters: vec![drafter::Stats::default(); n_drafters],
        jobs: planner::Counts::default(),
        trainer: trainer::Stats::default(),
        pool: pool::Stats::default(),
        ledger: None,
    };
    let mut first_gone = None;
    let ended = |ended| {
        match ended {
            Ended::Planner(counts, ledger) => (report.jobs, report.ledger) = (counts, Some(ledger)),
            Ended::Dispatcher => {}
            Ended::Target(i, work) => {
                if let Some(cause) = &work.gone {
                    first_gone.get_or_insert_with(|| Fault::new(format!("target {i}"), cause));
                }
                report.targets[i] = work;
                let paused = &dispatcher_settings.borrow().paused_targets;
                let gone = |i: usize| report.targets[i].gone.is_some();
                if gone(i) && !paused.is_empty() && (0..n_targets).all(|i| gone(i) || paused.contains(&i)) {
                    tracing::error!(?paused, "all remaining targets are paused");
                }
                if report.targets.iter().all(|target| target.gone.is_some()) {
                    return Next::Fail(first_gone.take());
                }
            }
            Ended::Pool(stats) => report.pool = stats,
            Ended::Drafter(i, work) => report.drafters[i] = work,
            Ended::Trainer(work) => {
                report.trainer = work;
                return Next::WindDown;
            }
        }
        Next::Wait
    };
    supervisor.join(&shutdown, control.grace, ended).await?;
    Ok(report)
}

/// Consequence of an actor's end.
enum Next {
    Wait,
    /// The trainer is done: nothing that the others still prepare can be trained.
    WindDown,
    Fail(Option<Fault>),
}

struct Supervisor<L> {
    tasks: JoinSet<Result<Ended<L>, Fault>>,
    names: HashMap<Id, String>,
    fail_at_poll: Option<FailAtPoll>,
}

impl<L: Send + 'static> Supervisor<L> {
    fn start(&mut self, name: String, work: impl Future<Output = Result<Ended<L>, Fault>> + Send + 'static) {
        let id = match self.fail_at_poll.take_if(|kill| kill.actor == name) {
            Some(kill) => self.tasks.spawn(FailAtPoll::wrap(kill.nth, work)).id(),
            None => self.tasks.spawn(work).id(),
        };
        self.names.insert(id, name);
    }

    /// Waits for every actor. After a fault it aborts the others and returns the fault that caused the rest (S1). Once
    /// the trainer is done, it waits no longer than `grace`: a hanging forward must not delay a finished run.
    async fn join(
        &mut self,
        shutdown: &Shutdown,
        grace: watch::Receiver<Duration>,
        mut ended: impl FnMut(Ended<L>) -> Next,
    ) -> Result<(), Fault> {
        let mut first: Option<Fault> = None;
        let aborted = async {
            shutdown.abort.cancelled().await;
            let grace = *grace.borrow();
            tokio::time::sleep(grace).await;
        };
        tokio::pin!(aborted);
        let (mut deadline, mut closed, mut remind): (Option<Instant>, _, Option<Instant>) = (None, None, None);
        loop {
            let joined = tokio::select! {
                biased;
                joined = self.tasks.join_next_with_id() => joined,
                () = &mut aborted => {
                    tracing::error!(still_running = ?self.still_running(), "grace period exceeded");
                    break;
                }
                () = shutdown.drain.cancelled(), if closed.is_none() => {
                    closed = Some(Instant::now());
                    remind = Some(Instant::now() + REMIND);
                    continue;
                }
                () = until(remind) => {
                    let seconds = closed.map_or(0, |closed| closed.elapsed().as_secs());
                    tracing::info!(seconds, still_running = self.still_running().join(", "), "shutdown in progress");
                    remind = Some(Instant::now() + REMIND);
                    continue;
                }
                () = until(deadline) => {
                    tracing::warn!(still_running = ?self.still_running(), "run finished without these actors");
                    return Ok(());
                }
            };
            let fault = match joined {
                None => break,
                Some(Ok((id, result))) => {
                    self.names.remove(&id);
                    match result.map(&mut ended) {
                        Ok(Next::Wait | Next::Fail(None)) => continue,
                        Ok(Next::WindDown) => {
                            shutdown.stop.cancel();
                            deadline = Some(Instant::now() + *grace.borrow());
                            continue;
                        }
                        Ok(Next::Fail(Some(fault))) | Err(fault) => fault,
                    }
                }
                Some(Err(e)) => {
                    let name = self.names.remove(&e.id()).unwrap_or_default();
                    let why = match e.try_into_panic() {
                        Ok(panic) => format!("panicked: {}", panic_text(&*panic)),
                        Err(e) => e.to_string(),
                    };
                    Fault::new(name, why)
                }
            };
            if fault.root {
                let kind = fault.actor.split(' ').next().unwrap_or_default().to_owned();
                counter!(m::FAULTS, "actor" => kind).increment(1);
                tracing::error!(%fault, "actor failed");
            }
            // A consequential fault never hides its cause.
            if first.as_ref().is_none_or(|f| !f.root && fault.root) {
                first = Some(fault);
            }
            shutdown.abort.cancel();
        }
        match first {
            Some(fault) => Err(fault),
            None if shutdown.abort.is_cancelled() => Err(Fault::aborted("run")),
            None => Ok(()),
        }
    }

    fn still_running(&self) -> Vec<&str> {
        let mut names: Vec<_> = self.names.values().map(String::as_str).collect();
        names.sort_unstable();
        names
    }
}
