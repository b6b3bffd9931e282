//! Export of a checkpoint as a model folder in z-lab's or speculators' layout (docs/dflash.md#file-formats). The folder is
//! validated strictly and passes a self-test before it is published.

mod self_test;
mod serve;
mod write;

#[cfg(feature = "torch")]
pub use self::self_test::run_self_test;
pub use self::self_test::{SelfTestError, SelfTestReport, device_available};
pub use self::serve::ServeCommands;
pub use crate::hf::validate::{Finding, Severity, check};

use crate::{
    common::guard::{Protected, Refusal},
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

/// Failure of an export.
#[derive(Debug, Error)]
pub enum ExportError {
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Hf(#[from] HfError),
    #[error("{} cannot be written: {source}; free disk space or correct its permissions", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("{} exists and is not empty; choose another folder, or replace an earlier export with --force", .0.display())]
    Occupied(PathBuf),
    #[error("{} has {found}, which is not part of an export, and --force replaces exports only; choose another folder", dir.display())]
    Foreign { dir: PathBuf, found: String },
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error("the export failed its validation and was discarded: {0}")]
    Unsound(Finding),
    #[error("the drafter was not made for the target of {}: {why}", target.display())]
    OtherTarget { target: PathBuf, why: String },
    #[error("the speculators layout contains the target's embedding and head; give the target's folder with --target")]
    NoTarget,
    #[error(transparent)]
    SelfTest(#[from] SelfTestError),
}

/// Options of an export.
#[derive(Clone, Debug)]
pub struct ExportOptions {
    pub dtype: Dtype,
    pub layout: Layout,
    /// Replace an earlier export.
    pub force: bool,
    /// Folder of the drafter's target. The self-test and the speculators layout need it.
    pub target: Option<PathBuf>,
    /// Device of the self-test; `None` skips it. A build without libtorch skips it too.
    pub self_check: Option<Device>,
}

impl ExportOptions {
    /// Creates options for z-lab's layout without self-test.
    pub fn new(dtype: Dtype) -> ExportOptions {
        ExportOptions { dtype, layout: Layout::Zlab, force: false, target: None, self_check: None }
    }
}

/// Written export. The field names are keys of the JSON output.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ExportReport {
    pub dir: PathBuf,
    /// Optimizer steps in the weights; `None` if they come from another folder.
    pub step: Option<u64>,
    pub tensors: usize,
    pub parameters: usize,
    pub bytes: u64,
    pub dtype: &'static str,
    /// Result of the self-test; `None` if it was skipped.
    pub self_check: Option<SelfTestReport>,
    /// Command lines that serve it; `None` if the target's folder is not known.
    pub serve: Option<ServeCommands>,
}

/// Exports the drafter of a checkpoint folder to `out` atomically, after validation and an optional self-test.
///
/// # Errors
/// An [`ExportError`]; `out` is unchanged then.
pub fn export_checkpoint(dir: &Path, out: &Path, options: &ExportOptions) -> Result<ExportReport, ExportError> {
    Protected::default().folders(options.target.iter()).path(out)?;
    let from = Verified::open(dir)?;
    let draft = DraftConfig { dtype: options.dtype, ..from.draft.clone() };
    let target = options.target.as_deref().map(TargetConfig::load).transpose()?;
    if let Some((folder, model)) = options.target.as_deref().zip(target.as_ref()) {
        check_target(&draft, folder, model)?;
    }
    let files = from.tensors(checkpoint::WEIGHTS)?;
    let mut tensors = draft_tensors(&files, &draft)?;
    let json = match options.layout {
        Layout::Zlab => draft.to_json(),
        Layout::Speculators => {
            let folder = options.target.as_deref().ok_or(ExportError::NoTarget)?;
            tensors.extend(target_tensors(folder, target.as_ref().ok_or(ExportError::NoTarget)?)?);
            speculators_json(&draft, &verifier(folder)?)?
        }
    };
    let mut self_check = None;
    let written = write_folder(out, options.force, &json, &tensors, options.dtype, |dir| {
        if let (Some(device), Some(folder)) = (options.self_check, options.target.as_deref()) {
            self_check = self_test::run_if_available(dir, &draft, &tensors, folder, device)?;
        }
        Ok(())
    })?;
    let serve = |target: &PathBuf| ServeCommands::new(out, target, options.layout, &draft);
    let serve = options.target.as_ref().map(serve);
    Ok(ExportReport { step: Some(from.state.step), self_check, serve, ..written })
}

/// Exports at the end of a run, with a self-test on the first target's device. If the self-test cannot run, for example for
/// lack of memory, logs a warning and exports without it.
///
/// # Errors
/// An [`ExportError`], including a failed self-test.
pub fn export_run(checkpoint: &Path, out: &Path, config: &Config) -> Result<ExportReport, ExportError> {
    let options = ExportOptions {
        force: true,
        target: Some(config.target.dir.clone()),
        self_check: config.target.devices.first().copied(),
        ..ExportOptions::new(config.checkpoint.export_dtype.into())
    };
    match export_checkpoint(checkpoint, out, &options) {
        Err(ExportError::SelfTest(SelfTestError::NotRun(why))) => {
            tracing::warn!(why, "export self-test not run; exporting without it");
            export_checkpoint(checkpoint, out, &ExportOptions { self_check: None, ..options })
        }
        exported => exported,
    }
}

/// Converts a drafter's folder of either layout to z-lab's layout with the same dtype, tensor names and bits.
///
/// # Errors
/// An [`ExportError`]; `out` is unchanged then.
pub fn import_folder(dir: &Path, target: Option<&Path>, out: &Path, force: bool) -> Result<ExportReport, ExportError> {
    Protected::default().folders(target.into_iter().chain([dir])).path(out)?;
    let model = target.map(TargetConfig::load).transpose()?;
    let folder = DraftFolder::open(dir, model.as_ref().map(|model| model.num_hidden_layers))?;
    if let Some((target, model)) = target.zip(model.as_ref()) {
        check_target(&folder.config, target, model)?;
        folder.check_shared(target, model)?;
    }
    let tensors = draft_tensors(&folder.files, &folder.config)?;
    let written = write_folder(out, force, &folder.config.to_json(), &tensors, folder.config.dtype, |_| Ok(()))?;
    let serve = target.map(|target| ServeCommands::new(out, target, Layout::Zlab, &folder.config));
    Ok(ExportReport { serve, ..written })
}

/// Refuses a drafter of another target than `model`, the model in `folder`.
fn check_target(draft: &DraftConfig, folder: &Path, model: &TargetConfig) -> Result<(), ExportError> {
    draft.check_target(model).map_err(|why| ExportError::OtherTarget { target: folder.to_owned(), why })
}

/// Reads the drafter's tensors as f32.
fn draft_tensors(files: &TensorFiles, draft: &DraftConfig) -> Result<Vec<NamedTensor>, HfError> {
    let read = |(name, shape): (String, Vec<usize>)| {
        let data = files.weight(&name, &shape)?.to_f32();
        Ok(NamedTensor { name, shape, data })
    };
    draft.tensor_shapes().into_iter().map(read).collect()
}

/// Reads the target's embedding and head under the names of the speculators layout.
fn target_tensors(folder: &Path, target: &TargetConfig) -> Result<[NamedTensor; 2], HfError> {
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

/// Name and architectures of the target's folder.
fn verifier(folder: &Path) -> Result<Verifier, ExportError> {
    let json = read_json(&folder.join(CONFIG))?;
    let names = json["architectures"].as_array().into_iter().flatten();
    let architectures = names.filter_map(|name| name.as_str().map(String::from)).collect();
    let path = fs::canonicalize(folder).map_err(|source| ExportError::Io { path: folder.to_owned(), source })?;
    Ok(Verifier { name_or_path: path.display().to_string(), architectures })
}
