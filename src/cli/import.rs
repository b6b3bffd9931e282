//! `draftmill import`.

use super::{ImportArgs, output};
use crate::{
    common::exit::{Exit, Failure},
    export,
    hf::draft::DraftConfig,
    import::{ImportOptions, import_gguf},
};
use std::path::Path;

/// Turns a GGUF file, or a drafter's folder, into a Hugging Face folder and tells what it wrote.
pub fn run(args: &ImportArgs) -> Result<(), Failure> {
    match (&args.draft, &args.gguf) {
        (Some(dir), _) => drafter(args, dir),
        (None, Some(gguf)) => target(args, gguf),
        (None, None) => Err(Failure::new(Exit::Usage, "give --gguf FILE, or --draft DIR")),
    }
}

fn drafter(args: &ImportArgs, dir: &Path) -> Result<(), Failure> {
    let report = export::import_folder(dir, args.target.as_deref(), &args.out, args.force);
    let report = report.map_err(Failure::of(Exit::Model))?;
    let out = report.dir.display();
    let written = DraftConfig::load(&report.dir).map_err(Failure::of(Exit::Model))?;
    let next = match written.slides() {
        true => {
            "Its layers slide over the context, so it can be measured (draftmill eval) and served, but not trained on"
                .into()
        }
        false => format!("Next: draftmill train --set drafter.init_from={out}"),
    };
    output::print(&format!(
        "{out}: {} tensors, {} parameters in {}\n\n{next}\n",
        report.tensors, report.parameters, report.dtype
    ))
}

fn target(args: &ImportArgs, gguf: &Path) -> Result<(), Failure> {
    let options =
        ImportOptions { gguf: gguf.to_owned(), out: args.out.clone(), dtype: args.dtype.into(), force: args.force };
    let report = import_gguf(&options).map_err(Failure::of(Exit::Model))?;
    output::print(&format!("{report}\n"))
}
