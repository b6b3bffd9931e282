//! `draftmill runs`.

use super::{RunsArgs, output};
use crate::{
    common::exit::{Exit, Failure},
    run_dir::db::{StateError, StateReader, holder},
};
use serde::Serialize;
use std::{
    fs,
    path::{Path, PathBuf},
};

/// Where a run stands.
#[derive(Debug, Serialize)]
struct Listed {
    dir: PathBuf,
    /// running, finished, step-limit, stopped, failed, killed, unknown, or unreadable.
    state: String,
    /// Optimizer steps, as far as they are recorded.
    step: u64,
    /// Epochs that are planned, and that the run will have (0: unknown).
    epochs_planned: u32,
    epochs: u32,
    trained: u64,
    skipped: u64,
    /// Planned and without an outcome.
    open: u64,
    checkpoint: Option<String>,
    starts: u64,
    /// When the last start began and ended, in milliseconds since 1970.
    began: Option<i64>,
    ended: Option<i64>,
    /// Why it failed, or cannot be read.
    problem: Option<String>,
}

/// Lists the run in a folder, or the runs in its subfolders, by name. One that cannot be read hides no other.
pub fn run(args: &RunsArgs) -> Result<(), Failure> {
    let dirs = run_folders(&args.dir)?;
    let listed: Vec<Listed> = dirs.into_iter().map(|dir| look(&dir).unwrap_or_else(|e| unreadable(dir, &e))).collect();
    if args.json {
        output::print_json(&listed)?;
    } else {
        let head = ["run", "state", "step", "epoch", "trained", "skipped", "open", "checkpoint", "last end"];
        let rows: Vec<_> = [head.map(String::from).to_vec()].into_iter().chain(listed.iter().map(row)).collect();
        output::print(&output::table(&rows))?;
        for run in &listed {
            if let Some(problem) = &run.problem {
                output::tell(&format!("{}: {problem}", run.dir.display()));
            }
        }
    }
    match listed.iter().filter(|run| run.state == "unreadable").count() {
        0 => Ok(()),
        n => Err(Failure::new(Exit::Run, format!("{n} of {} runs cannot be read", listed.len()))),
    }
}

fn run_folders(dir: &Path) -> Result<Vec<PathBuf>, Failure> {
    let is_run = |dir: &Path| dir.join("state.db").exists();
    if is_run(dir) {
        return Ok(vec![dir.to_owned()]);
    }
    let failed = |why: String| Failure::new(Exit::Run, format!("{} {why}", dir.display()));
    let entries = fs::read_dir(dir).map_err(|e| failed(format!("cannot be read: {e}; give a folder of runs")))?;
    let mut runs: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).filter(|path| is_run(path)).collect();
    runs.sort();
    if runs.is_empty() {
        return Err(failed(
            "is no run, and no folder in it is one; give the run.dir of a run, or the folder above".into(),
        ));
    }
    Ok(runs)
}

fn look(dir: &Path) -> Result<Listed, StateError> {
    let reader = StateReader::open(dir)?;
    let (counts, runs) = (reader.counts()?, reader.runs()?);
    let last = runs.last();
    let ended = last.and_then(|run| run.outcome.clone());
    Ok(Listed {
        dir: dir.to_owned(),
        state: match holder(dir) {
            Some(_) => "running".into(),
            // A file of an older draftmill does not say how its starts ended.
            None if last.is_none() => "unknown".into(),
            None => ended.unwrap_or_else(|| "killed".into()),
        },
        step: reader.last_step()?,
        epochs_planned: counts.len() as u32,
        epochs: last.map_or(0, |run| run.epochs),
        trained: counts.iter().map(|c| c.trained).sum(),
        skipped: counts.iter().map(|c| c.skipped).sum(),
        open: counts.iter().map(|c| c.open()).sum(),
        checkpoint: reader.latest_checkpoint()?.map(|checkpoint| checkpoint.name),
        starts: runs.len() as u64,
        began: last.map(|run| run.time),
        ended: last.and_then(|run| run.ended),
        problem: last.and_then(|run| run.problem.clone()),
    })
}

fn unreadable(dir: PathBuf, error: &StateError) -> Listed {
    Listed {
        dir,
        state: "unreadable".into(),
        step: 0,
        epochs_planned: 0,
        epochs: 0,
        trained: 0,
        skipped: 0,
        open: 0,
        checkpoint: None,
        starts: 0,
        began: None,
        ended: None,
        problem: Some(error.to_string()),
    }
}

fn row(run: &Listed) -> Vec<String> {
    let none = || "-".to_owned();
    let epoch = match run.epochs {
        0 => run.epochs_planned.to_string(),
        epochs => format!("{} of {epochs}", run.epochs_planned),
    };
    let mut row = vec![run.dir.display().to_string(), run.state.clone(), run.step.to_string(), epoch];
    row.extend([run.trained, run.skipped, run.open].map(|n| n.to_string()));
    row.extend([run.checkpoint.clone().unwrap_or_else(none), run.ended.map_or_else(none, output::utc)]);
    row
}
