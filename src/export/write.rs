//! Atomic writer of an exported model folder, with validation and self-test before the rename.

use super::{ExportError, ExportReport};
use crate::common::fs::{AtomicDir, parent, write_json};
use crate::hf::layout::{CONFIG, MODEL, config_of};
use crate::hf::validate;
use crate::{
    hf::{Dtype, dtype_name, read_json, tensors::RawDtype},
    run_dir::checkpoint::{self, NamedTensor},
};
use half::{bf16, f16};
use serde_json::Value;
use std::{fs, io, path::Path};

/// Files of an export, which another export may replace.
const EXPORT_FILES: [&str; 2] = [CONFIG, MODEL];

/// Refuses a folder with foreign files or another model, and without `force` an earlier export.
fn check_free(out: &Path, force: bool) -> Result<(), ExportError> {
    let at = |source| ExportError::Io { path: out.to_owned(), source };
    if !out.exists() {
        return Ok(());
    }
    let names = fs::read_dir(out).map_err(at)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
    let names = names.collect::<io::Result<Vec<_>>>().map_err(at)?;
    if let Some(found) = names.iter().find(|name| !EXPORT_FILES.contains(&name.as_str())) {
        return Err(ExportError::Foreign { dir: out.to_owned(), found: found.clone() });
    }
    if names.is_empty() {
        return Ok(());
    }
    // By their names alone, a target with its two most important files would be an export (speculators#690).
    let is_draft = |json: &Value| config_of(CONFIG, json, Some(1 << 20)).is_ok();
    if !read_json(&out.join(CONFIG)).is_ok_and(|json| is_draft(&json)) {
        return Err(ExportError::Foreign { dir: out.to_owned(), found: "a config.json of another model".into() });
    }
    if force { Ok(()) } else { Err(ExportError::Occupied(out.to_owned())) }
}

/// Writes config and tensors, validates the folder, calls `self_test` with it, and publishes it as `out`.
///
/// # Errors
/// An [`ExportError`]; `out` is unchanged then.
pub fn write_folder(
    out: &Path,
    force: bool,
    json: &Value,
    tensors: &[NamedTensor],
    dtype: Dtype,
    self_test: impl FnOnce(&Path) -> Result<(), ExportError>,
) -> Result<ExportReport, ExportError> {
    let at = |path: &Path| {
        let path = path.to_owned();
        move |source| ExportError::Io { path, source }
    };
    check_free(out, force)?;
    fs::create_dir_all(parent(out)).map_err(at(parent(out)))?;
    let dir = AtomicDir::create(out, "export").map_err(at(out))?;
    let (model, config) = (dir.partial_path().join(MODEL), dir.partial_path().join(CONFIG));
    match dtype {
        Dtype::F32 => checkpoint::write_tensors(&model, tensors, f32::to_le_bytes, RawDtype::F32),
        Dtype::F16 => checkpoint::write_tensors(&model, tensors, |v| f16::from_f32(v).to_le_bytes(), RawDtype::F16),
        Dtype::Bf16 => checkpoint::write_tensors(&model, tensors, |v| bf16::from_f32(v).to_le_bytes(), RawDtype::BF16),
    }
    .map_err(at(&model))?;
    write_json(&config, json).map_err(at(&config))?;
    if let Some(finding) = validate::check(dir.partial_path()).into_iter().next() {
        return Err(ExportError::Unsound(finding));
    }
    self_test(dir.partial_path())?;
    check_free(out, force)?;
    let out = dir.publish().map_err(at(out))?;
    Ok(ExportReport {
        dir: out.clone(),
        step: None,
        tensors: tensors.len(),
        parameters: tensors.iter().map(|t| t.data.len()).sum(),
        bytes: fs::metadata(out.join(MODEL)).map_or(0, |m| m.len()),
        dtype: dtype_name(dtype),
        self_check: None,
        serve: None,
    })
}

#[cfg(test)]
mod tests {
    use super::super::{ExportOptions, SelfTestError};
    use super::*;
    use crate::hf::draft::DraftConfig;

    #[test]
    fn a_failed_self_test_leaves_and_replaces_nothing() {
        assert!(!ExportOptions::new(Dtype::F32).force);
        let root = tempfile::tempdir().unwrap();
        let out = root.path().join("export");
        let draft = crate::engines::simulated::placeholder_draft();
        let draft = DraftConfig { dtype: Dtype::F32, num_target_layers: 3, ..draft };
        let shapes = draft.tensor_shapes().into_iter();
        let tensors: Vec<NamedTensor> =
            shapes.map(|(name, shape)| NamedTensor { data: vec![0.5; shape.iter().product()], name, shape }).collect();
        let write = |serves: bool| {
            write_folder(&out, true, &draft.to_json(), &tensors, Dtype::F32, |dir| {
                assert!(dir.join(MODEL).exists() && dir.join(CONFIG).exists());
                let no = || ExportError::SelfTest(SelfTestError::Differs("no".into()));
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
    #[test]
    fn speculators_690_a_folder_of_another_model_is_never_replaced() {
        let root = tempfile::tempdir().unwrap();
        let out = root.path().join("target");
        fs::create_dir(&out).unwrap();
        for config in [r#"{"model_type": "llama"}"#, "{", "[]"] {
            fs::write(out.join(CONFIG), config).unwrap();
            fs::write(out.join(MODEL), "weights").unwrap();
            let error = write_folder(&out, true, &Value::Null, &[], Dtype::F32, |_| Ok(())).unwrap_err();
            assert!(matches!(error, ExportError::Foreign { .. }), "{error}");
            assert_eq!(fs::read_to_string(out.join(MODEL)).unwrap(), "weights");
        }
    }
}
