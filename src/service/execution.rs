//! Execution of a run: connects admin port, step recorder and configuration controller to the actors, and shuts down after them.

use super::{
    Failed, Start, Summary,
    admin_port::{self, AdminChannels},
    config_controller::ConfigController,
    engine_set::EngineSet,
    prepared_run::PreparedRun,
    progress::Progress,
    reload::ReloadPolicy,
    sd_notify::ServiceManager,
    shutdown::{RunOutcome, close},
    step_recorder::StepRecorder,
};
use crate::{
    admin::{commands, run_info::RunInfo},
    check::pipeline_settings::{RunProgress, pipeline_settings},
    common::{
        clock,
        exit::{Exit, Failure},
    },
    config::Loaded,
    engines::checkpointing::CheckpointSettings,
    eval::schedule::Evaluator,
    run_dir::{db::RunEnd, eval_log::EvalHistory},
};
use draftmill_actors::{
    messages::engine::{DraftEngine, Optimizer, TargetEngine},
    pipeline::{self, ControlHandle, Parts},
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
    (live, checkpoint_settings): (Live, watch::Sender<CheckpointSettings>),
    shutdown: Shutdown,
) -> Result<Summary, Failure>
where
    T: TargetEngine,
    D: DraftEngine<Features = T::Features>,
    O: Optimizer<Gradient = D::Gradient, Weights = D::Weights>,
{
    let trained = prepared.opened.state.counts().failed(Exit::Run)?.iter().map(|c| c.trained).sum();
    let position = RunProgress { step: prepared.start_step(), micro_batches: trained };
    let settings = pipeline_settings(&prepared.loaded.config, &prepared.forecast, &prepared.lengths, position);
    let (info, info_reader) = watch::channel(run_info(&prepared));
    let (commands, requests) = commands::channel();
    let port = match listener {
        Some(listener) => {
            let checkpoint_time = prepared.opened.state.checkpoint_time().failed(Exit::Run)?.unwrap_or(0.0);
            let channels = AdminChannels { commands, info: info_reader.clone() };
            let PreparedRun { loaded, forecast, .. } = &prepared;
            Some(admin_port::serve(listener, &loaded.config, forecast, checkpoint_time, channels, &shutdown)?)
        }
        None => None,
    };
    let folder = prepared.opened.folder.clone();
    let in_force = live.in_force.subscribe();
    let progress = Progress::new(position.step, in_force.clone(), info_reader);
    let epoch = prepared.forecast.jobs_per_epoch as u64;
    let (recorder, records, position) = StepRecorder::start(&folder, position, epoch, progress, shutdown.clone())?;
    let manager = ServiceManager::from_env().map(|m| m.run(info.subscribe(), position.clone(), shutdown.drain.clone()));
    let manager = manager.map(|task| AbortOnDropHandle::new(tokio::spawn(task)));

    let (control, inbox) = ControlHandle::new(&settings);
    let controller = ConfigController {
        source: live.start.source,
        policy: ReloadPolicy { forecast: prepared.forecast, machine: prepared.machine },
        lengths: prepared.lengths,
        folder: folder.clone(),
        control,
        in_force: live.in_force,
        checkpoint_settings,
        info,
        set_level: live.start.logs.set_level,
        commands: requests,
        hangup: live.hangup,
        position,
        evaluations: evaluations(engines.evaluator.as_ref()),
        notes: Default::default(),
    };
    let ended = CancellationToken::new();
    let controller_task = tokio::spawn(controller.run(shutdown.drain.clone(), ended.clone()));

    let EngineSet { targets, drafters, optimizer, evaluator } = engines;
    let source = Arc::new(prepared.source);
    let parts = Parts { targets, drafters, optimizer, source, ledger: prepared.opened.state, records };
    let started = Instant::now();
    let report = pipeline::run_with_control(settings, parts, inbox, shutdown).await;
    let seconds = started.elapsed().as_secs_f64();
    ended.cancel();
    controller_task.await.failed(Exit::Internal)?;
    let loaded = in_force.borrow().clone();
    let log = recorder.finish().await?;
    let report = report.map_err(|fault| match fault.root {
        true => Failure::new(Exit::Run, fault),
        false => Failure::new(Exit::Interrupted, "stopped at once; the last checkpoint is kept"),
    })?;
    let resumed_from = prepared.opened.from;
    let mut outcome = RunOutcome { report, log: &log, seconds, resumed_from, evaluations: None };
    let weights = outcome.final_weights(&folder).filter(|_| outcome.end(&loaded.config) != RunEnd::Stopped);
    outcome.evaluations = match (evaluator, weights) {
        (Some(evaluator), Some(weights)) => Some(evaluator.finish(weights).await),
        (evaluator, _) => evaluator.map(|evaluator| evaluator.history().borrow().clone()),
    };
    let summary = close(&loaded, &folder, prepared.opened.started.run, outcome)?;
    drop((port, manager));
    Ok(summary)
}

fn run_info(prepared: &PreparedRun) -> RunInfo {
    let config = &prepared.loaded.config;
    RunInfo {
        run: prepared.opened.started.run,
        started: clock::now(),
        dir: config.run.dir.display().to_string(),
        engine: config.run.engine.to_string(),
        planned_steps: prepared.forecast.steps,
        epochs: config.run.epochs.into(),
        ..RunInfo::default()
    }
}

fn evaluations(evaluator: Option<&Evaluator>) -> watch::Receiver<EvalHistory> {
    evaluator.map_or_else(|| watch::channel(EvalHistory::default()).1, Evaluator::history)
}
