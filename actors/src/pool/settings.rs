//! Settings of the pool: limits, minimum fill, draw policy, and a check for deadlocks.

use serde::{Deserialize, Serialize};

/// Policy that chooses the batch for a draw.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DrawPolicy {
    /// Any batch, with equal probability.
    Uniform,
    /// A random batch of the bucket whose drawn share lags its planned share most.
    #[default]
    Proportional,
    /// The next batch of a fixed order ([`super::replay`]). The same batches form the same steps, regardless of timing
    /// and number of targets. A draw waits for that one batch; `min_ready` has no effect.
    Replay,
}

/// Settings of the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Limit on reserved, waiting and checked-out bytes together.
    pub max_bytes: u64,
    /// Limit on reserved and waiting batches together.
    pub max_batches: usize,
    /// Minimum of ready batches before a draw is answered, unless the pool drains.
    pub min_ready: usize,
    pub draw_policy: DrawPolicy,
    /// Jobs within which the order of policy `replay` is shuffled. It limits the undrawn jobs in flight.
    pub replay_window: usize,
    /// Steps already in the weights. The random draws of a resumed run have their own stream.
    pub start_step: u64,
    pub seed: u64,
}

/// Reason why settings could wait forever.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deadlock {
    /// One batch is larger than the whole pool.
    LargeBatch,
    /// The batch limit is lower than the batches that must be present at once.
    FewBatches,
    /// The batches that must be present at once need more bytes than the limit.
    FewBytes { needed: u128 },
}

impl Settings {
    /// Returns the reason why these settings could wait forever, if the largest batch has `largest` bytes.
    pub fn deadlock(&self, largest: u64) -> Option<Deadlock> {
        let needed = self.at_once() as u128 * u128::from(largest);
        if largest > self.max_bytes {
            Some(Deadlock::LargeBatch)
        } else if self.max_batches < self.at_once() {
            Some(Deadlock::FewBatches)
        } else {
            (needed > u128::from(self.max_bytes)).then_some(Deadlock::FewBytes { needed })
        }
    }

    /// Returns the batches that must be present at once, whatever their size. Nothing leaves while fewer than
    /// `min_ready` are ready. With policy `replay` nothing leaves until the wanted batch is present, which may be the
    /// last of the window.
    pub fn at_once(&self) -> usize {
        self.window().unwrap_or(self.min_ready).max(1)
    }

    /// Returns the limit on undrawn jobs in flight, if there is one.
    pub fn window(&self) -> Option<usize> {
        (self.draw_policy == DrawPolicy::Replay).then_some(self.replay_window.max(1))
    }
}
