//! Replica check: compares the drafters' weights with the published ones by checksums, every few steps.
//!
//! Each step publishes the whole weights to every drafter, so a difference cannot grow. The check detects a faulty
//! copy, or memory that changed, which has no other symptom.

use super::messages::Settings;
use crate::{messages::engine::EngineError, runtime::metrics as m};
use metrics::{Counter, counter};

/// Returns true if the replicas that train `step` are compared.
pub(crate) fn is_due(settings: &Settings, step: u64) -> bool {
    let every = settings.replica_check_every;
    settings.drafters > 1 && every > 0 && step.is_multiple_of(every)
}

/// Returns the checksum, if it could be computed. A failure costs this comparison only.
pub(crate) fn available(who: &str, checksum: Result<Option<u64>, EngineError>) -> Option<u64> {
    checksum.unwrap_or_else(|error| {
        tracing::warn!(who, %error, "replica check failed");
        None
    })
}

/// Counters of the comparisons.
pub(crate) struct ReplicaCheck {
    same: Counter,
    different: Counter,
}

impl ReplicaCheck {
    pub(crate) fn new() -> Self {
        let of = |result| counter!(m::REPLICA_CHECKS, "result" => result);
        Self { same: of("same"), different: of("different") }
    }

    /// Compares the weights of each drafter while it trained `step` with the published ones.
    pub(crate) fn compare(&self, step: u64, found: &[(usize, u64)], given: u64) {
        for &(drafter, checksum) in found {
            if checksum == given {
                self.same.increment(1);
                continue;
            }
            self.different.increment(1);
            // The gradient of this step is in the update, and the drafter now gets the published weights again.
            tracing::error!(
                drafter,
                step,
                expected = format_args!("{given:016x}"),
                found = format_args!("{checksum:016x}"),
                advice = "run draftmill doctor; pause the drafter (drafter.paused) if this recurs",
                "replica differs from the published weights"
            );
        }
    }
}
