//! Evaluation of drafters: acceptance and speed of speculative decoding with the drafter's target.

mod confidence;
#[cfg(feature = "torch")]
mod evaluate;
#[cfg(feature = "torch")]
pub mod evaluator;
mod plot;
mod prompts;
mod record;
pub mod schedule;
mod show;
mod stats;
mod table;

#[cfg(feature = "torch")]
pub use self::evaluate::evaluate;
pub use self::{
    plot::{is_plot, svg},
    prompts::{MAX_ROW_BYTES, Prompt, PromptError, parse, read},
    record::{Piece, Record, Shown, Step},
    show::Marks,
    stats::{Category, Report, Stats},
};

use crate::config::Device;
use std::path::PathBuf;

/// Options of `draftmill eval`.
#[derive(Clone, Debug, PartialEq)]
pub struct EvalOptions {
    /// Folder of the target in Hugging Face's layout.
    pub target: PathBuf,
    /// Folder of the drafter in z-lab's layout.
    pub draft: PathBuf,
    pub max_new_tokens: usize,
    /// Sampling temperature; 0 decodes greedily.
    pub temperature: f64,
    pub seed: u64,
    /// Least predicted survival of a drafted token that is verified; 0 verifies every token.
    pub min_survival: f64,
    /// Number of responses whose text is kept, from the first one.
    pub show: usize,
    /// cpu, cuda or cuda:N.
    pub device: Device,
}

/// `part / whole`, or `None` if `whole` is 0.
fn ratio(part: f64, whole: f64) -> Option<f64> {
    (whole > 0.0).then(|| part / whole)
}
