//! `draftmill doctor`: examines and tests the machine, without a model and without a run.

#[cfg(feature = "torch")]
mod matmul_check;
#[cfg_attr(not(feature = "torch"), path = "no_torch.rs")]
mod torch;

use crate::{
    check::machine::{self, Machine},
    common::{
        exit::Exit,
        host::{cores, free_disk, machine_memory, memory_limit},
        process::open_files,
    },
    config::{ByteSize, Loaded},
};
use serde::Serialize;
use std::{
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
};

/// Minimum free disk space without a warning. A checkpoint of a drafter with 1e9 parameters takes 12 GB.
const MIN_FREE_DISK: u64 = 10 << 30;
/// Minimum limit of open files without a warning. A run needs some dozens, and the HTTP port up to 64 connections.
const MIN_OPEN_FILES: u64 = 1024;

/// State of a part of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    Ok,
    /// A run works, but is slow or may fail later.
    Warning,
    Failed,
}

/// Finding about one part of the machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    pub part: String,
    pub state: State,
    /// Sentence without a full stop.
    pub found: String,
    /// Remedy of a warning or a failure.
    pub remedy: Option<String>,
}

/// Findings about every examined part.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    pub findings: Vec<Finding>,
}

impl Report {
    fn ok(&mut self, part: &str, found: impl Into<String>) {
        self.findings.push(Finding { part: part.into(), state: State::Ok, found: found.into(), remedy: None });
    }

    fn warn(&mut self, part: &str, found: impl Into<String>, remedy: impl Into<String>) {
        self.note(part, State::Warning, found.into(), remedy.into());
    }

    fn fail(&mut self, part: &str, found: impl Into<String>, remedy: impl Into<String>) {
        self.note(part, State::Failed, found.into(), remedy.into());
    }

    fn note(&mut self, part: &str, state: State, found: String, remedy: String) {
        let remedy = (!remedy.is_empty()).then_some(remedy);
        self.findings.push(Finding { part: part.into(), state, found, remedy });
    }

    /// Number of findings in this state.
    pub fn count(&self, state: State) -> usize {
        self.findings.iter().filter(|finding| finding.state == state).count()
    }

    /// Exit code of the command.
    pub fn exit(&self) -> Exit {
        if self.count(State::Failed) > 0 { Exit::Machine } else { Exit::Done }
    }

    /// Table with one line for each finding.
    pub fn table(&self) -> String {
        let width = self.findings.iter().map(|finding| finding.part.chars().count()).max().unwrap_or(0);
        let line = |Finding { part, state, found, remedy }: &Finding| {
            let state = match state {
                State::Ok => "ok",
                State::Warning => "warning",
                State::Failed => "failed",
            };
            let remedy = remedy.as_ref().map_or_else(String::new, |remedy| format!("; {remedy}"));
            format!("{part:<width$}  {state:<7}  {found}{remedy}\n")
        };
        self.findings.iter().map(line).collect()
    }
}

/// Examines this machine. With `chosen`, the user gave the configuration, so everything that it names must exist.
pub fn examine(loaded: &Loaded, chosen: bool) -> Report {
    let (config, mut report) = (&loaded.config, Report::default());
    torch::examine(&mut report);
    let cores = cores();
    let threads = config.run.threads;
    report.ok("threads", format!("{cores} cores; an operation on the CPU uses {threads} (run.threads)"));
    memory(&mut report, machine_memory(), memory_limit(), config.pool.max_bytes);
    files(&mut report, open_files());
    folder(&mut report, &config.run.dir);
    if chosen {
        for problem in machine::problems(config, &loaded.written, &Machine::detect(config)) {
            report.fail(&problem.key, problem.message, problem.remedy);
        }
    }
    report
}

fn memory(report: &mut Report, host: Option<u64>, limit: Option<u64>, pool: ByteSize) {
    let (Some(host), Some(limit)) = (host, limit) else {
        return report.warn("memory", "size unknown", "mount /proc");
    };
    let found = match limit < host {
        true => format!("{}, limited to {} for this process", ByteSize(host).rounded(), ByteSize(limit).rounded()),
        false => ByteSize(host).rounded(),
    };
    match limit > pool.0 {
        true => report.ok("memory", found),
        false => {
            report.warn("memory", format!("{found}; pool.max_bytes = {pool} is not below that"), "lower pool.max_bytes")
        }
    }
}

/// Compares the limit of open files with a run's need. `counted` is open files and limit.
fn files(report: &mut Report, counted: io::Result<(u64, u64)>) {
    match counted {
        Ok((_, u64::MAX)) => report.ok("open files", "no limit"),
        Ok((open, limit)) if limit >= MIN_OPEN_FILES => report.ok("open files", format!("{open} of at most {limit}")),
        Ok((_, limit)) => report.warn(
            "open files",
            format!("limit is {limit}"),
            "raise it: ulimit -n 4096, or LimitNOFILE= in the unit of the service",
        ),
        Err(error) => report.warn("open files", format!("limit unknown: {error}"), "mount /proc"),
    }
}

/// Tests that the run folder can be created, and compares the free disk space with a run's need.
fn folder(report: &mut Report, run: &Path) {
    let remedy = "choose another folder (run.dir), or give this user write permission";
    let parent = match existing_parent(run) {
        Ok(parent) => parent,
        Err(error) => return report.fail("run folder", format!("{} has no parent: {error}", run.display()), remedy),
    };
    let at = format!("{} goes into {}", run.display(), parent.display());
    if let Err(error) = test_write(&parent) {
        return report.fail("run folder", format!("{at}, which is not writable: {error}"), remedy);
    }
    match free_disk(&parent) {
        Some(free) if free < MIN_FREE_DISK => report.warn(
            "run folder",
            format!("{at}, which has only {} free", ByteSize(free).rounded()),
            "draftmill check reports a run's need; choose another disk (run.dir), or lower checkpoint.keep_last",
        ),
        Some(free) => {
            report.ok("run folder", format!("{at}, which is writable and has {} free", ByteSize(free).rounded()))
        }
        None => report.warn("run folder", format!("{at}, whose free space is unknown"), remedy),
    }
}

/// Closest existing ancestor of the run folder.
fn existing_parent(run: &Path) -> io::Result<PathBuf> {
    let run = std::path::absolute(run)?;
    let existing = run.ancestors().skip(1).find(|path| path.exists());
    Ok(existing.unwrap_or(&run).to_owned())
}

/// Creates, syncs and removes a file with a unique name.
fn test_write(folder: &Path) -> io::Result<()> {
    let path = folder.join(format!(".draftmill-doctor-{}", std::process::id()));
    let mut file = fs::OpenOptions::new().write(true).create_new(true).open(&path)?;
    let written = file.write_all(b"draftmill doctor\n").and_then(|()| file.sync_all());
    fs::remove_file(&path)?;
    written
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::load_text;

    fn states(examine: impl FnOnce(&mut Report)) -> Vec<State> {
        let mut report = Report::default();
        examine(&mut report);
        for finding in &report.findings {
            assert_eq!(finding.remedy.is_some(), finding.state != State::Ok, "{finding:?}");
        }
        report.findings.into_iter().map(|finding| finding.state).collect()
    }

    #[test]
    fn little_memory_and_few_files_are_warnings() {
        let gib = |n: u64| Some(n << 30);
        for (host, limit, state) in
            [(gib(8), gib(8), State::Ok), (gib(8), gib(3), State::Warning), (None, None, State::Warning)]
        {
            assert_eq!(states(|report| memory(report, host, limit, ByteSize(4 << 30))), [state], "{limit:?}");
        }
        for (limit, state) in [(1024, State::Ok), (u64::MAX, State::Ok), (1023, State::Warning)] {
            assert_eq!(states(|report| files(report, Ok((3, limit)))), [state], "{limit}");
        }
        assert_eq!(states(|report| files(report, Err(io::Error::other("no /proc")))), [State::Warning]);
    }

    #[test]
    fn a_run_folder_needs_a_writable_parent() {
        let dir = tempfile::tempdir().unwrap();
        let deep = dir.path().join("not/yet/there");
        assert!(states(|report| folder(report, &deep))[0] < State::Failed);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is left behind");
        fs::write(dir.path().join("file"), "").unwrap();
        assert_eq!(states(|report| folder(report, &dir.path().join("file/run"))), [State::Failed]);
    }

    /// Everything that a chosen configuration names must exist; the defaults are not checked.
    #[test]
    fn a_chosen_configuration_is_checked_against_the_machine() {
        let sets = ["target.devices=cuda:77".into(), "admin.listen=off".into()];
        let loaded = load_text("", "x.toml", &sets).unwrap();
        let report = examine(&loaded, true);
        let failed: Vec<_> = report.findings.iter().filter(|finding| finding.state == State::Failed).collect();
        assert!(failed.iter().any(|finding| finding.part == "target.devices"), "{failed:?}");
        assert_eq!(report.exit(), Exit::Machine);
        assert_eq!(examine(&loaded, false).exit(), Exit::Done);
        let table = report.table();
        assert!(
            table.lines().count() == report.findings.len() && table.contains("  failed   cuda:77 does not exist"),
            "{table}"
        );
    }
}
