//! `draftmill check`: validates configuration, models, data and machine, and forecasts a run. It runs nothing.
//!
//! The check continues after a mistake and reports every problem that it can find.

mod forecast;
pub mod lr_schedule;
pub mod machine;
pub mod pipeline_settings;
mod report;
mod store;

pub use self::{
    forecast::{Bucket, DeviceMemory, Disk, Forecast, PoolForecast, forecast},
    machine::{Machine, capacity_problems},
    report::Report,
    store::examine_store,
};

use crate::{
    common::{
        exit::Exit,
        guard::{Protected, lines_are},
    },
    config::{
        Config, Engine, Loaded, Problem, Written, draft_config,
        mask::{MaskToken, mask_token_of},
        pool_problem, start_from, step_problem,
    },
    hf::{config::TargetConfig, draft::DraftConfig, layout::DraftFolder, tensors::TensorFiles},
    run_dir::files,
};
use serde_json::Value;

/// State of the prepared store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stored {
    /// `draftmill prepare` has not written the store yet.
    Absent,
    /// The store is unusable, with the reason.
    Broken(String),
    Ready(Samples),
}

/// Content of the store that a plan needs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Samples {
    /// Tokens of every training sample.
    pub lengths: Vec<u32>,
    /// Number of held-out samples.
    pub validation: usize,
}

/// Checks a configuration that was read without problems.
pub fn examine(loaded: &Loaded, machine: &Machine, stored: &Stored) -> Report {
    let (config, written) = (&loaded.config, &loaded.written);
    let mut report = Report::default();
    for problem in machine::problems(config, written, machine) {
        report.fail(Exit::Config, problem);
    }
    if let Some(address) = config.admin.listen.0.filter(|address| !address.ip().is_loopback()) {
        report.notes.push(written.problem(
            "admin.listen",
            format!("{} is reachable from other machines: commands need the token, reading does not", address.ip()),
            "listen on 127.0.0.1 to allow local clients only",
        ));
    }
    report.notes.extend(machine::thread_note(config, written, machine));
    outputs(config, written, &mut report);
    let prompts = config.eval.prompt_file.as_deref().filter(|_| config.evaluates(true));
    if let Some(Err(error)) = prompts.map(|file| crate::eval::read(file, Some(1))) {
        report.fail(Exit::Config, written.problem("eval.prompt_file", error.to_string(), ""));
    }
    let models = match config.run.engine {
        Engine::Torch => models(config, written, &mut report),
        Engine::Simulated => None,
    };
    report.models = models.clone();
    let positions = models.as_ref().and_then(|(target, _)| beyond_positions(config, written, target));
    if let Some(problem) = positions {
        report.fail(Exit::Config, problem);
    }
    let samples = samples(config, written, stored, &mut report);
    let known = models.is_some() || config.run.engine == Engine::Simulated;
    if let Some(samples) = samples.filter(|_| known) {
        let models = models.as_ref().map(|(target, drafter)| (target, drafter));
        match forecast(config, &samples.lengths, models) {
            Ok(forecast) => {
                let refused = [
                    pool_problem(config, written, forecast.largest_job_bytes),
                    step_problem(config, written, forecast.jobs_per_epoch),
                ];
                for problem in refused.into_iter().flatten() {
                    report.fail(Exit::Config, problem);
                }
                let host = forecast.host();
                for problem in machine::capacity_problems(config, written, machine, forecast.disk.total, &host) {
                    report.fail(Exit::Config, problem);
                }
                let (problems, notes) = machine::gpu_problems(written, machine, &forecast.devices);
                for problem in problems {
                    report.fail(Exit::Config, problem);
                }
                report.notes.extend(notes);
                report.validation_samples = Some(samples.validation);
                report.plan = Some(forecast);
            }
            Err(error) => report.fail(Exit::Data, written.problem("data.store", error.to_string(), "")),
        }
    }
    report
}

/// Checks that no file of the run is inside a model folder or an input of the run (speculators#690).
fn outputs(config: &Config, written: &Written, report: &mut Report) {
    let folders = [Some(&config.target.dir), config.drafter.init_from.as_ref()];
    let protected = Protected::default()
        .inputs(&config.data.inputs)
        .inputs([&config.data.store])
        .inputs(config.eval.prompt_file.iter())
        .folders(folders.into_iter().flatten());
    let folder = &config.run.dir;
    let files = files::FILES.iter().chain(&files::DIRS).map(|name| folder.join(name));
    let touched = std::iter::once(folder.clone()).chain(files).find_map(|path| protected.path(&path).err());
    // Without a database these files are not of a run, unless their content is.
    let own = |name: &str, ours: fn(&[u8]) -> bool| {
        let path = folder.join(name);
        path.is_file().then(|| protected.file(&path, "a file of a run", ours).err()).flatten()
    };
    let foreign = || {
        own(files::CONFIG, |head| String::from_utf8_lossy(head).contains("[run]"))
            .or_else(|| own(files::STEPS, is_log))
            .or_else(|| own(files::EVALS, is_log))
            .or_else(|| own(files::SUMMARY, |head| head.starts_with(b"{")))
    };
    let new = !folder.join(files::STATE_DB).exists();
    let refusal = touched.or_else(|| new.then(foreign).flatten());
    if let Some(refusal) = refusal {
        report.fail(Exit::Config, written.problem("run.dir", refusal.to_string(), "choose another run.dir"));
    }
}

/// True for the first bytes of a log of a run, whose lines are objects with a step.
fn is_log(head: &[u8]) -> bool {
    lines_are(head, b"{", |line| serde_json::from_slice::<Value>(line).is_ok_and(|value| value["step"].is_u64()))
}

/// Reads the target's configuration and derives the drafter's shape.
fn models(config: &Config, written: &Written, report: &mut Report) -> Option<(TargetConfig, DraftConfig)> {
    let folder = &config.target.dir;
    let unreadable = |error: &dyn std::fmt::Display| written.problem("target.dir", error.to_string(), "");
    if !folder.is_dir() {
        report.fail(
            Exit::Model,
            written.problem(
                "target.dir",
                "there is no such folder",
                "name the folder of a Hugging Face model, or create one with draftmill import",
            ),
        );
        return None;
    }
    let target = TargetConfig::load(folder).map_err(|error| report.fail(Exit::Model, unreadable(&error))).ok();
    if let Some(target) = &target {
        match TensorFiles::open(folder) {
            Ok(files) => {
                for error in target.check_weights(&files) {
                    report.fail(Exit::Model, unreadable(&error));
                }
            }
            Err(error) => report.fail(Exit::Model, unreadable(&error)),
        }
    }
    let target = target?;
    let mask = mask_token_id(config, written, &target, report);
    // Without a mask token the rest of the shape is still checked with row 0, which always exists.
    match draft_config(config, written, &target, mask.unwrap_or_default()) {
        Ok(drafter) => {
            let init = config.drafter.init_from.as_deref().filter(|_| mask.is_some());
            let shared = init.and_then(|init| {
                let folder = DraftFolder::open(init, Some(target.num_hidden_layers)).ok()?;
                Some(folder.check_shared(&config.target.dir, &target))
            });
            if let Some(Err(error)) = shared {
                report.fail(Exit::Model, written.problem("drafter.init_from", error.to_string(), ""));
            }
            let started = init.map_or(Ok(drafter.clone()), |init| start_from(init, written, &drafter));
            let started =
                started.map_err(|problems| problems.0.into_iter().for_each(|one| report.fail(Exit::Model, one)));
            Some((target, started.unwrap_or(drafter)))
        }
        Err(problems) => {
            problems.0.into_iter().for_each(|problem| report.fail(Exit::Config, problem));
            None
        }
    }
}

/// Problem if the target lacks a position for the longest sample that `prepare` may write (torchtitan#3395). The default of
/// data.max_length is no problem: samples beyond the target are refused one by one.
pub fn beyond_positions(config: &Config, written: &Written, target: &TargetConfig) -> Option<Problem> {
    let positions = target.max_position_embeddings;
    let message = format!("the target has {positions} positions (max_position_embeddings)");
    let problem = written.problem("data.max_length", message, format!("lower it to at most {positions}"));
    (config.data.max_length as usize > positions && problem.file != "default").then_some(problem)
}

/// Returns the mask token's row, or adds a problem if there is no candidate.
fn mask_token_id(config: &Config, written: &Written, target: &TargetConfig, report: &mut Report) -> Option<u32> {
    let chosen = match (config.drafter.mask_token_id, mask_token_of(&config.target.dir, target)) {
        (Some(id), _) => MaskToken { id, reason: "as configured".into() },
        (None, Err(error)) => {
            report.fail(Exit::Model, written.problem("target.dir", error.to_string(), ""));
            return None;
        }
        (None, Ok(Some(mask))) => mask,
        (None, Ok(None)) => {
            report.fail(
                Exit::Config,
                written.problem(
                    "drafter.mask_token_id",
                    "every row of the target's embedding has a token that text may use",
                    "choose the id of a token that your data does not contain",
                ),
            );
            return None;
        }
    };
    report.mask_token = Some(chosen.clone());
    Some(chosen.id)
}

/// Checks the store, or the inputs of `prepare` if there is no store.
fn samples<'a>(config: &Config, written: &Written, stored: &'a Stored, report: &mut Report) -> Option<&'a Samples> {
    match stored {
        Stored::Ready(samples) => {
            let longest = samples.lengths.iter().max().copied().unwrap_or(0);
            if longest > config.data.max_length {
                report.fail(
                    Exit::Data,
                    written.problem(
                        "data.store",
                        format!(
                            "the store holds a sample of {longest} tokens, more than data.max_length = {}",
                            config.data.max_length
                        ),
                        "run draftmill prepare again, or raise data.max_length",
                    ),
                );
            }
            return Some(samples);
        }
        Stored::Broken(reason) => {
            report.fail(Exit::Data, written.problem("data.store", reason.clone(), ""));
        }
        Stored::Absent => {
            report.notes.push(written.problem(
                "data.store",
                format!("{} does not exist yet, so there is no forecast", config.data.store.display()),
                "run draftmill prepare with the same configuration, then check again",
            ));
            inputs(config, written).into_iter().for_each(|problem| report.fail(Exit::Data, problem));
        }
    }
    None
}

/// Returns a problem for every input that `prepare` could not open.
fn inputs(config: &Config, written: &Written) -> Vec<Problem> {
    let remedy = "name existing files, for example --set 'data.inputs=[\"chats.jsonl\"]'";
    if config.data.inputs.is_empty() {
        return vec![written.problem("data.inputs", "there is neither a prepared store nor an input", remedy)];
    }
    let unreadable = config.data.inputs.iter().filter_map(|path| {
        let reason = match crate::common::fs::open_input(path) {
            Ok(_) => return None,
            Err(error) => error.to_string(),
        };
        Some(written.problem("data.inputs", format!("{} cannot be read: {reason}", path.display()), remedy))
    });
    unreadable.collect()
}
