//! `draftmill import`.

use super::ImportArgs;
use crate::exit::{Exit, Failure};

/// Turns a GGUF file into a Hugging Face folder.
pub fn run(_args: &ImportArgs) -> Result<(), Failure> {
    Err(Failure::new(Exit::Internal, "import is not wired to src/import yet"))
}
