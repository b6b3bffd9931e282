//! `draftmill import`.

use super::{ImportArgs, output};
use crate::{
    common::{
        exit::{Exit, Failure},
        text::counted,
    },
    export,
    import::{ImportOptions, import_gguf},
};
use std::path::Path;

/// Converts a GGUF file or a drafter's folder to a Hugging Face folder and prints the result.
pub fn run(args: &ImportArgs) -> Result<(), Failure> {
    match (&args.draft, &args.gguf) {
        (Some(dir), _) => drafter(args, dir),
        (None, Some(gguf)) => target(args, gguf),
        (None, None) => Err(Failure::new(Exit::Usage, "use --gguf FILE or --draft DIR")),
    }
}

fn drafter(args: &ImportArgs, dir: &Path) -> Result<(), Failure> {
    let report = export::import_folder(dir, args.target.as_deref(), &args.out, args.force);
    let report = report.map_err(Failure::of(Exit::Model))?;
    let out = report.dir.display();
    let next = format!("Next: draftmill train --set drafter.init_from={out}");
    output::print(&format!(
        "{out}: {}, {} in {}\n\n{next}\n",
        counted(report.tensors as u64, "tensor"),
        counted(report.parameters as u64, "parameter"),
        report.dtype
    ))
}

fn target(args: &ImportArgs, gguf: &Path) -> Result<(), Failure> {
    let options =
        ImportOptions { gguf: gguf.to_owned(), out: args.out.clone(), dtype: args.dtype.into(), force: args.force };
    let report = import_gguf(&options).map_err(Failure::of(Exit::Model))?;
    output::print(&format!("{report}\n"))
}
