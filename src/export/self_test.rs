//! Export self-test: loads the written folder as an engine does and compares its decoding of a few prompts with the drafter in
//! memory. Peers report 98 % accuracy in training and an acceptance of 10 % in serving (SpecForge#533).

#[cfg(feature = "torch")]
mod decode;

#[cfg(feature = "torch")]
pub use self::decode::run_self_test;

use super::ExportError;
use crate::{config::Device, hf::draft::DraftConfig, run_dir::checkpoint::NamedTensor};
use serde::Serialize;
use std::path::Path;
use thiserror::Error;

/// Result of a self-test. The field names are keys of the JSON output.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct SelfTestReport {
    pub prompts: usize,
    /// Number of verifications over all prompts.
    pub steps: usize,
    /// Tokens per verification of the export, over all prompts.
    pub acceptance: f64,
    /// Largest logit difference between the export and the drafter in memory, divided by the largest logit.
    pub largest_difference: f64,
}

/// Failure of the self-test.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum SelfTestError {
    /// The export decodes differently from the trained drafter.
    #[error(
        "the export was discarded, since it decodes differently from the trained drafter: {0}. \
         Please report this; the checkpoint is unchanged"
    )]
    Differs(String),
    /// The trained drafter itself is unusable.
    #[error(
        "the export was discarded, since its logits are NaN: the training diverged; lower \
         optimizer.learning_rate, and export an earlier checkpoint"
    )]
    Diverged,
    /// The self-test could not run.
    #[error(
        "the export was discarded, since its self-test could not run ({0}); give the target's folder with --target, or \
         skip the self-test with --no-self-check"
    )]
    NotRun(String),
}

/// Runs the self-test of the folder `dir`, which was written from `tensors`; `None` in a build without libtorch.
///
/// # Errors
/// A failed self-test.
#[cfg_attr(not(feature = "torch"), allow(unused_variables, reason = "the self-test needs libtorch"))]
pub(super) fn run_if_available(
    dir: &Path,
    draft: &DraftConfig,
    tensors: &[NamedTensor],
    target: &Path,
    device: Device,
) -> Result<Option<SelfTestReport>, ExportError> {
    #[cfg(feature = "torch")]
    return Ok(Some(run_self_test(dir, draft, tensors, target, device)?));
    #[cfg(not(feature = "torch"))]
    Ok(None)
}

/// True if this machine and build can compute on `device`.
pub fn device_available(device: Device) -> bool {
    #[cfg(feature = "torch")]
    let cuda = usize::try_from(tch::Cuda::device_count()).unwrap_or(0);
    #[cfg(not(feature = "torch"))]
    let cuda = 0;
    match device {
        Device::Cpu => true,
        Device::Cuda(index) => index < cuda,
    }
}
