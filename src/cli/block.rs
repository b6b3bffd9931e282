//! `draftmill block`: one block's logits in a file, for a comparison with other implementations (bench/conformance).

use super::output;
use crate::exit::{Exit, Failure};
use clap::Args;
use std::path::PathBuf;

/// Writes the logits of one drafted block, in f32, for a comparison with other implementations
#[derive(Args, Debug)]
pub struct BlockArgs {
    /// Folder of the target
    #[arg(long, value_name = "DIR")]
    pub target: PathBuf,
    /// Folder of the drafter, in either layout
    #[arg(long, value_name = "DIR")]
    pub draft: PathBuf,
    /// Tokens before the block's first one: 1,2,3
    #[arg(long, value_name = "IDS", value_delimiter = ',', required = true)]
    pub ids: Vec<u32>,
    /// The file to write: ids, anchor, context and logits
    #[arg(long, value_name = "FILE.safetensors")]
    pub out: PathBuf,
}

/// Drafts the block behind the given tokens and writes what it was made from and what came out.
#[cfg(feature = "torch")]
pub fn run(args: &BlockArgs) -> Result<(), Failure> {
    let slots =
        crate::eval::dump_block(&args.target, &args.draft, &args.ids, &args.out).map_err(Failure::of(Exit::Model))?;
    output::print(&format!("{}: logits of {slots} slots\n", args.out.display()))
}

/// What stands in for it in a build without libtorch: a sentence.
#[cfg(not(feature = "torch"))]
pub fn run(args: &BlockArgs) -> Result<(), Failure> {
    output::tell(&format!("{} is not written", args.out.display()));
    Err(Failure::new(Exit::Usage, "this draftmill was built without libtorch; build with the default features"))
}
