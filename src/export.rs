//! Drafters in the z-lab layout (`reference/dflash.md` section 2.1): written from a checkpoint, and held to a strict check.

mod check;

pub use check::{Finding, Severity, check};

use crate::{
    checkpoint::{self, CheckpointError, NamedTensor, Verified},
    hf::{Dtype, HfError, draft::DraftConfig, tensors::RawDtype},
};
use half::{bf16, f16};
use serde::Serialize;
use std::{
    fs, io,
    path::{Path, PathBuf},
};
use thiserror::Error;

const MODEL: &str = "model.safetensors";
const CONFIG: &str = "config.json";
/// What an export holds, and so what another one may replace.
const OURS: [&str; 2] = [CONFIG, MODEL];

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
}

/// What was written.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ExportReport {
    pub dir: PathBuf,
    pub step: u64,
    pub tensors: usize,
    pub parameters: usize,
    pub bytes: u64,
    pub dtype: &'static str,
}

/// The folder to write, where nothing stands in its way: it is absent or empty, or `force` replaces an earlier export.
fn free(out: &Path, force: bool) -> Result<PathBuf, ExportError> {
    let at = |source| ExportError::Io { path: out.to_owned(), source };
    if !out.exists() {
        return std::path::absolute(out).map_err(at);
    }
    let out = fs::canonicalize(out).map_err(at)?;
    let names = fs::read_dir(&out).map_err(at)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
    let names = names.collect::<io::Result<Vec<_>>>().map_err(at)?;
    if let Some(found) = names.iter().find(|name| !OURS.contains(&name.as_str())) {
        return Err(ExportError::Foreign { dir: out, found: found.clone() });
    }
    if names.is_empty() || force { Ok(out) } else { Err(ExportError::Occupied(out)) }
}

/// Writes the drafter of a checkpoint folder to `out`, whole or not at all, and checks it.
pub fn export_checkpoint(dir: &Path, out: &Path, dtype: Dtype, force: bool) -> Result<ExportReport, ExportError> {
    let from = Verified::open(dir)?;
    let draft = DraftConfig { dtype, ..from.draft.clone() };
    let files = from.tensors(checkpoint::WEIGHTS)?;
    let mut tensors = Vec::new();
    for (name, shape) in draft.tensor_shapes() {
        let raw = files.weight(&name, &shape)?;
        debug_assert_eq!(raw.dtype, RawDtype::F32, "checkpoints hold fp32 masters");
        let data = raw.bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        tensors.push(NamedTensor { name, shape, data });
    }
    let at = |path: &Path| {
        let path = path.to_owned();
        move |source| ExportError::Io { path, source }
    };
    let out = free(out, force)?;
    let tmp = out.with_extension("tmp");
    let out = out.as_path();
    let result = (|| {
        free(&tmp, true)?;
        let _ = fs::remove_dir_all(&tmp);
        fs::create_dir_all(&tmp).map_err(at(&tmp))?;
        let model = tmp.join(MODEL);
        match dtype {
            Dtype::F32 => checkpoint::write_tensors(&model, &tensors, f32::to_le_bytes, RawDtype::F32),
            Dtype::F16 => {
                checkpoint::write_tensors(&model, &tensors, |v| f16::from_f32(v).to_le_bytes(), RawDtype::F16)
            }
            Dtype::Bf16 => {
                checkpoint::write_tensors(&model, &tensors, |v| bf16::from_f32(v).to_le_bytes(), RawDtype::BF16)
            }
        }
        .map_err(at(&model))?;
        checkpoint::write_json(&tmp.join(CONFIG), &draft.to_json()).map_err(at(&tmp.join(CONFIG)))?;
        checkpoint::sync(&tmp).map_err(at(&tmp))?;
        if let Some(finding) = check(&tmp).into_iter().next() {
            return Err(ExportError::Unsound(finding));
        }
        if out.exists() {
            fs::remove_dir_all(out).map_err(at(out))?;
        }
        fs::rename(&tmp, out).map_err(at(out))
    })();
    if result.is_err() {
        // Best effort: the error is what the user must hear of.
        let _ = fs::remove_dir_all(&tmp);
    }
    result?;
    Ok(ExportReport {
        dir: out.to_owned(),
        step: from.state.step,
        tensors: tensors.len(),
        parameters: tensors.iter().map(|t| t.data.len()).sum(),
        bytes: fs::metadata(out.join(MODEL)).map_or(0, |m| m.len()),
        dtype: crate::hf::dtype_name(dtype),
    })
}
