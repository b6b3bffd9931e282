//! Options of `draftmill prepare`.

use crate::config::{Config, Data};
use std::path::PathBuf;

/// What to prepare and how.
#[derive(Clone, Debug, PartialEq)]
pub struct PrepareOptions {
    /// The section `[data]`.
    pub data: Data,
    /// Hugging Face folder with tokenizer and chat template; not needed for rows that are tokens already.
    pub model_dir: PathBuf,
}

impl From<&Config> for PrepareOptions {
    fn from(config: &Config) -> Self {
        PrepareOptions { data: config.data.clone(), model_dir: config.target.dir.clone() }
    }
}
