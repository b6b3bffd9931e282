//! Origin of a store: the model files, settings and inputs that made it, and their comparison with the present ones.
//!
//! A store that was made with another tokenizer or template trains a drafter of meaningless ids without an error
//! (SpecForge#743, axolotl#1265, litgpt#471).

use super::{
    chat::{ChatError, ChatTemplate},
    store::Store,
};
use crate::{
    common::hash::{sha256, sha256_file},
    config::Data,
    hf::read_json,
};
use rayon::iter::{IntoParallelIterator, ParallelIterator};
use serde_json::{Value, json};
use std::{
    collections::BTreeMap,
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
};

/// Metadata keys of the model files. The tokenizer of rows of token ids is recorded under its own key, since it did not
/// make the ids.
pub(super) const TEMPLATE: &str = "template_sha256";
pub(super) const TOKENIZER: &str = "tokenizer_sha256";
pub(super) const TOKENIZER_OF_IDS: &str = "ids_tokenizer_sha256";
pub(super) const SPECIAL_TOKENS: &str = "special_tokens";
pub(super) const INPUTS: &str = "inputs";
/// Value of a key whose file had no part in the store.
pub(super) const UNUSED: &str = "unused";
const REMEDY: &str = "run draftmill prepare again";

/// Difference between the origin of a store and the present configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Key of the configuration, `section.key`.
    pub key: String,
    pub message: String,
    pub remedy: String,
    /// True if the present configuration gives other ids or masks. Otherwise only the selection of rows may change.
    pub refused: bool,
}

/// Setting that shapes the samples.
pub(super) struct Setting {
    /// Key in `[data]` and in the metadata of the store.
    pub key: &'static str,
    pub value: String,
    /// Counts of the metadata on which the setting acted. If one of them is not 0, another value gives other samples.
    acted_on: &'static [&'static str],
}

/// Settings of `[data]` that shape the samples. Every other key is in `NOT_OF_SAMPLES` of the tests.
pub(super) fn settings(data: &Data) -> Vec<Setting> {
    let setting = |key, value, acted_on| Setting { key, value, acted_on };
    vec![
        setting("max_length", data.max_length.to_string(), &["cut", "left_out.too_long"]),
        setting("overlong", data.overlong.to_string(), &["cut", "left_out.too_long"]),
        setting("unknown_role", data.unknown_role.to_string(), &["unknown_roles", "rejected.unknown_role"]),
        setting(
            "hidden_fields",
            data.hidden_fields.to_string(),
            &["rejected.hidden_by_template", "changed.hidden_by_template"],
        ),
        setting(
            "leading_assistant",
            data.leading_assistant.to_string(),
            &["rejected.leading_assistant", "changed.leading_assistant_dropped"],
        ),
        setting("min_supervised", data.min_supervised.to_string(), &[]),
        setting("validation_fraction", data.validation_fraction.to_string(), &[]),
        setting("max_row_bytes", data.max_row_bytes.to_string(), &[]),
    ]
}

/// Begin and end token of a model folder, which templates write into the text, as one JSON text.
pub(super) fn special_tokens(folder: &Path) -> String {
    let read = |name: &str| read_json(&folder.join(name)).unwrap_or_default();
    let (settings, map) = (read("tokenizer_config.json"), read("special_tokens_map.json"));
    let text = |value: &Value| value.as_str().or(value["content"].as_str()).map(String::from);
    let token = |key: &str| text(&settings[key]).or_else(|| text(&map[key]));
    json!({ "bos_token": token("bos_token"), "eos_token": token("eos_token") }).to_string()
}

/// SHA-256 of the folder's tokenizer; `None` if the folder has none that can be read.
pub(super) fn tokenizer_sha256(folder: &Path) -> Option<String> {
    fs::read(folder.join("tokenizer.json")).ok().map(sha256)
}

/// Differences between the origin of `store` and the present model folder, settings and inputs. Reads each input whose
/// size is unchanged once.
pub fn differences(store: &Store, model: &Path, data: &Data) -> Vec<Difference> {
    let metadata = store.metadata();
    let mut found = of_model(metadata, model);
    found.extend(settings(data).iter().filter_map(|setting| of_setting(metadata, setting)));
    found.extend(of_inputs(metadata, &data.inputs));
    found
}

type Metadata = BTreeMap<String, String>;

fn of_model(metadata: &Metadata, model: &Path) -> Vec<Difference> {
    let recorded = |key: &str| metadata.get(key).filter(|value| *value != UNUSED);
    let folder = model.display();
    let refused = |message: String| Difference {
        key: "target.dir".into(),
        message,
        remedy: format!("{REMEDY}, or name the target that the store was made for"),
        refused: true,
    };
    let unknown = |what: &str, why: &str| Difference {
        key: "target.dir".into(),
        message: format!("{folder} has no {what} ({why}), so the store cannot be compared with its target"),
        remedy: format!("copy the {what} into the folder"),
        refused: false,
    };
    let mut found = Vec::new();
    if let Some(before) = recorded(TOKENIZER).or_else(|| recorded(TOKENIZER_OF_IDS)) {
        match fs::read(model.join("tokenizer.json")).map(sha256) {
            Ok(now) if now == *before => {}
            Ok(now) => found.push(refused(format!(
                "tokenizer.json of {folder} is not the tokenizer of the store (SHA-256 {} now, {} then), so the ids of the \
                 store mean other tokens",
                short(&now),
                short(before)
            ))),
            Err(error) => found.push(unknown("tokenizer.json", &error.to_string())),
        }
    }
    if let Some(before) = recorded(TEMPLATE) {
        match ChatTemplate::load(model).map(|template| sha256(template.text())) {
            Ok(now) if now == *before => {}
            Ok(now) => found.push(refused(format!(
                "the chat template of {folder} is not the template of the store (SHA-256 {} now, {} then)",
                short(&now),
                short(before)
            ))),
            Err(ChatError::Missing(_)) => found.push(unknown("chat template", "chat_template.jinja is missing")),
            Err(error) => {
                found.push(refused(format!("the chat template of {folder} is not the template of the store ({error})")))
            }
        }
    }
    if let Some(before) = recorded(SPECIAL_TOKENS) {
        let now = special_tokens(model);
        if now != *before && model.join("tokenizer_config.json").exists() {
            found.push(refused(format!("the special tokens of {folder} are {now}, those of the store are {before}")));
        }
    }
    found
}

fn of_setting(metadata: &Metadata, setting: &Setting) -> Option<Difference> {
    // A store of an earlier version lacks the newer settings.
    let before = metadata.get(setting.key).filter(|before| **before != setting.value)?;
    let acted: u64 = setting.acted_on.iter().map(|path| count(metadata, path)).sum();
    let effect = match (acted, setting.acted_on) {
        (0, []) => "the same rows would be selected or divided in another way".to_owned(),
        (0, _) => "no sample of the store would differ".to_owned(),
        _ => format!("ids or masks of {acted} rows would differ"),
    };
    Some(Difference {
        key: format!("data.{}", setting.key),
        message: format!("the store was made with {before}; {effect}"),
        remedy: format!("{REMEDY}, or write {before} again"),
        refused: acted > 0,
    })
}

/// Count of the metadata by its path, `key` or `key.reason`; 0 if it is absent.
fn count(metadata: &Metadata, path: &str) -> u64 {
    match path.split_once('.') {
        None => metadata.get(path).and_then(|text| text.parse().ok()).unwrap_or(0),
        Some((key, reason)) => {
            let counts = metadata.get(key).and_then(|text| serde_json::from_str::<Value>(text).ok());
            counts.and_then(|counts| counts[reason].as_u64()).unwrap_or(0)
        }
    }
}

fn of_inputs(metadata: &Metadata, inputs: &[PathBuf]) -> Vec<Difference> {
    let Some(before) = metadata.get(INPUTS).and_then(|text| serde_json::from_str::<Vec<Value>>(text).ok()) else {
        return Vec::new();
    };
    if inputs.is_empty() {
        return Vec::new();
    }
    let changed = |message: String| Difference {
        key: "data.inputs".into(),
        message,
        remedy: format!("{REMEDY} to train on the present rows"),
        refused: false,
    };
    let before_names: Vec<_> = before.iter().map(|file| file["name"].as_str().unwrap_or_default()).collect();
    let names: Vec<_> = inputs.iter().map(|path| name_of(path)).collect();
    if before_names != names {
        let message = format!("the store was made from {}, not from {}", before_names.join(", "), names.join(", "));
        return vec![changed(message)];
    }
    let pairs: Vec<_> = inputs.iter().zip(&before).collect();
    let found = pairs.into_par_iter().map(|(path, before)| {
        let why = change(path, before)?;
        Some(changed(format!("{} is not the file that the store was made from: {why}", path.display())))
    });
    found.collect::<Vec<_>>().into_iter().flatten().collect()
}

/// Reason why a file is not the recorded one. An absent file is no difference: a store may be moved without its inputs.
fn change(path: &Path, before: &Value) -> Option<String> {
    let metadata = match fs::metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == ErrorKind::NotFound => return None,
        Err(error) => return Some(format!("it cannot be read ({error})")),
    };
    // Reading a pipe or a device may never end.
    if !metadata.is_file() {
        return Some("it is not a regular file".into());
    }
    let bytes = before["bytes"].as_u64().unwrap_or_default();
    if metadata.len() != bytes {
        return Some(format!("it has {} bytes now, {bytes} then", metadata.len()));
    }
    match sha256_file(path) {
        Ok(now) if before["sha256"] == now => None,
        Ok(_) => Some("its content differs".into()),
        Err(error) => Some(format!("it cannot be read ({error})")),
    }
}

fn name_of(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

/// First digits of a hash, for messages.
fn short(hash: &str) -> &str {
    hash.get(..12).unwrap_or(hash)
}

#[cfg(test)]
mod tests {
    use crate::config::FIELDS;

    /// Keys of `[data]` without influence on a sample.
    const NOT_OF_SAMPLES: [&str; 4] = ["inputs", "store", "max_reject_fraction", "allow_truncated"];

    /// A new key of `[data]` that shapes samples must be recorded and compared.
    #[test]
    fn every_key_of_data_is_recorded_or_has_no_influence() {
        let data = crate::config::load(None, &[]).unwrap().config.data;
        let recorded: Vec<_> = super::settings(&data).iter().map(|setting| setting.key).collect();
        for field in FIELDS.iter().filter(|field| field.section == "data") {
            let known = recorded.contains(&field.key) || NOT_OF_SAMPLES.contains(&field.key);
            assert!(known, "add data.{} to `settings`, or to `NOT_OF_SAMPLES`", field.key);
        }
    }
}
