//! Strict validation of a drafter folder: every name, shape, dtype and key. SGLang ignores unknown names and leaves random
//! weights for misspelt ones (docs/dflash.md#loaders).

use super::layout::{CONFIG, MODEL};
use crate::hf::{
    Dtype,
    draft::DraftConfig,
    dtype_from_name, dtype_name,
    head::{DsparkConfig, HeadConfig, MarkovKind},
    layout::{Layout, config_of, tensor_shapes},
    read_json,
    tensors::{RawDtype, TensorFiles},
};
use serde::Serialize;
use serde_json::Value;
use std::{fmt, path::Path};

/// Severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// An engine refuses the folder, or loads another model.
    Error,
    /// A reader may fail.
    Warning,
}

/// Defect of a drafter folder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    pub severity: Severity,
    pub file: String,
    /// Tensor or config key.
    pub key: String,
    pub value: String,
    pub remedy: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let severity = if self.severity == Severity::Error { "error" } else { "warning" };
        write!(f, "{severity}: {}: {} {}; {}", self.file, self.key, self.value, self.remedy)
    }
}

/// Keys that must be absent from a drafter's config: readers act on them (speculators#613, DeepSpec#72, Automodel#3605), or
/// reorder the rotary halves (vllm#53063).
const FORBIDDEN: [&str; 9] = [
    "partial_rotary_factor",
    "mrope_section",
    "mrope_interleaved",
    "rope_interleaved",
    "rope_interleave",
    "is_neox_style",
    "linear_attn_config",
    "full_attention_interval",
    "mtp_num_hidden_layers",
];

/// Keys that a loader needs in addition to those of `DraftConfig`.
const REQUIRED: [(&str, &str); 9] = [
    ("architectures", "write the architecture of the head, such as [\"DFlashDraftModel\"]"),
    ("model_type", "write \"qwen3\""),
    ("num_target_layers", "write the number of the target's layers; z-lab's loader fails without it"),
    ("layer_types", "write one entry for each layer; transformers derives other types from max_window_layers"),
    ("rope_theta", "write the rope base; older transformers reads it here"),
    ("hidden_act", "write \"silu\""),
    ("rms_norm_eps", "write the epsilon of the norms"),
    ("head_dim", "write the width of one head"),
    ("vocab_size", "write the rows of the target's embedding"),
];

/// Keys that a reader of the speculators layout needs.
const REQUIRED_BY_SPECULATORS: [(&str, &str); 7] = [
    ("speculators_model_type", "write \"dflash\", \"dspark\" or \"dflash2\""),
    ("speculators_config", "write the algorithm, the proposal methods and the verifier; vLLM reads them"),
    ("transformer_layer_config", "write the settings of the layers"),
    ("aux_hidden_state_layer_ids", "list the tapped layers, each one higher than in z-lab's layout"),
    ("mask_token_id", "write the token that fills the slots"),
    ("block_size", "write the slots of a block"),
    ("draft_vocab_size", "write the rows of the target's embedding"),
];

/// Widths of a head that vLLM 0.32 computes on a CPU.
const CPU_HEADS: [usize; 11] = [32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512];
/// Flash attention, the GPU kernel of vLLM and SGLang, computes multiples of the first number up to the second.
const FLASH_HEADS: (usize, usize) = (8, 256);

/// Checks a folder. An empty result means that every known engine loads the drafter as trained.
pub fn check(dir: &Path) -> Vec<Finding> {
    let mut findings = Vec::new();
    if let Some((layout, config)) = check_config(dir, &mut findings) {
        check_tensors(dir, layout, &config, &mut findings);
    }
    findings
}

/// Warnings about shapes that are sound and that an engine cannot serve. Empty if the config cannot be read, which [`check`]
/// reports.
pub fn engine_limits(dir: &Path) -> Vec<Finding> {
    let Some((_, config)) = check_config(dir, &mut Vec::new()) else { return Vec::new() };
    head_dim_limits(&config).into_iter().chain(markov_limits(&config)).collect()
}

fn head_dim_limits(config: &DraftConfig) -> Option<Finding> {
    let (head, (multiple, largest)) = (config.head_dim, FLASH_HEADS);
    let engines = match (head.is_multiple_of(multiple) && head <= largest, CPU_HEADS.contains(&head)) {
        (true, true) => return None,
        (true, false) => "vLLM does not serve on a CPU",
        (false, true) => "flash attention does not serve on a GPU",
        (false, false) => "neither vLLM on a CPU nor flash attention on a GPU serves",
    };
    let served = CPU_HEADS.iter().filter(|&&head| head <= largest).map(usize::to_string).collect::<Vec<_>>();
    let remedy = format!("or train with a drafter.head_dim that engines serve: {}", served.join(", "));
    Some(warning(CONFIG, "head_dim", format!("= {head}, which {engines}"), format!("use another engine, {remedy}")))
}

/// vLLM 0.33 computes the vanilla bias, whatever the form of the Markov head is.
fn markov_limits(config: &DraftConfig) -> Option<Finding> {
    let HeadConfig::Dspark(DsparkConfig { markov, rank, .. }) = config.head else { return None };
    (rank > 0 && markov != MarkovKind::Vanilla).then(|| {
        let value = format!("= {}, which vLLM computes as vanilla without a word", markov.name());
        warning(
            CONFIG,
            "markov_head_type",
            value,
            "serve it with SGLang, or train with drafter.markov_head = \"vanilla\"",
        )
    })
}

fn error(file: &str, key: &str, value: impl fmt::Display, remedy: impl Into<String>) -> Finding {
    Finding {
        severity: Severity::Error,
        file: file.into(),
        key: key.into(),
        value: value.to_string(),
        remedy: remedy.into(),
    }
}

fn warning(file: &str, key: &str, value: impl fmt::Display, remedy: impl Into<String>) -> Finding {
    Finding { severity: Severity::Warning, ..error(file, key, value, remedy) }
}

fn check_config(dir: &Path, findings: &mut Vec<Finding>) -> Option<(Layout, DraftConfig)> {
    let json = match read_json(&dir.join(CONFIG)) {
        Ok(Value::Object(map)) => Value::Object(map),
        Ok(_) => {
            findings.push(error(CONFIG, "(file)", "is not a JSON object", "export the drafter again"));
            return None;
        }
        Err(e) => {
            findings.push(error(CONFIG, "(file)", e, "export the drafter again"));
            return None;
        }
    };
    let layers = json.get("transformer_layer_config").filter(|layers| layers.is_object());
    let speculators = json.get("speculators_model_type").is_some() || layers.is_some();
    let required: &[_] = if speculators { &REQUIRED_BY_SPECULATORS } else { &REQUIRED };
    for (key, remedy) in required {
        if json.get(key).is_none() {
            findings.push(error(CONFIG, key, "is missing", *remedy));
        }
    }
    let of_layers = layers.unwrap_or(&json);
    let mut objects = vec![&json, &json["dflash_config"], &of_layers["rope_parameters"], &of_layers["rope_scaling"]];
    objects.extend(layers);
    for at in objects {
        for key in FORBIDDEN {
            if let Some(value) = at.get(key) {
                findings.push(error(CONFIG, key, format!("= {value} changes what engines compute"), "delete the key"));
            }
        }
    }
    check_rope(of_layers, findings);
    match speculators {
        true => check_proposals(&json, findings),
        false => check_duplicates(&json, findings),
    }
    if let Some(map) = json.get("auto_map").and_then(Value::as_object) {
        for (class, target) in map {
            let module = target.as_str().and_then(|t| t.split('.').next()).unwrap_or_default();
            if !dir.join(format!("{module}.py")).exists() {
                let remedy = "delete auto_map, or add the file; SGLang fails on it";
                findings.push(warning(
                    CONFIG,
                    "auto_map",
                    format!("maps {class} to {module}.py, which is missing"),
                    remedy,
                ));
            }
        }
    }
    // A speculators config may lack the number of target layers.
    let ids = json["aux_hidden_state_layer_ids"].as_array().into_iter().flatten();
    let deepest = ids.filter_map(Value::as_u64).max().map_or(2, |id| id as usize + 2);
    let (layout, config) = match config_of(CONFIG, &json, Some(deepest)) {
        Ok(read) => read,
        Err(e) => {
            findings.push(error(CONFIG, "(value)", e, "or export it again"));
            return None;
        }
    };
    check_values(layout, &config, &json, findings);
    Some((layout, config))
}

/// speculators#456: an engine that proposes `block_size` tokens drafts one too many. vllm#56692: with `false` here vLLM drafts
/// with a causal block.
fn check_proposals(json: &Value, findings: &mut Vec<Finding>) {
    let proposed = json["speculators_config"]["proposal_methods"][0]["speculative_tokens"].as_u64();
    let size = json["block_size"].as_u64();
    if json.get("sliding_window_non_causal").is_some_and(|value| *value == false) {
        let remedy =
            "write true or delete the key: vLLM makes every layer causal otherwise, full attention too (vllm#56692)";
        findings.push(warning(CONFIG, "sliding_window_non_causal", "= false", remedy));
    }
    let given = u64::from(json["speculators_model_type"] != "dspark");
    if proposed.is_none() || size.is_some_and(|size| proposed != size.checked_sub(given)) {
        let value = format!(
            "= {} with block_size = {}",
            json["speculators_config"]["proposal_methods"][0]["speculative_tokens"], json["block_size"]
        );
        let remedy = match given {
            0 => "write block_size: all slots predict",
            _ => "write block_size - 1: the first slot is given",
        };
        findings.push(error(CONFIG, "speculative_tokens", value, remedy));
    }
}

/// Checks keys that have two locations.
fn check_duplicates(json: &Value, findings: &mut Vec<Finding>) {
    let (top, nested) = (json.get("block_size"), json["dflash_config"].get("block_size"));
    match (top, nested) {
        (Some(a), Some(b)) if a != b => {
            let value = format!("is {a} at the top level and {b} in dflash_config");
            findings.push(error(CONFIG, "block_size", value, "write the same number in both locations"));
        }
        (Some(_), None) | (None, Some(_)) => {
            let value = "is in one of its two locations only";
            findings.push(warning(
                CONFIG,
                "block_size",
                value,
                "write it at the top level and in dflash_config: readers differ",
            ));
        }
        _ => {}
    }
    // The same taps in the other numbering: engines that read both keys must get the same layers (vllm#42704).
    let ids = |value: &Value| value.as_array().map(|ids| ids.iter().filter_map(Value::as_u64).collect::<Vec<_>>());
    if let (Some(own), Some(aux)) =
        (ids(&json["dflash_config"]["target_layer_ids"]), ids(&json["aux_hidden_state_layer_ids"]))
        && !own.iter().map(|id| id + 1).eq(aux.iter().copied())
    {
        let value = format!("= {aux:?} with target_layer_ids = {own:?}");
        findings.push(error(
            CONFIG,
            "aux_hidden_state_layer_ids",
            value,
            "write each id one higher, or remove the key",
        ));
    }
}

/// Checks the rope base: old readers use the top level, new ones `rope_parameters`.
fn check_rope(json: &Value, findings: &mut Vec<Finding>) {
    let theta = |at: &Value| at.get("rope_theta").and_then(Value::as_f64);
    match (theta(json), theta(&json["rope_parameters"])) {
        (Some(a), Some(b)) if a != b => {
            let value = format!("is {a} at the top level and {b} in rope_parameters");
            findings.push(error(CONFIG, "rope_theta", value, "write the same number in both locations"));
        }
        (Some(_), None) => {
            let remedy = "write {rope_theta, rope_type} as well: newer transformers reads it there (SpecForge#742)";
            findings.push(warning(CONFIG, "rope_parameters", "is missing", remedy));
        }
        _ => {}
    }
}

fn check_values(layout: Layout, config: &DraftConfig, json: &Value, findings: &mut Vec<Finding>) {
    let layers = config.num_target_layers;
    let ids = &config.target_layer_ids;
    if ids.iter().any(|&id| id + 1 >= layers) {
        let remedy = format!(
            "tap layers from 0 to {}; engines return the last one normalised, or not at all",
            layers.saturating_sub(2)
        );
        findings.push(error(CONFIG, "target_layer_ids", format!("= {ids:?} with {layers} target layers"), remedy));
    }
    if ids.windows(2).any(|pair| pair[0] >= pair[1]) {
        let remedy = "list them in ascending order without repetition, the order in which features are concatenated";
        findings.push(error(CONFIG, "target_layer_ids", format!("= {ids:?}"), remedy));
    }
    if config.mask_token_id as usize >= config.vocab_size {
        let value = format!("= {} with {} embedding rows", config.mask_token_id, config.vocab_size);
        findings.push(error(CONFIG, "mask_token_id", value, "use a row that exists in the target's embedding"));
    }
    // Automodel#2461: a mask token that occurs in text is drafted as a known token, without a warning.
    if config.eos_token_ids.contains(&config.mask_token_id) {
        let value = format!("= {} ends a response", config.mask_token_id);
        findings.push(error(CONFIG, "mask_token_id", value, "use a token that never occurs in text, as in training"));
    }
    let architecture = match layout {
        Layout::Zlab => config.head.architecture(),
        Layout::Speculators => config.head.speculators_architecture(),
    };
    if json.get("architectures").is_some_and(|a| *a != serde_json::json!([architecture])) {
        let value = format!("= {}", json["architectures"]);
        findings.push(error(CONFIG, "architectures", value, format!("write [\"{architecture}\"]")));
    }
    // Engines read the settings of DSpark at the top level, where SpecForge does not write them.
    if layout == Layout::Zlab {
        for key in config.head.keys().0.keys().filter(|key| json.get(key.as_str()).is_none()) {
            let remedy = "write it at the top level: engines do not read it in dflash_config";
            findings.push(error(CONFIG, key, "is missing at the top level", remedy));
        }
    }
}

fn check_tensors(dir: &Path, layout: Layout, config: &DraftConfig, findings: &mut Vec<Finding>) {
    let files = match TensorFiles::open(dir) {
        Ok(files) => files,
        Err(e) => return findings.push(error(MODEL, "(file)", e, "export the drafter again")),
    };
    if files.metadata().and_then(|m| m.get("format")).map(String::as_str) != Some("pt") {
        let remedy = "write {\"format\": \"pt\"} into the file's metadata; transformers refuses it otherwise";
        findings.push(error(MODEL, "format", "is missing from the metadata", remedy));
    }
    let shapes = tensor_shapes(layout, config, &files);
    for name in files.names().filter(|name| !shapes.contains_key(*name)) {
        let remedy = "remove or rename it; SGLang ignores unknown names silently";
        findings.push(error(MODEL, name, "is not a tensor of this drafter", remedy));
    }
    let stated = json_dtype(dir);
    for (name, expected) in &shapes {
        let Ok(raw) = files.get(name) else {
            findings.push(error(MODEL, name, "is missing", "export the drafter again; SGLang would leave it random"));
            continue;
        };
        if raw.shape != expected.as_slice() {
            let value = format!("has shape {:?}, expected {expected:?}", raw.shape);
            findings.push(error(MODEL, name, value, "export it with the config of its training"));
            continue;
        }
        let dtype = match raw.dtype {
            RawDtype::F32 => Dtype::F32,
            RawDtype::F16 => Dtype::F16,
            RawDtype::BF16 => Dtype::Bf16,
            other => {
                findings.push(error(MODEL, name, format!("is stored as {other:?}"), "store it as BF16, F16 or F32"));
                continue;
            }
        };
        if stated.is_some_and(|stated| stated != dtype) {
            let value = format!(
                "is stored as {}, but config.json has {}",
                dtype_name(dtype),
                stated.map_or("none", dtype_name)
            );
            findings.push(error(MODEL, name, value, "set the config's dtype to that of the tensors"));
        }
        if !raw.all_finite() {
            let remedy = "export a checkpoint from before the training diverged";
            findings.push(error(MODEL, name, "has a NaN or an infinite value", remedy));
        }
    }
}

fn json_dtype(dir: &Path) -> Option<Dtype> {
    let json = read_json(&dir.join(CONFIG)).ok()?;
    dtype_from_name(json.get("dtype").or_else(|| json.get("torch_dtype"))?.as_str()?)
}
