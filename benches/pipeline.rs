//! Jobs per second of the pipeline on two worker threads, with engines that cost nothing and the real ledger.

use crate::{
    free::{BYTES_PER_TOKEN, FreeDrafter, FreeOptimizer, FreeSource, FreeTarget},
    machine::{Failed, Outcome},
};
use draftmill::run_dir::db::StateDb;
use draftmill_actors::{
    dispatcher,
    pipeline::{self, Parts},
    planner::{
        self,
        buckets::optimal_bounds,
        plan::{JobOrder, PlanSettings},
    },
    pool::{self, DrawPolicy},
    runtime::{fault::Shutdown, random::stream_seed},
    simulated::normal,
    trainer,
};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use std::{path::Path, sync::Arc, time::Duration};
use tokio::{runtime::Runtime, sync::mpsc, time::Instant};

/// Scenario of a run; `pipeline.py` gets the same numbers.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// Number of samples. A job holds one to a few, so there are about `samples / 4` jobs.
    pub samples: usize,
    pub targets: usize,
    pub drafters: usize,
    pub accumulation: usize,
    pub buckets: usize,
    pub job_tokens: u32,
    pub max_batches: usize,
    pub min_ready: usize,
}

/// Result of a run.
#[derive(Clone, Copy, Debug)]
pub struct Measured {
    pub jobs: u64,
    pub seconds: f64,
}

impl Measured {
    pub fn jobs_per_second(&self) -> f64 {
        self.jobs as f64 / self.seconds
    }
}

/// Returns log-normal lengths between 1 and `longest`: the median is an eighth of `longest`, sigma is 0.9.
pub fn lengths(samples: usize, longest: u32) -> Arc<[u32]> {
    let mut rng = ChaCha8Rng::from_seed(stream_seed(1, "bench lengths", &[]));
    let median = f64::from(longest) / 8.0;
    (0..samples).map(|_| (median * (0.9 * normal(&mut rng)).exp()).clamp(1.0, f64::from(longest)) as u32).collect()
}

/// Runs one epoch, from lengths in memory to the last outcome on disk: planning, the plan on disk, every job, the last
/// checkpoint. `folder` gets `state.db` and must be empty. With `HOP`, padding and engines run on blocking threads.
pub fn run<const HOP: bool>(runtime: &Runtime, setup: &Setup, folder: &Path) -> Outcome<Measured> {
    let lengths = lengths(setup.samples, setup.job_tokens);
    let bounds = optimal_bounds(&lengths, setup.buckets);
    let source = FreeSource::<HOP> { lengths: lengths.clone() };
    let ledger = StateDb::open_or_create(folder).failed("open the ledger")?;
    let (records, mut recorded) = mpsc::channel(64);
    let parts = Parts {
        targets: (0..setup.targets).map(|_| FreeTarget::<HOP>).collect(),
        drafters: (0..setup.drafters).map(|_| FreeDrafter::<HOP>::default()).collect(),
        optimizer: FreeOptimizer::default(),
        source: Arc::new(source),
        ledger,
        records,
    };
    let settings = settings(setup, lengths, bounds);
    let (report, seconds) = runtime.block_on(async {
        let reading = tokio::spawn(async move { while recorded.recv().await.is_some() {} });
        let born = Instant::now();
        let report =
            tokio::spawn(pipeline::run(settings, parts, Shutdown::default())).await.failed("run the pipeline")?;
        let seconds = born.elapsed().as_secs_f64();
        reading.await.failed("read the step records")?;
        Ok::<_, String>((report.failed("run the pipeline")?, seconds))
    })?;
    let counts = report.ledger.ok_or("the ledger was lost")?.counts().failed("count the outcomes")?;
    let (jobs, trained) = counts.iter().fold((0, 0), |(jobs, trained), c| (jobs + c.jobs, trained + c.trained));
    if report.jobs.trained != jobs || trained != jobs {
        return Err(format!("{} jobs were trained and {trained} recorded of {jobs}", report.jobs.trained));
    }
    Ok(Measured { jobs, seconds })
}

fn settings(setup: &Setup, lengths: Arc<[u32]>, bounds: Vec<u32>) -> pipeline::Settings {
    pipeline::Settings {
        planner: planner::Settings {
            plan: PlanSettings { seed: 1, job_tokens: setup.job_tokens, order: JobOrder::Spread, bounds },
            lengths,
            epochs: 1,
            epoch_barrier: false,
            max_skip_fraction: 0.0,
        },
        dispatcher: dispatcher::Settings {
            queue_jobs: 64,
            pad_ahead: 4,
            max_attempts: 3,
            straggler_factor: 5.0,
            offer_stragglers: true,
            paused: false,
            paused_targets: Vec::new(),
        },
        pool: pool::Settings {
            max_bytes: setup.max_bytes(),
            max_batches: setup.max_batches,
            min_ready: setup.min_ready,
            draw_policy: DrawPolicy::Proportional,
            replay_window: 1,
            start_step: 0,
            seed: 1,
        },
        trainer: trainer::Settings {
            drafters: setup.drafters,
            accumulation: setup.accumulation,
            learning_rate: Arc::new(|_| 1e-3),
            max_grad_norm: 1.0,
            weight_decay: 0.0,
            paused: Vec::new(),
            anchors: 1,
            start_micro_batches: 0,
            start_step: 0,
            max_steps: 0,
            checkpoint_every: 0,
            replica_check_every: 0,
        },
        prefetch: 1,
        max_failures_in_a_row: 5,
        max_restarts: 5,
        restart_pause: Duration::from_secs(1),
        fail_at_poll: None,
        grace: Duration::from_secs(10),
    }
}

impl Setup {
    /// Pool bytes for `max_batches` of the largest batches, so that the count is the limit.
    pub fn max_bytes(&self) -> u64 {
        self.max_batches as u64 * u64::from(self.job_tokens) * BYTES_PER_TOKEN
    }
}
