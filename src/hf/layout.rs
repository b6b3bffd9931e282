//! The two layouts of DFlash drafters on disk: z-lab's, which engines load, and that of the vLLM project's speculators, which
//! may contain the target's embedding and head and numbers taps from 1.

use super::{HfError, config::TargetConfig, draft::DraftConfig, draft::LayerType, read_json, tensors::TensorFiles};
use serde_json::{Map, Value, json};
use std::{collections::BTreeMap, path::Path};

/// Layout of a drafter's folder.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Layout {
    #[default]
    Zlab,
    Speculators,
}

/// Target in a speculators config.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verifier {
    /// Folder, or name on a hub.
    pub name_or_path: String,
    pub architectures: Vec<String>,
}

/// Version of speculators whose format is written.
const SPECULATORS_VERSION: &str = "0.9.0";
/// Files of a drafter's folder.
pub const CONFIG: &str = "config.json";
pub const MODEL: &str = "model.safetensors";
/// Tensors of the target in the speculators layout, each `[vocab, hidden]`.
pub const EMBEDDING: &str = "embed_tokens.weight";
pub const HEAD: &str = "lm_head.weight";
/// Keys of z-lab's config that are not settings of the layers.
const NOT_OF_LAYERS: [&str; 5] = ["architectures", "dflash_config", "block_size", "num_target_layers", "dtype"];

/// Values of `speculators_model_type`, with the architecture in z-lab's layout.
const SPECULATORS_HEADS: [(&str, &str); 3] =
    [("dflash", "DFlashDraftModel"), ("dspark", "DSparkDraftModel"), ("dflash2", "DFlash2DraftModel")];
/// Keys of the heads in a speculators config.
const HEAD_KEYS: [&str; 8] = [
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
];

/// Drafter's folder in either layout, with exactly the tensors of its configuration.
pub struct DraftFolder {
    pub layout: Layout,
    pub config: DraftConfig,
    pub files: TensorFiles,
}

impl DraftFolder {
    /// Opens a drafter's folder for `target`, the model in the folder `of`.
    ///
    /// # Errors
    /// A sentence: an unusable folder, or a drafter of another target.
    pub fn open_for(folder: &Path, of: &Path, target: &TargetConfig) -> Result<DraftFolder, String> {
        let opened = DraftFolder::open(folder, Some(target.num_hidden_layers)).map_err(|error| error.to_string())?;
        opened.config.check_target(target).map_err(|why| {
            format!("the drafter of {} was not made for the target of {}: {why}", folder.display(), of.display())
        })?;
        Ok(opened)
    }

    /// First tensor with a NaN or an infinite value. Reads all tensors.
    ///
    /// # Errors
    /// A tensor that cannot be read.
    pub fn not_finite(&self) -> Result<Option<&str>, HfError> {
        for name in self.files.names() {
            if !self.files.get(name)?.all_finite() {
                return Ok(Some(name));
            }
        }
        Ok(None)
    }

    /// Opens a folder and checks every name and shape. `target_layers` is the number of target layers for speculators configs
    /// without that key.
    ///
    /// # Errors
    /// An [`HfError`] with the file, the key or tensor, and the remedy.
    pub fn open(folder: &Path, target_layers: Option<usize>) -> Result<DraftFolder, HfError> {
        let path = folder.join("config.json");
        let (layout, config) = config_of(&path.display().to_string(), &read_json(&path)?, target_layers)?;
        let files = TensorFiles::open(folder)?;
        let shapes = tensor_shapes(layout, &config, &files);
        if let Some(name) = files.names().find(|name| !shapes.contains_key(*name)) {
            return Err(HfError::UnknownTensor { file: files.label().into(), name: name.into() });
        }
        match files.check(&shapes).into_iter().next() {
            Some(error) => Err(error),
            None => Ok(DraftFolder { layout, config, files }),
        }
    }
}

/// Reads a config of either layout.
///
/// # Errors
/// A missing, invalid or unsupported key.
pub fn config_of(file: &str, json: &Value, target_layers: Option<usize>) -> Result<(Layout, DraftConfig), HfError> {
    if json.get("speculators_model_type").is_some() || json.get("speculators_config").is_some() {
        let zlab = zlab_json(file, json, target_layers)?;
        Ok((Layout::Speculators, DraftConfig::from_named_json(file, &zlab)?))
    } else {
        Ok((Layout::Zlab, DraftConfig::from_named_json(file, json)?))
    }
}

/// Required tensors of a folder: the drafter's own, and in the speculators layout the target's embedding and head if one of
/// them is present. speculators 0.9.0 reads both and writes neither for a full vocabulary.
pub fn tensor_shapes(layout: Layout, config: &DraftConfig, files: &TensorFiles) -> BTreeMap<String, Vec<usize>> {
    let mut shapes = config.tensor_shapes();
    if layout == Layout::Speculators && files.names().any(|name| name == EMBEDDING || name == HEAD) {
        for name in [EMBEDDING, HEAD] {
            shapes.insert(name.into(), vec![config.vocab_size, config.hidden_size]);
        }
    }
    shapes
}

/// `config.json` in speculators' layout (docs/dflash.md#speculators-layout). Tap ids are one higher: 0 is the embedding's output.
/// With DFlash it proposes `block_size - 1` tokens, since the first slot is given (speculators#456).
///
/// # Errors
/// A sliding layer, whose window has another meaning in this layout.
pub fn speculators_json(config: &DraftConfig, verifier: &Verifier) -> Result<Value, HfError> {
    if config.layer_types.contains(&LayerType::Sliding) {
        // speculators counts the window from the anchor, Draftmill from each slot.
        return Err(HfError::Unsupported {
            file: "the drafter's configuration".into(),
            key: "layer_types".into(),
            value: "sliding_attention".into(),
            supported: "the speculators layout counts a window from the anchor; use z-lab's layout".into(),
        });
    }
    let mut layers = config.to_json();
    let (top, nested) = config.head.keys();
    if let Some(keys) = layers.as_object_mut() {
        NOT_OF_LAYERS.iter().for_each(|key| drop(keys.remove(*key)));
        top.keys().for_each(|key| drop(keys.remove(key)));
    }
    let mut json = json!({
        // As speculators 0.9.0 writes it; vLLM uses the next key.
        "architectures": [config.head.speculators_architecture()],
        "speculators_model_type": config.head.name(),
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": config.head.name(),
            "default_proposal_method": "greedy",
            "proposal_methods": [{
                "proposal_type": "greedy",
                "speculative_tokens": config.proposed_tokens(),
                "verifier_accept_k": 1,
                "accept_tolerance": 0.0,
            }],
            "verifier": { "name_or_path": verifier.name_or_path, "architectures": verifier.architectures },
        },
        "transformer_layer_config": layers,
        "draft_vocab_size": config.vocab_size,
        "target_hidden_size": config.hidden_size,
        "num_target_layers": config.num_target_layers,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "aux_hidden_state_layer_ids": config.target_layer_ids.iter().map(|id| id + 1).collect::<Vec<_>>(),
        // vLLM makes every layer causal where this is false, full ones included (vllm#56692).
        "sliding_window_non_causal": true,
        "sample_from_anchor": config.head.predicts_from_anchor(),
        "tie_word_embeddings": false,
        "dtype": super::dtype_name(config.dtype),
    });
    if let Some(keys) = json.as_object_mut() {
        keys.extend(nested);
    }
    Ok(json)
}

/// Converts a speculators config to z-lab's layout.
fn zlab_json(file: &str, json: &Value, target_layers: Option<usize>) -> Result<Value, HfError> {
    let bad = |key: &str, expected: &str| HfError::BadValue {
        file: file.into(),
        key: key.into(),
        value: json.get(key).unwrap_or(&Value::Null).to_string(),
        expected: expected.into(),
    };
    let (_, architecture) = *SPECULATORS_HEADS
        .iter()
        .find(|(name, _)| json["speculators_model_type"] == *name)
        .ok_or_else(|| bad("speculators_model_type", "\"dflash\", \"dspark\" or \"dflash2\""))?;
    let from_anchor = json["speculators_model_type"] == "dspark";
    if json.get("sample_from_anchor").map_or(from_anchor, |value| *value != from_anchor) {
        let expected = match from_anchor {
            true => "true: with DSpark the first slot predicts too",
            false => "false: the first slot holds a known token",
        };
        return Err(bad("sample_from_anchor", expected));
    }
    let layers = json["transformer_layer_config"].as_object();
    let layers = layers.ok_or_else(|| bad("transformer_layer_config", "an object with the settings of the layers"))?;
    if layers.get("model_type").is_some_and(|kind| kind != "qwen3") {
        return Err(HfError::Unsupported {
            file: file.into(),
            key: "transformer_layer_config.model_type".into(),
            value: layers["model_type"].to_string(),
            supported: "only \"qwen3\" is".into(),
        });
    }
    let slides = layers.get("layer_types").and_then(Value::as_array);
    if slides.is_some_and(|kinds| kinds.iter().any(|kind| kind == "sliding_attention")) {
        return Err(HfError::Unsupported {
            file: file.into(),
            key: "transformer_layer_config.layer_types".into(),
            value: layers["layer_types"].to_string(),
            supported: "speculators counts a window from the anchor, Draftmill from each slot".into(),
        });
    }
    let ids = json["aux_hidden_state_layer_ids"].as_array();
    let ids = ids.ok_or_else(|| bad("aux_hidden_state_layer_ids", "a list of tapped layers"))?;
    let expected = "a list of numbers from 1: id 0 is the embedding's output, which is not supported";
    let ids = ids.iter().map(|id| id.as_u64().and_then(|id| id.checked_sub(1)));
    let ids: Vec<u64> = ids.collect::<Option<_>>().ok_or_else(|| bad("aux_hidden_state_layer_ids", expected))?;
    // Files omit the defaults of transformers' Qwen3.
    let mut zlab: Map<String, Value> = Map::new();
    for (key, value) in qwen3_defaults() {
        zlab.insert(key.into(), value);
    }
    zlab.extend(layers.iter().map(|(key, value)| (key.clone(), value.clone())));
    if !layers.contains_key("rope_theta")
        && layers.get("rope_parameters").is_none_or(|rope| rope["rope_theta"].is_null())
    {
        zlab.insert("rope_theta".into(), json!(10_000.0));
    }
    if json.get("draft_vocab_size").is_some_and(|size| *size != zlab["vocab_size"]) {
        return Err(bad("draft_vocab_size", &format!("{}, the whole vocabulary", zlab["vocab_size"])));
    }
    let layers = match (json["num_target_layers"].as_u64(), target_layers) {
        (Some(stated), _) => json!(stated),
        (None, Some(known)) => json!(known),
        (None, None) => {
            return Err(bad("num_target_layers", "present, or known from the target's folder: give --target"));
        }
    };
    let dtype = [&json["dtype"], &json["torch_dtype"], &zlab["dtype"]].into_iter().find(|value| !value.is_null());
    let dtype = dtype.cloned().unwrap_or_default();
    let mut nested = json!({ "mask_token_id": json["mask_token_id"], "target_layer_ids": ids });
    for key in HEAD_KEYS {
        if let Some(value) = json.get(key) {
            nested[key] = value.clone();
        }
    }
    for (key, value) in [
        ("architectures", json!([architecture])),
        ("model_type", json!("qwen3")),
        ("block_size", json["block_size"].clone()),
        ("num_target_layers", layers),
        ("dflash_config", nested),
        ("dtype", dtype),
    ] {
        zlab.insert(key.into(), value);
    }
    Ok(Value::Object(zlab))
}

/// Defaults of transformers for absent keys of a Qwen3 config.
fn qwen3_defaults() -> [(&'static str, Value); 11] {
    [
        ("vocab_size", json!(151_936)),
        ("hidden_size", json!(4096)),
        ("intermediate_size", json!(22_016)),
        ("num_hidden_layers", json!(32)),
        ("num_attention_heads", json!(32)),
        ("num_key_value_heads", json!(32)),
        ("head_dim", json!(128)),
        ("max_position_embeddings", json!(32_768)),
        ("rms_norm_eps", json!(1e-6)),
        ("hidden_act", json!("silu")),
        ("dtype", Value::Null),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hf::Dtype;

    fn config() -> DraftConfig {
        let target = json!({
            "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 9,
            "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50, "max_position_embeddings": 128,
            "rope_theta": 5e5, "bos_token_id": 1, "eos_token_id": [2, 3],
        });
        let target = crate::hf::config::TargetConfig::from_json(&target).unwrap();
        DraftConfig { dtype: Dtype::F16, ..DraftConfig::for_target(&target, 2, vec![1, 3, 5], 4, 49) }
    }

    fn json() -> Value {
        speculators_json(&config(), &Verifier { name_or_path: "t".into(), architectures: vec!["X".into()] }).unwrap()
    }

    #[test]
    fn a_config_round_trips_through_speculators() {
        assert_eq!(config_of("x", &json(), None).unwrap(), (Layout::Speculators, config()));
        assert_eq!(config_of("x", &config().to_json(), None).unwrap(), (Layout::Zlab, config()));
    }

    /// vllm#40727, vllm#42704: the layouts number taps differently, and mixing them taps the wrong layer.
    #[test]
    fn vllm_42704_taps_are_one_higher() {
        let mut json = json();
        assert_eq!(json["aux_hidden_state_layer_ids"], json!([2, 4, 6]));
        json["aux_hidden_state_layer_ids"] = json!([0, 4, 6]);
        let text = config_of("x", &json, None).unwrap_err().to_string();
        assert!(text.contains("aux_hidden_state_layer_ids") && text.contains("embedding"), "{text}");
    }

    /// speculators#456: the anchor's slot proposes nothing.
    #[test]
    fn speculators_456_proposes_block_size_minus_one_tokens() {
        assert_eq!(json()["speculators_config"]["proposal_methods"][0]["speculative_tokens"], 3);
    }

    /// vllm#56692: vLLM takes `false` for every layer and drafts with a causal block, for which the drafter was not trained.
    /// speculators itself writes `false` for such drafters, so a reader ignores the value.
    #[test]
    fn vllm_56692_the_block_stays_non_causal_when_served() {
        assert_eq!(json()["sliding_window_non_causal"], true);
        for value in [Some(json!(true)), Some(json!(false)), Some(Value::Null), None] {
            let mut json = json();
            json.as_object_mut().unwrap().remove("sliding_window_non_causal");
            if let Some(value) = value {
                json["sliding_window_non_causal"] = value;
            }
            let (layout, read) = config_of("x", &json, None).unwrap();
            assert_eq!((layout, &read), (Layout::Speculators, &config()));
            assert!(read.layer_types.iter().all(|kind| *kind == LayerType::Full));
            assert_eq!(speculators_json(&read, &Verifier::default()).unwrap()["sliding_window_non_causal"], true);
        }
    }

    /// speculators writes only values that differ from transformers' defaults, and no number of target layers.
    #[test]
    fn absent_keys_are_defaults_and_target_depth_is_required() {
        let mut json = json();
        json["transformer_layer_config"] = json!({ "num_hidden_layers": 2, "hidden_size": 64 });
        json["draft_vocab_size"] = json!(151_936);
        json.as_object_mut().unwrap().remove("num_target_layers");
        assert!(config_of("x", &json, None).unwrap_err().to_string().contains("--target"));
        let (_, config) = config_of("x", &json, Some(9)).unwrap();
        assert_eq!((config.num_target_layers, config.hidden_size, config.intermediate_size), (9, 64, 22_016));
        assert_eq!((config.head_dim, config.rope_theta, config.max_position_embeddings), (128, 10_000.0, 32_768));
    }

    #[test]
    fn settings_that_change_the_output_are_refused_by_name() {
        type Change = fn(&mut Value);
        let cases: [(&str, Change); 7] = [
            ("sample_from_anchor", |c| c["sample_from_anchor"] = json!(true)),
            ("speculators_model_type", |c| c["speculators_model_type"] = json!("eagle3")),
            ("model_type", |c| c["transformer_layer_config"]["model_type"] = json!("llama")),
            ("draft_vocab_size", |c| c["draft_vocab_size"] = json!(32)),
            ("partial_rotary_factor", |c| c["transformer_layer_config"]["partial_rotary_factor"] = json!(0.25)),
            ("layer_types", |c| {
                c["transformer_layer_config"]["layer_types"] = json!(["sliding_attention", "full_attention"])
            }),
            ("mask_token_id", |c| c["mask_token_id"] = Value::Null),
        ];
        for (key, change) in cases {
            let mut json = json();
            change(&mut json);
            let text = config_of("x", &json, None).unwrap_err().to_string();
            assert!(text.contains(key), "{key}: {text}");
        }
        let mut sliding = config();
        (sliding.layer_types[0], sliding.sliding_window) = (LayerType::Sliding, Some(8));
        assert!(speculators_json(&sliding, &Verifier::default()).unwrap_err().to_string().contains("sliding"));
    }
}
