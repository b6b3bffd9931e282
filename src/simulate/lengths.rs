//! How long the samples of a simulation are: as those of a prepared store, or drawn from a distribution.

use crate::{
    check::forecast,
    common::exit::{Exit, Failure},
    config::{Config, Lengths},
    data::{Split, Store},
};
use draftmill_actors::{runtime::random::stream_seed, simulated::normal};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

/// Samples from which it is learned how many of them fill a job.
const PILOT: usize = 1 << 14;
/// More tell nothing new.
const LARGEST_PILOT: usize = 1 << 17;
/// A gigabyte of lengths.
const MOST_SAMPLES: usize = 1 << 28;

/// Tokens of every sample.
pub(super) fn lengths(config: &Config) -> Result<Vec<u32>, Failure> {
    match config.simulate.lengths {
        Lengths::Store => {
            let store = Store::open(&config.data.store).map_err(Failure::of(Exit::Data))?;
            Ok(store.lengths(Split::Train))
        }
        Lengths::Lognormal => lognormal(config),
    }
}

/// As many samples as fill about `simulate.jobs` jobs. How many that are is learned by planning a part of them, because it depends
/// on buckets and budget.
fn lognormal(config: &Config) -> Result<Vec<u32>, Failure> {
    let jobs = config.simulate.jobs as usize;
    let mut count = PILOT;
    for _ in 0..3 {
        let pilot = draw(config, count.min(LARGEST_PILOT));
        let plan = forecast(config, &pilot, None).map_err(Failure::of(Exit::Config))?;
        count = (pilot.len() as f64 * jobs as f64 / plan.jobs_per_epoch as f64).round().max(1.0) as usize;
    }
    if count > MOST_SAMPLES {
        return Err(Failure::new(
            Exit::Config,
            format!(
                "{jobs} jobs hold about {count} samples, more than the {MOST_SAMPLES} that a simulation keeps in memory; lower \
                 simulate.jobs, or raise simulate.median_length"
            ),
        ));
    }
    Ok(draw(config, count))
}

/// The first `count` samples of the stream that the seed names.
fn draw(config: &Config, count: usize) -> Vec<u32> {
    let simulate = &config.simulate;
    let (median, longest) = (f64::from(simulate.median_length), config.data.max_length);
    let shortest = simulate.min_length.min(longest);
    let mut rng = ChaCha8Rng::from_seed(stream_seed(config.run.seed, "simulated lengths", &[]));
    let mut length = || (median * (simulate.length_sigma * normal(&mut rng)).exp()).round() as u32;
    (0..count).map(|_| length().clamp(shortest, longest)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::load_text;

    fn config(text: &str) -> Config {
        load_text(text, "x.toml", &[]).unwrap().config
    }

    #[test]
    fn lengths_have_the_median_and_the_spread_that_were_asked_for_and_stay_in_bounds() {
        let config = config("[simulate]\nmedian_length = 600\nlength_sigma = 0.5\nmin_length = 200");
        let mut lengths = draw(&config, 20_000);
        lengths.sort_unstable();
        let at = |share: f64| f64::from(lengths[(share * 20_000.0) as usize]);
        assert!((at(0.5) / 600.0 - 1.0).abs() < 0.02, "{}", at(0.5));
        // One standard deviation above the median.
        assert!((at(0.8413) / (600.0 * 0.5_f64.exp()) - 1.0).abs() < 0.03, "{}", at(0.8413));
        assert_eq!((lengths[0], lengths[19_999]), (200, 3072));
    }

    #[test]
    fn samples_fill_about_the_jobs_that_were_asked_for() {
        for jobs in [50, 500, 5000] {
            let config = config(&format!("[simulate]\njobs = {jobs}"));
            let lengths = lengths(&config).unwrap();
            let planned = forecast(&config, &lengths, None).unwrap().jobs_per_epoch as f64;
            assert!((planned / f64::from(jobs) - 1.0).abs() < 0.03, "{planned} jobs where {jobs} were asked for");
        }
    }

    #[test]
    fn another_seed_gives_other_lengths_and_more_of_them_begin_alike() {
        let (one, two) = (config("[run]\nseed = 1"), config("[run]\nseed = 2"));
        assert_ne!(draw(&one, 100), draw(&two, 100));
        assert_eq!(draw(&one, 100), draw(&one, 200)[..100]);
    }

    #[test]
    fn more_samples_than_fit_into_memory_are_refused() {
        let text = "[simulate]\njobs = 5000000\nmedian_length = 1\nmin_length = 1\n[plan]\njob_tokens = 100000";
        let message = lengths(&config(text)).unwrap_err().message;
        assert!(message.contains("lower simulate.jobs"), "{message}");
    }
}
