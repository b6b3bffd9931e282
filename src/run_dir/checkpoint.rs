//! Checkpoint folders: written atomically, and read only if every file matches its hash.
//!
//! `checkpoints/step-N/` holds the fp32 weights, the two AdamW moments, `state.json` and `manifest.json` with the SHA-256 of
//! each file. It is an [`AtomicDir`]. A checkpoint exists once a row in state.db names it. `state.json` has the step, the seed
//! and the run, and these must be those of the folder's name and of state.db.

use super::{
    eval_log,
    retention::{Decision, StoredCheckpoint, retention},
};
use crate::common::{
    fs::{AtomicDir, open_input, read_input, read_remedy, remove_dir, remove_partial_dirs, sync, write_json},
    hash::hex,
};
use crate::{
    common::failpoint,
    config::RetentionPolicy,
    hf::{HfError, draft::DraftConfig, tensors::TensorFiles},
};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, Read},
    path::{Path, PathBuf},
};
use thiserror::Error;

pub const WEIGHTS: &str = "weights.safetensors";
pub const FIRST_MOMENTS: &str = "exp_avg.safetensors";
pub const SECOND_MOMENTS: &str = "exp_avg_sq.safetensors";
const DRAFT_CONFIG: &str = "draft_config.json";
const STATE: &str = "state.json";
const MANIFEST: &str = "manifest.json";
const VERSION: u32 = 1;
/// Limit on the small files of a checkpoint, in bytes.
const STATE_LIMIT: u64 = 64 << 20;
/// Ending of a whole checkpoint that state.db does not list.
pub const ASIDE: &str = "later";

/// Failure to write or read a checkpoint.
#[derive(Debug, Error)]
pub enum CheckpointError {
    #[error("{}: {source}; free disk space or correct its permissions", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("{} cannot be read: {source}; {}", path.display(), read_remedy(source))]
    Unreadable { path: PathBuf, source: io::Error },
    #[error("{} is damaged ({reason}); restore it from a copy, or delete the folder {} and run the same command, which then resumes from the previous checkpoint", file.display(), dir.display())]
    Damaged { dir: PathBuf, file: PathBuf, reason: String },
    #[error("{} was written by a newer version of draftmill (format {found}, this one reads up to {VERSION}); use that version", dir.display())]
    Newer { dir: PathBuf, found: u32 },
    #[error("{tensor} has a NaN or an infinite value in {file}: the training diverged; lower optimizer.learning_rate")]
    NotFinite { file: String, tensor: String },
}

/// Content of `state.json`. The field names are its keys.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct State {
    pub version: u32,
    pub draftmill: String,
    /// Optimizer steps in the weights.
    pub step: u64,
    pub seed: u64,
    /// Id of the run, as in state.db; empty if an older draftmill wrote it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub run: String,
    /// Resolved configuration, as in run.toml.
    pub config: String,
}

/// Run of a checkpoint, as recorded in state.db.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Origin {
    pub run: Option<String>,
    pub seed: Option<u64>,
}

impl State {
    pub fn new(step: u64, seed: u64, config: String) -> State {
        State { version: VERSION, draftmill: env!("CARGO_PKG_VERSION").into(), step, seed, run: String::new(), config }
    }
}

/// Named fp32 tensor, row-major.
#[derive(Clone, Debug, PartialEq)]
pub struct NamedTensor {
    pub name: String,
    pub shape: Vec<usize>,
    pub data: Vec<f32>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Manifest {
    files: BTreeMap<String, Entry>,
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Entry {
    bytes: u64,
    sha256: String,
}

/// Folder name of the checkpoint of a step.
pub fn name_of(step: u64) -> String {
    format!("step-{step}")
}

/// Writes `checkpoints/step-N` atomically. `tensors` has the name and content of each file. Returns the folder's name.
///
/// # Errors
/// A value that is not finite, or an I/O error.
pub fn write(
    checkpoints: &Path,
    state: &State,
    draft: &DraftConfig,
    tensors: &[(&str, Vec<NamedTensor>)],
) -> Result<String, CheckpointError> {
    for (file, tensors) in tensors {
        // No run can resume from such values, and retention would delete a good checkpoint for them.
        if let Some(bad) = tensors.iter().find(|one| !one.data.iter().all(|value| value.is_finite())) {
            return Err(CheckpointError::NotFinite { file: (*file).into(), tensor: bad.name.clone() });
        }
    }
    let name = name_of(state.step);
    let whole = checkpoints.join(&name);
    let at = |path: &Path| {
        let path = path.to_owned();
        move |source| CheckpointError::Io { path, source }
    };
    create_parent(checkpoints).map_err(at(checkpoints))?;
    // A folder of the same step may exist that was renamed but never recorded in state.db.
    let dir = AtomicDir::create(&whole, "checkpoint").map_err(at(&whole))?;
    let file = |name: &str| dir.partial_path().join(name);
    for (name, tensors) in tensors {
        write_tensors(&file(name), tensors, f32::to_le_bytes, safetensors::Dtype::F32).map_err(at(&file(name)))?;
    }
    write_json(&file(STATE), state).map_err(at(&file(STATE)))?;
    write_json(&file(DRAFT_CONFIG), &draft.to_json()).map_err(at(&file(DRAFT_CONFIG)))?;
    let manifest = Manifest { files: digests(dir.partial_path()).map_err(at(dir.partial_path()))? };
    write_json(&file(MANIFEST), &manifest).map_err(at(&file(MANIFEST)))?;
    dir.publish().map_err(at(&whole))?;
    Ok(name)
}

/// Checkpoint with verified hashes.
#[derive(Debug)]
pub struct Verified {
    dir: PathBuf,
    pub state: State,
    pub draft: DraftConfig,
}

impl Verified {
    /// Opens a checkpoint folder and compares every file with the manifest, and the step with the folder's name.
    ///
    /// # Errors
    /// A damaged or missing file, a newer format, or a file that cannot be read at this moment.
    pub fn open(dir: &Path) -> Result<Verified, CheckpointError> {
        let damaged =
            |file: &str, reason: String| CheckpointError::Damaged { dir: dir.to_owned(), file: dir.join(file), reason };
        let failed = |file: &str, source: io::Error| match is_damage(&source) {
            true => damaged(file, source.to_string()),
            false => CheckpointError::Unreadable { path: dir.join(file), source },
        };
        let read = |file: &str| read_input(&dir.join(file), STATE_LIMIT).map_err(|e| failed(file, e));
        let manifest: Manifest =
            serde_json::from_slice(&read(MANIFEST)?).map_err(|e| damaged(MANIFEST, e.to_string()))?;
        for (file, entry) in &manifest.files {
            let found = digest(&dir.join(file)).map_err(|e| failed(file, e))?;
            if found != *entry {
                return Err(damaged(
                    file,
                    format!(
                        "{} bytes, SHA-256 {}; expected {} bytes, {}",
                        found.bytes, found.sha256, entry.bytes, entry.sha256
                    ),
                ));
            }
        }
        let state: State = serde_json::from_slice(&read(STATE)?).map_err(|e| damaged(STATE, e.to_string()))?;
        if state.version > VERSION {
            return Err(CheckpointError::Newer { dir: dir.to_owned(), found: state.version });
        }
        let draft = serde_json::from_slice(&read(DRAFT_CONFIG)?).map_err(|e| damaged(DRAFT_CONFIG, e.to_string()))?;
        let draft = DraftConfig::from_json(&draft).map_err(|e| damaged(DRAFT_CONFIG, e.to_string()))?;
        for file in [WEIGHTS, FIRST_MOMENTS, SECOND_MOMENTS, STATE, DRAFT_CONFIG] {
            if !manifest.files.contains_key(file) {
                return Err(damaged(file, "it is not in the manifest".into()));
            }
        }
        match named_step(dir) {
            Some(step) if step != state.step => {
                Err(damaged(STATE, format!("it is of step {}, but the folder's name says {step}", state.step)))
            }
            _ => Ok(Verified { dir: dir.to_owned(), state, draft }),
        }
    }

    /// Compares seed and run with those of state.db. A value that one side lacks is not compared.
    ///
    /// # Errors
    /// [`CheckpointError::Damaged`] if the files are of another run.
    pub fn check_origin(&self, origin: &Origin) -> Result<(), CheckpointError> {
        let State { seed, run, .. } = &self.state;
        let damaged =
            |reason| Err(CheckpointError::Damaged { dir: self.dir.clone(), file: self.dir.join(STATE), reason });
        match origin {
            Origin { seed: Some(expected), .. } if seed != expected => {
                damaged(format!("it is of a run with run.seed = {seed}, but this run has {expected}"))
            }
            Origin { run: Some(expected), .. } if !run.is_empty() && run != expected => {
                damaged(format!("it is of the run {run}, but this run is {expected}"))
            }
            _ => Ok(()),
        }
    }

    /// Maps the tensors of one file and checks their shapes.
    ///
    /// # Errors
    /// A damaged file.
    pub fn tensors(&self, file: &str) -> Result<TensorFiles, CheckpointError> {
        let damaged =
            |reason: String| CheckpointError::Damaged { dir: self.dir.clone(), file: self.dir.join(file), reason };
        let files = TensorFiles::open_file(&self.dir.join(file)).map_err(|error| match error {
            HfError::Read { path, source } if !is_damage(&source) => CheckpointError::Unreadable { path, source },
            error => damaged(error.to_string()),
        })?;
        let mut shapes = self.draft.tensor_shapes();
        if file == SECOND_MOMENTS {
            // Matrices of Muon have none; the optimizer knows which tensors these are.
            shapes.retain(|name, _| files.names().any(|known| known == name));
        }
        match files.check(&shapes).first() {
            Some(error) => Err(damaged(error.to_string())),
            None => Ok(files),
        }
    }
}

/// Folders that [`clean`] handled.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Cleaned {
    /// Number of removed folders, none of which was whole.
    pub removed: usize,
    /// Whole checkpoints, now named `step-N.later`.
    pub aside: Vec<PathBuf>,
}

/// Removes unfinished checkpoint folders. Renames whole ones after step `newest`, which state.db does not list: a state.db
/// that was restored from a copy does not know them.
///
/// # Errors
/// An I/O error.
pub fn clean(checkpoints: &Path, newest: u64) -> io::Result<Cleaned> {
    let mut cleaned = Cleaned::default();
    if checkpoints.exists() {
        cleaned.removed += remove_partial_dirs(checkpoints)?;
        for step in steps(checkpoints)?.into_iter().filter(|&step| step > newest) {
            let dir = checkpoints.join(name_of(step));
            if let Err(CheckpointError::Damaged { .. }) = Verified::open(&dir) {
                fs::remove_dir_all(dir)?;
                cleaned.removed += 1;
                continue;
            }
            let aside = checkpoints.join(aside_name(step));
            remove_dir(&aside)?;
            failpoint::point("rename", "later checkpoint")?;
            fs::rename(dir, &aside)?;
            cleaned.aside.push(aside);
        }
    }
    Ok(cleaned)
}

/// Folder name of a whole checkpoint of this step that state.db does not list.
pub fn aside_name(step: u64) -> String {
    format!("{}.{ASIDE}", name_of(step))
}

/// Steps that have a checkpoint folder, ascending.
///
/// # Errors
/// An I/O error. A folder of checkpoints that does not exist has none.
pub fn steps(checkpoints: &Path) -> io::Result<Vec<u64>> {
    let mut steps = Vec::new();
    let entries = match fs::read_dir(checkpoints) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(steps),
        entries => entries?,
    };
    for entry in entries {
        let path = entry?.path();
        // Another spelling of the number, or a file, is not a checkpoint.
        let Some(step) = named_step(&path).filter(|&step| path.ends_with(name_of(step))) else { continue };
        match fs::metadata(&path) {
            Ok(data) if data.is_dir() => steps.push(step),
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    steps.sort_unstable();
    Ok(steps)
}

/// Deletes the checkpoints that retention does not keep. Their scores are the acceptances in the evaluation log.
///
/// # Errors
/// An I/O error.
pub fn retain(checkpoints: &Path, keep: RetentionPolicy) -> io::Result<()> {
    let scores = checkpoints.parent().map(eval_log::scores).unwrap_or_default();
    let stored = steps(checkpoints)?.into_iter();
    let stored: Vec<_> = stored.map(|step| StoredCheckpoint { step, score: scores.get(&step).copied() }).collect();
    for (step, decision) in retention(&stored, keep) {
        if decision == Decision::Delete {
            failpoint::point("delete", "checkpoint")?;
            fs::remove_dir_all(checkpoints.join(name_of(step)))?;
        }
    }
    Ok(())
}

/// Writes tensors as one synced safetensors file that transformers accepts. `bytes` encodes each value as `dtype`.
///
/// # Errors
/// An I/O error.
pub fn write_tensors<const N: usize>(
    path: &Path,
    tensors: &[NamedTensor],
    bytes: impl Fn(f32) -> [u8; N],
    dtype: safetensors::Dtype,
) -> io::Result<()> {
    let encoded: Vec<(&NamedTensor, Vec<u8>)> =
        tensors.iter().map(|t| (t, t.data.iter().flat_map(|&v| bytes(v)).collect())).collect();
    let other = |e: safetensors::SafeTensorError| io::Error::other(e.to_string());
    let views = encoded.iter().map(|(t, bytes)| {
        Ok((t.name.as_str(), safetensors::tensor::TensorView::new(dtype, t.shape.clone(), bytes).map_err(other)?))
    });
    let views = views.collect::<io::Result<Vec<_>>>()?;
    let metadata = [("format".to_owned(), "pt".to_owned())].into();
    // safetensors creates files that only the owner can read; other users may serve these.
    let permissions = File::create(path)?.metadata()?.permissions();
    safetensors::serialize_to_file(views, Some(metadata), path).map_err(other)?;
    fs::set_permissions(path, permissions)?;
    failpoint::written(path)?;
    failpoint::syncing(path)?;
    sync(path)
}

/// Step in a folder's name, also of one that is put aside.
fn named_step(dir: &Path) -> Option<u64> {
    let name = dir.file_name()?.to_str()?;
    let name = name.strip_suffix(ASIDE).and_then(|name| name.strip_suffix('.')).unwrap_or(name);
    name.strip_prefix("step-")?.parse().ok()
}

/// True if an error means that the file is missing, short or no file. Any other error may pass, and the file be whole.
fn is_damage(error: &io::Error) -> bool {
    use io::ErrorKind::{InvalidData, InvalidInput, IsADirectory, NotADirectory, NotFound, UnexpectedEof};
    matches!(error.kind(), InvalidData | InvalidInput | IsADirectory | NotADirectory | NotFound | UnexpectedEof)
}

fn digests(dir: &Path) -> io::Result<BTreeMap<String, Entry>> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        files.insert(entry.file_name().to_string_lossy().into_owned(), digest(&entry.path())?);
    }
    Ok(files)
}

fn digest(path: &Path) -> io::Result<Entry> {
    let mut file = open_input(path)?;
    let (mut hash, mut bytes, mut buffer) = (Sha256::new(), 0, vec![0; 1 << 20]);
    loop {
        let n = file.read(&mut buffer)?;
        if n == 0 {
            let sha256 = hex(&hash.finalize());
            return Ok(Entry { bytes, sha256 });
        }
        hash.update(&buffer[..n]);
        bytes += n as u64;
    }
}

/// Creates the folder of all checkpoints, but never the run folder: if that is missing, its disk was unmounted, and the path
/// below the mount point belongs to another disk.
fn create_parent(checkpoints: &Path) -> io::Result<()> {
    match fs::create_dir(checkpoints) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => Ok(()),
    }
}
