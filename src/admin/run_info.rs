//! Run info: state of a run beyond its metrics. The service writes it, the admin port reads it.

use crate::run_dir::eval_log::EvalHistory;
use serde::Serialize;
use std::collections::VecDeque;

/// Limit of stored reloads.
const MAX_RELOADS: usize = 20;
/// Limit of points of the acceptance curve; the newest are published.
const MAX_POINTS: usize = 500;

/// Run info. Times are seconds since 1970.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct RunInfo {
    /// Number of this start in its run folder.
    pub run: u64,
    pub started: f64,
    /// Run folder.
    pub dir: String,
    /// "torch" or "simulated".
    pub engine: String,
    /// Estimated steps of the plan; changes with `optimizer.accumulation`.
    pub planned_steps: u64,
    pub epochs: u64,
    /// Hash of the configuration in force.
    pub config_hash: String,
    /// Start of its validity.
    pub config_since: f64,
    /// Newest last.
    pub reloads: VecDeque<Reload>,
    pub paused: bool,
    /// A signal requested the shutdown.
    pub stopping: bool,
    /// Results of the evaluations during training; `None` before the first.
    pub acceptance: Option<Acceptance>,
}

/// Acceptance of the drafter so far, in tokens per verification.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Acceptance {
    /// Newest acceptance in real decoding.
    pub decoded: Option<f64>,
    /// Best acceptance in real decoding.
    pub best: Option<f64>,
    pub best_step: Option<u64>,
    /// Acceptance that the accuracies on held-out samples predict.
    pub predicted: Option<f64>,
    /// Loss on held-out samples, in nats.
    pub loss: Option<f64>,
    /// Step of the newest evaluation.
    pub step: u64,
    /// Acceptance in real decoding, as `[step, tokens]`.
    pub curve: Vec<(u64, f64)>,
}

impl Acceptance {
    /// Acceptance from the evaluation log; `None` if it is empty.
    pub fn of(history: &EvalHistory) -> Option<Acceptance> {
        let step = history.0.last()?.step;
        let held_out = history.held_out().map(|(_, held_out)| held_out);
        let skip = history.curve().count().saturating_sub(MAX_POINTS);
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

/// Attempt to change the configuration of the running service.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Reload {
    pub at: f64,
    pub applied: bool,
    /// Changes, or the reason of the refusal.
    pub text: String,
}

impl RunInfo {
    /// Stores a reload and removes the oldest beyond the limit.
    pub fn add_reload(&mut self, reload: Reload) {
        if self.reloads.len() == MAX_RELOADS {
            self.reloads.pop_front();
        }
        self.reloads.push_back(reload);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stored_reloads_are_limited() {
        let mut info = RunInfo::default();
        for n in 0..MAX_RELOADS + 3 {
            info.add_reload(Reload { at: n as f64, applied: true, text: String::new() });
        }
        assert_eq!((info.reloads.len(), info.reloads[0].at), (MAX_RELOADS, 3.0));
    }
}
