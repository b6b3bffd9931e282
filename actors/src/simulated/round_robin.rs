//! Round-robin assignment of jobs to targets, to compare pulling with.
//!
//! Each of n targets has every n-th job and a separate queue of `depth` jobs. The next job therefore waits for its target
//! while others idle. The dispatcher has no such policy: a target that is ahead of its turn is paused through the
//! pipeline's control handle.

use crate::{
    messages::{
        engine::{EngineError, FeatureShape, TargetEngine},
        types::{JobId, PaddedBatch},
    },
    pipeline::{self, ControlHandle},
    planner::plan::{PlanError, plan_epoch},
};
use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU64, Ordering},
};

/// Wraps targets so that they take the jobs in turns. `control` and `settings` belong to the pipeline that runs them.
///
/// # Errors
///
/// Fails if the settings give no plan.
pub fn round_robin<T>(
    targets: Vec<T>,
    depth: usize,
    control: ControlHandle,
    settings: pipeline::Settings,
) -> Result<Vec<RoundRobin<T>>, PlanError> {
    let planner = &settings.planner;
    let unstarted = |epoch| -> Result<Vec<AtomicBool>, PlanError> {
        let plan = plan_epoch(&planner.lengths, &planner.plan, epoch)?;
        Ok(plan.jobs.iter().map(|_| AtomicBool::new(false)).collect())
    };
    let turns = Turns {
        jobs: (0..planner.epochs).map(unstarted).collect::<Result<_, _>>()?,
        started: targets.iter().map(|_| AtomicU64::new(0)).collect(),
        depth: depth as u64,
        control,
        settings,
    };
    let turns = Arc::new(turns);
    let wrap = |(index, target)| RoundRobin { target, index, turns: turns.clone() };
    Ok(targets.into_iter().enumerate().map(wrap).collect())
}

/// Target that takes its jobs in turn with others.
pub struct RoundRobin<T> {
    target: T,
    index: usize,
    turns: Arc<Turns>,
}

struct Turns {
    /// Marks the jobs that were started, by epoch and index in the plan.
    jobs: Vec<Vec<AtomicBool>>,
    /// Jobs that each target started first. A retry counts for no target.
    started: Vec<AtomicU64>,
    depth: u64,
    control: ControlHandle,
    settings: pipeline::Settings,
}

impl Turns {
    /// Records that `target` starts a job, and pauses every target whose next job is not in its queue.
    fn start(&self, target: usize, job: JobId) {
        if self.jobs[job.epoch as usize][job.index as usize].swap(true, Ordering::Relaxed) {
            return;
        }
        self.started[target].fetch_add(1, Ordering::Relaxed);
        let mut settings = self.settings.clone();
        settings.dispatcher.paused_targets = (0..self.started.len()).filter(|&target| !self.may_pull(target)).collect();
        self.control.change(&settings);
    }

    /// Returns true if the next job of `target` exists and every job before it was started or fits into its target's queue. Once
    /// all jobs were started, any target may retry one.
    fn may_pull(&self, target: usize) -> bool {
        let started = |target: usize| self.started[target].load(Ordering::Relaxed);
        let (targets, next) = (self.started.len(), started(target));
        let jobs = self.jobs.iter().map(|epoch| epoch.len() as u64).sum::<u64>();
        if (0..targets).map(started).sum::<u64>() == jobs {
            return true;
        }
        let fits = |other: usize| next + u64::from(other < target) <= started(other) + self.depth;
        next * targets as u64 + (target as u64) < jobs && (0..targets).all(fits)
    }
}

impl<T: TargetEngine> TargetEngine for RoundRobin<T> {
    type Features = T::Features;

    fn expected_shape(&self, batch: &PaddedBatch) -> FeatureShape {
        self.target.expected_shape(batch)
    }

    fn feature_bytes(&self, batch: &PaddedBatch) -> u64 {
        self.target.feature_bytes(batch)
    }

    async fn extract(&mut self, batch: Arc<PaddedBatch>) -> Result<Self::Features, EngineError> {
        self.turns.start(self.index, batch.job);
        self.target.extract(batch).await
    }

    async fn restart(&mut self) -> Result<(), EngineError> {
        self.target.restart().await
    }
}
