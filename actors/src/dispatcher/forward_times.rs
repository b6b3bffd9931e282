//! Estimate of forward times, learned from successful forwards. It defines the straggler deadline.

use crate::messages::types::BucketId;
use std::{collections::BTreeMap, time::Duration};

/// Successful forwards of a bucket before its estimate counts.
const ENOUGH: u32 = 3;
/// Weight of the newest forward in the average.
const NEWEST: f64 = 0.2;
/// Minimum deadline: a shorter forward is not worth a second one.
const LEAST: Duration = Duration::from_secs(1);

/// Seconds per token slot of each bucket, as a moving average over all targets.
#[derive(Clone, Debug, Default)]
pub struct ForwardTimeEstimate {
    buckets: BTreeMap<BucketId, (u32, f64)>,
}

impl ForwardTimeEstimate {
    /// Learns from a successful forward of `slots` token slots.
    pub fn learn(&mut self, bucket: BucketId, slots: u64, took: Duration) {
        let rate = took.as_secs_f64() / slots.max(1) as f64;
        let (seen, mean) = self.buckets.entry(bucket).or_insert((0, rate));
        *mean += NEWEST * (rate - *mean);
        *seen = seen.saturating_add(1);
    }

    /// Returns the time after which a forward is a straggler: `factor` times its estimate. A bucket with too few
    /// forwards uses the slowest of the other estimates: its first forwards may hang too, and a rare bucket may have no
    /// more. Returns `None` without any estimate, and with a factor of 0.
    pub fn straggler_deadline(&self, bucket: BucketId, slots: u64, factor: f64) -> Option<Duration> {
        let known = |(seen, rate): &(u32, f64)| (*seen >= ENOUGH && factor > 0.0).then_some(*rate);
        let own = self.buckets.get(&bucket).and_then(known);
        let rate = own.or_else(|| self.buckets.values().filter_map(known).max_by(f64::total_cmp))?;
        let deadline = Duration::try_from_secs_f64(rate * slots as f64 * factor).ok()?;
        Some(deadline.max(LEAST))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_straggler_is_measured_against_its_own_bucket() {
        let mut estimate = ForwardTimeEstimate::default();
        let second = Duration::from_secs(1);
        for _ in 0..2 {
            estimate.learn(0, 100, second);
            estimate.learn(1, 100, 10 * second);
        }
        assert_eq!(estimate.straggler_deadline(0, 100, 4.0), None, "two are too few");
        estimate.learn(0, 100, second);
        estimate.learn(1, 100, 10 * second);
        assert_eq!(estimate.straggler_deadline(0, 200, 4.0), Some(8 * second));
        assert_eq!(estimate.straggler_deadline(1, 100, 4.0), Some(40 * second));
        assert_eq!(estimate.straggler_deadline(0, 1, 4.0), Some(LEAST), "the minimum");
        assert_eq!(estimate.straggler_deadline(0, 100, 0.0), None, "0 switches it off");
        assert_eq!(estimate.straggler_deadline(2, 100, 4.0), Some(40 * second), "the slowest of those that are known");
    }

    #[test]
    fn the_average_follows_a_node_that_slows_down() {
        let mut estimate = ForwardTimeEstimate::default();
        (0..10).for_each(|_| estimate.learn(0, 100, Duration::from_secs(1)));
        (0..40).for_each(|_| estimate.learn(0, 100, Duration::from_secs(3)));
        let deadline = estimate.straggler_deadline(0, 100, 1.0).unwrap_or_default().as_secs_f64();
        assert!((2.9..=3.0).contains(&deadline), "{deadline}");
    }
}
