//! Execution of a run: connects port, step recorder and configuration controller to the actors, waits for them, and closes.

use super::{
    Failed, Start, Summary,
    admin_port::{self, Asked},
    config_controller::Keeper,
    engine_set::EngineSet,
    prepared_run::PreparedRun,
    progress::Progress,
    reload::Ground,
    sd_notify::Manager,
    shutdown::{Left, close},
    step_recorder::StepRecorder,
};
use crate::{
    admin::{commands, run_info::Facts},
    check::pipeline_settings::{Place, mill_settings},
    common::{
        clock,
        exit::{Exit, Failure},
    },
    config::Loaded,
    engines::checkpointing::Kept,
    eval::schedule::Evaluator,
    run_dir::{db::RunEnd, eval_log::History},
};
use draftmill_actors::{
    messages::engine::{DraftEngine, Optimizer, TargetEngine},
    pipeline::{self, Parts, ControlHandle},
    runtime::fault::Shutdown,
};
use std::sync::Arc;
use tokio::{net::TcpListener, signal::unix::Signal, sync::watch, time::Instant};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};

/// Inputs that can change the configuration while the run lasts.
pub struct Live {
    pub in_force: watch::Sender<Loaded>,
    pub start: Start,
    pub hangup: Signal,
}

/// Runs the actors on these engines until the plan is trained, a stop, or the first fault. Returns the summary.
///
/// # Errors
/// The first fault, an interruption, or a file of the run that cannot be written.
pub async fn execute<T, D, O>(
    prepared: PreparedRun,
    engines: EngineSet<T, D, O>,
    listener: Option<TcpListener>,
    (live, kept): (Live, watch::Sender<Kept>),
    shutdown: Shutdown,
) -> Result<Summary, Failure>
where
    T: TargetEngine,
    D: DraftEngine<Features = T::Features>,
    O: Optimizer<Gradient = D::Gradient, Weights = D::Weights>,
{
    let trained = prepared.opened.state.counts().failed(Exit::Run)?.iter().map(|c| c.trained).sum();
    let place = Place { step: prepared.start_step(), micro_batches: trained };
    let settings = mill_settings(&prepared.loaded.config, &prepared.forecast, &prepared.lengths, place);
    let (facts, told) = watch::channel(run_info(&prepared));
    let (orders, requests) = commands::channel();
    let port = match listener {
        Some(listener) => {
            let checkpoint_time = prepared.opened.state.checkpoint_time().failed(Exit::Run)?.unwrap_or(0.0);
            let asked = Asked { orders, facts: told.clone() };
            let PreparedRun { loaded, forecast, .. } = &prepared;
            Some(admin_port::serve(listener, &loaded.config, forecast, checkpoint_time, asked, &shutdown)?)
        }
        None => None,
    };
    let folder = prepared.opened.folder.clone();
    let in_force = live.in_force.subscribe();
    let progress = Progress::new(place.step, in_force.clone(), told);
    let (recorder, records, position) = StepRecorder::start(&folder, place, progress, shutdown.clone())?;
    let manager = Manager::of_this_process().map(|m| m.keep(facts.subscribe(), position.clone(), shutdown.drain.clone()));
    let manager = manager.map(|task| AbortOnDropHandle::new(tokio::spawn(task)));

    let (steering, steered) = ControlHandle::new(&settings);
    let keeper = Keeper {
        source: live.start.source,
        ground: Ground { forecast: prepared.forecast, machine: prepared.machine },
        lengths: prepared.lengths,
        folder: folder.clone(),
        steering,
        in_force: live.in_force,
        kept,
        facts,
        set_level: live.start.logs.set_level,
        orders: requests,
        hangup: live.hangup,
        place: position,
        measured: evaluations(engines.evaluator.as_ref()),
        notes: Default::default(),
    };
    let ended = CancellationToken::new();
    let keeping = tokio::spawn(keeper.run(shutdown.drain.clone(), ended.clone()));

    let EngineSet { targets, drafters, optimizer, evaluator } = engines;
    let source = Arc::new(prepared.source);
    let parts = Parts { targets, drafters, optimizer, source, ledger: prepared.opened.state, records };
    let born = Instant::now();
    let report = pipeline::run_with_control(settings, parts, steered, shutdown).await;
    let seconds = born.elapsed().as_secs_f64();
    ended.cancel();
    keeping.await.failed(Exit::Internal)?;
    let loaded = in_force.borrow().clone();
    let log = recorder.finish().await?;
    let report = report.map_err(|fault| match fault.root {
        true => Failure::new(Exit::Run, fault),
        false => Failure::new(Exit::Interrupted, "stopped at once; the last checkpoint stays"),
    })?;
    let mut left = Left { report, log: &log, seconds, before: prepared.opened.from, evaluated: None };
    let last = left.last(&folder).filter(|_| left.how(&loaded.config) != RunEnd::Stopped);
    left.evaluated = match (evaluator, last) {
        (Some(evaluator), Some(last)) => Some(evaluator.finish(last).await),
        (evaluator, _) => evaluator.map(|evaluator| evaluator.history().borrow().clone()),
    };
    let summary = close(&loaded, &folder, prepared.opened.begun.run, left)?;
    drop((port, manager));
    Ok(summary)
}

fn run_info(prepared: &PreparedRun) -> Facts {
    let config = &prepared.loaded.config;
    Facts {
        run: prepared.opened.begun.run,
        started: clock::now(),
        dir: config.run.dir.display().to_string(),
        engine: config.run.engine.to_string(),
        planned_steps: prepared.forecast.steps,
        epochs: config.run.epochs.into(),
        ..Facts::default()
    }
}

fn evaluations(evaluator: Option<&Evaluator>) -> watch::Receiver<History> {
    evaluator.map_or_else(|| watch::channel(History::default()).1, Evaluator::history)
}
