//! `draftmill runs`.

use super::{RunsArgs, output};
use crate::{
    common::{
        exit::{Exit, Failure},
        fs::{exists, read_remedy},
        text::{counted, grouped, printable},
    },
    run_dir::db::{StateError, StateReader, holder},
};
use serde::Serialize;
use std::{
    fs, io,
    path::{Path, PathBuf},
};

/// State and progress of a run.
#[derive(Debug, Serialize)]
struct RunEntry {
    dir: PathBuf,
    /// running, finished, step-limit, stopped, failed, killed, unknown, or unreadable.
    state: String,
    /// Recorded optimizer steps.
    step: u64,
    /// Planned epochs, and all epochs of the run (0: unknown).
    epochs_planned: u32,
    epochs: u32,
    trained: u64,
    skipped: u64,
    /// Planned jobs without an outcome.
    open: u64,
    checkpoint: Option<String>,
    starts: u64,
    /// Begin and end of the last start, in milliseconds since 1970.
    began: Option<i64>,
    ended: Option<i64>,
    /// Reason of a failure, or of an unreadable run.
    problem: Option<String>,
}

/// Lists the run in a folder, or the runs in its subfolders, by name. An unreadable run is an entry of the list.
pub fn run(args: &RunsArgs) -> Result<(), Failure> {
    let dirs = run_folders(&args.dir)?;
    let listed: Vec<RunEntry> =
        dirs.into_iter().map(|dir| read(&dir).unwrap_or_else(|e| unreadable(dir, &e))).collect();
    if args.json {
        output::print_json(&listed)?;
    } else {
        let head = ["run", "state", "step", "epoch", "trained", "skipped", "open", "checkpoint", "last end"];
        let rows: Vec<_> = [head.map(String::from).to_vec()].into_iter().chain(listed.iter().map(row)).collect();
        output::print(&output::table(&rows))?;
        for run in &listed {
            if let Some(problem) = &run.problem {
                output::note(&format!("{}: {problem}", run.dir.display()));
            }
        }
    }
    match listed.iter().filter(|run| run.state == "unreadable").count() {
        0 => Ok(()),
        n => Err(Failure::new(Exit::Run, format!("{n} of {} cannot be read", counted(listed.len() as u64, "run")))),
    }
}

fn run_folders(dir: &Path) -> Result<Vec<PathBuf>, Failure> {
    // A folder that may not be searched is listed with its problem.
    let is_run = |dir: &Path| exists(&dir.join("state.db")).unwrap_or(!dir.ends_with("lost+found"));
    if exists(&dir.join("state.db")).is_ok_and(|exists| exists) {
        return Ok(vec![dir.to_owned()]);
    }
    let failed = |why: String| Failure::new(Exit::Run, format!("{} {why}", dir.display()));
    let entries = fs::read_dir(dir).map_err(|e| match e.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
            failed(format!("cannot be read: {e}; name a folder of runs"))
        }
        _ => failed(format!("cannot be read: {e}; {}", read_remedy(&e))),
    })?;
    let mut runs = Vec::new();
    for entry in entries {
        let path = entry.map_err(|e| failed(format!("cannot be read: {e}; {}", read_remedy(&e))))?.path();
        if is_run(&path) {
            runs.push(path);
        }
    }
    runs.sort();
    if runs.is_empty() {
        return Err(failed("is not a run and contains no run; name the run.dir of a run, or its parent folder".into()));
    }
    Ok(runs)
}

fn read(dir: &Path) -> Result<RunEntry, StateError> {
    let reader = StateReader::open(dir)?;
    let (counts, runs) = (reader.counts()?, reader.runs()?);
    let last = runs.last();
    let ended = last.and_then(|run| run.outcome.clone());
    Ok(RunEntry {
        dir: dir.to_owned(),
        state: match holder(dir) {
            Some(_) => "running".into(),
            // A state.db of an older draftmill has no ends of its starts.
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

fn unreadable(dir: PathBuf, error: &StateError) -> RunEntry {
    RunEntry {
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

fn row(run: &RunEntry) -> Vec<String> {
    let none = || "-".to_owned();
    let epoch = match run.epochs {
        0 => grouped(run.epochs_planned.into()),
        epochs => format!("{} of {}", grouped(run.epochs_planned.into()), grouped(epochs.into())),
    };
    let mut row = vec![
        printable(&run.dir.display().to_string()).replace(['\n', '\t'], " "),
        run.state.clone(),
        grouped(run.step),
        epoch,
    ];
    row.extend([run.trained, run.skipped, run.open].map(grouped));
    row.extend([run.checkpoint.clone().unwrap_or_else(none), run.ended.map_or_else(none, output::utc)]);
    row
}
