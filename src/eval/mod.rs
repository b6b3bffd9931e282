//! What a drafter is worth: acceptance and speed of speculative decoding, measured with the target it was trained for.

#[cfg(feature = "torch")]
mod bench;
#[cfg(feature = "torch")]
mod block;
pub mod during;
#[cfg(feature = "torch")]
pub mod evaluator;
mod figures;
mod history;
#[cfg(feature = "torch")]
mod measure;
mod plot;
mod prompts;
mod table;

#[cfg(feature = "torch")]
pub use self::{bench::Bench, block::dump_block, measure::measure};
pub use self::{
    figures::{Category, Figures, Record, Report, Step},
    history::{Decoded, EvalLog, HeldOut, History, Measured, best, read as read_history, scores},
    plot::svg,
    prompts::{MAX_ROW_BYTES, Prompt, PromptError, parse, read},
};

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
    pub device: String,
}
