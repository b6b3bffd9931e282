//! Statistics of the pool: its metrics, and the depth weighted by time.

use crate::runtime::{causes::Cause, metrics as m};
use metrics::{Counter, Gauge, counter, gauge};
use std::time::Duration;
use tokio::time::Instant;

/// Pool statistics of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Peak of reserved, waiting and checked-out bytes together.
    pub peak_bytes: u64,
    pub peak_batches: usize,
    /// Median number of ready batches, weighted by time from the first batch to the last.
    pub ready_p50: usize,
    /// The 95th percentile of the same.
    pub ready_p95: usize,
}

/// Metrics of the pool, looked up once.
pub(crate) struct Series {
    pub(crate) batches: Gauge,
    pub(crate) reserved_batches: Gauge,
    pub(crate) checked_out_batches: Gauge,
    pub(crate) bytes: Gauge,
    pub(crate) reserved_bytes: Gauge,
    pub(crate) checked_out_bytes: Gauge,
    pub(crate) draining: Gauge,
    buckets: Vec<BucketSeries>,
}

pub(crate) struct BucketSeries {
    pub(crate) batches: Gauge,
    pub(crate) draws: Counter,
}

impl Series {
    pub(crate) fn new() -> Self {
        Self {
            batches: gauge!(m::POOL_BATCHES),
            reserved_batches: gauge!(m::POOL_RESERVED_BATCHES),
            checked_out_batches: gauge!(m::POOL_CHECKED_OUT_BATCHES),
            bytes: gauge!(m::POOL_BYTES),
            reserved_bytes: gauge!(m::POOL_RESERVED_BYTES),
            checked_out_bytes: gauge!(m::POOL_CHECKED_OUT_BYTES),
            draining: gauge!(m::POOL_DRAINING),
            buckets: Vec::new(),
        }
    }

    pub(crate) fn bucket(&mut self, bucket: usize) -> &BucketSeries {
        while self.buckets.len() <= bucket {
            let label = self.buckets.len().to_string();
            self.buckets.push(BucketSeries {
                batches: gauge!(m::POOL_BUCKET_BATCHES, "bucket" => label.clone()),
                draws: counter!(m::POOL_DRAWS, "bucket" => label),
            });
        }
        &self.buckets[bucket]
    }
}

/// Returns the cause of the pool's wait, from the unanswered draws and reservations.
pub(crate) fn cause((draws, reservations): (usize, usize)) -> Cause {
    match (draws, reservations) {
        (0, 0) => Cause::Idle,
        (0, _) => Cause::Drafter,
        _ => Cause::Target,
    }
}

/// Histogram of the pool's depth, weighted by time.
pub(crate) struct Depths {
    /// Time at each depth, up to the last change of the depth.
    at: Vec<Duration>,
    since: Instant,
    depth: usize,
    /// True once a batch was ready: time before the first batch does not count.
    begun: bool,
    /// Time without a batch that counts only if another one follows.
    empty: Duration,
}

impl Depths {
    pub(crate) fn new(now: Instant) -> Self {
        Self { at: Vec::new(), since: now, depth: 0, begun: false, empty: Duration::ZERO }
    }

    pub(crate) fn observe(&mut self, now: Instant, depth: usize) {
        let passed = now - self.since;
        if self.depth > 0 {
            self.add(self.depth, passed);
        } else if self.begun {
            self.empty += passed;
        }
        if depth > 0 {
            self.begun = true;
            let empty = std::mem::take(&mut self.empty);
            self.add(0, empty);
        }
        (self.since, self.depth) = (now, depth);
    }

    fn add(&mut self, depth: usize, time: Duration) {
        if self.at.len() <= depth {
            self.at.resize(depth + 1, Duration::ZERO);
        }
        self.at[depth] += time;
    }

    /// Returns the smallest depth that was not exceeded for this percentage of the time.
    pub(crate) fn percentile(&self, percent: u32) -> usize {
        let all: Duration = self.at.iter().sum();
        let mut below = Duration::ZERO;
        let reached = self.at.iter().position(|&time| {
            below += time;
            below * 100 >= all * percent
        });
        reached.unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn depths_are_weighed_by_time_from_the_first_batch_to_the_last() {
        let mut depths = Depths::new(Instant::now());
        for (seconds, depth) in [(50, 1), (10, 4), (60, 2), (10, 0), (10, 3), (10, 0), (900, 0)] {
            tokio::time::advance(Duration::from_secs(seconds)).await;
            depths.observe(Instant::now(), depth);
        }
        // One batch 10 s, four 60 s, two 10 s, none 10 s, three 10 s; neither the 50 s before nor the 900 s after
        // count.
        assert_eq!(depths.at.iter().map(Duration::as_secs).collect::<Vec<_>>(), [10, 10, 10, 10, 60]);
        assert_eq!([20, 30, 40, 50, 95].map(|p| depths.percentile(p)), [1, 2, 3, 4, 4]);
        assert_eq!(Depths::new(Instant::now()).percentile(50), 0);
    }
}
