//! What a running service tells of itself beyond its metrics: one value that the service changes and the admin port reads.

use serde::Serialize;
use std::{
    collections::VecDeque,
    time::{SystemTime, UNIX_EPOCH},
};

/// Reloads that are remembered.
const RELOADS: usize = 20;

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
    pub min_ready: u64,
    pub max_batches: u64,
    /// Hash of the configuration that is in force, and since when.
    pub config_hash: String,
    pub config_since: f64,
    /// The newest last.
    pub reloads: VecDeque<Reload>,
    pub paused: bool,
    /// A signal asked for the end.
    pub stopping: bool,
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

/// Now, in seconds since 1970.
pub fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
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
