//! `draftmill block`: one block's logits in a file, for a comparison with other implementations (bench/conformance).

use super::{BlockArgs, output};
use crate::exit::{Exit, Failure};

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
