//! `draftmill export`.

use super::{ExportArgs, WhichCheckpoint, output};
use crate::{
    checkpoint,
    config::Engine,
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
    if args.checkpoint == WhichCheckpoint::Best {
        return Err(Failure::new(
            Exit::Model,
            format!(
                "no acceptance was measured of any checkpoint of {} yet, so none is the best; use --checkpoint latest, or a \
                 step",
                run.display()
            ),
        ));
    }
    let config = crate::config::load(Some(&folder.config()), &[]).map(|loaded| loaded.config).ok();
    if config.as_ref().is_some_and(|config| config.run.engine == Engine::Simulated) {
        let run = run.display();
        return Err(Failure::new(
            Exit::Model,
            format!("{run} is a simulated run, which trains no drafter; give a run of run.engine = \"torch\""),
        ));
    }
    let step = match args.checkpoint {
        WhichCheckpoint::Latest | WhichCheckpoint::Best => steps.last().copied(),
        WhichCheckpoint::Step(step) => steps.contains(&step).then_some(step),
    };
    let step = step.ok_or_else(|| {
        let asked = match args.checkpoint {
            WhichCheckpoint::Step(step) => step.to_string(),
            WhichCheckpoint::Latest | WhichCheckpoint::Best => "latest".into(),
        };
        let run = run.display();
        Failure::new(Exit::Model, format!("{run} has no checkpoint {asked}; it has those of the steps {steps:?}"))
    })?;
    // What run.toml says, or bf16.
    let stated = config.map_or(Dtype::Bf16, |config| config.checkpoint.export_dtype.into());
    let dtype = args.dtype.map_or(stated, Dtype::from);
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
