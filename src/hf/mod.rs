//! Hugging Face model folders: configurations and weights on disk, without libtorch.

pub mod config;
pub mod draft;
mod fields;
pub mod fingerprint;
pub mod head;
pub mod layout;
pub mod stop_tokens;
pub mod tensors;
pub mod validate;
mod weights;

pub use draftmill_actors::messages::engine::FeatureDtype as Dtype;

use crate::common::fs::read_input;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Defect of a model folder. Each text has the file, the key or tensor, the value and the remedy.
#[derive(Debug, Error)]
pub enum HfError {
    #[error("{} cannot be read ({source}); give the folder of a Hugging Face model", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{file} is not valid JSON ({reason}); download or write it again")]
    Json { file: String, reason: String },
    #[error("{file} lacks the key `{key}`; add it ({expected})")]
    MissingKey { file: String, key: String, expected: String },
    #[error("{file} has `{key}` = {value}, expected {expected}; correct the value")]
    BadValue { file: String, key: String, value: String, expected: String },
    #[error("{file} has `{key}` = {value}, which is not supported ({supported}); choose another model")]
    Unsupported { file: String, key: String, value: String, supported: String },
    #[error("{file} is not a usable tokenizer ({reason}); download or write it again")]
    Tokenizer { file: String, reason: String },
    #[error("{file} is not a complete safetensors file ({reason}); download or write it again")]
    Safetensors { file: String, reason: String },
    #[error(
        "{folder} has both model.safetensors and model.safetensors.index.json, and engines differ in the one that they load; \
         remove one of them"
    )]
    TwoModels { folder: String },
    #[error("{file} has no tensor `{name}`; the folder is incomplete or of another architecture")]
    MissingTensor { file: String, name: String },
    #[error(
        "{file} has a tensor `{name}` that its config.json does not define; config and weights are of different models"
    )]
    UnknownTensor { file: String, name: String },
    #[error("{file} has tensor `{name}` with shape {found:?}, but its config.json requires {expected:?}")]
    BadShape { file: String, name: String, found: Vec<usize>, expected: Vec<usize> },
    #[error("{file} has a tensor `{name}` whose values differ from those that are used ({instead}); {remedy}")]
    OtherValues { file: String, name: String, instead: String, remedy: String },
    #[error("{file} has a NaN or an infinite value in tensor `{name}`; download or write the file again")]
    NotFinite { file: String, name: String },
    #[error("{file} has values in tensor `{name}` that are infinite as {dtype}; load it as bf16 or f32 (target.dtype)")]
    OutOfRange { file: String, name: String, dtype: String },
    #[error("{file} has tensor `{name}` as {found}; only F32, F16 and BF16 weights can be loaded")]
    BadDtype { file: String, name: String, found: String },
}

/// Name of a dtype in config files.
pub fn dtype_name(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::F32 => "float32",
        Dtype::F16 => "float16",
        Dtype::Bf16 => "bfloat16",
    }
}

/// Dtype of a name in config files; `None` for an unknown name.
pub fn dtype_from_name(name: &str) -> Option<Dtype> {
    [Dtype::F32, Dtype::F16, Dtype::Bf16].into_iter().find(|&dtype| dtype_name(dtype) == name)
}

/// Maximum size of a JSON file in bytes.
const MAX_JSON: u64 = 1 << 30;

/// Reads a JSON file.
///
/// # Errors
/// [`HfError::Read`] or [`HfError::Json`].
pub fn read_json(path: &Path) -> Result<serde_json::Value, HfError> {
    let bytes = read_input(path, MAX_JSON).map_err(|source| HfError::Read { path: path.into(), source })?;
    serde_json::from_slice(&bytes)
        .map_err(|error| HfError::Json { file: path.display().to_string(), reason: error.to_string() })
}
