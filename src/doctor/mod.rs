//! `draftmill doctor`: what the machine is and whether it works, tried out without a model and without a run.

#[cfg(feature = "torch")]
mod matmul_check;
#[cfg_attr(not(feature = "torch"), path = "no_torch.rs")]
mod torch;

use crate::{
    check::machine::{self, Machine},
    common::{
        exit::Exit,
        host::{free_disk, machine_memory, memory_limit},
        process::open_files,
    },
    config::{ByteSize, Loaded},
};
use serde::Serialize;
use std::{
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
    thread::available_parallelism,
};

/// Less room than this for checkpoints is worth a word: one of a drafter of a billion parameters takes 12 GB.
const LITTLE_DISK: u64 = 10 << 30;
/// Fewer open files than this are worth a word: a run takes some dozens, and as many again for whoever looks at it.
const FEW_FILES: u64 = 1024;

/// Whether a part of the machine works.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    Ok,
    /// A run will do, but not as well as it might.
    Warning,
    Failed,
}

/// What was found of one part.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    pub part: String,
    pub state: State,
    /// A sentence without its full stop.
    pub found: String,
    /// What to do, unless all is well.
    pub remedy: Option<String>,
}

/// Every part that was looked at.
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

    /// How many are in this state.
    pub fn count(&self, state: State) -> usize {
        self.findings.iter().filter(|finding| finding.state == state).count()
    }

    pub fn exit(&self) -> Exit {
        if self.count(State::Failed) > 0 { Exit::Machine } else { Exit::Done }
    }

    /// One line for each part.
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

/// Looks at this machine. `chosen`: the configuration is somebody's, so that what it names has to be there.
pub fn examine(loaded: &Loaded, chosen: bool) -> Report {
    let (config, mut report) = (&loaded.config, Report::default());
    torch::examine(&mut report);
    let cores = available_parallelism().map_or(1, usize::from);
    let threads = config.run.threads;
    report.ok("threads", format!("{cores} cores; an operation on the CPU takes {threads} (run.threads)"));
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
        return report.warn("memory", "the machine does not tell how much it has", "mount /proc");
    };
    let found = match limit < host {
        true => format!("{}, of which this process may take {}", ByteSize(host).rounded(), ByteSize(limit).rounded()),
        false => ByteSize(host).rounded(),
    };
    match limit > pool.0 {
        true => report.ok("memory", found),
        false => report.warn("memory", format!("{found}; pool.max_bytes = {pool} alone may take that"), "lower it"),
    }
}

/// How many are open, and how many may be.
fn files(report: &mut Report, counted: io::Result<(u64, u64)>) {
    match counted {
        Ok((_, u64::MAX)) => report.ok("open files", "no limit"),
        Ok((open, most)) if most >= FEW_FILES => report.ok("open files", format!("{open} of at most {most}")),
        Ok((_, most)) => report.warn(
            "open files",
            format!("at most {most}"),
            "raise it: ulimit -n 4096, or LimitNOFILE= in the unit of the service",
        ),
        Err(error) => report.warn("open files", format!("the limit is not told: {error}"), "mount /proc"),
    }
}

/// Where run folders go: whether they can be made, and how much room there is.
fn folder(report: &mut Report, run: &Path) {
    let remedy = "name another folder (run.dir), or give this user the right to write there";
    let place = match parent(run) {
        Ok(place) => place,
        Err(error) => return report.fail("run folder", format!("{} has no place: {error}", run.display()), remedy),
    };
    let at = format!("{} goes into {}", run.display(), place.display());
    if let Err(error) = try_to_write(&place) {
        return report.fail("run folder", format!("{at}, where nothing can be written: {error}"), remedy);
    }
    match free_disk(&place) {
        Some(free) if free < LITTLE_DISK => report.warn(
            "run folder",
            format!("{at}, which has only {} free", ByteSize(free).rounded()),
            "draftmill check tells what a run needs; choose another disk (run.dir), or lower checkpoint.keep_last",
        ),
        Some(free) => {
            report.ok("run folder", format!("{at}, which can be written and has {} free", ByteSize(free).rounded()))
        }
        None => report.warn("run folder", format!("{at}, which does not tell its free room"), remedy),
    }
}

/// The first folder above that is there; others are made in it.
fn parent(run: &Path) -> io::Result<PathBuf> {
    let run = std::path::absolute(run)?;
    let above = run.ancestors().skip(1).find(|path| path.exists());
    Ok(above.unwrap_or(&run).to_owned())
}

/// Makes a file that nobody else has, and takes it away again.
fn try_to_write(folder: &Path) -> io::Result<()> {
    let path = folder.join(format!(".draftmill-doctor-{}", std::process::id()));
    let mut file = fs::OpenOptions::new().write(true).create_new(true).open(&path)?;
    let written = file.write_all(b"draftmill doctor was here\n").and_then(|()| file.sync_all());
    fs::remove_file(&path)?;
    written
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::load_text;

    fn states(look: impl FnOnce(&mut Report)) -> Vec<State> {
        let mut report = Report::default();
        look(&mut report);
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
        for (most, state) in [(1024, State::Ok), (u64::MAX, State::Ok), (1023, State::Warning)] {
            assert_eq!(states(|report| files(report, Ok((3, most)))), [state], "{most}");
        }
        assert_eq!(states(|report| files(report, Err(io::Error::other("no /proc")))), [State::Warning]);
    }

    #[test]
    fn a_run_folder_needs_a_folder_above_it_that_can_be_written() {
        let dir = tempfile::tempdir().unwrap();
        let deep = dir.path().join("not/yet/there");
        assert!(states(|report| folder(report, &deep))[0] < State::Failed);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is left behind");
        fs::write(dir.path().join("file"), "").unwrap();
        assert_eq!(states(|report| folder(report, &dir.path().join("file/run"))), [State::Failed]);
    }

    /// What a chosen configuration names has to be there; of the defaults nothing is held against the machine.
    #[test]
    fn a_chosen_configuration_is_held_to_the_machine() {
        let sets = ["target.devices=cuda:77".into(), "admin.listen=off".into()];
        let loaded = load_text("", "x.toml", &sets).unwrap();
        let report = examine(&loaded, true);
        let failed: Vec<_> = report.findings.iter().filter(|finding| finding.state == State::Failed).collect();
        assert!(failed.iter().any(|finding| finding.part == "target.devices"), "{failed:?}");
        assert_eq!(report.exit(), Exit::Machine);
        assert_eq!(examine(&loaded, false).exit(), Exit::Done);
        let table = report.table();
        assert!(
            table.lines().count() == report.findings.len() && table.contains("  failed   cuda:77 is not there"),
            "{table}"
        );
    }
}
