//! Sample lengths of a simulation: those of a prepared store, or lognormal ones.

use crate::{
    check::forecast,
    common::{
        exit::{Exit, Failure},
        text::{counted, grouped},
    },
    config::{Config, Lengths},
    data::{Split, Store},
};
use draftmill_actors::{runtime::random::stream_seed, simulated::normal};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

/// Samples of the first pilot plan, which estimates the samples per job.
const PILOT: usize = 1 << 14;
/// Maximum samples of a pilot plan. More samples do not improve the estimate.
const MAX_PILOT: usize = 1 << 17;
/// Maximum samples of a simulation: 1 GiB of lengths.
const MAX_SAMPLES: usize = 1 << 28;

/// Returns the length of every sample, in tokens.
///
/// # Errors
/// If the store cannot be read, or the samples do not fit into memory.
pub(super) fn lengths(config: &Config) -> Result<Vec<u32>, Failure> {
    match config.simulate.lengths {
        Lengths::Store => {
            let store = Store::open(&config.data.store).map_err(Failure::of(Exit::Data))?;
            Ok(store.lengths(Split::Train))
        }
        Lengths::Lognormal => lognormal(config),
    }
}

/// Returns the samples of about `simulate.jobs` jobs. Pilot plans estimate their number, which depends on buckets and budget.
fn lognormal(config: &Config) -> Result<Vec<u32>, Failure> {
    let jobs = config.simulate.jobs as usize;
    let mut count = PILOT;
    for _ in 0..3 {
        let pilot = draw(config, count.min(MAX_PILOT));
        let plan = forecast(config, &pilot, None).map_err(Failure::of(Exit::Config))?;
        count = (pilot.len() as f64 * jobs as f64 / plan.jobs_per_epoch as f64).round().max(1.0) as usize;
    }
    if count > MAX_SAMPLES {
        return Err(Failure::new(
            Exit::Config,
            format!(
                "{} hold about {}, and a simulation has at most {}; lower simulate.jobs, or raise simulate.median_length",
                counted(jobs as u64, "job"),
                counted(count as u64, "sample"),
                grouped(MAX_SAMPLES as u64)
            ),
        ));
    }
    Ok(draw(config, count))
}

/// Draws the first `count` lengths of the random stream of the seed.
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
    fn lengths_have_the_configured_median_and_spread() {
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
    fn samples_fill_about_the_configured_jobs() {
        for jobs in [50, 500, 5000] {
            let config = config(&format!("[simulate]\njobs = {jobs}"));
            let lengths = lengths(&config).unwrap();
            let planned = forecast(&config, &lengths, None).unwrap().jobs_per_epoch as f64;
            assert!((planned / f64::from(jobs) - 1.0).abs() < 0.03, "{planned} jobs instead of {jobs}");
        }
    }

    #[test]
    fn lengths_depend_on_the_seed_and_extend() {
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
