//! The self-check of an export: what lies on disk is loaded anew, as an engine would, and decodes a few fixed prompts beside the
//! drafter in memory. Peers report 98 % accuracy in training and an acceptance of 10 % when served (SpecForge#533).

#[cfg(feature = "torch")]
mod decode;

#[cfg(feature = "torch")]
pub use self::decode::prove;

use super::ExportError;
use crate::{config::Device, hf::draft::DraftConfig, run_dir::checkpoint::NamedTensor};
use serde::Serialize;
use std::path::Path;
use thiserror::Error;

/// What serving an export showed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Proof {
    pub prompts: usize,
    /// Verifications of all prompts.
    pub steps: usize,
    /// Tokens per verification of the export, all prompts together.
    pub acceptance: f64,
    /// Largest difference of a logit between the export and the drafter in memory, over the largest logit.
    pub largest_difference: f64,
}

/// Why an export was not found to serve.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum ProofError {
    /// It was served, and is not the drafter that was trained.
    #[error(
        "the export was thrown away: loaded anew and served with its target, it is not the drafter that was trained: {0}. \
         Please report this; the checkpoint is as it was"
    )]
    Differs(String),
    /// What was trained serves nobody.
    #[error(
        "the export was thrown away: served with its target, its logits are NaN, since the training diverged; lower \
         optimizer.learning_rate, and go back to an earlier checkpoint"
    )]
    Diverged,
    /// It could not be served at all.
    #[error(
        "the export could not be served to check it ({0}) and was thrown away; name the target's folder with --target, or \
         leave the check out with --no-self-check"
    )]
    Unserved(String),
}

/// Serves the folder `dir`, which was written from `tensors`; `None` in a build without libtorch.
#[cfg_attr(not(feature = "torch"), allow(unused_variables, reason = "there is nothing to serve with"))]
pub(super) fn served(
    dir: &Path,
    draft: &DraftConfig,
    tensors: &[NamedTensor],
    target: &Path,
    device: Device,
) -> Result<Option<Proof>, ExportError> {
    #[cfg(feature = "torch")]
    return Ok(Some(prove(dir, draft, tensors, target, device)?));
    #[cfg(not(feature = "torch"))]
    Ok(None)
}

/// Whether models can compute on this device here.
pub fn is_here(device: Device) -> bool {
    #[cfg(feature = "torch")]
    let cuda = usize::try_from(tch::Cuda::device_count()).unwrap_or(0);
    #[cfg(not(feature = "torch"))]
    let cuda = 0;
    match device {
        Device::Cpu => true,
        Device::Cuda(index) => index < cuda,
    }
}
