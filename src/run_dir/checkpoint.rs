//! Checkpoint folders: written atomically, and read only if every file matches its hash.
//!
//! `checkpoints/step-N/` holds the fp32 weights, the two AdamW moments, `state.json` and `manifest.json` with the SHA-256 of
//! each file. It is an [`AtomicDir`]. A checkpoint exists once a row in state.db names it.

use super::{
    eval_log,
    retention::{Decision, StoredCheckpoint, retention},
};
use crate::common::{
    fs::{AtomicDir, remove_partial_dirs, sync, write_json},
    hash::hex,
};
use crate::{
    common::failpoint,
    config::RetentionPolicy,
    hf::{draft::DraftConfig, tensors::TensorFiles},
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

/// Failure to write or read a checkpoint.
#[derive(Debug, Error)]
pub enum CheckpointError {
    #[error("{}: {source}; free disk space or correct its permissions", path.display())]
    Io { path: PathBuf, source: io::Error },
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
    /// Resolved configuration, as in run.toml.
    pub config: String,
}

impl State {
    pub fn new(step: u64, seed: u64, config: String) -> State {
        State { version: VERSION, draftmill: env!("CARGO_PKG_VERSION").into(), step, seed, config }
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
    /// Opens a checkpoint folder and compares every file with the manifest.
    ///
    /// # Errors
    /// A damaged or missing file, or a newer format.
    pub fn open(dir: &Path) -> Result<Verified, CheckpointError> {
        let damaged =
            |file: &str, reason: String| CheckpointError::Damaged { dir: dir.to_owned(), file: dir.join(file), reason };
        let read = |file: &str| fs::read(dir.join(file)).map_err(|e| damaged(file, e.to_string()));
        let manifest: Manifest =
            serde_json::from_slice(&read(MANIFEST)?).map_err(|e| damaged(MANIFEST, e.to_string()))?;
        for (file, entry) in &manifest.files {
            let found = digest(&dir.join(file)).map_err(|e| damaged(file, e.to_string()))?;
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
        Ok(Verified { dir: dir.to_owned(), state, draft })
    }

    /// Maps the tensors of one file and checks their shapes.
    ///
    /// # Errors
    /// A damaged file.
    pub fn tensors(&self, file: &str) -> Result<TensorFiles, CheckpointError> {
        let damaged =
            |reason: String| CheckpointError::Damaged { dir: self.dir.clone(), file: self.dir.join(file), reason };
        let files = TensorFiles::open_file(&self.dir.join(file)).map_err(|e| damaged(e.to_string()))?;
        match files.check(&self.draft.tensor_shapes()).first() {
            Some(error) => Err(damaged(error.to_string())),
            None => Ok(files),
        }
    }
}

/// Removes unfinished checkpoint folders, and those after step `newest`, which state.db does not list. Returns the number of
/// folders.
///
/// # Errors
/// An I/O error.
pub fn clean(checkpoints: &Path, newest: u64) -> io::Result<usize> {
    let mut removed = 0;
    if checkpoints.exists() {
        removed += remove_partial_dirs(checkpoints)?;
        for step in steps(checkpoints)?.into_iter().filter(|&step| step > newest) {
            fs::remove_dir_all(checkpoints.join(name_of(step)))?;
            removed += 1;
        }
    }
    Ok(removed)
}

/// Steps that have a checkpoint folder, ascending.
///
/// # Errors
/// An I/O error.
pub fn steps(checkpoints: &Path) -> io::Result<Vec<u64>> {
    let mut steps = Vec::new();
    for entry in fs::read_dir(checkpoints)? {
        let entry = entry?;
        let step = entry.file_name().to_str().and_then(|n| n.strip_prefix("step-")).and_then(|n| n.parse::<u64>().ok());
        // Another spelling of the number, or a file, is not a checkpoint.
        steps.extend(step.filter(|&step| entry.file_name().to_str() == Some(&name_of(step)) && entry.path().is_dir()));
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

fn digests(dir: &Path) -> io::Result<BTreeMap<String, Entry>> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        files.insert(entry.file_name().to_string_lossy().into_owned(), digest(&entry.path())?);
    }
    Ok(files)
}

fn digest(path: &Path) -> io::Result<Entry> {
    let mut file = File::open(path)?;
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
