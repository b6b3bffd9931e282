//! Least-squares initialisation of a new run's weights from a few target forwards.

use super::Failed;
use crate::{
    common::exit::{Exit, Failure},
    config::{Config, Device},
    data::{Split, Store},
    hf::{config::TargetConfig, draft::DraftConfig, tensors::TensorFiles},
    model::{
        ModelError,
        batch::Rows,
        drafter::least_squares_init::LeastSquaresInit,
        libtorch::{open_device, set_threads, use_all_cores},
        load::kind_of,
        params::ParamSet,
        target::{Depth, Target},
    },
};
use tokio::time::Instant;

/// Minimum tokens of the target forwards: about 20 for each unknown of a regression with 1000 inputs.
const MIN_TOKENS: usize = 32_768;

/// Weights after least-squares initialisation of the random weights `start`. Loads a whole target on the first target's device
/// and frees it.
///
/// # Errors
/// A device or model that cannot be used, or a singular regression.
pub fn least_squares_weights(
    config: &Config,
    target: &TargetConfig,
    files: &TensorFiles,
    draft: &DraftConfig,
    store: &Store,
    start: ParamSet,
) -> Result<ParamSet, Failure> {
    let started = Instant::now();
    use_all_cores();
    let device = open_device(config.target.devices.first().copied().unwrap_or(Device::Cpu)).failed(Exit::Config)?;
    let kind = kind_of(config.target.dtype.into());
    let target = Target::load(target.clone(), files, Depth::Whole, kind, device).failed(Exit::Model)?;
    let result = solve(&target, draft, store, start);
    set_threads(config.run.threads);
    let (params, anchors, samples) = result.failed(Exit::Model)?;
    let seconds = started.elapsed().as_secs_f64().round();
    tracing::info!(anchors, samples, seconds, "least-squares initialisation finished");
    Ok(params)
}

fn solve(
    target: &Target,
    draft: &DraftConfig,
    store: &Store,
    start: ParamSet,
) -> Result<(ParamSet, usize, usize), ModelError> {
    let shared = target.shared()?;
    let mut init = LeastSquaresInit::new(draft, &shared, start, target.final_norm()?)?;
    let (count, mut tokens, mut samples) = (store.len(Split::Train), 0, 0);
    // A stride without a common factor with `count` visits each sample once, and distant ones in sequence.
    let stride = (count / 2..count).find(|&stride| coprime(stride, count)).unwrap_or(1);
    for sample in (0..count).map(|index| index * stride % count) {
        if tokens >= MIN_TOKENS {
            break;
        }
        let (ids, mask) = store.sample(Split::Train, sample);
        let lengths = [ids.len() as u32];
        let rows = Rows::new(ids, &lengths, ids.len())?;
        let (taps, last) = target.forward_with_states(&rows, &draft.target_layer_ids, target.kind())?;
        init.add(ids, mask, &taps, &last)?;
        (tokens, samples) = (tokens + ids.len(), samples + 1);
    }
    let anchors = init.anchors();
    Ok((init.finish()?, anchors, samples))
}

fn coprime(a: usize, b: usize) -> bool {
    if a == 0 { b == 1 } else { coprime(b % a, a) }
}
