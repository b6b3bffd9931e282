//! Drafter configuration in z-lab's layout: reads and writes `config.json`, and lists the tensors.

use super::fields::{Fields, MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_WIDTH};
use super::head::HeadConfig;
use super::{Dtype, HfError, dtype_name, read_json};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

/// Attention of a drafter layer to the context (docs/dflash.md#sliding-layers).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerType {
    /// Full attention to the context before the anchor and to the whole block.
    Full,
    /// Attention to the context within `sliding_window`, and to the block as `sliding_causal` says.
    Sliding,
}

/// Shape and settings of a drafter (docs/dflash.md#z-lab-layout): the backbone is DFlash's with every head.
#[derive(Clone, Debug, PartialEq)]
pub struct DraftConfig {
    pub head: HeadConfig,
    /// Width of the residual stream; equal to the target's.
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    pub num_key_value_heads: usize,
    pub head_dim: usize,
    pub rms_norm_eps: f64,
    pub rope_theta: f64,
    /// Rows of the target's embedding.
    pub vocab_size: usize,
    /// Slots of a block, including the anchor.
    pub block_size: usize,
    /// Token that fills every slot except the first.
    pub mask_token_id: u32,
    /// Tapped target layers, 0-based: id `i` is the residual stream after layer `i`.
    pub target_layer_ids: Vec<usize>,
    /// Number of layers of the target.
    pub num_target_layers: usize,
    pub max_position_embeddings: usize,
    /// One entry for each drafter layer.
    pub layer_types: Vec<LayerType>,
    /// Positions visible to a sliding layer, including its own; `None` if every layer is full.
    pub sliding_window: Option<usize>,
    /// True if a slot sees only itself and the slots before it on sliding layers; true without such layers.
    pub sliding_causal: bool,
    pub bos_token_id: Option<u32>,
    pub eos_token_ids: Vec<u32>,
    pub pad_token_id: Option<u32>,
    /// Dtype of the weights.
    pub dtype: Dtype,
}

impl DraftConfig {
    /// Number of tokens that a block proposes.
    pub fn proposed_tokens(&self) -> usize {
        self.head.proposed_tokens(self.block_size)
    }

    /// True if a layer has sliding attention.
    pub fn slides(&self) -> bool {
        self.layer_types.contains(&LayerType::Sliding)
    }

    /// Reads `config.json` of a drafter folder.
    ///
    /// # Errors
    /// As [`DraftConfig::from_json`], or an unreadable file.
    pub fn load(folder: &Path) -> Result<DraftConfig, HfError> {
        let path = folder.join("config.json");
        DraftConfig::from_named_json(&path.display().to_string(), &read_json(&path)?)
    }

    /// Parses a config. `block_size` and the rope settings may be in either of their two locations.
    ///
    /// # Errors
    /// A missing or invalid key, or an unsupported setting.
    pub fn from_json(value: &Value) -> Result<DraftConfig, HfError> {
        DraftConfig::from_named_json("config.json", value)
    }

    pub(super) fn from_named_json(file: &str, value: &Value) -> Result<DraftConfig, HfError> {
        let top = Fields::new(file, value)?;
        refuse_other_settings(&top)?;
        let nested = match top.nested("dflash_config")? {
            Some(nested) => nested,
            // DeepSpec writes all keys at the top level.
            None if top.get("target_layer_ids").is_some() => top,
            None => {
                let expected = "an object with `mask_token_id`, `target_layer_ids` and `block_size`";
                return Err(top.missing("dflash_config", expected));
            }
        };
        let heads = top.size_to("num_attention_heads", MAX_HEADS)?;
        let hidden_size = top.size_to("hidden_size", MAX_WIDTH)?;
        let layers = top.size_to("num_hidden_layers", MAX_LAYERS)?;
        let sliding_window =
            if top.flag("use_sliding_window")?.unwrap_or(false) { top.count("sliding_window")? } else { None };
        let layer_types = layer_types(&top, layers, sliding_window)?;
        let config = DraftConfig {
            head: HeadConfig::read(&top, &nested)?,
            hidden_size,
            intermediate_size: top.size_to("intermediate_size", MAX_WIDTH)?,
            num_hidden_layers: layers,
            num_attention_heads: heads,
            num_key_value_heads: top.count_to("num_key_value_heads", MAX_HEADS)?.unwrap_or(heads),
            head_dim: top.count_to("head_dim", MAX_HEAD_DIM)?.unwrap_or(hidden_size / heads),
            rms_norm_eps: top.positive("rms_norm_eps")?.unwrap_or(1e-6),
            rope_theta: rope_theta(&top)?,
            vocab_size: top.size_to("vocab_size", MAX_WIDTH)?,
            block_size: block_size(&top, &nested)?,
            mask_token_id: one_id(&nested, "mask_token_id")?
                .ok_or_else(|| nested.missing("mask_token_id", "a token id that the target never produces"))?,
            target_layer_ids: nested.ids("target_layer_ids")?.into_iter().map(|id| id as usize).collect(),
            num_target_layers: top.size("num_target_layers")?,
            max_position_embeddings: top.size("max_position_embeddings")?,
            sliding_causal: sliding_causal(&top, &nested, &layer_types)?,
            layer_types,
            sliding_window,
            bos_token_id: one_id(&top, "bos_token_id")?,
            eos_token_ids: top.ids("eos_token_id")?,
            pad_token_id: top.padding_id()?,
            dtype: top.dtype()?.unwrap_or(Dtype::Bf16),
        };
        config.check(file)?;
        Ok(config)
    }

    /// Checks a config that was built in code.
    ///
    /// # Errors
    /// The first value that contradicts another one.
    pub fn validate(&self) -> Result<(), HfError> {
        self.check("the drafter's configuration")
    }

    /// Writes `config.json` for z-lab, SGLang, vLLM and both generations of transformers. `block_size` and the rope settings are
    /// in both of their locations, and the layer types are explicit. `auto_map` is omitted, since the export has no
    /// `dflash.py`.
    pub fn to_json(&self) -> Value {
        let kinds: Vec<&str> = self.layer_types.iter().map(|&kind| layer_type_name(kind)).collect();
        let eos = match self.eos_token_ids.as_slice() {
            [] => Value::Null,
            [one] => json!(one),
            many => json!(many),
        };
        let (head, nested) = self.head.keys();
        let mut json = json!({
            "architectures": [self.head.architecture()],
            "model_type": "qwen3",
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": self.target_layer_ids,
                "block_size": self.block_size,
            },
            "block_size": self.block_size,
            "num_target_layers": self.num_target_layers,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "attention_bias": false,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_position_embeddings,
            "rope_theta": self.rope_theta,
            "rope_scaling": null,
            "rope_parameters": { "rope_theta": self.rope_theta, "rope_type": "default" },
            "layer_types": kinds,
            "sliding_window": self.sliding_window,
            "use_sliding_window": self.sliding_window.is_some(),
            "max_window_layers": self.num_hidden_layers,
            "tie_word_embeddings": false,
            "use_cache": true,
            "dtype": dtype_name(self.dtype),
            "bos_token_id": self.bos_token_id,
            "eos_token_id": eos,
            "pad_token_id": self.pad_token_id,
        });
        if let Some(top) = json.as_object_mut() {
            if let Some(keys) = top.get_mut("dflash_config").and_then(Value::as_object_mut) {
                keys.extend(nested);
            }
            top.extend(head);
            if !self.sliding_causal {
                top.insert("is_causal".into(), false.into());
            }
        }
        json
    }

    /// Shapes of the tensors by name: the `11 n + 3` of a backbone with `n` layers, and those of the head.
    pub fn tensor_shapes(&self) -> BTreeMap<String, Vec<usize>> {
        let (hidden, inner) = (self.hidden_size, self.intermediate_size);
        let query = self.num_attention_heads * self.head_dim;
        let key = self.num_key_value_heads * self.head_dim;
        let mut shapes = BTreeMap::from([
            ("fc.weight".to_string(), vec![hidden, self.target_layer_ids.len() * hidden]),
            ("hidden_norm.weight".to_string(), vec![hidden]),
            ("norm.weight".to_string(), vec![hidden]),
        ]);
        for layer in 0..self.num_hidden_layers {
            for (name, shape) in [
                ("input_layernorm", vec![hidden]),
                ("post_attention_layernorm", vec![hidden]),
                ("self_attn.q_proj", vec![query, hidden]),
                ("self_attn.k_proj", vec![key, hidden]),
                ("self_attn.v_proj", vec![key, hidden]),
                ("self_attn.o_proj", vec![hidden, query]),
                ("self_attn.q_norm", vec![self.head_dim]),
                ("self_attn.k_norm", vec![self.head_dim]),
                ("mlp.gate_proj", vec![inner, hidden]),
                ("mlp.up_proj", vec![inner, hidden]),
                ("mlp.down_proj", vec![hidden, inner]),
            ] {
                shapes.insert(layer_weight(layer, name), shape);
            }
        }
        shapes.extend(self.head.tensor_shapes(hidden, self.vocab_size, self.num_hidden_layers));
        shapes
    }

    fn check(&self, file: &str) -> Result<(), HfError> {
        let bad = |key: &str, value: String, expected: String| {
            Err(HfError::BadValue { file: file.into(), key: key.into(), value, expected })
        };
        let (heads, kv) = (self.num_attention_heads, self.num_key_value_heads);
        if kv == 0 || !heads.is_multiple_of(kv) {
            return bad("num_key_value_heads", kv.to_string(), format!("a divisor of num_attention_heads ({heads})"));
        }
        if self.head_dim == 0 || !self.head_dim.is_multiple_of(2) {
            return bad("head_dim", self.head_dim.to_string(), "even and at least 2, for the rotary halves".into());
        }
        if self.block_size < 2 {
            return bad("block_size", self.block_size.to_string(), "at least 2: an anchor and a slot to draft".into());
        }
        if self.mask_token_id as usize >= self.vocab_size {
            let expected = format!("below vocab_size ({}), as its embedding row must exist", self.vocab_size);
            return bad("mask_token_id", self.mask_token_id.to_string(), expected);
        }
        let ids = &self.target_layer_ids;
        let distinct = ids.iter().collect::<std::collections::BTreeSet<_>>().len() == ids.len();
        if ids.is_empty() || !distinct || ids.iter().any(|&id| id + 1 >= self.num_target_layers) {
            // Engines differ in the tap of the last layer: before the final norm, after it, or none.
            let expected = format!(
                "a list of different layers below {}, the last of the target's layers excluded",
                self.num_target_layers.saturating_sub(1)
            );
            return bad("target_layer_ids", format!("{ids:?}"), expected);
        }
        if let Err((key, value, expected)) = self.head.check(self.hidden_size, self.vocab_size) {
            return bad(key, value, expected);
        }
        if self.layer_types.len() != self.num_hidden_layers {
            let expected = format!("one entry for each of the {} layers", self.num_hidden_layers);
            return bad("layer_types", format!("{} entries", self.layer_types.len()), expected);
        }
        let slides = self.slides();
        match self.sliding_window {
            Some(window) if window > 0 && slides => Ok(()),
            None if !slides => Ok(()),
            Some(window) if slides => bad("sliding_window", window.to_string(), "at least 1".into()),
            Some(window) => bad("sliding_window", window.to_string(), "absent, since no layer type is sliding".into()),
            None => {
                let expected = "true, with a sliding_window, since a layer type is sliding";
                bad("use_sliding_window", "false or absent".into(), expected.into())
            }
        }
    }
}

/// z-lab's choice of `n` taps in a target of `num_target_layers` layers: evenly spaced from layer 1 to the third last, rounded
/// half to even as in Python (docs/dflash.md#tapped-layers). Ids repeat for targets of fewer than five layers;
/// [`DraftConfig::validate`] refuses those.
pub fn default_target_layer_ids(num_target_layers: usize, n: usize) -> Vec<usize> {
    if n == 1 {
        return vec![num_target_layers / 2];
    }
    let span = num_target_layers as f64 - 4.0;
    (0..n).map(|i| (1.0 + i as f64 * span / (n as f64 - 1.0)).round_ties_even().max(0.0) as usize).collect()
}

fn layer_type_name(kind: LayerType) -> &'static str {
    match kind {
        LayerType::Full => "full_attention",
        LayerType::Sliding => "sliding_attention",
    }
}

fn refuse_other_settings(top: &Fields<'_>) -> Result<(), HfError> {
    if top.text("hidden_act")?.is_some_and(|name| name != "silu") {
        return Err(top.unsupported("hidden_act", "only silu is"));
    }
    if top.flag("attention_bias")?.unwrap_or(false) {
        return Err(top.unsupported("attention_bias", "drafters have no biases"));
    }
    // These settings change the output of a drafter trained with full rotary embedding and plain logits.
    for key in ["partial_rotary_factor", "mrope_section", "input_embedding_scale", "output_multiplier"] {
        if top.get(key).is_some_and(|value| value.as_f64() != Some(1.0)) {
            return Err(top.unsupported(key, "remove the key"));
        }
    }
    for key in ["final_logit_softcapping", "quantization_config"] {
        if top.get(key).is_some() {
            return Err(top.unsupported(key, "remove the key"));
        }
    }
    Ok(())
}

fn block_size(top: &Fields<'_>, nested: &Fields<'_>) -> Result<usize, HfError> {
    match (nested.count("block_size")?, top.count("block_size")?) {
        (Some(inner), Some(outer)) if inner != outer => {
            Err(top.bad("block_size", &format!("{inner}, as in `dflash_config.block_size`")))
        }
        (Some(size), _) | (None, Some(size)) => Ok(size),
        (None, None) => Err(top.missing("block_size", "an integer of at least 2, here or in `dflash_config`")),
    }
}

/// Reads `rope_theta` at the top level (transformers 4) or in `rope_parameters` (transformers 5). Scaling is refused.
fn rope_theta(top: &Fields<'_>) -> Result<f64, HfError> {
    let mut theta = top.positive("rope_theta")?;
    for key in ["rope_scaling", "rope_parameters"] {
        let Some(rope) = top.nested(key)? else { continue };
        if let Some(layers) = rope.first_object() {
            return Err(rope.unsupported(layers, "drafters have one base for all layers"));
        }
        for name in ["rope_type", "type"] {
            if rope.text(name)?.is_some_and(|kind| kind != "default") {
                return Err(rope.unsupported(name, "drafters use the default rotary embedding"));
            }
        }
        for name in ["partial_rotary_factor", "mrope_section"] {
            if rope.get(name).is_some_and(|value| value.as_f64() != Some(1.0)) {
                return Err(rope.unsupported(name, "remove the key"));
            }
        }
        match (rope.positive("rope_theta")?, theta) {
            (Some(inner), Some(outer)) if inner != outer => {
                return Err(rope.bad("rope_theta", &format!("{outer}, as in `rope_theta`")));
            }
            (Some(inner), _) => theta = Some(inner),
            (None, _) => {}
        }
    }
    theta.ok_or_else(|| top.missing("rope_theta", "the base of the rotary embedding, such as 1000000"))
}

fn layer_types(top: &Fields<'_>, layers: usize, window: Option<usize>) -> Result<Vec<LayerType>, HfError> {
    let Some(value) = top.get("layer_types") else {
        // Default of transformers.
        let first = top.count("max_window_layers")?.unwrap_or(layers);
        let sliding = |layer: usize| window.is_some() && layer >= first;
        return Ok((0..layers).map(|l| if sliding(l) { LayerType::Sliding } else { LayerType::Full }).collect());
    };
    let expected = "a list of \"full_attention\" and \"sliding_attention\"";
    let list = value.as_array().ok_or_else(|| top.bad("layer_types", expected))?;
    list.iter()
        .map(|entry| match entry.as_str() {
            Some("full_attention") => Ok(LayerType::Full),
            Some("sliding_attention") => Ok(LayerType::Sliding),
            _ => Err(top.bad("layer_types", expected)),
        })
        .collect()
}

/// Reads `is_causal`, or `dflash_config.causal`, which engines apply to all layers. Full layers are never causal.
fn sliding_causal(top: &Fields<'_>, nested: &Fields<'_>, kinds: &[LayerType]) -> Result<bool, HfError> {
    let (fields, key, value) = match top.flag("is_causal")? {
        Some(value) => (top, "is_causal", Some(value)),
        None => (nested, "causal", nested.flag("causal")?),
    };
    if value == Some(true) && kinds.contains(&LayerType::Full) {
        return Err(fields.unsupported(key, "the slots of a block see each other on full layers: remove the key"));
    }
    Ok(value.unwrap_or(true) || !kinds.contains(&LayerType::Sliding))
}

fn one_id(fields: &Fields<'_>, key: &str) -> Result<Option<u32>, HfError> {
    match fields.ids(key)?.as_slice() {
        [] => Ok(None),
        [one] => Ok(Some(*one)),
        _ => Err(fields.bad(key, "one token id")),
    }
}

/// Name of a layer's weight, for example `layers.0.mlp.up_proj.weight`.
pub fn layer_weight(layer: usize, name: &str) -> String {
    format!("layers.{layer}.{name}.weight")
}

#[cfg(test)]
mod tests;
