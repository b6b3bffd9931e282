//! Converts a GGUF file to a Hugging Face folder: configuration, weights, tokenizer and chat template.
//!
//! The crate anamnesis reads the file and dequantises blocks. This module maps names, shapes and row order. It converts
//! one tensor at a time, so memory stays near twice the size of the largest tensor. One rename publishes the folder.

mod config;
mod folder;
mod gguf;
mod special_tokens;
mod tensors;
mod tokenizer;

use crate::hf::{Dtype, config::TargetConfig, dtype_name};
use config::Architecture;
use folder::NewFolder;
use gguf::Gguf;
use std::{fmt, path::PathBuf};

/// Options of an import.
#[derive(Clone, Debug)]
pub struct ImportOptions {
    /// GGUF file to read.
    pub gguf: PathBuf,
    /// Folder to write. It must be absent or empty unless `force` is set.
    pub out: PathBuf,
    /// Dtype of the written weights.
    ///
    /// f32 keeps the dequantised values exactly and is fastest on a CPU without bf16 matrix units. bf16 halves the
    /// folder and suits a GPU. f16 has a narrow range: a weight outside it is an error.
    pub dtype: Dtype,
    /// Replaces an earlier import in `out`. A folder with any other file is never replaced.
    pub force: bool,
}

/// Result of an import.
#[derive(Clone, Debug, PartialEq)]
pub struct ImportReport {
    pub out: PathBuf,
    /// `general.architecture` of the GGUF file, such as `llama`.
    pub architecture: String,
    pub tensors: usize,
    pub parameters: u64,
    /// Size of `model.safetensors` in bytes.
    pub weight_bytes: u64,
    pub dtype: Dtype,
    /// Number of tensors by their type in the GGUF file, most frequent first.
    pub stored_types: Vec<(String, usize)>,
    /// Number of tokens, without fillers.
    pub vocabulary: usize,
    pub tied_embeddings: bool,
    /// `true` if the GGUF file has a chat template. Without one, `draftmill prepare` needs pre-tokenised rows or a
    /// template file.
    pub chat_template: bool,
}

/// Reason for a failed import. A failed import leaves no file in or next to `out`.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    #[error("cannot read {path}: {source}; give the path of a GGUF file", path = path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{path} is not a GGUF file: {found}; give the path of the .gguf file", path = path.display())]
    NotGguf { path: PathBuf, found: String },
    #[error("{path} is damaged or cut short: {why}; fetch or copy it again", path = path.display())]
    Damaged { path: PathBuf, why: String },
    #[error("{path} has {what} {found}, which import does not support; it supports {known}", path = path.display())]
    Unsupported { path: PathBuf, what: String, found: String, known: String },
    #[error("{path} is inconsistent: {why}; convert the model again with llama.cpp's converter", path = path.display())]
    Inconsistent { path: PathBuf, why: String },
    #[error("{path} has a model that no other command of draftmill can use: {why}", path = path.display())]
    Unusable { path: PathBuf, why: String },
    #[error("{path} cannot be the output folder: {why}", path = path.display())]
    Out { path: PathBuf, why: String },
    #[error("cannot write {path}: {source}; free disk space or correct the permissions of the folder", path = path.display())]
    Write { path: PathBuf, source: std::io::Error },
}

/// Writes the Hugging Face folder `options.out` from `options.gguf`.
///
/// The folder has `config.json`, `generation_config.json`, `model.safetensors`, `tokenizer.json`,
/// `tokenizer_config.json` and, if the file has a chat template, `chat_template.jinja`. Metadata, shapes and tokenizer
/// are checked before the first weight is written. The folder is written under a temporary name, synced and renamed.
///
/// # Errors
///
/// Fails if the file cannot be read, is damaged or unsupported, or if the folder cannot be written.
pub fn import_gguf(options: &ImportOptions) -> Result<ImportReport, ImportError> {
    let gguf = Gguf::open(&options.gguf)?;
    let model = Architecture::read(&gguf)?;
    let plan = tensors::plan(&gguf, &model)?;
    let tokenizer = tokenizer::read(&gguf, &model)?;

    let config = model.config(&tokenizer.special, options.dtype);
    // No folder is written that every later command refuses (Automodel#2376).
    TargetConfig::from_named_json("its configuration", &config).map_err(|error| gguf.refused(error))?;

    let folder = NewFolder::create(&options.out, options.force)?;
    folder.json("config.json", &config)?;
    folder.json("generation_config.json", &tokenizer.special.generation_config())?;
    folder.json("tokenizer_config.json", &tokenizer.config(&model))?;
    folder.bytes("tokenizer.json", tokenizer.json.as_bytes())?;
    if let Some(template) = &tokenizer.chat_template {
        folder.bytes("chat_template.jinja", template.as_bytes())?;
    }
    let weight_bytes = tensors::write(&gguf, &plan, options.dtype, &folder)?;
    let out = folder.finish()?;

    Ok(ImportReport {
        out,
        architecture: model.family.name().into(),
        tensors: plan.len(),
        parameters: plan.iter().map(|t| t.shape.iter().product::<usize>() as u64).sum(),
        weight_bytes,
        dtype: options.dtype,
        stored_types: tensors::stored_types(&gguf, &plan),
        vocabulary: tokenizer.vocabulary,
        tied_embeddings: model.tied,
        chat_template: tokenizer.chat_template.is_some(),
    })
}

impl fmt::Display for ImportReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stored: Vec<_> = self.stored_types.iter().map(|(stored, n)| format!("{n} {stored}")).collect();
        write!(
            f,
            "{}: {} model, {:.1} M parameters in {} tensors ({}), written as {} ({:.1} MB), {} tokens, {} head, {} chat template",
            self.out.display(),
            self.architecture,
            self.parameters as f64 / 1e6,
            self.tensors,
            stored.join(", "),
            dtype_name(self.dtype),
            self.weight_bytes as f64 / 1e6,
            self.vocabulary,
            if self.tied_embeddings { "tied" } else { "separate" },
            if self.chat_template { "with" } else { "without" },
        )
    }
}
