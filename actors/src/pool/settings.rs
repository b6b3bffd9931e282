//! What shapes the pool: its limits, its minimum fill, its draws, and when these could wait for ever.

use serde::{Deserialize, Serialize};

/// Which batch answers a draw.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DrawPolicy {
    /// Any batch, all equally likely.
    Uniform,
    /// The bucket whose share of what was drawn lags its share of the plan most; a random batch of it.
    #[default]
    Proportional,
    /// The next batch of an order that the plan fixes ([`super::replay`]): the same batches make the same steps whatever
    /// the timing and the number of targets. Waits for that one batch, whatever else is ready: `min_ready` has no part in it.
    Replay,
}

/// What shapes the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Bound on reserved, waiting and checked_out bytes together.
    pub max_bytes: u64,
    /// Bound on reserved and waiting batches together.
    pub max_batches: usize,
    /// No draw is answered while fewer batches are ready, unless draining.
    pub min_ready: usize,
    pub draw_policy: DrawPolicy,
    /// Draw `replay`: jobs among which the order is shuffled, and which may be under way before they are drawn.
    pub replay_window: usize,
    /// Steps that are in the weights already. Random draws of a run that goes on have a stream of their own.
    pub start_step: u64,
    pub seed: u64,
}

/// Why settings could wait for ever.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deadlock {
    /// One batch is larger than the whole pool.
    LargeBatch,
    /// Fewer batches may be held than have to be there at once.
    FewBatches,
    /// What has to be there at once needs so many bytes, more than may be held.
    FewBytes { needed: u128 },
}

impl Settings {
    /// Whether these settings could wait for ever when the largest batch has `largest` bytes, and why.
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

    /// Batches that have to be there at once, whatever their size. While fewer than `min_ready` are ready nothing leaves; in draw
    /// `replay` nothing leaves until the wanted batch is there, which may be the last of the window.
    pub fn at_once(&self) -> usize {
        self.window().unwrap_or(self.min_ready).max(1)
    }

    /// Jobs that may be under way before they are drawn, where that is limited.
    pub fn window(&self) -> Option<usize> {
        (self.draw_policy == DrawPolicy::Replay).then_some(self.replay_window.max(1))
    }
}
