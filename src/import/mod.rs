//! Turns a GGUF file into a Hugging Face folder: configuration, weights, tokenizer and chat template.
//!
//! candle reads and dequantises; this module names, shapes and orders things the way Hugging Face does. Weights pass
//! one tensor at a time, so memory stays near the size of the largest tensor. The folder appears by one rename.

mod config;
mod folder;
mod gguf;
mod special_tokens;
mod tensors;
mod tokenizer;

use crate::hf::{Dtype, dtype_name};
use config::Architecture;
use folder::NewFolder;
use gguf::Gguf;
use std::{fmt, path::PathBuf};

/// What to import, and where to.
#[derive(Clone, Debug)]
pub struct ImportOptions {
    pub gguf: PathBuf,
    /// The folder to make. It must be absent or empty unless `force` is set.
    pub out: PathBuf,
    /// How the weights are stored.
    ///
    /// f32 keeps exactly the values that the file dequantises to, and a CPU without matrix units for bf16 computes fastest
    /// in it. bf16 halves the folder, which is what a GPU wants. f16 has a narrow range: a weight that does not fit is an
    /// error.
    pub dtype: Dtype,
    /// Replaces an earlier import in `out`. A folder that holds anything else is left alone.
    pub force: bool,
}

/// What was made.
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
    /// Number of tensors by the type in which the GGUF file stores them, most frequent first.
    pub stored_as: Vec<(String, usize)>,
    pub vocabulary: usize,
    pub tied_embeddings: bool,
    /// The GGUF file may carry none; then `draftmill prepare` needs pre-tokenised rows or a template of its own.
    pub chat_template: bool,
}

/// Why an import failed. Nothing is left in or beside `out`.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    #[error("cannot read {path}: {source}; give the path of a GGUF file", path = path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{path} is not a GGUF file: {found}; name the .gguf file itself", path = path.display())]
    NotGguf { path: PathBuf, found: String },
    #[error("{path} is damaged or cut short: {why}; fetch or copy it again", path = path.display())]
    Damaged { path: PathBuf, why: String },
    #[error("{path} has {what} {found}, which import does not know; it knows {known}", path = path.display())]
    Unsupported { path: PathBuf, what: String, found: String, known: String },
    #[error("{path} does not hold together: {why}; the tool that wrote it did not follow the usual layout", path = path.display())]
    Inconsistent { path: PathBuf, why: String },
    #[error("{path} cannot be the output folder: {why}", path = path.display())]
    Out { path: PathBuf, why: String },
    #[error("cannot write {path}: {source}; see that the disk has room and the folder can be written", path = path.display())]
    Write { path: PathBuf, source: std::io::Error },
}

/// Writes the Hugging Face folder `options.out` from `options.gguf`.
///
/// The folder holds `config.json`, `generation_config.json`, `model.safetensors`, `tokenizer.json`,
/// `tokenizer_config.json` and, where the file carries one, `chat_template.jinja`. Everything that can be refused is
/// refused before the first weight is written. The folder is written under a temporary name, synced and renamed.
pub fn import_gguf(options: &ImportOptions) -> Result<ImportReport, ImportError> {
    let mut gguf = Gguf::open(&options.gguf)?;
    let model = Architecture::read(&mut gguf)?;
    let plan = tensors::plan(&gguf, &model)?;
    let tokenizer = tokenizer::read(&gguf, &model)?;

    let folder = NewFolder::create(&options.out, options.force)?;
    folder.json("config.json", &model.config(&tokenizer.special, options.dtype))?;
    folder.json("generation_config.json", &tokenizer.special.generation_config())?;
    folder.json("tokenizer_config.json", &tokenizer.config(&model))?;
    folder.bytes("tokenizer.json", tokenizer.json.as_bytes())?;
    if let Some(template) = &tokenizer.chat_template {
        folder.bytes("chat_template.jinja", template.as_bytes())?;
    }
    let weight_bytes = tensors::write(&mut gguf, &plan, options.dtype, &folder)?;
    let out = folder.finish()?;

    Ok(ImportReport {
        out,
        architecture: model.family.name().into(),
        tensors: plan.len(),
        parameters: plan.iter().map(|t| t.shape.iter().product::<usize>() as u64).sum(),
        weight_bytes,
        dtype: options.dtype,
        stored_as: tensors::stored_as(&gguf, &plan),
        vocabulary: tokenizer.vocabulary,
        tied_embeddings: model.tied,
        chat_template: tokenizer.chat_template.is_some(),
    })
}

impl fmt::Display for ImportReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stored: Vec<_> = self.stored_as.iter().map(|(kind, n)| format!("{n} {kind}")).collect();
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
