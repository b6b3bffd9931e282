//! What the actors of a run are told, real or simulated: from the configuration and the forecast of its plan.

use super::{MAX_FAILURES_IN_A_ROW, Schedule};
use crate::{
    check::Forecast,
    config::{Config, pool_settings},
};
use draftmill_actors::{dispatcher, mill, plan::PlanSettings, planner, trainer};
use std::sync::Arc;

/// What shapes the plans of every epoch.
pub(crate) fn plan_settings(config: &Config, forecast: &Forecast) -> PlanSettings {
    PlanSettings {
        seed: config.run.seed,
        job_tokens: config.plan.job_tokens,
        order: config.plan.order,
        bounds: forecast.buckets.iter().map(|bucket| bucket.bound).collect(),
    }
}

/// The settings of every actor; `start_step` steps are in the weights already.
pub(crate) fn mill_settings(
    config: &Config,
    forecast: &Forecast,
    lengths: &Arc<[u32]>,
    start_step: u64,
) -> mill::Settings {
    let schedule = Schedule::new(&config.optimizer, forecast.steps);
    mill::Settings {
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
            paused_targets: Vec::new(),
        },
        pool: pool_settings(config, forecast.largest_job_bytes, start_step),
        trainer: trainer::Settings {
            drafters: config.drafter.devices.len(),
            accumulation: config.optimizer.accumulation as usize,
            learning_rate: Arc::new(move |step| schedule.at(step)),
            max_grad_norm: config.optimizer.max_grad_norm,
            weight_decay: 0.0,
            paused: Vec::new(),
            anchors: 1,
            start_micro_batches: start_step * (self.drafters.len() * self.accumulation) as u64,
            start_step,
            max_steps: config.run.max_steps.unwrap_or(0),
            checkpoint_every: config.checkpoint.every_steps,
        },
        prefetch: config.drafter.prefetch as usize,
        max_failures_in_a_row: MAX_FAILURES_IN_A_ROW,
        max_restarts: config.dispatch.max_restarts,
        restart_pause: config.dispatch.restart_pause.0,
        kill: None,
        grace: config.shutdown.grace.0,
    }
}
