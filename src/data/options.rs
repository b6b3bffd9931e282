//! Options of `draftmill prepare`.

use crate::config::{Config, Data};
use std::path::PathBuf;

/// Inputs and limits of one store.
#[derive(Clone, Debug, PartialEq)]
pub struct PrepareOptions {
    /// The section `[data]`.
    pub data: Data,
    /// Hugging Face folder with tokenizer and chat template. Rows of token ids do not need it.
    pub model_dir: PathBuf,
}

impl From<&Config> for PrepareOptions {
    fn from(config: &Config) -> Self {
        PrepareOptions { data: config.data.clone(), model_dir: config.target.dir.clone() }
    }
}
