//! Test world: a whole pipeline with simulated engines on paused time, and settings that break one part of it.

use crate::slow_checkpoints::SlowCheckpoints;
use draftmill_actors::{
    dispatcher,
    messages::{
        engine::{DraftEngine, EngineError, FeatureShape, MicroFailure, MicroReport, TargetEngine},
        types::{JobId, Outcome, PaddedBatch},
    },
    pipeline::{self, ControlHandle, Parts, Report},
    planner::{
        self,
        ledger::{Ledger, MemoryLedger},
        plan::{JobOrder, PlanSettings},
    },
    pool,
    runtime::fault::{FailAtPoll, Fault, Shutdown},
    simulated::{CostModel, SimDrafter, SimFeatures, SimOptimizer, SimSource, SimTarget},
    trainer::{self, StepRecord},
};
use std::{
    collections::BTreeMap,
    collections::HashMap,
    future::Future,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::{sync::mpsc, time::Instant};

/// Settings of the world; the defaults are a small healthy node.
#[derive(Clone)]
pub struct World {
    pub lengths: Vec<u32>,
    pub job_tokens: u32,
    /// Longest sample of each bucket; empty selects four optimal buckets.
    pub bounds: Vec<u32>,
    pub order: JobOrder,
    pub targets: Vec<Breakage>,
    pub drafters: Vec<Breakage>,
    pub costs: CostModel,
    pub accumulation: usize,
    pub epochs: u32,
    pub epoch_barrier: bool,
    pub max_steps: u64,
    pub checkpoint_every: u64,
    pub max_attempts: u32,
    pub max_skip_fraction: f64,
    pub max_failures_in_a_row: u32,
    pub max_restarts: u32,
    pub straggler_factor: f64,
    pub offer_stragglers: bool,
    pub fail_at_poll: Option<FailAtPoll>,
    pub pool: pool::Settings,
    pub queue_jobs: usize,
    pub pad_ahead: usize,
    pub prefetch: usize,
    /// Duration of the write of a checkpoint.
    pub checkpoint_takes: Duration,
    pub replica_check_every: u64,
    /// Steps whose checkpoint fails, each once.
    pub bad_checkpoints: Vec<u64>,
    /// Time of an orderly stop.
    pub stop_at: Option<Duration>,
    /// Time of a shutdown that trains the pool.
    pub close_at: Option<Duration>,
    pub abort_at: Option<Duration>,
    /// Counters of the jobs that each target extracted.
    pub counts: Vec<Arc<AtomicU64>>,
    /// Script that controls the run.
    pub control: Option<ControlScript>,
    /// Keeps only the last record.
    pub forgetful: bool,
}

/// Controls a pipeline that began with these settings, for as long as it runs.
pub type ControlScript =
    Arc<dyn Fn(ControlHandle, pipeline::Settings) -> Pin<Box<dyn Future<Output = ()> + Send>> + Send + Sync>;

/// Misbehaviour of an engine.
#[derive(Clone, Default)]
pub struct Breakage {
    pub slowness: Option<f64>,
    /// Does this in every n-th unit of work (1-based).
    pub every: Option<(u64, Wrong)>,
    /// A drafter cannot train the jobs whose index is 3 modulo this, on any attempt.
    pub poison: Option<u32>,
    /// A target cannot extract the jobs whose real tokens are 3 modulo this, on any attempt.
    pub indigestible: Option<u64>,
    /// Limit on the failures that one engine causes for a job. Without it, turns can fall on one job forever.
    pub mercy: Option<u32>,
    /// Ends the misbehaviour after this unit of work.
    pub until: Option<u64>,
    /// Corrupts every n-th copy of a drafter's weights.
    pub garbles: Option<u64>,
    /// Restarts that fail before one succeeds.
    pub bad_restarts: u32,
}

#[derive(Clone, Copy, PartialEq)]
pub enum Wrong {
    Fail,
    Lose,
    LoseFeatures,
    Nan,
    Short,
    Panic,
    /// A panic that does not appear in the test's output.
    QuietPanic,
    Hang,
}

impl Default for World {
    fn default() -> Self {
        Self {
            lengths: (0..400).map(|i| 10 + (i * 37) % 300).collect(),
            job_tokens: 1000,
            bounds: Vec::new(),
            order: JobOrder::Spread,
            targets: vec![Breakage::default(); 3],
            drafters: vec![Breakage::default(); 2],
            costs: CostModel { taps: 2, hidden_size: 8, ..CostModel::default() },
            accumulation: 2,
            epochs: 1,
            epoch_barrier: false,
            max_steps: 0,
            checkpoint_every: 0,
            replica_check_every: 1,
            max_attempts: 3,
            max_skip_fraction: 0.0,
            max_failures_in_a_row: 5,
            max_restarts: 3,
            straggler_factor: 4.0,
            offer_stragglers: true,
            fail_at_poll: None,
            pool: pipeline::Settings::for_test([]).pool,
            queue_jobs: 8,
            pad_ahead: 2,
            prefetch: 1,
            checkpoint_takes: Duration::ZERO,
            bad_checkpoints: Vec::new(),
            stop_at: None,
            close_at: None,
            abort_at: None,
            counts: Vec::new(),
            control: None,
            forgetful: false,
        }
    }
}

/// Outcome of a run.
pub struct Outcomes<L = MemoryLedger> {
    pub result: Result<Report<L>, Fault>,
    pub records: Vec<StepRecord>,
    /// Virtual duration.
    pub took: Duration,
}

impl<L> Outcomes<L> {
    /// Returns the report of a run that must have succeeded.
    pub fn report(&self) -> &Report<L> {
        match &self.result {
            Ok(report) => report,
            Err(fault) => panic!("the run failed: {fault}"),
        }
    }
}

impl Outcomes {
    pub fn ledger(&self) -> &MemoryLedger {
        self.report().ledger.as_ref().expect("the planner returns its ledger")
    }

    pub fn outcomes(&self) -> &BTreeMap<JobId, Outcome> {
        &self.ledger().outcomes
    }

    pub fn fault(&self) -> &Fault {
        match &self.result {
            Ok(_) => panic!("the run should have failed"),
            Err(fault) => fault,
        }
    }
}

impl World {
    /// Runs to the end under paused time; a limit of virtual days detects a hang.
    pub fn run(self) -> Outcomes {
        self.run_with(MemoryLedger::default(), 0)
    }

    pub fn run_with<L: Ledger>(self, ledger: L, start_step: u64) -> Outcomes<L> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(self.go(ledger, start_step))
    }

    /// Runs for this time, then aborts. Returns the jobs that each target extracted.
    pub fn run_for(self, time: Duration) -> Vec<u64> {
        let counts: Vec<_> = self.targets.iter().map(|_| Arc::new(AtomicU64::new(0))).collect();
        let world = World { counts: counts.clone(), abort_at: Some(time), ..self };
        let ended = world.run();
        assert!(ended.result.is_err(), "the run should have been aborted");
        counts.iter().map(|c| c.load(Ordering::Relaxed)).collect()
    }

    async fn go<L: Ledger>(self, ledger: L, start_step: u64) -> Outcomes<L> {
        let bounds = match self.bounds.is_empty() {
            true => draftmill_actors::planner::buckets::optimal_bounds(&self.lengths, 4),
            false => self.bounds.clone(),
        };
        let lengths: Arc<[u32]> = self.lengths.clone().into();
        let base = pipeline::Settings::for_test(lengths.clone());
        let settings = pipeline::Settings {
            planner: planner::Settings {
                plan: PlanSettings { job_tokens: self.job_tokens, order: self.order, bounds, ..base.planner.plan },
                epochs: self.epochs,
                epoch_barrier: self.epoch_barrier,
                max_skip_fraction: self.max_skip_fraction,
                ..base.planner
            },
            dispatcher: dispatcher::Settings {
                queue_jobs: self.queue_jobs,
                pad_ahead: self.pad_ahead,
                max_attempts: self.max_attempts,
                straggler_factor: self.straggler_factor,
                offer_stragglers: self.offer_stragglers,
                ..base.dispatcher
            },
            pool: pool::Settings { start_step, ..self.pool },
            trainer: trainer::Settings {
                drafters: self.drafters.len(),
                accumulation: self.accumulation,
                start_micro_batches: start_step * (self.drafters.len() * self.accumulation) as u64,
                start_step,
                max_steps: self.max_steps,
                checkpoint_every: self.checkpoint_every,
                replica_check_every: self.replica_check_every,
                ..base.trainer
            },
            prefetch: self.prefetch,
            max_failures_in_a_row: self.max_failures_in_a_row,
            max_restarts: self.max_restarts,
            fail_at_poll: self.fail_at_poll.clone(),
            ..base
        };
        let (records, mut recorded) = mpsc::channel(16);
        let slow = |b: &Breakage| b.slowness.unwrap_or(1.0);
        let parts = Parts {
            targets: self
                .targets
                .iter()
                .enumerate()
                .map(|(i, b)| BreakableTarget::new(self.costs, slow(b), b.clone(), self.counts.get(i).cloned()))
                .collect(),
            drafters: self.drafters.iter().map(|b| BreakableDrafter::new(self.costs, slow(b), b.clone())).collect(),
            optimizer: SlowCheckpoints {
                inner: SimOptimizer::new(self.costs, 0.0),
                takes: self.checkpoint_takes,
                bad: self.bad_checkpoints.clone(),
            },
            source: Arc::new(SimSource { lengths }),
            ledger,
            records,
        };
        let shutdown = Shutdown::default();
        let started = Instant::now();
        let (handle, controlled) = ControlHandle::new(&settings);
        let handle = self.control.clone().map(|control| tokio::spawn(control(handle, settings.clone())));
        let run = tokio::spawn(pipeline::run_with_control(settings, parts, controlled, shutdown.clone()));
        let tokens =
            [(self.close_at, &shutdown.drain), (self.stop_at, &shutdown.stop), (self.abort_at, &shutdown.abort)];
        for (after, token) in tokens {
            let (Some(after), token) = (after, token.clone()) else { continue };
            tokio::spawn(async move {
                tokio::time::sleep(after).await;
                token.cancel();
            });
        }
        let collect = tokio::spawn(async move {
            let mut all = Vec::new();
            while let Some(record) = recorded.recv().await {
                if self.forgetful {
                    all.clear();
                }
                all.push(record);
            }
            all
        });
        let days = Duration::from_secs(10 * 24 * 3600);
        let result = tokio::time::timeout(days, run).await.expect("the run hangs").expect("the pipeline panicked");
        let took = started.elapsed();
        if let Some(handle) = handle {
            handle.abort();
            if let Err(error) = handle.await {
                assert!(error.is_cancelled(), "the control script panicked: {error}");
            }
        }
        Outcomes { result, records: collect.await.unwrap(), took }
    }
}

struct Trouble {
    breakage: Breakage,
    count: u64,
    struck: HashMap<JobId, u32>,
}

impl Trouble {
    fn new(breakage: Breakage) -> Self {
        Self { breakage, count: 0, struck: HashMap::new() }
    }

    async fn strike(&mut self, job: JobId) -> Option<Wrong> {
        self.count += 1;
        let (n, wrong) = self.breakage.every?;
        if !self.count.is_multiple_of(n) || self.breakage.until.is_some_and(|last| self.count > last) {
            return None;
        }
        let struck = self.struck.entry(job).or_default();
        if self.breakage.mercy.is_some_and(|most| *struck >= most) {
            return None;
        }
        *struck += 1;
        match wrong {
            Wrong::Panic => panic!("the engine panicked on purpose"),
            Wrong::QuietPanic => std::panic::resume_unwind(Box::new("the engine panicked on purpose")),
            Wrong::Hang => std::future::pending().await,
            other => Some(other),
        }
    }
}

/// Simulated target that can misbehave.
pub struct BreakableTarget {
    inner: SimTarget,
    trouble: Trouble,
    /// True until a restart.
    lost: bool,
    count: Option<Arc<AtomicU64>>,
}

impl BreakableTarget {
    fn new(costs: CostModel, slowness: f64, breakage: Breakage, count: Option<Arc<AtomicU64>>) -> Self {
        Self { inner: SimTarget::new(costs, slowness), trouble: Trouble::new(breakage), lost: false, count }
    }
}

impl TargetEngine for BreakableTarget {
    type Features = SimFeatures;

    fn expected_shape(&self, batch: &PaddedBatch) -> FeatureShape {
        self.inner.expected_shape(batch)
    }

    fn feature_bytes(&self, batch: &PaddedBatch) -> u64 {
        self.inner.feature_bytes(batch)
    }

    async fn extract(&mut self, batch: Arc<PaddedBatch>) -> Result<SimFeatures, EngineError> {
        if self.lost {
            return Err(EngineError::Lost("the device is still off the bus".into()));
        }
        self.lost = true; // should it panic
        let wrong = self.trouble.strike(batch.job).await;
        self.lost = wrong == Some(Wrong::Lose);
        let indigestible = self.trouble.breakage.indigestible.is_some_and(|n| batch.tokens() % n == 3);
        let mut features = self.inner.extract(batch).await?;
        if let Some(count) = &self.count {
            count.fetch_add(1, Ordering::Relaxed);
        }
        if indigestible {
            return Err(EngineError::Failed("indigestible".into()));
        }
        match wrong {
            Some(Wrong::Fail) => return Err(EngineError::Failed("out of luck".into())),
            Some(Wrong::Lose) => return Err(EngineError::Lost("the device fell off the bus".into())),
            Some(Wrong::Nan) => features.finite = false,
            Some(Wrong::Short) => features.shape.tokens -= 1,
            _ => {}
        }
        Ok(features)
    }

    async fn restart(&mut self) -> Result<(), EngineError> {
        if self.trouble.breakage.bad_restarts > 0 {
            self.trouble.breakage.bad_restarts -= 1;
            return Err(EngineError::Failed("no answer to the probe".into()));
        }
        self.lost = false;
        self.inner.restart().await
    }
}

/// Simulated drafter that can misbehave.
pub struct BreakableDrafter {
    inner: SimDrafter,
    trouble: Trouble,
    loads: u64,
}

impl BreakableDrafter {
    fn new(costs: CostModel, slowness: f64, breakage: Breakage) -> Self {
        Self { inner: SimDrafter::new(costs, slowness), trouble: Trouble::new(breakage), loads: 0 }
    }
}

impl DraftEngine for BreakableDrafter {
    type Features = SimFeatures;
    type Gradient = f64;
    type Weights = f64;

    async fn micro_batch(
        &mut self,
        job: JobId,
        features: SimFeatures,
    ) -> Result<MicroReport, MicroFailure<SimFeatures>> {
        let failed = |error| Err(MicroFailure { error, features: Some(features) });
        if self.trouble.breakage.poison.is_some_and(|n| job.index % n == 3) {
            return failed(EngineError::Failed("poison".into()));
        }
        let struck = self.trouble.strike(job).await;
        match struck {
            Some(Wrong::Fail) => {
                // In the middle of the work: by then the next batch has been drawn.
                let seconds = self.inner.costs.seconds_per_micro_batch * self.inner.slowness;
                tokio::time::sleep(Duration::from_secs_f64(seconds / 2.0)).await;
                return failed(EngineError::Failed("out of luck".into()));
            }
            Some(Wrong::LoseFeatures) => {
                return Err(MicroFailure { error: EngineError::Failed("out of luck".into()), features: None });
            }
            Some(Wrong::Lose) => return failed(EngineError::Lost("the device fell off the bus".into())),
            _ => {}
        }
        let mut report = self.inner.micro_batch(job, features).await?;
        if job.index.is_multiple_of(17) {
            // A batch without a valid anchor: nothing to train, and no hang (Automodel#2468).
            report = MicroReport { tokens: report.tokens, ..MicroReport::default() };
        }
        if struck == Some(Wrong::Nan) {
            report.loss_numerator = f64::NAN;
        }
        Ok(report)
    }

    async fn take_gradient(&mut self) -> Result<Option<f64>, EngineError> {
        self.inner.take_gradient().await
    }

    async fn load_weights(&mut self, weights: f64) -> Result<(), EngineError> {
        self.loads += 1;
        let wrong = self.trouble.breakage.garbles.is_some_and(|every| self.loads.is_multiple_of(every));
        self.inner.load_weights(if wrong { 0.0 } else { weights }).await
    }

    async fn checksum(&mut self) -> Result<Option<u64>, EngineError> {
        self.inner.checksum().await
    }
}
