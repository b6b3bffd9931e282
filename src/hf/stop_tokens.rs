//! Token ids at which a target stops: those of config.json and of generation_config.json.

use super::{HfError, config::TargetConfig, read_json};
use serde_json::Value;
use std::path::Path;

/// Keys of generation_config.json with ids that have a role in generation.
const ROLES: [&str; 4] = ["bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"];

/// Stop tokens of a model folder, ascending.
///
/// # Errors
/// An unreadable generation_config.json; an absent one has no ids.
pub fn stop_tokens(folder: &Path, target: &TargetConfig) -> Result<Vec<u32>, HfError> {
    let more = ids(&generation_config(folder)?["eos_token_id"]);
    Ok(sorted(target.eos_token_ids.iter().copied().chain(more)))
}

/// Ids of a model folder with a role in config.json or generation_config.json: begin, end and padding, ascending.
///
/// # Errors
/// As [`stop_tokens`].
pub fn role_tokens(folder: &Path, target: &TargetConfig) -> Result<Vec<u32>, HfError> {
    let generation = generation_config(folder)?;
    let own = target.eos_token_ids.iter().copied().chain(target.bos_token_id).chain(target.pad_token_id);
    Ok(sorted(own.chain(ROLES.iter().flat_map(|key| ids(&generation[*key])))))
}

fn generation_config(folder: &Path) -> Result<Value, HfError> {
    let path = folder.join("generation_config.json");
    if path.exists() { read_json(&path) } else { Ok(Value::Null) }
}

/// Ids of a value, which is a number or a list.
fn ids(value: &Value) -> Vec<u32> {
    let all = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
    all.iter().filter_map(Value::as_u64).filter_map(|id| u32::try_from(id).ok()).collect()
}

fn sorted(ids: impl Iterator<Item = u32>) -> Vec<u32> {
    let mut ids: Vec<_> = ids.collect();
    ids.sort_unstable();
    ids.dedup();
    ids
}
