//! Cost of durability: the ledger's fraction of a step, and opening a run that has a million jobs.

use crate::machine::{Failed, Outcome, median};
use draftmill::run_dir::db::{NewRun, StateDb};
use draftmill_actors::{
    messages::types::{self, JobId},
    planner::{
        ledger::Ledger,
        plan::{JobOrder, Plan, PlanSettings, plan_epoch},
    },
};
use std::path::Path;
use tokio::time::Instant;

/// Jobs of a step on the node of `configs/sim-8gpu.toml`: 3 drafters that accumulate 4.
pub const JOBS_PER_STEP: u32 = 12;
const STEPS: u32 = 2_000;
const EPOCHS: u32 = 10;
const JOBS_PER_EPOCH: u32 = 100_000;

fn plan(jobs: u32, epoch: u32) -> Outcome<Plan> {
    // Eight samples fill a job, and both buckets get the same number.
    let lengths: Vec<u32> = (0..jobs * 8).map(|i| 10 + i % 2).collect();
    let settings = PlanSettings { seed: 1, job_tokens: 88, order: JobOrder::Spread, bounds: vec![10, 11] };
    plan_epoch(&lengths, &settings, epoch).failed("plan an epoch")
}

fn trained(jobs: impl Iterator<Item = u32>, epoch: u32, step: u64) -> Vec<(JobId, types::Outcome)> {
    jobs.map(|index| (JobId { epoch, index }, types::Outcome::Trained { step })).collect()
}

/// Measures the transaction that records the outcomes of one step. Returns mean and median in seconds.
pub fn record(folder: &Path) -> Outcome<(f64, f64)> {
    let mut state = StateDb::open_or_create(folder).failed("open the ledger")?;
    state.begin_run(&NewRun { epochs: 1, micro_batches: JOBS_PER_STEP.into(), ..NewRun::default() }).failed("begin")?;
    state.begin_epoch(&plan(STEPS * JOBS_PER_STEP, 0)?).failed("write a plan")?;
    let mut seconds = Vec::new();
    for step in 0..STEPS {
        let outcomes = trained(step * JOBS_PER_STEP..(step + 1) * JOBS_PER_STEP, 0, u64::from(step) + 1);
        let born = Instant::now();
        state.record(&outcomes).failed("record a step")?;
        seconds.push(born.elapsed().as_secs_f64());
    }
    Ok((seconds.iter().sum::<f64>() / f64::from(STEPS), median(seconds)))
}

/// Writes a run folder with a million jobs, nearly all of them trained. Returns the step of its last checkpoint.
pub fn million(folder: &Path) -> Outcome<u64> {
    let mut state = StateDb::open_or_create(folder).failed("open the ledger")?;
    state.begin_run(&NewRun { epochs: EPOCHS, ..NewRun::default() }).failed("begin")?;
    let mut step = 0;
    for epoch in 0..EPOCHS {
        let plan = plan(JOBS_PER_EPOCH, epoch)?;
        state.begin_epoch(&plan).failed("write a plan")?;
        for first in (0..JOBS_PER_EPOCH).step_by(JOBS_PER_STEP as usize) {
            step += 1;
            let jobs = first..(first + JOBS_PER_STEP).min(JOBS_PER_EPOCH);
            state.record(&trained(jobs, epoch, step)).failed("record a step")?;
        }
    }
    // State after a kill: the last thousand steps are in no checkpoint.
    let saved = step - 1_000;
    state.checkpoint(saved, &format!("step-{saved}")).failed("record a checkpoint")?;
    Ok(saved)
}

/// Opens the run to resume from `step`, and reopens and counts its jobs. Returns the seconds and the reopened jobs.
pub fn open(folder: &Path, step: u64) -> Outcome<(f64, usize)> {
    let born = Instant::now();
    let mut state = StateDb::open_or_create(folder).failed("open the ledger")?;
    let begun = state.begin_run(&NewRun { from: step, epochs: EPOCHS, ..NewRun::default() }).failed("begin")?;
    state.counts().failed("count the jobs")?;
    Ok((born.elapsed().as_secs_f64(), begun.reopened))
}
