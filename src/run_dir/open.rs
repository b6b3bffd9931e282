//! Opening of a run folder: lock, identity check, resume point and settings.

use super::{
    checkpoint::{self, CheckpointError, Cleaned, Origin, Verified},
    db::{
        Checkpoint, ConfigChange, FileId, Identity, NewRun, RunEnd, RunLock, StartedRun, StateDb, StateReader,
        Violation,
    },
    files,
};
use crate::common::{
    fs::{remove_dir, remove_file, write_atomic},
    hash::sha256,
};
use crate::{
    common::{
        exit::{Exit, Failure},
        failpoint,
    },
    config::{self, Loaded, annotated},
};
use std::{
    fs, io,
    path::{Path, PathBuf},
};

/// Paths of a run folder.
#[derive(Clone, Debug)]
pub struct RunDir {
    root: PathBuf,
    /// state.db of this start, once it is open.
    state_file: Option<FileId>,
}

/// A run folder locked by this process, with the resume point of its run.
#[derive(Debug)]
pub struct OpenRun {
    pub folder: RunDir,
    pub state: StateDb,
    /// Checkpoint to resume from; `None` at the start of a run.
    pub from: Option<Checkpoint>,
    /// Its folder, with verified hashes.
    pub verified: Option<Verified>,
    /// Record of this start, with the number of jobs reopened.
    pub started: StartedRun,
}

/// Inputs of a start that come from outside the run folder.
#[derive(Clone, Debug)]
pub struct StartContext {
    /// Settings and data that must not change between starts, by name.
    pub identity: Identity,
    /// Samples of an epoch.
    pub samples: u64,
    /// Delete an old run; needs `force`.
    pub fresh: bool,
    /// Step of the checkpoint to resume from; the newest if `None`.
    pub from_checkpoint: Option<u64>,
    pub force: bool,
}

impl RunDir {
    pub fn new(root: &Path) -> RunDir {
        RunDir { root: root.to_owned(), state_file: None }
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    pub fn checkpoints(&self) -> PathBuf {
        self.root.join(files::CHECKPOINTS)
    }

    pub fn export(&self) -> PathBuf {
        self.root.join(files::EXPORT)
    }

    pub fn summary(&self) -> PathBuf {
        self.root.join(files::SUMMARY)
    }

    pub fn config(&self) -> PathBuf {
        self.root.join(files::CONFIG)
    }

    /// Locks the folder, checks the identity, finds the resume point and records this start.
    ///
    /// # Errors
    /// A [`Failure`]: the folder is in use, has another identity, lacks a usable checkpoint, or cannot be written.
    pub fn open(&self, loaded: &Loaded, context: &StartContext) -> Result<OpenRun, Failure> {
        let StartContext { identity, samples, fresh, force, from_checkpoint } = context;
        if *fresh && self.holds_a_run()? {
            if !force {
                return Err(Failure::new(
                    Exit::Config,
                    format!(
                        "{} holds a run, which --fresh would delete; add --force to delete it, or choose another run.dir",
                        self.root.display()
                    ),
                ));
            }
            self.clear()?;
        }
        let mut state = StateDb::open_or_create(&self.root).map_err(Failure::of(Exit::Run))?;
        // A folder without a started run has no identity.
        let known = !state.identity().map_err(Failure::of(Exit::Run))?.is_empty();
        let differences = match known {
            true => state.compare_identity(identity).map_err(Failure::of(Exit::Run))?,
            false if self.has_checkpoints()? => {
                return Err(Failure::new(
                    Exit::Run,
                    format!(
                        "{} holds checkpoints, but its state.db is empty or missing, so the jobs in their weights are \
                         unknown. Restore state.db from a copy, choose another run.dir, or delete the old run with \
                         --fresh --force; draftmill export still exports the checkpoints",
                        self.root.display()
                    ),
                ));
            }
            false => Vec::new(),
        };
        if !differences.is_empty() {
            let or_nothing = |value: &Option<String>| value.clone().unwrap_or_else(|| "nothing".into());
            let line = |d: &super::db::IdentityDifference| {
                format!("  {}: the run has {}, now it is {}", d.name, or_nothing(&d.old), or_nothing(&d.new))
            };
            let list: Vec<_> = differences.iter().map(line).collect();
            return Err(Failure::new(
                Exit::Config,
                format!(
                    "{} holds a run that was started with other settings or data, and cannot resume with these:\n{}\n\
                     Undo the change, choose another run.dir, or delete the old run with --fresh --force",
                    self.root.display(),
                    list.join("\n")
                ),
            ));
        }
        state.set_identity(identity).map_err(Failure::of(Exit::Run))?;
        let (from, verified) = self.resume_point(&mut state, *from_checkpoint)?.unzip();
        let step = from.as_ref().map_or(0, |checkpoint| checkpoint.step);
        let text = annotated(&loaded.written.wire);
        let config = &loaded.config;
        let new = NewRun {
            from: step,
            settings: sha256(&text),
            epochs: config.run.epochs,
            samples: *samples,
            micro_batches: config.micro_batches_per_step(),
        };
        let started = state.begin_run(&new).map_err(Failure::of(Exit::Run))?;
        let folder = RunDir { state_file: Some(state.file()), ..self.clone() };
        if let Err(failure) = self.settle_in(&mut state, loaded, &text, step) {
            // Best effort: the caller reports the failure.
            if let Err(error) = state.end_run(started.run, &RunEnd::Failed(failure.message.clone()), None) {
                tracing::debug!(%error, "end of run not recorded");
            }
            return Err(failure);
        }
        Ok(OpenRun { folder, state, from, verified, started })
    }

    /// Removes leftovers and records the settings of a start.
    fn settle_in(&self, state: &mut StateDb, loaded: &Loaded, text: &str, step: u64) -> Result<(), Failure> {
        self.clean(step)?;
        let changes = self.changed_settings(loaded);
        if !changes.is_empty() {
            let list = changes.iter().map(|c| format!("{}: {} -> {}", c.key, c.old, c.new)).collect::<Vec<_>>();
            tracing::info!(changes = %list.join("; "), "settings changed");
            state.config_changed(step, &changes).map_err(Failure::of(Exit::Run))?;
        }
        self.write_config(text).map_err(|e| self.cannot_write(&self.config(), &e))
    }

    /// Writes the settings in force to run.toml.
    ///
    /// # Errors
    /// An I/O error.
    pub fn write_config(&self, text: &str) -> io::Result<()> {
        write_atomic(&self.config(), text.as_bytes())
    }

    /// Records a failed start if the open database was lost with the failure. Best effort: the caller reports the failure.
    pub fn record_failure(&self, run: u64, failure: &Failure) {
        let end = match failure.exit {
            Exit::Interrupted => RunEnd::Stopped,
            _ => RunEnd::Failed(failure.message.clone()),
        };
        let found = FileId::of(&self.root.join(files::STATE_DB)).ok();
        if found.is_none() || self.state_file.is_some_and(|ours| found != Some(ours)) {
            // The folder or its disk was removed, or the file replaced; this end belongs to no file that is there.
            return;
        }
        let recorded = StateDb::open_or_create(&self.root).and_then(|mut state| state.end_run(run, &end, None));
        if let Err(error) = recorded {
            tracing::debug!(%error, "end of run not recorded");
        }
    }

    /// Steps with a checkpoint folder, ascending.
    ///
    /// # Errors
    /// A folder that cannot be read.
    pub fn steps(&self) -> Result<Vec<u64>, Failure> {
        let folder = self.checkpoints();
        checkpoint::steps(&folder)
            .map_err(|source| Failure::new(Exit::Run, CheckpointError::Unreadable { path: folder.clone(), source }))
    }

    /// Id of the run in state.db; empty before the first start.
    ///
    /// # Errors
    /// An unreadable state.db.
    pub fn run_id(&self) -> Result<String, Failure> {
        let reader = StateReader::open(&self.root).map_err(Failure::of(Exit::Run))?;
        Ok(reader.origin().map_err(Failure::of(Exit::Run))?.run.unwrap_or_default())
    }

    /// Compares every checkpoint folder that `state` names with its manifest, its name and its run. Retention and a run that
    /// lasts may delete a folder, so a missing one is no difference.
    ///
    /// # Errors
    /// An unreadable state.db or checkpoint.
    pub fn verify_checkpoints(&self, state: &StateReader) -> Result<Vec<Violation>, Failure> {
        let origin = state.origin().map_err(Failure::of(Exit::Run))?;
        let mut found = Vec::new();
        for checkpoint in state.checkpoints().map_err(Failure::of(Exit::Run))? {
            let dir = self.checkpoints().join(&checkpoint.name);
            match recorded(&dir, &checkpoint, &origin) {
                Ok(_) => {}
                Err(CheckpointError::Damaged { file, reason, .. }) if dir.exists() => {
                    let file = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
                    let text = format!("checkpoint {} is damaged: {file}: {reason}", checkpoint.name);
                    found.push(Violation { invariant: "file", text });
                }
                Err(CheckpointError::Damaged { .. }) => {}
                Err(error) => return Err(Failure::new(Exit::Run, error)),
            }
        }
        Ok(found)
    }

    fn holds_a_run(&self) -> Result<bool, Failure> {
        Ok(self.root.join(files::STATE_DB).exists() || self.has_checkpoints()?)
    }

    fn has_checkpoints(&self) -> Result<bool, Failure> {
        Ok(!self.steps()?.is_empty())
    }

    /// Newest intact checkpoint. Damaged ones are logged and renamed for inspection.
    fn resume_point(
        &self,
        state: &mut StateDb,
        wanted: Option<u64>,
    ) -> Result<Option<(Checkpoint, Verified)>, Failure> {
        let mut known = state.checkpoints().map_err(Failure::of(Exit::Run))?;
        if let Some(step) = wanted {
            let steps: Vec<_> = known.iter().map(|checkpoint| checkpoint.name.clone()).collect();
            known.retain(|checkpoint| checkpoint.step == step);
            if known.is_empty() {
                return Err(Failure::new(
                    Exit::Usage,
                    format!(
                        "--from-checkpoint: {} has no checkpoint of step {step}; it has {}",
                        self.checkpoints().display(),
                        if steps.is_empty() { "none".into() } else { steps.join(", ") }
                    ),
                ));
            }
        }
        let origin = state.origin().map_err(Failure::of(Exit::Run))?;
        let mut unusable = Vec::new();
        for checkpoint in &known {
            let dir = self.checkpoints().join(&checkpoint.name);
            let why = match recorded(&dir, checkpoint, &origin) {
                Ok(verified) => {
                    self.set_aside(state, &unusable, &checkpoint.name)?;
                    return Ok(Some((checkpoint.clone(), verified)));
                }
                Err(error @ (CheckpointError::Newer { .. } | CheckpointError::Unreadable { .. })) => {
                    return Err(Failure::new(Exit::Model, error));
                }
                Err(CheckpointError::Damaged { file, reason, .. }) if dir.exists() => {
                    let file = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
                    format!("{} is damaged: {file}: {reason}", checkpoint.name)
                }
                Err(CheckpointError::Damaged { .. }) => format!("{} is missing", checkpoint.name),
                Err(error @ (CheckpointError::Io { .. } | CheckpointError::NotFinite { .. })) => {
                    format!("{}: {error}", checkpoint.name)
                }
            };
            unusable.push((dir, why));
        }
        if unusable.is_empty() {
            return Ok(None);
        }
        // Retention deletes old checkpoints, so of the missing ones only the newest is reported.
        let mut reported: Vec<_> =
            unusable.iter().filter(|(dir, _)| dir.exists()).map(|(_, why)| why.as_str()).collect();
        if reported.is_empty() {
            reported.push(&unusable[0].1);
        }
        Err(Failure::new(
            Exit::Model,
            format!(
                "no checkpoint in {} is usable: {}. Restore one from a copy, choose another run.dir, or start over with \
                 --fresh --force",
                self.checkpoints().display(),
                reported.join("; ")
            ),
        ))
    }

    /// Reports unusable checkpoints and renames their folders, before the ledger forgets them.
    fn set_aside(&self, state: &mut StateDb, unusable: &[(PathBuf, String)], instead: &str) -> Result<(), Failure> {
        for (dir, why) in unusable {
            let aside = dir.with_extension("damaged");
            let kept = if dir.exists() {
                let rename = || {
                    remove_dir(&aside)?;
                    failpoint::point("rename", "damaged checkpoint")?;
                    fs::rename(dir, &aside)
                };
                rename().map_err(|e| self.cannot_write(&aside, &e))?;
                format!(" (kept as {})", aside.display())
            } else {
                String::new()
            };
            let text = format!("checkpoint {why}{kept}; resuming from {instead}, the newest intact one");
            tracing::warn!(reason = %text, "checkpoint unusable");
            state.event("checkpoint-unusable", &text).map_err(Failure::of(Exit::Run))?;
        }
        Ok(())
    }

    /// Removes unfinished checkpoints, and puts whole ones after step `newest` aside.
    fn clean(&self, newest: u64) -> Result<(), Failure> {
        let folder = self.checkpoints();
        let Cleaned { removed, aside } =
            checkpoint::clean(&folder, newest).map_err(|e| self.cannot_write(&folder, &e))?;
        if removed > 0 {
            tracing::info!(removed, "unfinished checkpoints removed");
        }
        for kept in aside {
            tracing::warn!(kept = %kept.display(), "state.db does not list this checkpoint; draftmill export can read it");
        }
        Ok(())
    }

    /// Settings that differ from those of the previous start in run.toml.
    fn changed_settings(&self, loaded: &Loaded) -> Vec<ConfigChange> {
        let path = self.config();
        if !path.exists() {
            return Vec::new();
        }
        let old = match config::load(Some(&path), &[]) {
            Ok(old) => old.written.wire,
            Err(problems) => {
                tracing::warn!(path = %path.display(), %problems, "previous settings unreadable; changes unknown");
                return Vec::new();
            }
        };
        config::changes(&old, &loaded.written.wire)
    }

    /// Deletes the files of a run, [`files::FILES`] and [`files::DIRS`]. A prepared store in the folder stays.
    fn clear(&self) -> Result<(), Failure> {
        // Fails if another process has the folder. The database may be damaged, so it is not opened.
        let _lock = RunLock::acquire(&self.root).map_err(Failure::of(Exit::Run))?;
        for path in files::FILES.map(|name| self.root.join(name)) {
            remove_file(&path).map_err(|e| self.cannot_write(&path, &e))?;
        }
        for dir in files::DIRS.map(|name| self.root.join(name)) {
            remove_dir(&dir).map_err(|e| self.cannot_write(&dir, &e))?;
        }
        Ok(())
    }

    /// Failure for a file of the run that cannot be written.
    pub fn cannot_write(&self, path: &Path, error: &std::io::Error) -> Failure {
        Failure::new(
            Exit::Run,
            format!(
                "{} cannot be written: {error}; free disk space, correct its permissions, or choose another run.dir",
                path.display()
            ),
        )
    }
}

/// Opens the folder of a recorded checkpoint and compares its step and run with the record.
fn recorded(dir: &Path, checkpoint: &Checkpoint, origin: &Origin) -> Result<Verified, CheckpointError> {
    let verified = Verified::open(dir)?;
    if verified.state.step != checkpoint.step {
        let reason = format!("it is of step {}, but state.db says {}", verified.state.step, checkpoint.step);
        return Err(CheckpointError::Damaged { dir: dir.to_owned(), file: dir.join("state.json"), reason });
    }
    verified.check_origin(origin)?;
    Ok(verified)
}
