//! The service: opens everything a run needs, starts the actors, and closes with the figures.
//!
//! Start-up in order, each step failing with a sentence before the next one costs time: settings, models, store, run
//! folder (lock, identity, resume point), port, engines; then the actors run until the plan is trained, a signal asks
//! for an orderly end, or the first fault.

mod config_controller;
mod identity;
#[cfg(feature = "torch")]
mod least_squares_init;
mod logs;
mod models;
mod progress;
mod reload;
mod sd_notify;
mod shutdown;
mod signals;
mod startup_banner;
mod summary;
#[cfg_attr(not(feature = "torch"), path = "no_torch.rs")]
mod torch_engines;

pub use self::config_controller::SetLevel;
pub use logs::Logs;
pub use summary::{ActorShares, Evaluation, Summary};

use self::config_controller::Keeper;
use self::sd_notify::Manager;
use self::shutdown::{Left, close};
use self::startup_banner::Opening;
use crate::admin::commands::{self, Orders};
use crate::admin::run_info::Facts;
use crate::run_dir::{About, Opened};
use crate::{
    admin,
    check::{
        Forecast, Machine, Samples, Stored, examine,
        pipeline_settings::{Place, mill_settings, plan_settings},
    },
    common::{
        clock,
        exit::{Exit, Failure},
        process,
    },
    config::{Config, Engine, Loaded, Source},
    data::{Split, Store, StoreSource},
    engines::{
        checkpointing::{Kept, Saving},
        costs,
        simulated::{self, RememberingDrafter, RememberingOptimizer, trained_jobs},
    },
    eval::schedule::Evaluator,
    run_dir::{RunFolder, db::RunEnd, eval_log::History, step_log::StepLog},
};
use draftmill_actors::{
    messages::engine::{DraftEngine, Optimizer, TargetEngine},
    pipeline::{self, Parts, Steering},
    runtime::{fault::Stops, metrics},
    simulated::{self as sim, SimOptimizer},
    trainer::StepRecord,
};
use models::Models;
use progress::Progress;
use reload::Ground;
use std::{fmt::Display, sync::Arc};
use tokio::{
    net::TcpListener,
    signal::unix::{Signal, SignalKind, signal},
    sync::{mpsc, watch},
    time::Instant,
};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};

/// Step records on their way to the log: the trainer waits for the disk only when this is full.
const RECORDS: usize = 64;

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
    let stops = Stops::default();
    let (in_force, watching) = watch::channel(loaded);
    let signals = signals::listen(stops.clone(), watching, start.logs.clone()).failed(Exit::Internal)?;
    // From here on a SIGHUP does not end the process.
    let hangup = signal(SignalKind::hangup()).failed(Exit::Internal)?;
    let trained = train_until(in_force, start, hangup, &stops).await;
    let terminated = signals.first() == Some(signals::Asked::Terminate) && !stops.abort.is_cancelled();
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
    stops: &Stops,
) -> Result<Summary, Failure> {
    let loaded = in_force.borrow().clone();
    let asked = start.clone();
    // Reads and compares gigabytes; a signal need not wait for that.
    let opening = tokio::task::spawn_blocking(move || Prepared::open(loaded, asked));
    let mut prepared = unless_stopped(stops, opening).await?.failed(Exit::Internal)??;
    if let Some(summary) = prepared.finished()? {
        tracing::info!(run = %summary.run_dir.display(), "the run is finished already; nothing is left to do");
        return Ok(summary);
    }
    let listener = match prepared.loaded.config.admin.listen.0 {
        Some(address) => Some(admin::bind(address).await.failed(Exit::Config)?),
        None => None,
    };
    let (folder, run) = (prepared.opened.folder.clone(), prepared.opened.begun.run);
    let ended = prepared.run(listener, Live { in_force, start, hangup }, stops).await;
    if let Err(failure) = &ended {
        folder.note_failure(run, failure);
    }
    ended
}

/// What comes out of `work`, or the end of a run that was stopped before it began.
async fn unless_stopped<T>(stops: &Stops, work: impl Future<Output = T>) -> Result<T, Failure> {
    let done = stops.close.run_until_cancelled(work).await;
    done.ok_or_else(|| Failure::new(Exit::Interrupted, "interrupted before training began; the last checkpoint stays"))
}

/// What keeps the settings changeable.
struct Live {
    in_force: watch::Sender<Loaded>,
    start: Start,
    hangup: Signal,
}

/// Everything that a run needs but the engines.
struct Prepared {
    loaded: Loaded,
    models: Option<Models>,
    store: Arc<Store>,
    source: StoreSource,
    lengths: Arc<[u32]>,
    machine: Machine,
    forecast: Forecast,
    opened: Opened,
}

impl Prepared {
    fn open(loaded: Loaded, start: Start) -> Result<Prepared, Failure> {
        let config = &loaded.config;
        let store = Arc::new(Store::open(&config.data.store).failed(Exit::Data)?);
        let lengths: Arc<[u32]> = store.lengths(Split::Train).into();
        let samples = Samples { lengths: lengths.to_vec(), validation: store.len(Split::Validation) };
        let machine = Machine { ask_port: false, ..Machine::detect(config) };
        let report = examine(&loaded, &machine, &Stored::Ready(samples)).sound()?;
        let forecast =
            report.plan.ok_or_else(|| Failure::new(Exit::Internal, "there is no forecast of a sound run"))?;
        let models = report.models.map(|(target, draft)| Models { target, draft });
        let plan = plan_settings(config, &forecast);
        let source = StoreSource::new(store.clone(), Split::Train);
        let mut identity = identity::of(config, &plan, &store, models.as_ref())?;
        if let Some(window) = forecast.pool.replay_window {
            // The order of the rest of an epoch follows from it.
            identity.insert("pool.replay_window".into(), window.to_string());
        }
        let folder = RunFolder::new(&config.run.dir);
        let about = About { identity, samples: lengths.len() as u64, fresh: start.fresh, force: start.force };
        let opened = folder.open(&loaded, &about)?;
        Ok(Prepared { loaded, models, store, source, lengths, machine, forecast, opened })
    }

    fn start_step(&self) -> u64 {
        self.opened.from.as_ref().map_or(0, |checkpoint| checkpoint.step)
    }

    /// The summary of a run that has nothing left to do.
    fn finished(&mut self) -> Result<Option<Summary>, Failure> {
        let path = self.opened.folder.summary();
        let Config { run, .. } = &self.loaded.config;
        let counts = self.opened.state.counts().failed(Exit::Run)?;
        let planned = (0..run.epochs).all(|epoch| counts.iter().any(|c| c.epoch == epoch && c.open() == 0));
        let done = planned || run.max_steps.is_some_and(|limit| self.start_step() >= limit);
        if !done || !path.exists() {
            return Ok(None);
        }
        let text = std::fs::read_to_string(&path).failed(Exit::Run)?;
        // Written by an earlier end, of fewer epochs, or damaged: then the end is written anew.
        let of_this_end = |s: &Summary| {
            s.finished && s.steps == self.start_step() && s.export_dir.as_ref().is_none_or(|dir| dir.exists())
        };
        let summary = serde_json::from_str::<Summary>(&text).ok().filter(of_this_end);
        if summary.is_some() {
            let end = if planned { RunEnd::Finished } else { RunEnd::StepLimit };
            let step = self.start_step();
            let Opened { state, begun, .. } = &mut self.opened;
            state.end_run(begun.run, &end, Some(step)).failed(Exit::Run)?;
        }
        Ok(summary)
    }

    async fn run(mut self, listener: Option<TcpListener>, live: Live, stops: &Stops) -> Result<Summary, Failure> {
        let address = listener.as_ref().and_then(|listener| listener.local_addr().ok());
        Opening::announce(&self, address, live.start.source.file.as_deref(), live.start.logs.human);
        let (kept, for_saving) = watch::channel(Kept::of(&self.loaded));
        match self.loaded.config.run.engine {
            Engine::Simulated => {
                let config = &self.loaded.config;
                let costs = costs::costs(config);
                let checkpoints = self.opened.folder.checkpoints();
                let trained = match &self.opened.from {
                    Some(from) => trained_jobs(&checkpoints.join(&from.name)).failed(Exit::Model)?,
                    None => Vec::new(),
                };
                let saving = Saving {
                    folder: checkpoints,
                    kept: for_saving,
                    seed: config.run.seed,
                    draft: simulated::stand_in(),
                };
                let weight = 0.01 * self.start_step() as f64;
                let optimizer = SimOptimizer::new(costs, weight);
                let mut drafters = sim::drafters(costs, &costs::drafter_speeds(config));
                drafters.iter_mut().for_each(|drafter| drafter.weight = weight);
                let engines = Engines {
                    targets: sim::targets(costs, &costs::target_speeds(config)),
                    drafters: drafters.into_iter().map(RememberingDrafter::new).collect(),
                    optimizer: RememberingOptimizer::new(optimizer, trained, saving),
                    // There is no drafter to measure.
                    evaluator: None,
                };
                self.drive(engines, listener, (live, kept), stops.clone()).await
            }
            Engine::Torch => {
                let models =
                    self.models.take().ok_or_else(|| Failure::new(Exit::Internal, "no models were looked at"))?;
                let (folder, from) = (self.opened.folder.clone(), self.opened.verified.take());
                let in_force = live.in_force.subscribe();
                let load = torch_engines::load(in_force, models, folder, from, for_saving, self.store.clone());
                let engines = unless_stopped(stops, load).await??;
                self.drive(engines, listener, (live, kept), stops.clone()).await
            }
        }
    }

    fn workers(&self) -> (usize, usize) {
        (self.loaded.config.target.devices.len(), self.loaded.config.drafter.devices.len())
    }

    /// Where this start goes on; `None` at the beginning of a run.
    fn resumed(&self) -> Option<String> {
        let Opened { folder, state, from, begun, .. } = &self.opened;
        let reopened = match begun.reopened {
            1 => "1 job that ended after it is open again".to_owned(),
            n => format!("{n} jobs that ended after it are open again"),
        };
        if let Some(from) = from {
            let trained: u64 = state.counts().map_or(0, |counts| counts.iter().map(|c| c.trained).sum());
            let folder = folder.root().display();
            Some(format!("going on from checkpoint {} of {folder}, which holds {trained} jobs; {reopened}", from.name))
        } else if begun.run > 1 {
            Some(format!("no checkpoint was written yet, so the run begins again at its start; {reopened}"))
        } else {
            None
        }
    }

    async fn drive<T, D, O>(
        self,
        engines: Engines<T, D, O>,
        listener: Option<TcpListener>,
        (live, kept): (Live, watch::Sender<Kept>),
        stops: Stops,
    ) -> Result<Summary, Failure>
    where
        T: TargetEngine,
        D: DraftEngine<Features = T::Features>,
        O: Optimizer<Gradient = D::Gradient, Weights = D::Weights>,
    {
        let start_step = self.start_step();
        let trained = self.opened.state.counts().failed(Exit::Run)?.iter().map(|c| c.trained).sum();
        let place = Place { step: start_step, micro_batches: trained };
        let settings = mill_settings(&self.loaded.config, &self.forecast, &self.lengths, place);
        let Prepared { loaded, source, lengths, machine, forecast, opened, .. } = self;
        let Opened { folder, state, from, begun, .. } = opened;
        let checkpoint_time = state.checkpoint_time().failed(Exit::Run)?.unwrap_or(0.0);
        let facts = Facts {
            run: begun.run,
            started: clock::now(),
            dir: loaded.config.run.dir.display().to_string(),
            engine: loaded.config.run.engine.to_string(),
            planned_steps: forecast.steps,
            epochs: loaded.config.run.epochs.into(),
            ..Facts::default()
        };
        let (facts, told) = watch::channel(facts);
        let (orders, given) = commands::channel();
        let asked = Asked { orders, facts: told.clone() };
        let metrics = listener
            .map(|listener| serve_metrics(listener, &loaded.config, &forecast, checkpoint_time, asked, &stops))
            .transpose()?;

        let steps = StepLog::file(folder.root());
        let log = StepLog::open(folder.root(), start_step).map_err(|e| folder.cannot_write(&steps, &e))?;
        let in_force = live.in_force.subscribe();
        let progress = Progress::new(start_step, in_force.clone(), told);
        let (records, recorded) = mpsc::channel(RECORDS);
        let (reached, watched) = watch::channel(place);
        let recording = tokio::spawn(record(recorded, log, progress, reached, stops.clone()));
        let (steering, steered) = Steering::new(&settings);
        let manager =
            Manager::of_this_process().map(|m| m.keep(facts.subscribe(), watched.clone(), stops.close.clone()));
        let keeper = Keeper {
            source: live.start.source,
            ground: Ground { forecast, machine },
            lengths,
            folder: folder.clone(),
            steering,
            in_force: live.in_force,
            kept,
            facts,
            set_level: live.start.logs.set_level,
            orders: given,
            hangup: live.hangup,
            place: watched,
            measured: engines
                .evaluator
                .as_ref()
                .map_or_else(|| watch::channel(History::default()).1, Evaluator::history),
            notes: Default::default(),
        };
        let ended = CancellationToken::new();
        let keeping = tokio::spawn(keeper.run(stops.close.clone(), ended.clone()));

        let Engines { targets, drafters, optimizer, evaluator } = engines;
        let parts = Parts { targets, drafters, optimizer, source: Arc::new(source), ledger: state, records };
        let telling = manager.map(|telling| AbortOnDropHandle::new(tokio::spawn(telling)));
        let born = Instant::now();
        let report = pipeline::run_steered(settings, parts, steered, stops.clone()).await;
        let seconds = born.elapsed().as_secs_f64();
        ended.cancel();
        keeping.await.failed(Exit::Internal)?;
        let loaded = in_force.borrow().clone();
        let log = recording.await.failed(Exit::Internal)?.map_err(|e| folder.cannot_write(&steps, &e))?;
        let report = report.map_err(|fault| match fault.root {
            true => Failure::new(Exit::Run, fault),
            false => Failure::new(Exit::Interrupted, "stopped at once; the last checkpoint stays"),
        })?;
        let mut left = Left { report, log: &log, seconds, before: from, evaluated: None };
        let last = left.last(&folder).filter(|_| left.how(&loaded.config) != RunEnd::Stopped);
        left.evaluated = match (evaluator, last) {
            (Some(evaluator), Some(last)) => Some(evaluator.finish(last).await),
            (evaluator, _) => evaluator.map(|evaluator| evaluator.history().borrow().clone()),
        };
        let summary = close(&loaded, &folder, begun.run, left)?;
        drop((metrics, telling));
        Ok(summary)
    }
}

struct Engines<T, D, O> {
    targets: Vec<T>,
    drafters: Vec<D>,
    optimizer: O,
    evaluator: Option<Evaluator>,
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

/// What the admin port needs of a running service: where orders go, and what is so.
struct Asked {
    orders: Orders,
    facts: watch::Receiver<Facts>,
}

fn serve_metrics(
    listener: TcpListener,
    config: &Config,
    forecast: &Forecast,
    checkpoint_time: f64,
    Asked { orders, facts }: Asked,
    stops: &Stops,
) -> Result<tokio_util::task::AbortOnDropHandle<()>, Failure> {
    let token =
        config.admin.token().transpose().map_err(|why| format!("admin.token_file: {why}")).failed(Exit::Config)?;
    let histograms: Vec<_> =
        metrics::TABLE.iter().filter(|s| !s.buckets.is_empty()).map(|s| (s.name, s.buckets)).collect();
    let handle = admin::install_recorder(&config.run.dir.display().to_string(), &histograms).failed(Exit::Internal)?;
    metrics::register(&metrics::Known {
        targets: config.target.devices.len(),
        drafters: config.drafter.devices.len(),
        positions: config.drafter.block_size as usize - 1,
        buckets: forecast.buckets.iter().map(|bucket| bucket.bound).collect(),
        gpus: forecast.gpus(),
        version: env!("CARGO_PKG_VERSION"),
        planned_steps: forecast.steps,
        checkpoint_time,
    });
    let watching = process::watch(forecast.gpus());
    let faults = admin::recent_warnings::recent();
    let server =
        admin::Server { listener, metrics: handle, facts, faults, orders, token, limits: admin::Limits::default() };
    let serving = server.run(stops.abort.clone());
    Ok(tokio_util::task::AbortOnDropHandle::new(tokio::spawn(async move {
        tokio::select! {
            () = serving => {}
            () = watching => {}
        }
    })))
}

/// Writes every step to the log and shows it. A disk that fails ends the run.
async fn record(
    mut records: mpsc::Receiver<StepRecord>,
    mut log: StepLog,
    mut progress: Progress,
    place: watch::Sender<Place>,
    stops: Stops,
) -> std::io::Result<StepLog> {
    let mut result = Ok(());
    while let Some(record) = records.recv().await {
        progress.on_step(&record);
        place.send_modify(|place| {
            *place = Place { step: record.step, micro_batches: place.micro_batches + record.micro_batches };
        });
        if result.is_ok() {
            result = log.push(record);
            if let Err(error) = &result {
                tracing::error!(%error, path = %log.path().display(), "the step log cannot be written; ending the run");
                stops.stop.cancel();
            }
        }
    }
    progress.finish();
    result.map(|()| log)
}
