//! What a drafter is worth: acceptance and speed of speculative decoding, measured with the target it was trained for.

#[cfg(feature = "torch")]
pub mod evaluator;
#[cfg(feature = "torch")]
mod measure;
mod plot;
mod prompts;
pub mod schedule;
mod stats;
mod table;

#[cfg(feature = "torch")]
pub use self::measure::measure;
pub use self::{
    plot::svg,
    prompts::{MAX_ROW_BYTES, Prompt, PromptError, parse, read},
    stats::{Category, Figures, Record, Report, Step},
};

use crate::config::Device;
use std::path::PathBuf;

/// What is measured, and how.
#[derive(Clone, Debug, PartialEq)]
pub struct EvalOptions {
    /// Folder of the target, in Hugging Face's layout.
    pub target: PathBuf,
    /// Folder of the drafter, in z-lab's layout.
    pub draft: PathBuf,
    pub max_new_tokens: usize,
    /// 0 takes the most likely token; any other value samples.
    pub temperature: f64,
    pub seed: u64,
    /// cpu, cuda or cuda:N.
    pub device: Device,
}
