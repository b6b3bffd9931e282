//! `draftmill export`.

use super::{ExportArgs, WhichCheckpoint, output};
use crate::{
    checkpoint,
    exit::{Exit, Failure},
    export::{self, Severity},
    hf::Dtype,
    service::RunFolder,
};
use std::path::Path;

/// Writes a drafter as a model folder, or checks one.
pub fn run(args: &ExportArgs) -> Result<(), Failure> {
    match (&args.check, &args.run, &args.out) {
        (Some(dir), ..) => check(dir, args.json),
        (None, Some(run), Some(out)) => write(args, run, out),
        _ => Err(Failure::new(Exit::Usage, "give --run DIR and --out DIR, or --check DIR")),
    }
}

fn check(dir: &Path, json: bool) -> Result<(), Failure> {
    let findings = export::check(dir);
    if json {
        output::print_json(&serde_json::json!({ "dir": dir, "sound": findings.is_empty(), "findings": findings }))?;
    } else if findings.is_empty() {
        output::print(&format!(
            "{}: sound; every name, shape, number type and key is as engines expect it\n",
            dir.display()
        ))?;
    } else {
        output::print(&findings.iter().map(|f| format!("{f}\n")).collect::<String>())?;
    }
    match findings.iter().filter(|f| f.severity == Severity::Error).count() {
        0 => Ok(()),
        n => Err(Failure::new(
            Exit::Model,
            format!("{} has {n} errors; an engine would not load it, or load something else", dir.display()),
        )),
    }
}

fn write(args: &ExportArgs, run: &Path, out: &Path) -> Result<(), Failure> {
    let folder = RunFolder::new(run);
    let steps = checkpoint::steps(&folder.checkpoints()).unwrap_or_default();
    if steps.is_empty() {
        let why = match folder.config().exists() {
            true => "has no checkpoint yet; let it train on, or end it with one Ctrl-C, which writes one",
            false => "is no run; give the run.dir of a run",
        };
        return Err(Failure::new(Exit::Model, format!("{} {why}", run.display())));
    }
    let step = match args.checkpoint {
        WhichCheckpoint::Latest => steps.last().copied(),
        WhichCheckpoint::Step(step) => steps.contains(&step).then_some(step),
    };
    let step = step.ok_or_else(|| {
        let asked = match args.checkpoint {
            WhichCheckpoint::Latest => "latest".into(),
            WhichCheckpoint::Step(step) => step.to_string(),
        };
        let run = run.display();
        Failure::new(Exit::Model, format!("{run} has no checkpoint {asked}; it has those of the steps {steps:?}"))
    })?;
    let dtype = args.dtype.map_or_else(|| stated_dtype(&folder), Dtype::from);
    let checkpoint = folder.checkpoints().join(checkpoint::name_of(step));
    let report = export::export_checkpoint(&checkpoint, out, dtype, args.force).map_err(Failure::of(Exit::Model))?;
    if args.json {
        return output::print_json(&report);
    }
    output::print(&format!(
        "{}: step {}, {} tensors, {} parameters, {} MiB in {}\n",
        report.dir.display(),
        report.step,
        report.tensors,
        report.parameters,
        report.bytes >> 20,
        report.dtype
    ))
}

/// What run.toml says, or bf16.
fn stated_dtype(folder: &RunFolder) -> Dtype {
    crate::config::load(Some(&folder.config()), &[]).map_or(Dtype::Bf16, |l| l.config.checkpoint.export_dtype.into())
}
