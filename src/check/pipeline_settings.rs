//! What the actors of a run are told, real or simulated: from the configuration and the forecast of its plan.

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

/// A target or drafter that fails this often in a row is broken, not its jobs.
const MAX_FAILURES_IN_A_ROW: u32 = 5;

/// What shapes the plans of every epoch.
pub(crate) fn plan_settings(config: &Config, forecast: &Forecast) -> PlanSettings {
    PlanSettings {
        seed: config.run.seed,
        job_tokens: config.plan.job_tokens,
        order: config.plan.order,
        bounds: forecast.buckets.iter().map(|bucket| bucket.bound).collect(),
    }
}

/// How far a run is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Place {
    /// Steps that are in the weights.
    pub step: u64,
    /// Their micro-batches.
    pub micro_batches: u64,
}

/// The settings of every actor of a run that stands at `place`.
pub(crate) fn mill_settings(
    config: &Config,
    forecast: &Forecast,
    lengths: &Arc<[u32]>,
    place: Place,
) -> pipeline::Settings {
    let schedule = Schedule::new(&config.optimizer, scheduled_steps(config, forecast, place));
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
            policy: dispatcher::Policy::Pull,
            paused: false,
            paused_targets: config.target.paused.clone(),
        },
        pool: pool_settings(config, forecast.largest_job_bytes, place.step),
        trainer: trainer::Settings {
            drafters: config.drafter.devices.len(),
            accumulation: config.optimizer.accumulation as usize,
            learning_rate: Arc::new(move |place| schedule.at(place)),
            max_grad_norm: config.optimizer.max_grad_norm,
            weight_decay: config.optimizer.weight_decay,
            paused: config.drafter.paused.clone(),
            anchors: config.drafter.anchors as usize,
            start_step: place.step,
            start_micro_batches: place.micro_batches,
            max_steps: config.run.max_steps.unwrap_or(0),
            checkpoint_every: config.checkpoint.every_steps,
            replica_check_every: config.drafter.replica_check_every,
        },
        prefetch: config.drafter.prefetch as usize,
        max_failures_in_a_row: MAX_FAILURES_IN_A_ROW,
        max_restarts: config.dispatch.max_restarts,
        restart_pause: config.dispatch.restart_pause.0,
        kill: None,
        grace: config.shutdown.grace.0,
    }
}

/// Steps over which the learning rate runs, counted as if every step had as many micro-batches as those that follow.
fn scheduled_steps(config: &Config, forecast: &Forecast, place: Place) -> u64 {
    let per_step = config.micro_batches_per_step();
    let all = (forecast.jobs_per_epoch as u64 * u64::from(config.run.epochs)).div_ceil(per_step);
    let done = place.micro_batches as f64 / per_step as f64;
    let limit = config.run.max_steps.map(|most| (most as f64 - place.step as f64 + done).round().max(1.0) as u64);
    limit.map_or(all, |limit| limit.min(all))
}
