//! `draftmill import`.

use super::{ImportArgs, output};
use crate::{
    exit::{Exit, Failure},
    import::{ImportOptions, import_gguf},
};

/// Turns a GGUF file into a Hugging Face folder and tells what it wrote.
pub fn run(args: &ImportArgs) -> Result<(), Failure> {
    let options =
        ImportOptions { gguf: args.gguf.clone(), out: args.out.clone(), dtype: args.dtype.into(), force: args.force };
    let report = import_gguf(&options).map_err(Failure::of(Exit::Model))?;
    output::print(&format!("{report}\n"))
}
