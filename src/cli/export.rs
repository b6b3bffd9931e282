//! `draftmill export`.

use super::{ExportArgs, WhichCheckpoint, output};
use crate::{
    common::exit::{Exit, Failure},
    config::{Config, Engine, load_text},
    export::{self, ExportOptions, ServeCommands},
    hf::{
        Dtype,
        config::TargetConfig,
        layout::DraftFolder,
        validate::{self, Severity},
    },
    run_dir::{
        RunDir,
        checkpoint::{self, Verified},
        eval_log,
    },
};
use std::path::{Path, PathBuf};

/// Writes a drafter as a model folder, or checks one.
pub fn run(args: &ExportArgs) -> Result<(), Failure> {
    match (&args.check, &args.run, &args.out) {
        (Some(dir), ..) => check(dir, args.target.as_deref(), args.json),
        (None, Some(run), Some(out)) => write(args, run, out),
        _ => Err(Failure::new(Exit::Usage, "give --run DIR and --out DIR, or --check DIR")),
    }
}

fn check(dir: &Path, target: Option<&Path>, json: bool) -> Result<(), Failure> {
    let defects = validate::check(dir);
    let sound = defects.is_empty();
    let findings: Vec<_> = defects.into_iter().chain(validate::engine_limits(dir)).collect();
    if json {
        output::print_json(&serde_json::json!({ "dir": dir, "sound": sound, "findings": findings }))?;
    } else {
        let listed = findings.iter().map(|f| format!("{f}\n")).collect::<String>();
        let verdict = format!("{}: sound; every name, shape, dtype and key is as engines expect it\n", dir.display());
        output::print(&if sound { listed + &verdict } else { listed })?;
    }
    match findings.iter().filter(|f| f.severity == Severity::Error).count() {
        0 => target.map_or(Ok(()), |target| belongs(dir, target)),
        n => Err(Failure::new(
            Exit::Model,
            format!("{} has {n} errors; an engine would not load it, or load something else", dir.display()),
        )),
    }
}

/// Whether a sound folder is a drafter of this target.
fn belongs(dir: &Path, target: &Path) -> Result<(), Failure> {
    let model = TargetConfig::load(target).map_err(Failure::of(Exit::Model))?;
    DraftFolder::open_for(dir, target, &model).map(drop).map_err(Failure::of(Exit::Model))
}

fn write(args: &ExportArgs, run: &Path, out: &Path) -> Result<(), Failure> {
    let folder = RunDir::new(run);
    let steps = checkpoint::steps(&folder.checkpoints()).unwrap_or_default();
    if steps.is_empty() {
        let why = match folder.config().exists() {
            true => "has no checkpoint yet; let it train on, or end it with one Ctrl-C, which writes one",
            false => "is no run; give the run.dir of a run",
        };
        return Err(Failure::new(Exit::Model, format!("{} {why}", run.display())));
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
        WhichCheckpoint::Latest => steps.last().copied(),
        WhichCheckpoint::Best => Some(best(run, &steps)?),
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
    let trained_with = Verified::open(&checkpoint).map_err(Failure::of(Exit::Model))?.state.config;
    let trained_with = load_text(&trained_with, "the checkpoint's configuration", &[]).map(|loaded| loaded.config).ok();
    let options = ExportOptions {
        dtype,
        layout: args.format,
        force: args.force,
        target: target(args, trained_with.as_ref()),
        self_check: (!args.no_self_check).then(|| device(trained_with.as_ref())),
    };
    if options.self_check.is_some() && options.target.is_none() {
        return Err(Failure::new(
            Exit::Model,
            "the checkpoint does not say where its target lies, which the export is served with to check it; give --target, or \
             leave the check out with --no-self-check",
        ));
    }
    let report = export::export_checkpoint(&checkpoint, out, &options).map_err(Failure::of(Exit::Model))?;
    match (&report.self_check, args.no_self_check) {
        (Some(proof), _) => output::tell(&format!(
            "self-check: served anew on {} prompts; {:.2} tokens per step in {} steps, as the drafter in memory",
            proof.prompts, proof.acceptance, proof.steps
        )),
        (None, true) => output::tell("self-check: left out, so nothing says that this export serves as it was trained"),
        (None, false) => output::tell("self-check: left out, since this draftmill was built without libtorch"),
    }
    if args.json {
        return output::print_json(&report);
    }
    let mut text = format!(
        "{}: step {step}, {} tensors, {} parameters, {} MiB in {}\n",
        report.dir.display(),
        report.tensors,
        report.parameters,
        report.bytes >> 20,
        report.dtype
    );
    for (engine, command) in report.serve.iter().flat_map(ServeCommands::by_engine) {
        text += &format!("\nServe with {engine}:\n  {command}\n");
    }
    for warning in validate::engine_limits(&report.dir) {
        text += &format!("\n{warning}\n");
    }
    output::print(&text)
}

/// The checkpoint whose drafter had the best measured acceptance.
fn best(run: &Path, steps: &[u64]) -> Result<u64, Failure> {
    let scores = eval_log::scores(run);
    let scored = steps.iter().filter_map(|step| Some((*step, *scores.get(step)?)));
    eval_log::best(scored).map(|(step, _)| step).ok_or_else(|| {
        let run = run.display();
        Failure::new(
            Exit::Model,
            format!(
                "no acceptance was measured of any checkpoint of {run}, so none is the best; use --checkpoint latest, or a \
                 step ({steps:?}). Section [eval] has it measured"
            ),
        )
    })
}

/// The target's folder: as named, or as the checkpoint's configuration has it.
fn target(args: &ExportArgs, trained_with: Option<&Config>) -> Option<PathBuf> {
    args.target.clone().or_else(|| trained_with.map(|config| config.target.dir.clone()))
}

/// Where the run's first target computed; the CPU, where that device is not here.
fn device(trained_with: Option<&Config>) -> crate::config::Device {
    let first = trained_with.and_then(|config| config.target.devices.first().copied());
    first.filter(|device| export::device_available(*device)).unwrap_or(crate::config::Device::Cpu)
}
