//! Cost model and device speeds of the simulated engine, from the section `[simulate]`.

use crate::config::Config;
use draftmill_actors::{messages::engine::FeatureDtype, simulated::CostModel};

/// Cost model from `[simulate]`.
pub fn costs(config: &Config) -> CostModel {
    let simulate = &config.simulate;
    let dtype = FeatureDtype::Bf16;
    CostModel {
        seconds_per_token: simulate.target_per_token.0.as_secs_f64(),
        seconds_per_token_squared: simulate.target_attention.0.as_secs_f64() / 1024.0,
        bytes_per_second: simulate.bandwidth.0 as f64,
        seconds_per_micro_batch: simulate.micro_batch.0.as_secs_f64(),
        seconds_per_context_token: simulate.per_context_token.0.as_secs_f64(),
        seconds_per_reduce: simulate.reduce.0.as_secs_f64(),
        seconds_per_step: simulate.step.0.as_secs_f64(),
        jitter: simulate.jitter,
        job_failures: simulate.job_failures,
        micro_batch_failures: simulate.micro_batch_failures,
        seed: config.run.seed,
        taps: 1,
        hidden_size: (simulate.feature_bytes_per_token.0 / dtype.bytes()) as u32,
        dtype,
    }
}

/// Relative speed of each target; 1 if `[simulate]` names none.
pub fn target_speeds(config: &Config) -> Vec<f64> {
    speeds(&config.simulate.target_speeds, config.target.devices.len())
}

/// Relative speed of each drafter; 1 if `[simulate]` names none.
pub fn drafter_speeds(config: &Config) -> Vec<f64> {
    speeds(&config.simulate.drafter_speeds, config.drafter.devices.len())
}

fn speeds(given: &[f64], count: usize) -> Vec<f64> {
    given.iter().copied().chain(std::iter::repeat(1.0)).take(count).collect()
}
