//! Now and then the drafters' replicas are compared with the weights that they were given, by checksums of their bits.
//!
//! Every step gives every drafter the whole weights anew, so that no difference grows. What is looked for is a copy that went wrong
//! or memory that changed under it, which nothing else would tell.

use crate::{messages::engine::EngineError, runtime::metrics as m, trainer::Settings};
use metrics::{Counter, counter};

/// Whether the replicas with which a step was trained are compared.
pub(crate) fn is_due(settings: &Settings, step: u64) -> bool {
    let every = settings.replica_check_every;
    settings.drafters > 1 && every > 0 && step.is_multiple_of(every)
}

/// A checksum that could be had. One that could not costs its comparison and nothing else.
pub(crate) fn available(who: &str, checksum: Result<Option<u64>, EngineError>) -> Option<u64> {
    checksum.unwrap_or_else(|error| {
        tracing::warn!("the weights of the {who} could not be compared with the others': {error}");
        None
    })
}

/// The replica_check so far.
pub(crate) struct ReplicaCheck {
    same: Counter,
    different: Counter,
}

impl ReplicaCheck {
    pub(crate) fn new() -> Self {
        let of = |result| counter!(m::REPLICA_CHECKS, "result" => result);
        Self { same: of("same"), different: of("different") }
    }

    /// Holds what each drafter had while it trained `step` to what it had been given.
    pub(crate) fn compare(&self, step: u64, found: &[(usize, u64)], given: u64) {
        for &(drafter, checksum) in found {
            if checksum == given {
                self.same.increment(1);
                continue;
            }
            self.different.increment(1);
            tracing::error!(
                drafter,
                step,
                "drafter {drafter} did not train step {step} with the weights that it was given: their checksum was {given:016x}, that of \
                 its replica is {checksum:016x}. Its gradient of this step is in the update; the weights are published to it anew now. A \
                 device or a copy between devices brings wrong values: run draftmill doctor, and take the device out \
                 (drafter.paused) if this comes again"
            );
        }
    }
}
