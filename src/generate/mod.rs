//! `draftmill generate`: the target answers prompts, so that a drafter can learn from what the target itself says.
//!
//! ```text
//! files ──questions──▶ conversations ──chat template──▶ prompts ──decode::Batch──▶ answers ──part──▶ rows of token ids
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
    partial_output::{Line, Part, PartError},
    prompts::{Asked, LeftOut, Questions, conversation},
    report::{GenerateReport, Progress},
};

use crate::config::{Auto, Device, Dtype};
use std::path::PathBuf;

/// What is answered, and how.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateOptions {
    /// Folder of the target, in Hugging Face's layout.
    pub target: PathBuf,
    pub prompts: Vec<PathBuf>,
    pub out: PathBuf,
    /// Conversations to answer at most.
    pub limit: Option<usize>,
    /// Tokens of an answer at most.
    pub max_new_tokens: usize,
    /// Tokens of a prompt at most; none: what the target's positions leave beside an answer.
    pub max_prompt_tokens: Option<usize>,
    /// Questions of a conversation at most.
    pub turns: Option<usize>,
    /// 0 takes the most likely token; any other value samples.
    pub temperature: f64,
    pub seed: u64,
    /// Answers that grow side by side.
    pub rows: usize,
    /// Forwards at a time, each of its share of the rows; none: one for each core on CPU, else one.
    pub workers: Option<usize>,
    /// cpu, cuda or cuda:N.
    pub device: Device,
    pub dtype: Auto<Dtype>,
    /// Begin anew where a part of other options lies, and replace what was written before.
    pub force: bool,
}
