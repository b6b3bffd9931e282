//! Configurations and tensor names of each head, as public trainers write them.

use super::case::*;
use draftmill::hf::config::TargetConfig;
use draftmill::hf::draft::DraftConfig;
use draftmill::hf::layout::{Layout, Verifier, config_of, speculators_json};
use serde_json::Value;
use std::collections::BTreeMap;

/// Layers of the folder's target, which speculators' configurations do not have.
fn target_layers() -> usize {
    TargetConfig::load(&path("target")).unwrap().num_hidden_layers
}

/// Checks that a written configuration is read, has the tensors of the file, and survives both of our layouts.
fn check(name: &str, entry: &Value, tensors: &Value) -> DraftConfig {
    let (_, config) =
        config_of(name, &entry["config.json"], Some(target_layers())).unwrap_or_else(|why| panic!("{name}: {why}"));
    let want: BTreeMap<String, Vec<usize>> = serde_json::from_value(tensors.clone()).unwrap();
    assert_eq!(config.tensor_shapes(), want, "{name}");
    assert_eq!(config_of(name, &config.to_json(), None).unwrap(), (Layout::Zlab, config.clone()), "{name}");
    let speculators = speculators_json(&config, &Verifier::default()).unwrap();
    assert_eq!(config_of(name, &speculators, None).unwrap(), (Layout::Speculators, config.clone()), "{name}");
    config
}

#[test]
fn layouts_of_each_head_are_read_with_their_tensors() {
    for file in ["dspark_layouts.json", "dflash2_layouts.json"] {
        let layouts = json(file);
        let mut tensors = None;
        let mut read = Vec::new();
        for (name, entry) in layouts.as_object().unwrap() {
            if !entry["config.json"].is_object() {
                continue;
            }
            // "the same" stands for the tensors of the entry before.
            if entry["tensors"].is_object() {
                tensors = Some(entry["tensors"].clone());
            }
            read.push(check(&format!("{file} {name}"), entry, tensors.as_ref().unwrap()));
        }
        assert!(read.len() >= 2 && read.windows(2).all(|pair| pair[0].head == pair[1].head), "{file}");
    }
}

/// Keys that speculators writes for a head have the same values in our configuration of that layout.
#[test]
fn our_speculators_layout_has_every_key_of_a_head() {
    for file in ["dspark_layouts.json", "dflash2_layouts.json"] {
        let theirs = &json(file)["speculators_save_pretrained"]["config.json"];
        let (_, config) = config_of(file, theirs, Some(target_layers())).unwrap();
        let ours = speculators_json(&config, &Verifier::default()).unwrap();
        for (key, value) in theirs.as_object().unwrap() {
            // Names and versions of the writer, and the flag that vLLM misreads (vllm#56692).
            let own = ["auto_map", "speculators_config", "transformer_layer_config", "transformers_version"];
            let differs = ["target_hidden_size", "sliding_window_non_causal"];
            if own.contains(&key.as_str()) || differs.contains(&key.as_str()) {
                continue;
            }
            assert_eq!(&ours[key], value, "{file}: {key}");
        }
        let tokens = |json: &Value| json["speculators_config"]["proposal_methods"][0]["speculative_tokens"].clone();
        assert_eq!(tokens(&ours), tokens(theirs), "{file}");
    }
}
