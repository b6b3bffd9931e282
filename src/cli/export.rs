//! `draftmill export`.

use super::ExportArgs;
use crate::exit::{Exit, Failure};

/// Writes a checkpoint in the z-lab layout, or checks a folder in it.
pub fn run(_args: &ExportArgs) -> Result<(), Failure> {
    Err(Failure::new(Exit::Internal, "export is not wired to src/export yet"))
}
