//! `draftmill import`.

use super::{ImportArgs, output};
use crate::{
    config::Dtype,
    exit::{Exit, Failure},
    import::{ImportOptions, WeightType, import_gguf},
};

/// Turns a GGUF file into a Hugging Face folder and tells what it wrote.
pub fn run(args: &ImportArgs) -> Result<(), Failure> {
    let dtype = match args.dtype {
        Dtype::F32 => WeightType::F32,
        Dtype::F16 => WeightType::F16,
        Dtype::Bf16 => WeightType::Bf16,
    };
    let options = ImportOptions { gguf: args.gguf.clone(), out: args.out.clone(), dtype, force: args.force };
    let report = import_gguf(&options).map_err(Failure::of(Exit::Model))?;
    output::print(&format!("{report}\n"))
}
