//! One simulated node: runs the real actors on a paused clock and collects their records.

use super::{Policy, Report, Scenario, stats::SimulatedRun};
use crate::engines::costs::{costs, drafter_speeds, target_speeds};
use crate::{
    check::{
        forecast,
        pipeline_settings::{RunProgress, pipeline_settings},
    },
    common::exit::{Exit, Failure},
    config::{Config, Problems, pool_problem, step_problem},
};
use draftmill_actors::{
    messages::{
        engine::{EngineError, FeatureShape, TargetEngine},
        types::PaddedBatch,
    },
    pipeline::{self, ControlHandle, ControlInbox, Parts},
    planner::ledger::MemoryLedger,
    runtime::fault::{Fault, Shutdown},
    simulated::{self as sim, SimFeatures, SimOptimizer, SimSource, SimTarget},
    trainer::StepRecord,
};
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::{sync::mpsc, time::Instant};

/// Capacity of the step record channel. It has no effect on the result.
const RECORDS: usize = 64;

/// Plans, checks and simulates a scenario.
pub(super) fn run(scenario: &Scenario, lengths: &Arc<[u32]>) -> Result<Report, Failure> {
    let (config, written) = (&scenario.loaded.config, &scenario.loaded.written);
    let forecast = forecast(config, lengths, None).map_err(Failure::of(Exit::Data))?;
    let refused = [
        pool_problem(config, written, forecast.largest_job_bytes),
        step_problem(config, written, forecast.jobs_per_epoch),
    ];
    let refused: Vec<_> = refused.into_iter().flatten().collect();
    if !refused.is_empty() {
        return Err(Problems(refused).into());
    }
    let mut settings = pipeline_settings(config, &forecast, lengths, RunProgress::default());
    settings.trainer.checkpoint_every = 0;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    let runtime = runtime.map_err(|e| Failure::new(Exit::Internal, format!("the runtime cannot start: {e}")))?;
    let simulated = runtime.block_on(simulate(scenario, settings, lengths.clone()))?;
    Ok(simulated.stats(scenario))
}

async fn simulate(
    scenario: &Scenario,
    settings: pipeline::Settings,
    lengths: Arc<[u32]>,
) -> Result<SimulatedRun, Failure> {
    let config = &scenario.loaded.config;
    let costs = costs(config);
    let (born, last_lease) = (Instant::now(), Arc::new(AtomicU64::new(0)));
    let timed = |target| TimedTarget { target, born, last_lease: last_lease.clone() };
    let (records, recorded) = mpsc::channel(RECORDS);
    let targets: Vec<_> = sim::targets(costs, &target_speeds(config)).into_iter().map(timed).collect();
    let recording = tokio::spawn(collect(recorded));
    let node = Node { config, settings, lengths, records };
    let (control, inbox) = ControlHandle::new(&node.settings);
    let report = match scenario.policy {
        Policy::Pull => node.run(targets, inbox).await,
        Policy::RoundRobin { queue_depth } => {
            let targets = sim::round_robin(targets, queue_depth, control, node.settings.clone());
            node.run(targets.map_err(Failure::of(Exit::Data))?, inbox).await
        }
    }
    .map_err(Failure::of(Exit::Run))?;
    let elapsed = born.elapsed();
    let steps = recording.await.map_err(Failure::of(Exit::Internal))?;
    Ok(SimulatedRun { report, steps, elapsed, last_lease: Duration::from_nanos(last_lease.load(Ordering::Relaxed)) })
}

/// A node without its targets.
struct Node<'a> {
    config: &'a Config,
    settings: pipeline::Settings,
    lengths: Arc<[u32]>,
    records: mpsc::Sender<StepRecord>,
}

impl Node<'_> {
    async fn run<T: TargetEngine<Features = SimFeatures>>(
        self,
        targets: Vec<T>,
        inbox: ControlInbox,
    ) -> Result<pipeline::Report<MemoryLedger>, Fault> {
        let costs = costs(self.config);
        let parts = Parts {
            targets,
            drafters: sim::drafters(costs, &drafter_speeds(self.config)),
            optimizer: SimOptimizer::new(costs, 0.0),
            source: Arc::new(SimSource { lengths: self.lengths }),
            ledger: MemoryLedger::default(),
            records: self.records,
        };
        pipeline::run_with_control(self.settings, parts, inbox, Shutdown::default()).await
    }
}

async fn collect(mut records: mpsc::Receiver<StepRecord>) -> Vec<StepRecord> {
    let mut steps = Vec::new();
    while let Some(record) = records.recv().await {
        steps.push(record);
    }
    steps
}

/// Target that records the start of its last job, which is the start of the drain.
struct TimedTarget {
    target: SimTarget,
    born: Instant,
    /// Nanoseconds after `born`, shared by all targets.
    last_lease: Arc<AtomicU64>,
}

impl TargetEngine for TimedTarget {
    type Features = SimFeatures;

    fn expected_shape(&self, batch: &PaddedBatch) -> FeatureShape {
        self.target.expected_shape(batch)
    }

    fn feature_bytes(&self, batch: &PaddedBatch) -> u64 {
        self.target.feature_bytes(batch)
    }

    async fn extract(&mut self, batch: Arc<PaddedBatch>) -> Result<SimFeatures, EngineError> {
        self.last_lease.fetch_max(self.born.elapsed().as_nanos() as u64, Ordering::Relaxed);
        self.target.extract(batch).await
    }

    async fn restart(&mut self) -> Result<(), EngineError> {
        self.target.restart().await
    }
}
