//! Drafters as model folders, in z-lab's layout or that of speculators (`reference/dflash.md` section 2): written from a
//! checkpoint, held to a strict check, and served once before they exist.

mod self_test;
mod write;

#[cfg(feature = "torch")]
pub use self::self_test::prove;
pub use self::self_test::{Proof, ProofError, is_here};
pub use crate::hf::validate::{Finding, Severity, check};

use crate::{
    config::{Config, Device},
    hf::{
        Dtype, HfError,
        config::TargetConfig,
        draft::DraftConfig,
        layout::{CONFIG, DraftFolder, EMBEDDING, HEAD, Layout, Verifier, speculators_json},
        read_json,
        tensors::TensorFiles,
    },
    run_dir::checkpoint::{self, CheckpointError, NamedTensor, Verified},
};
use serde::Serialize;
use std::{
    fs, io,
    path::{Path, PathBuf},
};
use thiserror::Error;
use write::write_folder;

/// Why an export could not be written.
#[derive(Debug, Error)]
pub enum ExportError {
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Hf(#[from] HfError),
    #[error("{} cannot be written: {source}; free space or mend its permissions", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("{} exists and is not empty; choose another folder, or add --force to replace an earlier export", .0.display())]
    Occupied(PathBuf),
    #[error("{} holds {found}, which no export wrote, and --force replaces exports only; choose another folder", dir.display())]
    Foreign { dir: PathBuf, found: String },
    #[error("the export does not pass its own check and was thrown away: {0}")]
    Unsound(Finding),
    #[error("the drafter was not made for the target of {}: {why}", target.display())]
    OtherTarget { target: PathBuf, why: String },
    #[error("the speculators layout holds the target's embedding and head; give the target's folder with --target")]
    NoTarget,
    #[error(transparent)]
    Proof(#[from] ProofError),
}

/// What is to be written, and how.
#[derive(Clone, Debug)]
pub struct ExportOptions {
    pub dtype: Dtype,
    pub layout: Layout,
    /// Replace an earlier export.
    pub force: bool,
    /// Folder of the target that the drafter was trained with. The self-check and the speculators layout need it.
    pub target: Option<PathBuf>,
    /// Serve the export once before it exists, on this device. Without libtorch there is nothing to serve it with.
    pub self_check: Option<Device>,
}

impl ExportOptions {
    /// z-lab's layout, without a self-check.
    pub fn new(dtype: Dtype) -> ExportOptions {
        ExportOptions { dtype, layout: Layout::Zlab, force: false, target: None, self_check: None }
    }
}

/// What was written.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ExportReport {
    pub dir: PathBuf,
    /// Optimizer steps in the weights; absent where they come from another folder.
    pub step: Option<u64>,
    pub tensors: usize,
    pub parameters: usize,
    pub bytes: u64,
    pub dtype: &'static str,
    /// What serving it showed; absent where it was not served.
    pub self_check: Option<Proof>,
}

/// Writes the drafter of a checkpoint folder to `out`, whole or not at all, checks it, and serves it where that is asked for.
pub fn export_checkpoint(dir: &Path, out: &Path, options: &ExportOptions) -> Result<ExportReport, ExportError> {
    let from = Verified::open(dir)?;
    let draft = DraftConfig { dtype: options.dtype, ..from.draft.clone() };
    let target = options.target.as_deref().map(TargetConfig::load).transpose()?;
    if let Some((folder, model)) = options.target.as_deref().zip(target.as_ref()) {
        belongs(&draft, folder, model)?;
    }
    let files = from.tensors(checkpoint::WEIGHTS)?;
    let mut tensors = named(&files, &draft)?;
    let json = match options.layout {
        Layout::Zlab => draft.to_json(),
        Layout::Speculators => {
            let folder = options.target.as_deref().ok_or(ExportError::NoTarget)?;
            tensors.extend(of_target(folder, target.as_ref().ok_or(ExportError::NoTarget)?)?);
            speculators_json(&draft, &verifier(folder)?)?
        }
    };
    let mut self_check = None;
    let written = write_folder(out, options.force, &json, &tensors, options.dtype, |dir| {
        if let (Some(device), Some(folder)) = (options.self_check, options.target.as_deref()) {
            self_check = self_test::served(dir, &draft, &tensors, folder, device)?;
        }
        Ok(())
    })?;
    Ok(ExportReport { step: Some(from.state.step), self_check, ..written })
}

/// The export at the end of a run: self-checked on the first target's device. One that serves as another drafter is an error;
/// one that could not be served at all, for want of memory perhaps, is written and the reason told.
pub fn export_run(checkpoint: &Path, out: &Path, config: &Config) -> Result<ExportReport, ExportError> {
    let options = ExportOptions {
        force: true,
        target: Some(config.target.dir.clone()),
        self_check: config.target.devices.first().copied(),
        ..ExportOptions::new(config.checkpoint.export_dtype.into())
    };
    match export_checkpoint(checkpoint, out, &options) {
        Err(ExportError::Proof(ProofError::Unserved(why))) => {
            tracing::warn!(why, "the export could not be served to check it, and is written without that check");
            export_checkpoint(checkpoint, out, &ExportOptions { self_check: None, ..options })
        }
        exported => exported,
    }
}

/// Turns a drafter's folder of either layout into one of z-lab's with the same number type: the same bits under the same names.
pub fn import_folder(dir: &Path, target: Option<&Path>, out: &Path, force: bool) -> Result<ExportReport, ExportError> {
    let model = target.map(TargetConfig::load).transpose()?;
    let folder = DraftFolder::open(dir, model.as_ref().map(|model| model.num_hidden_layers))?;
    if let Some((target, model)) = target.zip(model.as_ref()) {
        belongs(&folder.config, target, model)?;
    }
    let tensors = named(&folder.files, &folder.config)?;
    write_folder(out, force, &folder.config.to_json(), &tensors, folder.config.dtype, |_| Ok(()))
}

/// Refuses a drafter of another target than `model`, which lies in `folder`.
fn belongs(draft: &DraftConfig, folder: &Path, model: &TargetConfig) -> Result<(), ExportError> {
    draft.fits(model).map_err(|why| ExportError::OtherTarget { target: folder.to_owned(), why })
}

/// The drafter's own tensors, in f32.
fn named(files: &TensorFiles, draft: &DraftConfig) -> Result<Vec<NamedTensor>, HfError> {
    let read = |(name, shape): (String, Vec<usize>)| {
        let data = files.weight(&name, &shape)?.to_f32();
        Ok(NamedTensor { name, shape, data })
    };
    draft.tensor_shapes().into_iter().map(read).collect()
}

/// The target's embedding and head under the names of the speculators layout.
fn of_target(folder: &Path, target: &TargetConfig) -> Result<[NamedTensor; 2], HfError> {
    let files = TensorFiles::open(folder)?;
    let shape = vec![target.vocab_size, target.hidden_size];
    let read = |name: &str, from: &str| {
        let data = files.weight(from, &shape)?.to_f32();
        Ok::<_, HfError>(NamedTensor { name: name.into(), shape: shape.clone(), data })
    };
    let embedding = "model.embed_tokens.weight";
    let head = if target.tie_word_embeddings { embedding } else { "lm_head.weight" };
    Ok([read(EMBEDDING, embedding)?, read(HEAD, head)?])
}

/// What the target's folder says of itself.
fn verifier(folder: &Path) -> Result<Verifier, ExportError> {
    let json = read_json(&folder.join(CONFIG))?;
    let names = json["architectures"].as_array().into_iter().flatten();
    let architectures = names.filter_map(|name| name.as_str().map(String::from)).collect();
    let path = fs::canonicalize(folder).map_err(|source| ExportError::Io { path: folder.to_owned(), source })?;
    Ok(Verifier { name_or_path: path.display().to_string(), architectures })
}
