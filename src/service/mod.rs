//! Service of one run: opens everything that the run needs, starts the actors, and ends with a summary.
//!
//! A start takes these steps, and each one fails with a sentence before the next one costs time: settings, models, store, run
//! folder (lock, identity, resume point), port, engines. Then the actors run until the plan is trained, a signal asks for an
//! orderly end, or the first fault.

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
    engines::checkpointing::Kept,
};
use draftmill_actors::runtime::fault::Shutdown;
use std::fmt::Display;
use tokio::{
    net::TcpListener,
    signal::unix::{Signal, SignalKind, signal},
    sync::watch,
};

/// How a run begins.
#[derive(Clone, Default)]
pub struct Start {
    /// Begin anew instead of going on.
    pub fresh: bool,
    /// With `fresh`: throw an old run away.
    pub force: bool,
    /// Where the configuration came from, to read it again.
    pub source: Source,
    pub logs: Logs,
}

/// How a start of a run came to its end.
#[derive(Debug)]
pub struct Ended {
    /// Its figures; one that was stopped before its plan was done is not `finished`. `None` where it was stopped before it began.
    pub summary: Option<Summary>,
    /// SIGTERM asked for it, and it was orderly.
    pub terminated: bool,
}

/// Trains until the plan is done, a signal comes, or the first fault.
pub async fn train(loaded: Loaded, start: Start) -> Result<Ended, Failure> {
    let shutdown = Shutdown::default();
    let (in_force, watching) = watch::channel(loaded);
    let signals = signals::listen(shutdown.clone(), watching, start.logs.clone()).failed(Exit::Internal)?;
    // From here on a SIGHUP does not end the process.
    let hangup = signal(SignalKind::hangup()).failed(Exit::Internal)?;
    let trained = train_until(in_force, start, hangup, &shutdown).await;
    let terminated = signals.first() == Some(signals::Asked::Terminate) && !shutdown.abort.is_cancelled();
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
    let asked = start.clone();
    // Reads and compares gigabytes; a signal need not wait for that.
    let opening = tokio::task::spawn_blocking(move || PreparedRun::open(loaded, asked));
    let mut prepared = unless_stopped(shutdown, opening).await?.failed(Exit::Internal)??;
    if let Some(summary) = prepared.finished()? {
        tracing::info!(run = %summary.run_dir.display(), "the run is finished already; nothing is left to do");
        return Ok(summary);
    }
    let listener = match prepared.loaded.config.admin.listen.0 {
        Some(address) => Some(admin::bind(address).await.failed(Exit::Config)?),
        None => None,
    };
    let (folder, number) = (prepared.opened.folder.clone(), prepared.opened.begun.run);
    let ended = run(prepared, listener, Live { in_force, start, hangup }, shutdown).await;
    if let Err(failure) = &ended {
        folder.note_failure(number, failure);
    }
    ended
}

/// What comes out of `work`, or the end of a run that was stopped before it began.
async fn unless_stopped<T>(shutdown: &Shutdown, work: impl Future<Output = T>) -> Result<T, Failure> {
    let done = shutdown.drain.run_until_cancelled(work).await;
    done.ok_or_else(|| Failure::new(Exit::Interrupted, "interrupted before training began; the last checkpoint stays"))
}

/// Makes the engines of the configured kind and runs the actors on them.
async fn run(
    mut prepared: PreparedRun,
    listener: Option<TcpListener>,
    live: Live,
    shutdown: &Shutdown,
) -> Result<Summary, Failure> {
    let address = listener.as_ref().and_then(|listener| listener.local_addr().ok());
    startup_banner::Opening::announce(&prepared, address, live.start.source.file.as_deref(), live.start.logs.human);
    let (kept, for_saving) = watch::channel(Kept::of(&prepared.loaded));
    match prepared.loaded.config.run.engine {
        Engine::Simulated => {
            let engines = EngineSet::simulated(&prepared, for_saving)?;
            execution::execute(prepared, engines, listener, (live, kept), shutdown.clone()).await
        }
        Engine::Torch => {
            let models =
                prepared.models.take().ok_or_else(|| Failure::new(Exit::Internal, "no models were looked at"))?;
            let (folder, from) = (prepared.opened.folder.clone(), prepared.opened.verified.take());
            let in_force = live.in_force.subscribe();
            let load = torch_engines::load(in_force, models, folder, from, for_saving, prepared.store.clone());
            let engines = unless_stopped(shutdown, load).await??;
            execution::execute(prepared, engines, listener, (live, kept), shutdown.clone()).await
        }
    }
}

/// `result.failed(Exit::Data)?`: the error's own sentence with an exit code.
trait Failed<T> {
    fn failed(self, exit: Exit) -> Result<T, Failure>;
}

impl<T, E: Display> Failed<T> for Result<T, E> {
    fn failed(self, exit: Exit) -> Result<T, Failure> {
        self.map_err(Failure::of(exit))
    }
}
