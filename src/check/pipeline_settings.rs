//! Settings of the pipeline's actors, derived from the configuration and the forecast of its plan.

use super::lr_schedule::Schedule;
use crate::{
    check::Forecast,
    config::{Config, pool_settings},
};
use draftmill_actors::{
    dispatcher, pipeline,
    planner::{self, plan::PlanSettings},
    trainer,
};
use std::sync::Arc;

/// Consecutive failures after which a target or drafter counts as broken.
const MAX_FAILURES_IN_A_ROW: u32 = 5;

/// Returns the settings of every epoch's plan.
pub(crate) fn plan_settings(config: &Config, forecast: &Forecast) -> PlanSettings {
    PlanSettings {
        seed: config.run.seed,
        job_tokens: config.plan.job_tokens,
        order: config.plan.order,
        bounds: forecast.buckets.iter().map(|bucket| bucket.bound).collect(),
    }
}

/// Progress of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RunProgress {
    /// Optimizer steps that the weights contain.
    pub step: u64,
    /// Micro-batches of these steps.
    pub micro_batches: u64,
}

/// Returns the settings of all actors for a run at `progress`.
pub(crate) fn pipeline_settings(
    config: &Config,
    forecast: &Forecast,
    lengths: &Arc<[u32]>,
    progress: RunProgress,
) -> pipeline::Settings {
    let schedule = Schedule::new(&config.optimizer, scheduled_steps(config, forecast, progress));
    pipeline::Settings {
        planner: planner::Settings {
            plan: plan_settings(config, forecast),
            lengths: lengths.clone(),
            epochs: config.run.epochs,
            epoch_barrier: config.plan.epoch_barrier,
            max_skip_fraction: config.dispatch.max_skip_fraction,
        },
        dispatcher: dispatcher::Settings {
            queue_jobs: config.dispatch.queue_jobs as usize,
            pad_ahead: config.dispatch.pad_ahead as usize,
            max_attempts: config.dispatch.max_attempts,
            straggler_factor: config.dispatch.straggler_factor,
            offer_stragglers: config.dispatch.offer_stragglers,
            paused: false,
            paused_targets: config.target.paused.clone(),
        },
        pool: pool_settings(config, forecast.largest_job_bytes, progress.step),
        trainer: trainer::Settings {
            drafters: config.drafter.devices.len(),
            accumulation: config.optimizer.accumulation as usize,
            learning_rate: Arc::new(move |step| schedule.at(step)),
            max_grad_norm: config.optimizer.max_grad_norm,
            weight_decay: config.optimizer.weight_decay,
            paused: config.drafter.paused.clone(),
            anchors: config.drafter.anchors as usize,
            start_step: progress.step,
            start_micro_batches: progress.micro_batches,
            max_steps: config.run.max_steps.unwrap_or(0),
            checkpoint_every: config.checkpoint.every_steps,
            replica_check_every: config.drafter.replica_check_every,
        },
        prefetch: config.drafter.prefetch as usize,
        max_failures_in_a_row: MAX_FAILURES_IN_A_ROW,
        max_restarts: config.dispatch.max_restarts,
        restart_pause: config.dispatch.restart_pause.0,
        fail_at_poll: None,
        grace: config.shutdown.grace.0,
    }
}

/// Returns the steps of the learning rate schedule, as if every step had the current number of micro-batches.
fn scheduled_steps(config: &Config, forecast: &Forecast, progress: RunProgress) -> u64 {
    let per_step = config.micro_batches_per_step();
    let all = (forecast.jobs_per_epoch as u64 * u64::from(config.run.epochs)).div_ceil(per_step);
    let done = progress.micro_batches as f64 / per_step as f64;
    let limit = config.run.max_steps.map(|most| (most as f64 - progress.step as f64 + done).round().max(1.0) as u64);
    limit.map_or(all, |limit| limit.min(all))
}
