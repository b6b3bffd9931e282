//! The run folder: who may use it, whether it belongs to these settings, and where a run in it goes on.

use super::{
    checkpoint::{self, CheckpointError, Verified},
    db::{Begun, Checkpoint, ConfigChange, Identity, NewRun, RunEnd, RunLock, StateDb},
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
    /// Its folder, every byte of it as it was written.
    pub verified: Option<Verified>,
    /// This start, and how many jobs that ended after that checkpoint are open again.
    pub begun: Begun,
}

/// What a start must know of its run.
#[derive(Clone, Debug)]
pub struct About {
    /// What must not change between starts, by name.
    pub identity: Identity,
    /// Samples of an epoch.
    pub samples: u64,
    /// Throw an old run away, which needs `force`.
    pub fresh: bool,
    pub force: bool,
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

    /// Takes the folder for this process and finds where its run stands.
    pub fn open(&self, loaded: &Loaded, about: &About) -> Result<Opened, Failure> {
        let About { identity, samples, fresh, force } = about;
        if *fresh && self.holds_a_run() {
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
            let line = |d: &super::db::IdentityDifference| {
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
        let (from, verified) = self.resume_point(&mut state)?.unzip();
        let step = from.as_ref().map_or(0, |checkpoint| checkpoint.step);
        let text = annotated(&loaded.written.wire);
        let config = &loaded.config;
        let new = NewRun {
            from: step,
            settings: hash(&text),
            epochs: config.run.epochs,
            samples: *samples,
            micro_batches: config.micro_batches_per_step(),
        };
        let begun = state.begin_run(&new).map_err(Failure::of(Exit::Run))?;
        self.clean(step)?;
        let changes = self.changed_settings(loaded);
        if !changes.is_empty() {
            let list = changes.iter().map(|c| format!("{}: {} -> {}", c.key, c.old, c.new)).collect::<Vec<_>>();
            tracing::info!("settings that changed since the last start: {}", list.join("; "));
            state.config_changed(step, &changes).map_err(Failure::of(Exit::Run))?;
        }
        self.keep_config(&text).map_err(|e| self.cannot_write(&self.config(), &e))?;
        Ok(Opened { folder: self.clone(), state, from, verified, begun })
    }

    /// Writes down the settings that are in force.
    pub fn keep_config(&self, text: &str) -> io::Result<()> {
        write_atomic(&self.config(), text.as_bytes())
    }

    /// Notes that a start failed, where its state was lost with what failed. Best effort: the failure itself is told anyway.
    pub fn note_failure(&self, run: u64, failure: &Failure) {
        let end = match failure.exit {
            Exit::Interrupted => RunEnd::Stopped,
            _ => RunEnd::Failed(failure.message.clone()),
        };
        if !self.root.join("state.db").exists() {
            // The folder, or its disk, was taken away: another must not be begun in its place.
            return;
        }
        let noted = StateDb::open_or_create(&self.root).and_then(|mut state| state.end_run(run, &end, None));
        if let Err(error) = noted {
            tracing::debug!(%error, "how the run ended could not be noted");
        }
    }

    fn holds_a_run(&self) -> bool {
        self.root.join("state.db").exists() || self.has_checkpoints()
    }

    fn has_checkpoints(&self) -> bool {
        checkpoint::steps(&self.checkpoints()).is_ok_and(|steps| !steps.is_empty())
    }

    /// The newest checkpoint that is as it was written. Damaged ones are told, and put aside for a person to look at.
    fn resume_point(&self, state: &mut StateDb) -> Result<Option<(Checkpoint, Verified)>, Failure> {
        let known = state.checkpoints().map_err(Failure::of(Exit::Run))?;
        let mut unusable = Vec::new();
        for checkpoint in &known {
            let dir = self.checkpoints().join(&checkpoint.name);
            let why = match Verified::open(&dir) {
                Ok(verified) => {
                    self.give_up(state, &unusable, &checkpoint.name)?;
                    return Ok(Some((checkpoint.clone(), verified)));
                }
                Err(error @ CheckpointError::Newer { .. }) => return Err(Failure::new(Exit::Model, error)),
                Err(CheckpointError::Damaged { file, reason, .. }) if dir.exists() => {
                    let file = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
                    format!("{} is damaged: {file}: {reason}", checkpoint.name)
                }
                Err(CheckpointError::Damaged { .. }) => format!("{} is gone", checkpoint.name),
                Err(error @ (CheckpointError::Io { .. } | CheckpointError::NotFinite { .. })) => {
                    format!("{}: {error}", checkpoint.name)
                }
            };
            unusable.push((dir, why));
        }
        if unusable.is_empty() {
            return Ok(None);
        }
        // Older ones than are kept are gone by right; of those that are not there the newest one is told.
        let mut told: Vec<_> = unusable.iter().filter(|(dir, _)| dir.exists()).map(|(_, why)| why.as_str()).collect();
        if told.is_empty() {
            told.push(&unusable[0].1);
        }
        Err(Failure::new(
            Exit::Model,
            format!(
                "no checkpoint in {} can be gone on from: {}; and there is no other. Restore one from a copy, choose another \
                 run.dir, or begin anew with --fresh --force",
                self.checkpoints().display(),
                told.join("; ")
            ),
        ))
    }

    /// Tells that checkpoints cannot be used and puts what is left of them aside, before the ledger forgets them.
    fn give_up(&self, state: &mut StateDb, unusable: &[(PathBuf, String)], instead: &str) -> Result<(), Failure> {
        for (dir, why) in unusable {
            let aside = dir.with_extension("damaged");
            let kept = if dir.exists() {
                let put = || {
                    remove_dir(&aside)?;
                    failpoint::point("rename", "damaged checkpoint")?;
                    fs::rename(dir, &aside)
                };
                put().map_err(|e| self.cannot_write(&aside, &e))?;
                format!(" (kept as {})", aside.display())
            } else {
                String::new()
            };
            let text = format!("checkpoint {why}{kept}; going on from {instead}, the newest that is whole");
            tracing::warn!("{text}");
            state.event("checkpoint-unusable", &text).map_err(Failure::of(Exit::Run))?;
        }
        Ok(())
    }

    /// Removes what a killed process left beyond the checkpoint of `newest`.
    fn clean(&self, newest: u64) -> Result<(), Failure> {
        let folder = self.checkpoints();
        let removed = checkpoint::clean(&folder, newest).map_err(|e| self.cannot_write(&folder, &e))?;
        if removed > 0 {
            tracing::info!(removed, "checkpoints that a killed process left unfinished were removed");
        }
        Ok(())
    }

    /// The settings in which this start differs from what run.toml says of the one before.
    fn changed_settings(&self, loaded: &Loaded) -> Vec<ConfigChange> {
        let path = self.config();
        if !path.exists() {
            return Vec::new();
        }
        let old = match config::load(Some(&path), &[]) {
            Ok(old) => old.written.wire,
            Err(problems) => {
                let path = path.display();
                tracing::warn!("{path} cannot be read, so nothing tells which settings changed: {problems}");
                return Vec::new();
            }
        };
        config::changes(&old, &loaded.written.wire)
    }

    /// Deletes what a run wrote, and nothing else. The prepared store, where it lies in this folder, stays.
    fn clear(&self) -> Result<(), Failure> {
        // Refused while another process has the folder. The database may be damaged, so nothing opens it.
        let _lock = RunLock::acquire(&self.root).map_err(Failure::of(Exit::Run))?;
        let files = [
            "state.db",
            "state.db-wal",
            "state.db-shm",
            "state.db-journal",
            "run.toml",
            "steps.jsonl",
            "evals.jsonl",
            "summary.json",
        ];
        for name in files {
            remove_file(&self.root.join(name)).map_err(|e| self.cannot_write(&self.root.join(name), &e))?;
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

/// SHA-256 of the text of a configuration, in hexadecimal.
pub fn hash(text: &str) -> String {
    sha256(text)
}
