//! Noise and failure model of simulated work. Samples depend on the seed, the job and the attempt, never on the engine
//! or the time.

use crate::{messages::types::JobId, runtime::random::stream_seed};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

/// Limit on the noise in standard deviations, so that no work takes no time.
const MOST_DEVIATIONS: f64 = 3.0;
/// Number of attempt counters: no fewer than jobs in flight (`planner::IN_FLIGHT`), so that two of those never share
/// one.
const SLOTS: usize = 1 << 16;

/// Sample of noise for one unit of work.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct NoiseSample {
    /// Factor on the cost model's duration; 1 on average.
    pub factor: f64,
    pub fails: bool,
}

/// Samples the stream `name` and `words`: work varies by `jitter` (relative standard deviation) and fails with
/// probability `rate`.
pub(super) fn noise(seed: u64, name: &str, words: &[u64], jitter: f64, rate: f64) -> NoiseSample {
    if jitter <= 0.0 && rate <= 0.0 {
        return NoiseSample { factor: 1.0, fails: false };
    }
    let mut rng = ChaCha8Rng::from_seed(stream_seed(seed, name, words));
    let deviations = normal(&mut rng).clamp(-MOST_DEVIATIONS, MOST_DEVIATIONS);
    NoiseSample { factor: 1.0 + jitter * deviations, fails: rng.random::<f64>() < rate }
}

/// Samples the standard normal distribution (Box and Muller 1958).
pub fn normal(rng: &mut ChaCha8Rng) -> f64 {
    // 1 - u is in (0, 1], so the logarithm is finite.
    let (u, v): (f64, f64) = (rng.random(), rng.random());
    (-2.0 * (1.0 - u).ln()).sqrt() * (std::f64::consts::TAU * v).cos()
}

/// Counters of the attempts of each job, by any engine of one stage, so that every attempt has its own noise.
#[derive(Clone, Debug)]
pub(super) struct AttemptCounters(Arc<[AtomicU32]>);

impl Default for AttemptCounters {
    fn default() -> Self {
        Self((0..SLOTS).map(|_| AtomicU32::new(0)).collect())
    }
}

impl AttemptCounters {
    /// Returns the number of earlier attempts of this job. If jobs share a counter, the attempts of the earlier job
    /// count as well; that shift does not depend on the engine.
    pub fn next(&self, job: JobId) -> u64 {
        u64::from(self.0[job.index as usize % SLOTS].fetch_add(1, Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jitter_has_the_deviation_that_was_asked_for_and_no_bias() {
        let draws: Vec<f64> = (0..20_000).map(|i| noise(7, "target", &[i], 0.1, 0.0).factor).collect();
        let mean = draws.iter().sum::<f64>() / draws.len() as f64;
        let deviation = (draws.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / draws.len() as f64).sqrt();
        assert!((mean - 1.0).abs() < 0.003, "{mean}");
        assert!((deviation - 0.1).abs() < 0.003, "{deviation}");
        assert!(draws.iter().all(|x| (0.7..=1.3).contains(x)));
    }

    #[test]
    fn failures_come_at_their_rate() {
        let failed = (0..20_000).filter(|&i| noise(7, "target", &[i], 0.0, 0.2).fails).count();
        assert!((3_700..4_300).contains(&failed), "{failed}");
    }

    #[test]
    fn luck_is_a_function_of_the_seed_and_the_words() {
        let of = |seed, name, words: &[u64]| noise(seed, name, words, 0.1, 0.5);
        assert_eq!(of(1, "target", &[0, 3, 0]), of(1, "target", &[0, 3, 0]));
        for other in [of(2, "target", &[0, 3, 0]), of(1, "drafter", &[0, 3, 0]), of(1, "target", &[0, 3, 1])] {
            assert_ne!(of(1, "target", &[0, 3, 0]).factor, other.factor);
        }
    }

    #[test]
    fn every_try_of_a_job_is_counted_whoever_makes_it() {
        let attempts = AttemptCounters::default();
        let (job, other) = (JobId { epoch: 0, index: 5 }, JobId { epoch: 0, index: 6 });
        let shared = attempts.clone();
        assert_eq!((attempts.next(job), shared.next(job), shared.next(other), attempts.next(job)), (0, 1, 0, 2));
    }
}
