//! Settings of a whole pipeline, from which each actor's settings follow.

use crate::{
    dispatcher, drafter,
    planner::{
        self,
        buckets::optimal_bounds,
        plan::{JobOrder, PlanSettings},
    },
    pool,
    runtime::fault::FailAtPoll,
    target, trainer,
};
use std::{sync::Arc, time::Duration};

/// Settings of a run.
#[derive(Clone)]
pub struct Settings {
    pub planner: planner::Settings,
    pub dispatcher: dispatcher::Settings,
    pub pool: pool::Settings,
    pub trainer: trainer::Settings,
    /// Batches that a drafter holds in addition to the one in work.
    pub prefetch: usize,
    /// Failures in a row after which a target goes out of service and is restarted, and after which a drafter stops the
    /// run.
    pub max_failures_in_a_row: u32,
    /// Failed restarts after which a target has failed permanently. When all targets have, the run stops with the first
    /// one's cause.
    pub max_restarts: u32,
    /// Pause before the first restart of a target; each further one doubles it.
    pub restart_pause: Duration,
    /// Time for actors to end after an abort.
    pub grace: Duration,
    /// Injected fault, for tests.
    pub fail_at_poll: Option<FailAtPoll>,
}

impl Settings {
    /// Returns settings of a small run over samples of these lengths, as a base for tests and benches.
    pub fn for_test(lengths: impl Into<Arc<[u32]>>) -> Self {
        let lengths = lengths.into();
        let plan =
            PlanSettings { seed: 1, job_tokens: 1000, order: JobOrder::Spread, bounds: optimal_bounds(&lengths, 4) };
        Self {
            planner: planner::Settings { plan, lengths, epochs: 1, epoch_barrier: false, max_skip_fraction: 0.0 },
            dispatcher: dispatcher::Settings {
                queue_jobs: 8,
                pad_ahead: 2,
                max_attempts: 3,
                straggler_factor: 4.0,
                offer_stragglers: true,
                paused: false,
                paused_targets: Vec::new(),
            },
            pool: pool::Settings {
                max_bytes: 1 << 20,
                max_batches: 16,
                min_ready: 4,
                draw_policy: pool::DrawPolicy::Proportional,
                replay_window: 16,
                start_step: 0,
                seed: 7,
            },
            trainer: trainer::Settings {
                drafters: 2,
                accumulation: 2,
                paused: Vec::new(),
                anchors: 1,
                learning_rate: Arc::new(|_| 1e-3),
                max_grad_norm: 1.0,
                weight_decay: 0.0,
                start_step: 0,
                start_micro_batches: 0,
                max_steps: 0,
                checkpoint_every: 0,
                replica_check_every: 0,
            },
            prefetch: 1,
            max_failures_in_a_row: 5,
            max_restarts: 3,
            restart_pause: Duration::from_secs(1),
            grace: Duration::from_secs(10),
            fail_at_poll: None,
        }
    }

    pub(crate) fn of_targets(&self) -> target::Settings {
        let &Settings { max_failures_in_a_row, max_restarts, restart_pause, .. } = self;
        target::Settings { max_failures_in_a_row, max_restarts, restart_pause }
    }

    pub(crate) fn of_drafters(&self) -> drafter::Settings {
        drafter::Settings {
            prefetch: self.prefetch,
            max_attempts: self.dispatcher.max_attempts,
            max_failures_in_a_row: self.max_failures_in_a_row,
            paused: self.trainer.paused.clone(),
        }
    }
}
