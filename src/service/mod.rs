//! Service of one run: opens everything that the run needs, starts the actors, and ends with a summary.
//!
//! Steps of a start, cheap ones first: settings, models, store, run folder (lock, identity, resume point), port, engines. Then
//! the actors run until the plan is trained, a signal requests an orderly shutdown, or the first fault.

mod admin_port;
mod config_controller;
mod engine_set;
mod execution;
mod identity;
#[cfg(feature = "torch")]
mod least_squares_init;
mod logs;
mod models;
mod prepared_run;
mod progress;
mod reload;
mod sd_notify;
mod shutdown;
mod signals;
mod startup_banner;
mod step_recorder;
mod summary;
#[cfg_attr(not(feature = "torch"), path = "no_torch.rs")]
mod torch_engines;

pub use self::{
    config_controller::SetLevel,
    logs::Logs,
    summary::{ActorShares, Evaluation, Summary},
};

use self::{engine_set::EngineSet, execution::Live, prepared_run::PreparedRun};
use crate::{
    admin,
    common::exit::{Exit, Failure},
    config::{Engine, Loaded, Source},
    engines::checkpointing::CheckpointSettings,
};
use draftmill_actors::runtime::fault::Shutdown;
use std::fmt::Display;
use tokio::{
    net::TcpListener,
    signal::unix::{Signal, SignalKind, signal},
    sync::watch,
};

/// Options of a start.
#[derive(Clone, Default)]
pub struct Start {
    /// Start from the beginning instead of resuming.
    pub fresh: bool,
    /// Step of the checkpoint to resume from; the newest if `None`.
    pub from_checkpoint: Option<u64>,
    /// With `fresh`: delete an existing run.
    pub force: bool,
    /// Source of the configuration, for reloads.
    pub source: Source,
    pub logs: Logs,
}

/// End of a start.
#[derive(Debug)]
pub struct Ended {
    /// Summary, with `finished` false if the start was stopped. `None` if it was stopped before training began.
    pub summary: Option<Summary>,
    /// True after an orderly shutdown by SIGTERM.
    pub terminated: bool,
}

/// Trains until the plan is done, a signal, or the first fault.
///
/// # Errors
/// The first fault or unusable input with its exit code, or an interruption.
pub async fn train(loaded: Loaded, start: Start) -> Result<Ended, Failure> {
    let shutdown = Shutdown::default();
    let (in_force, watching) = watch::channel(loaded);
    let signals = signals::listen(shutdown.clone(), watching, start.logs.clone()).failed(Exit::Internal)?;
    // Installs the handler: the default action of SIGHUP ends the process.
    let hangup = signal(SignalKind::hangup()).failed(Exit::Internal)?;
    let trained = train_until(in_force, start, hangup, &shutdown).await;
    let terminated = signals.first() == Some(signals::StopSignal::Terminate) && !shutdown.abort.is_cancelled();
    match trained {
        Ok(summary) => Ok(Ended { summary: Some(summary), terminated }),
        Err(failure) if failure.exit == Exit::Interrupted && terminated => {
            tracing::info!("{failure}");
            Ok(Ended { summary: None, terminated })
        }
        Err(failure) => Err(failure),
    }
}

async fn train_until(
    in_force: watch::Sender<Loaded>,
    start: Start,
    hangup: Signal,
    shutdown: &Shutdown,
) -> Result<Summary, Failure> {
    let loaded = in_force.borrow().clone();
    let options = start.clone();
    // On a blocking thread, because it reads gigabytes and a signal must not wait for it.
    let open = tokio::task::spawn_blocking(move || PreparedRun::open(loaded, options));
    let mut prepared = unless_stopped(shutdown, open).await?.failed(Exit::Internal)??;
    let (folder, number) = (prepared.opened.folder.clone(), prepared.opened.started.run);
    let live = Live { in_force, start, hangup };
    let ended = async move {
        if let Some(summary) = prepared.finished()? {
            tracing::info!(run = %summary.run_dir.display(), "the run is finished already");
            return Ok(summary);
        }
        let listener = match prepared.loaded.config.admin.listen.0 {
            Some(address) => Some(admin::bind(address).await.failed(Exit::Config)?),
            None => None,
        };
        run(prepared, listener, live, shutdown).await
    };
    let ended = ended.await;
    if let Err(failure) = &ended {
        folder.record_failure(number, failure);
    }
    ended
}

/// Output of `work`, or a failure if the run is stopped before training begins.
async fn unless_stopped<T>(shutdown: &Shutdown, work: impl Future<Output = T>) -> Result<T, Failure> {
    let done = shutdown.drain.run_until_cancelled(work).await;
    done.ok_or_else(|| {
        Failure::new(Exit::Interrupted, "interrupted before training began; the last checkpoint is kept")
    })
}

/// Creates the configured engines and runs the actors on them.
async fn run(
    mut prepared: PreparedRun,
    listener: Option<TcpListener>,
    live: Live,
    shutdown: &Shutdown,
) -> Result<Summary, Failure> {
    let address = listener.as_ref().and_then(|listener| listener.local_addr().ok());
    startup_banner::StartupBanner::log(&prepared, address, live.start.source.file.as_deref(), live.start.logs.human);
    let (checkpoint_settings, checkpoint_reader) = watch::channel(CheckpointSettings::new(&prepared.loaded));
    match prepared.loaded.config.run.engine {
        Engine::Simulated => {
            let engines = EngineSet::simulated(&prepared, checkpoint_reader)?;
            execution::execute(prepared, engines, listener, (live, checkpoint_settings), shutdown.clone()).await
        }
        Engine::Torch => {
            let models = prepared.models.take().ok_or_else(|| Failure::new(Exit::Internal, "models not loaded"))?;
            let (folder, from) = (prepared.opened.folder.clone(), prepared.opened.verified.take());
            let in_force = live.in_force.subscribe();
            let load = torch_engines::load(in_force, models, folder, from, checkpoint_reader, prepared.store.clone());
            let engines = unless_stopped(shutdown, load).await??;
            execution::execute(prepared, engines, listener, (live, checkpoint_settings), shutdown.clone()).await
        }
    }
}

/// Conversion of an error to a [`Failure`] with an exit code: `result.failed(Exit::Data)?`.
trait Failed<T> {
    fn failed(self, exit: Exit) -> Result<T, Failure>;
}

impl<T, E: Display> Failed<T> for Result<T, E> {
    fn failed(self, exit: Exit) -> Result<T, Failure> {
        self.map_err(Failure::of(exit))
    }
}
