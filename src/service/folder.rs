//! The run folder: who may use it, whether it belongs to these settings, and where a run in it goes on.

use crate::{
    checkpoint,
    config::{Engine, Loaded, annotated},
    exit::{Exit, Failure},
    state::{Checkpoint, Identity, RunLock, StateDb},
};
use std::{
    fs,
    path::{Path, PathBuf},
};

/// The files and folders of a run.
#[derive(Clone, Debug)]
pub struct RunFolder {
    root: PathBuf,
}

/// A run folder that this process holds, and where its run stands.
#[derive(Debug)]
pub struct Opened {
    pub folder: RunFolder,
    pub state: StateDb,
    /// The checkpoint to go on from; `None` at the beginning.
    pub from: Option<Checkpoint>,
    /// Jobs that were trained after that checkpoint and are open again.
    pub reopened: usize,
}

impl RunFolder {
    pub fn new(root: &Path) -> RunFolder {
        RunFolder { root: root.to_owned() }
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    pub fn checkpoints(&self) -> PathBuf {
        self.root.join("checkpoints")
    }

    pub fn export(&self) -> PathBuf {
        self.root.join("export")
    }

    pub fn summary(&self) -> PathBuf {
        self.root.join("summary.json")
    }

    pub fn config(&self) -> PathBuf {
        self.root.join("run.toml")
    }

    /// Takes the folder for this process and finds where its run stands. `identity` is what must not change between
    /// starts. `fresh` throws an old run away, which needs `force`.
    pub fn open(&self, loaded: &Loaded, identity: &Identity, fresh: bool, force: bool) -> Result<Opened, Failure> {
        if fresh && self.holds_a_run() {
            if !force {
                return Err(Failure::new(
                    Exit::Config,
                    format!(
                        "{} holds a run; --fresh would throw it away. Add --force to do so, or choose another run.dir",
                        self.root.display()
                    ),
                ));
            }
            self.clear()?;
        }
        let mut state = StateDb::open_or_create(&self.root).map_err(Failure::of(Exit::Run))?;
        // A folder whose run never began has no identity yet.
        let known = !state.identity().map_err(Failure::of(Exit::Run))?.is_empty();
        let differences = match known {
            true => state.compare_identity(identity).map_err(Failure::of(Exit::Run))?,
            false if self.has_checkpoints() => {
                return Err(Failure::new(
                    Exit::Run,
                    format!(
                        "{} holds checkpoints, but its state.db is empty or gone, so nothing says which jobs are in their \
                         weights. Restore state.db from a copy, choose another run.dir, or throw the old run away with \
                         --fresh --force; draftmill export still exports them",
                        self.root.display()
                    ),
                ));
            }
            false => Vec::new(),
        };
        if !differences.is_empty() {
            let or_nothing = |value: &Option<String>| value.clone().unwrap_or_else(|| "nothing".into());
            let line = |d: &crate::state::IdentityDifference| {
                format!("  {}: the run has {}, now it is {}", d.name, or_nothing(&d.old), or_nothing(&d.new))
            };
            let list: Vec<_> = differences.iter().map(line).collect();
            return Err(Failure::new(
                Exit::Config,
                format!(
                    "{} holds a run that was started with other settings or data, and cannot go on with these:\n{}\n\
                     Undo the change, choose another run.dir, or throw the old run away with --fresh --force",
                    self.root.display(),
                    list.join("\n")
                ),
            ));
        }
        state.set_identity(identity).map_err(Failure::of(Exit::Run))?;
        let from = self.resume_point(&state, loaded.config.run.engine)?;
        let step = from.as_ref().map_or(0, |c| c.step);
        let reopened = state.reopen_after(step).map_err(Failure::of(Exit::Run))?;
        let text = annotated(&loaded.written.wire);
        write_whole(&self.config(), &text).map_err(|e| self.cannot_write(&self.config(), &e))?;
        Ok(Opened { folder: self.clone(), state, from, reopened })
    }

    fn holds_a_run(&self) -> bool {
        self.root.join("state.db").exists() || self.has_checkpoints()
    }

    fn has_checkpoints(&self) -> bool {
        checkpoint::steps(&self.checkpoints()).is_ok_and(|steps| !steps.is_empty())
    }

    /// The newest checkpoint whose folder is there. The simulated engine has none on disk.
    fn resume_point(&self, state: &StateDb, engine: Engine) -> Result<Option<Checkpoint>, Failure> {
        let known = state.checkpoints().map_err(Failure::of(Exit::Run))?;
        let there = |c: &&Checkpoint| engine == Engine::Simulated || self.checkpoints().join(&c.name).exists();
        let found = known.iter().find(there).cloned();
        match (&found, known.first()) {
            (None, Some(newest)) => Err(Failure::new(
                Exit::Model,
                format!(
                    "{} is gone, and so is every checkpoint before it. Restore one from a copy, choose another run.dir, or \
                     begin anew with --fresh --force",
                    self.checkpoints().join(&newest.name).display()
                ),
            )),
            (Some(found), Some(newest)) if found.step < newest.step => {
                tracing::warn!(
                    gone = newest.name,
                    instead = found.name,
                    "the newest checkpoint is gone; going on before it"
                );
                Ok(Some(found.clone()))
            }
            _ => Ok(found),
        }
    }

    /// Deletes what a run wrote, and nothing else. The prepared store, where it lies in this folder, stays.
    fn clear(&self) -> Result<(), Failure> {
        // Refused while another process has the folder. The database may be damaged, so nothing opens it.
        let _lock = RunLock::acquire(&self.root).map_err(Failure::of(Exit::Run))?;
        let files =
            ["state.db", "state.db-wal", "state.db-shm", "state.db-journal", "run.toml", "steps.jsonl", "summary.json"];
        for name in files {
            remove(&self.root.join(name)).map_err(|e| self.cannot_write(&self.root.join(name), &e))?;
        }
        for dir in [self.checkpoints(), self.export()] {
            if dir.exists() {
                fs::remove_dir_all(&dir).map_err(|e| self.cannot_write(&dir, &e))?;
            }
        }
        Ok(())
    }

    /// The sentence for a file of the run that cannot be written.
    pub fn cannot_write(&self, path: &Path, error: &std::io::Error) -> Failure {
        Failure::new(
            Exit::Run,
            format!(
                "{} cannot be written: {error}; free space, mend its permissions, or choose another run.dir",
                path.display()
            ),
        )
    }
}

/// Whole or not at all.
fn write_whole(path: &Path, text: &str) -> std::io::Result<()> {
    let tmp = path.with_extension("toml.tmp");
    fs::write(&tmp, text)?;
    fs::rename(tmp, path)
}

fn remove(path: &Path) -> std::io::Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}
