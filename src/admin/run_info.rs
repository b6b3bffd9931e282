//! What a running service tells of itself beyond its metrics: one value that the service changes and the admin port reads.

use crate::run_dir::eval_log::History;
use serde::Serialize;
use std::collections::VecDeque;

/// Reloads that are remembered.
const RELOADS: usize = 20;
/// Points of the curve that are told, the newest.
const POINTS: usize = 500;

/// Facts of a run. Times are seconds since 1970.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Facts {
    /// Number of this start in its run folder.
    pub run: u64,
    pub started: f64,
    /// The run folder.
    pub dir: String,
    /// "torch" or "simulated".
    pub engine: String,
    /// Steps that the whole plan will take; the estimate changes with accumulation.
    pub planned_steps: u64,
    pub epochs: u64,
    /// Hash of the configuration that is in force, and since when.
    pub config_hash: String,
    pub config_since: f64,
    /// The newest last.
    pub reloads: VecDeque<Reload>,
    pub paused: bool,
    /// A signal asked for the end.
    pub stopping: bool,
    /// What was measured beside the steps; absent where nothing was yet.
    pub acceptance: Option<Acceptance>,
}

/// What the drafter is worth so far, in tokens per verification.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Acceptance {
    /// The newest measure in real decoding, and the best one with its step.
    pub decoded: Option<f64>,
    pub best: Option<f64>,
    pub best_step: Option<u64>,
    /// What the accuracies on held-out samples predict, and their loss in nats.
    pub predicted: Option<f64>,
    pub loss: Option<f64>,
    /// Step of the newest measure.
    pub step: u64,
    /// Acceptance in real decoding by step: `[step, tokens]`.
    pub curve: Vec<(u64, f64)>,
}

impl Acceptance {
    /// `None` where nothing was measured.
    pub fn of(history: &History) -> Option<Acceptance> {
        let step = history.0.last()?.step;
        let held_out = history.held_out().map(|(_, held_out)| held_out);
        let skip = history.curve().count().saturating_sub(POINTS);
        Some(Acceptance {
            decoded: history.curve().last().map(|(_, acceptance)| acceptance),
            best: history.best().map(|(_, acceptance)| acceptance),
            best_step: history.best().map(|(step, _)| step),
            predicted: held_out.and_then(|held_out| held_out.predicted_acceptance),
            loss: held_out.map(|held_out| held_out.loss),
            step,
            curve: history.curve().skip(skip).collect(),
        })
    }
}

/// One try to change the configuration of the running service.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Reload {
    pub at: f64,
    pub applied: bool,
    /// What changed, or why nothing did.
    pub text: String,
}

impl Facts {
    /// Remembers a reload, and forgets the oldest.
    pub fn reloaded(&mut self, reload: Reload) {
        if self.reloads.len() == RELOADS {
            self.reloads.pop_front();
        }
        self.reloads.push_back(reload);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_reload_is_forgotten() {
        let mut facts = Facts::default();
        for n in 0..RELOADS + 3 {
            facts.reloaded(Reload { at: n as f64, applied: true, text: String::new() });
        }
        assert_eq!((facts.reloads.len(), facts.reloads[0].at), (RELOADS, 3.0));
    }
}
