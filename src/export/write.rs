//! A model folder on its way to disk: written beside its place, synced, checked, and renamed; or nothing of it stays.

use super::{CONFIG, ExportError, ExportReport, MODEL, check};
use crate::{
    checkpoint::{self, NamedTensor},
    hf::{Dtype, dtype_name, tensors::RawDtype},
};
use half::{bf16, f16};
use serde_json::Value;
use std::{
    fs, io,
    path::{Path, PathBuf},
};

/// What an export holds, and so what another one may replace.
const OURS: [&str; 2] = [CONFIG, MODEL];

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

/// Writes config and tensors, checks the folder strictly, lets `prove` look at it, and puts it in its place.
pub fn write_folder(
    out: &Path,
    force: bool,
    json: &Value,
    tensors: &[NamedTensor],
    dtype: Dtype,
    prove: impl FnOnce(&Path) -> Result<(), ExportError>,
) -> Result<ExportReport, ExportError> {
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
            Dtype::F32 => checkpoint::write_tensors(&model, tensors, f32::to_le_bytes, RawDtype::F32),
            Dtype::F16 => checkpoint::write_tensors(&model, tensors, |v| f16::from_f32(v).to_le_bytes(), RawDtype::F16),
            Dtype::Bf16 => {
                checkpoint::write_tensors(&model, tensors, |v| bf16::from_f32(v).to_le_bytes(), RawDtype::BF16)
            }
        }
        .map_err(at(&model))?;
        checkpoint::write_json(&tmp.join(CONFIG), json).map_err(at(&tmp.join(CONFIG)))?;
        checkpoint::sync(&tmp).map_err(at(&tmp))?;
        if let Some(finding) = check(&tmp).into_iter().next() {
            return Err(ExportError::Unsound(finding));
        }
        prove(&tmp)?;
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
        step: None,
        tensors: tensors.len(),
        parameters: tensors.iter().map(|t| t.data.len()).sum(),
        bytes: fs::metadata(out.join(MODEL)).map_or(0, |m| m.len()),
        dtype: dtype_name(dtype),
        self_check: None,
    })
}

#[cfg(test)]
mod tests {
    use super::super::{ExportOptions, ProofError};
    use super::*;
    use crate::hf::draft::DraftConfig;

    #[test]
    fn a_folder_that_does_not_serve_leaves_nothing_and_replaces_nothing() {
        assert!(!ExportOptions::new(Dtype::F32).force);
        let root = tempfile::tempdir().unwrap();
        let out = root.path().join("export");
        let draft = crate::engines::simulated::stand_in();
        let draft = DraftConfig { dtype: Dtype::F32, num_target_layers: 3, ..draft };
        let shapes = draft.tensor_shapes().into_iter();
        let tensors: Vec<NamedTensor> =
            shapes.map(|(name, shape)| NamedTensor { data: vec![0.5; shape.iter().product()], name, shape }).collect();
        let write = |serves: bool| {
            write_folder(&out, true, &draft.to_json(), &tensors, Dtype::F32, |dir| {
                assert!(dir.join(MODEL).exists() && dir.join(CONFIG).exists());
                let no = || ExportError::Proof(ProofError::Differs("no".into()));
                serves.then_some(()).ok_or_else(no)
            })
        };
        let left = || fs::read_dir(root.path()).unwrap().count();
        assert!(write(false).unwrap_err().to_string().contains("no"));
        assert_eq!(left(), 0);
        write(true).unwrap();
        let before = fs::read(out.join(MODEL)).unwrap();
        write(false).unwrap_err();
        assert_eq!((left(), fs::read(out.join(MODEL)).unwrap()), (1, before));
    }
}
