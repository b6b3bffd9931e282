//! `draftmill export`.

use super::{ExportArgs, WhichCheckpoint, output};
use crate::{
    common::{
        exit::{Exit, Failure},
        text::{counted, grouped},
    },
    config::{ByteSize, Config, Engine, load_text},
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
        db::StateReader,
        eval_log,
    },
};
use std::path::{Path, PathBuf};

/// Exports a drafter as a model folder, or checks such a folder.
pub fn run(args: &ExportArgs) -> Result<(), Failure> {
    match (&args.check, &args.run, &args.out) {
        (Some(dir), ..) => check(dir, args.target.as_deref(), args.json),
        (None, Some(run), Some(out)) => write(args, run, out),
        _ => Err(Failure::new(Exit::Usage, "use --run DIR with --out DIR, or --check DIR")),
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
        let verdict = format!(
            "{}: sound; all names, shapes, dtypes and keys are as inference engines expect them\n",
            dir.display()
        );
        output::print(&if sound { listed + &verdict } else { listed })?;
    }
    match findings.iter().filter(|f| f.severity == Severity::Error).count() {
        0 => target.map_or(Ok(()), |target| check_target(dir, target)),
        n => Err(Failure::new(
            Exit::Model,
            format!(
                "{} has {}; an inference engine would refuse this folder or load other weights",
                dir.display(),
                counted(n as u64, "error")
            ),
        )),
    }
}

/// Checks that a sound folder is a drafter of this target.
fn check_target(dir: &Path, target: &Path) -> Result<(), Failure> {
    let model = TargetConfig::load(target).map_err(Failure::of(Exit::Model))?;
    DraftFolder::open_for(dir, target, &model).map(drop).map_err(Failure::of(Exit::Model))
}

fn write(args: &ExportArgs, run: &Path, out: &Path) -> Result<(), Failure> {
    let folder = RunDir::new(run);
    let steps = folder.steps()?;
    if steps.is_empty() && !matches!(args.checkpoint, WhichCheckpoint::Later(_)) {
        let why = match folder.config().exists() {
            true => "has no checkpoint yet; wait for the first one, or end the run with one Ctrl-C, which writes one",
            false => "is not a run; name the run.dir of a run",
        };
        return Err(Failure::new(Exit::Model, format!("{} {why}", run.display())));
    }
    let config = crate::config::load(Some(&folder.config()), &[]).map(|loaded| loaded.config).ok();
    if config.as_ref().is_some_and(|config| config.run.engine == Engine::Simulated) {
        let run = run.display();
        return Err(Failure::new(
            Exit::Model,
            format!("{run} is a simulated run, which trains no drafter; name a run with run.engine = \"torch\""),
        ));
    }
    let step = match args.checkpoint {
        WhichCheckpoint::Latest => steps.last().copied(),
        WhichCheckpoint::Best => Some(best(run, &steps)?),
        WhichCheckpoint::Step(step) => steps.contains(&step).then_some(step),
        WhichCheckpoint::Later(step) => {
            folder.checkpoints().join(checkpoint::aside_name(step)).is_dir().then_some(step)
        }
    };
    let step = step.ok_or_else(|| {
        let wanted = match args.checkpoint {
            WhichCheckpoint::Step(step) => step.to_string(),
            WhichCheckpoint::Later(step) => checkpoint::aside_name(step),
            WhichCheckpoint::Latest | WhichCheckpoint::Best => "latest".into(),
        };
        let run = run.display();
        Failure::new(
            Exit::Model,
            format!("{run} has no checkpoint {wanted}; its checkpoints are at the steps {steps:?}"),
        )
    })?;
    // The dtype of run.toml, or bf16.
    let configured = config.map_or(Dtype::Bf16, |config| config.checkpoint.export_dtype.into());
    let dtype = args.dtype.map_or(configured, Dtype::from);
    let name = match args.checkpoint {
        WhichCheckpoint::Later(step) => checkpoint::aside_name(step),
        _ => checkpoint::name_of(step),
    };
    let checkpoint = folder.checkpoints().join(name);
    let verified = Verified::open(&checkpoint).map_err(Failure::of(Exit::Model))?;
    // A run without a usable state.db can still be exported.
    if let Ok(origin) = StateReader::open(run).and_then(|state| state.origin()) {
        verified.check_origin(&origin).map_err(Failure::of(Exit::Model))?;
    }
    let trained_with = verified.state.config;
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
            "the checkpoint does not contain the path of its target, which the self-check needs; set --target, or skip the \
             self-check with --no-self-check",
        ));
    }
    let report = export::export_checkpoint(&checkpoint, out, &options).map_err(Failure::of(Exit::Model))?;
    match (&report.self_check, args.no_self_check) {
        (Some(test), _) => output::note(&format!(
            "self-check: passed on {}; {:.2} tokens per step in {}, equal to the trained drafter",
            counted(test.prompts as u64, "prompt"),
            test.acceptance,
            counted(test.steps as u64, "step")
        )),
        (None, true) => output::note("self-check: skipped, so this export was not compared with the trained drafter"),
        (None, false) => output::note("self-check: skipped, because this draftmill was built without libtorch"),
    }
    if args.json {
        return output::print_json(&report);
    }
    let mut text = format!(
        "{}: step {}, {}, {}, {} in {}\n",
        report.dir.display(),
        grouped(step),
        counted(report.tensors as u64, "tensor"),
        counted(report.parameters as u64, "parameter"),
        ByteSize(report.bytes).rounded(),
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

/// Returns the step of the checkpoint with the best measured acceptance.
fn best(run: &Path, steps: &[u64]) -> Result<u64, Failure> {
    let scores = eval_log::scores(run);
    let scored = steps.iter().filter_map(|step| Some((*step, *scores.get(step)?)));
    eval_log::best(scored).map(|(step, _)| step).ok_or_else(|| {
        let run = run.display();
        Failure::new(
            Exit::Model,
            format!(
                "no checkpoint of {run} has a measured acceptance, so there is no best one; use --checkpoint latest or a step \
                 ({steps:?}). Section [eval] configures the measurement"
            ),
        )
    })
}

/// Returns the target's folder: --target, or that of the checkpoint's configuration.
fn target(args: &ExportArgs, trained_with: Option<&Config>) -> Option<PathBuf> {
    args.target.clone().or_else(|| trained_with.map(|config| config.target.dir.clone()))
}

/// Returns the device of the run's first target, or the CPU if that device does not exist here.
fn device(trained_with: Option<&Config>) -> crate::config::Device {
    let first = trained_with.and_then(|config| config.target.devices.first().copied());
    first.filter(|device| export::device_available(*device)).unwrap_or(crate::config::Device::Cpu)
}
