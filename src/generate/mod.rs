//! `draftmill generate`: the target answers prompts, so that a drafter trains on the target's own text.
//!
//! ```text
//! files ──prompts──▶ conversations ──chat template──▶ token ids ──workers──▶ answers ──partial_output──▶ rows of token ids
//! ```

mod partial_output;
mod prompts;
mod report;
#[cfg(feature = "torch")]
mod scheduler;
#[cfg(feature = "torch")]
mod workers;

#[cfg(feature = "torch")]
pub use self::scheduler::generate;
pub use self::{
    partial_output::{AnswerLine, PartialOutput, PartialOutputError},
    prompts::{PromptConversation, PromptReader, SkipReason, parse_prompts},
    report::{GenerateReport, Progress},
};

use crate::config::{Auto, Device, Dtype};
use std::path::PathBuf;

/// Options of `draftmill generate`.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateOptions {
    /// Folder of the target in Hugging Face's layout.
    pub target: PathBuf,
    pub prompts: Vec<PathBuf>,
    pub out: PathBuf,
    /// Limit on the number of conversations.
    pub limit: Option<usize>,
    /// Limit on the tokens of an answer.
    pub max_new_tokens: usize,
    /// Limit on the tokens of a prompt. Default: the target's positions minus those of an answer.
    pub max_prompt_tokens: Option<usize>,
    /// Limit on the answered prompts of a conversation.
    pub turns: Option<usize>,
    /// Sampling temperature; 0 decodes greedily.
    pub temperature: f64,
    pub seed: u64,
    /// Answers decoded in parallel.
    pub rows: usize,
    /// Worker threads, among which the rows are divided. Default: one for each core on CPU, else one.
    pub workers: Option<usize>,
    /// cpu, cuda or cuda:N.
    pub device: Device,
    pub dtype: Auto<Dtype>,
    /// Discard a partial output of other options, and replace an existing output.
    pub force: bool,
}
