//! The first weights of a new run, fitted to a few of the target's own forwards.

use super::Failed;
use crate::{
    common::exit::{Exit, Failure},
    config::{Config, Device},
    data::{Split, Store},
    hf::{config::TargetConfig, draft::DraftConfig, tensors::TensorFiles},
    model::{
        ModelError,
        batch::Rows,
        drafter::least_squares_init::Fit,
        libtorch::{open_device, set_threads, use_all_cores},
        load::kind_of,
        params::ParamSet,
        target::{Depth, Target},
    },
};
use tokio::time::Instant;

/// Tokens that the target reads for it: some twenty for each number of a regression of a thousand inputs.
const TOKENS: usize = 32_768;

/// Changes the random weights `start`. Loads a whole target on the first target's device, and lets go of it.
pub fn fitted(
    config: &Config,
    target: &TargetConfig,
    files: &TensorFiles,
    draft: &DraftConfig,
    store: &Store,
    start: ParamSet,
) -> Result<ParamSet, Failure> {
    let begun = Instant::now();
    use_all_cores();
    let device = open_device(config.target.devices.first().copied().unwrap_or(Device::Cpu)).failed(Exit::Config)?;
    let kind = kind_of(config.target.dtype.into());
    let target = Target::load(target.clone(), files, Depth::Whole, kind, device).failed(Exit::Model)?;
    let fitted = fit(&target, draft, store, start);
    set_threads(config.run.threads);
    let (params, anchors, samples) = fitted.failed(Exit::Model)?;
    let seconds = begun.elapsed().as_secs_f64();
    tracing::info!("fitted the first weights to {anchors} places of {samples} samples in {seconds:.0} s");
    Ok(params)
}

fn fit(
    target: &Target,
    draft: &DraftConfig,
    store: &Store,
    start: ParamSet,
) -> Result<(ParamSet, usize, usize), ModelError> {
    let shared = target.shared()?;
    let mut fit = Fit::new(draft, &shared, start, target.final_norm()?)?;
    let (count, mut tokens, mut samples) = (store.len(Split::Train), 0, 0);
    // An odd stride that shares no factor with the number of samples meets each of them once, and neighbours never.
    let stride = (count / 2..count).find(|&stride| coprime(stride, count)).unwrap_or(1);
    for sample in (0..count).map(|turn| turn * stride % count) {
        if tokens >= TOKENS {
            break;
        }
        let (ids, mask) = store.sample(Split::Train, sample);
        let lengths = [ids.len() as u32];
        let rows = Rows::new(ids, &lengths, ids.len())?;
        let (taps, last) = target.taps_and_last(&rows, &draft.target_layer_ids, target.kind())?;
        fit.add(ids, mask, &taps, &last)?;
        (tokens, samples) = (tokens + ids.len(), samples + 1);
    }
    let anchors = fit.anchors();
    Ok((fit.finish()?, anchors, samples))
}

fn coprime(a: usize, b: usize) -> bool {
    if a == 0 { b == 1 } else { coprime(b % a, a) }
}
