//! `draftmill import`: small generated GGUF files for the rules, the demo's GGUF file for the result.

use draftmill::{
    hf::Dtype as WeightType,
    import::{ImportError, ImportOptions, ImportReport, import_gguf},
};
use serde_json::Value;
use std::path::{Path, PathBuf};

mod dequantise;
mod gguf_file;
#[cfg(feature = "torch")]
mod greedy;
mod refusals;
mod smollm2;
mod tiny;

fn import(gguf: &Path, out: &Path, dtype: WeightType, force: bool) -> Result<ImportReport, ImportError> {
    import_gguf(&ImportOptions { gguf: gguf.into(), out: out.into(), dtype, force })
}

fn json(path: PathBuf) -> Value {
    serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap()
}

/// Names in a folder, sorted.
fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}
