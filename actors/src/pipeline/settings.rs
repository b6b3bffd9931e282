//! Settings of a whole pipeline, from which each actor's settings follow.

use crate::{dispatcher, drafter, planner, pool, runtime::fault::Kill, target, trainer};
use std::time::Duration;

/// What shapes a run.
#[derive(Clone)]
pub struct Settings {
    pub planner: planner::Settings,
    pub dispatcher: dispatcher::Settings,
    pub pool: pool::Settings,
    pub trainer: trainer::Settings,
    /// Batches that a drafter holds beside the one in work.
    pub prefetch: usize,
    /// Failures in a row after which a target is taken out and restarted, and after which a drafter stops the run.
    pub max_failures_in_a_row: u32,
    /// Restarts in vain after which a target is gone for good. When all are gone, the run stops with the first one's cause.
    pub max_restarts: u32,
    /// Pause before the first restart of a target; each further one doubles it.
    pub restart_pause: Duration,
    /// Time that actors have to end once the run is aborted.
    pub grace: Duration,
    /// For tests: ends one actor in the middle of its life.
    pub kill: Option<Kill>,
}

impl Settings {
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
