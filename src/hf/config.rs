//! Configuration of a target: Qwen3, Qwen2 and Llama folders in the forms of transformers 4 and 5.

use super::fields::{Fields, MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_WIDTH};
use super::{Dtype, HfError, draft::DraftConfig, draft::LayerType, head::HeadConfig, read_json};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// Model family. Families differ in biases, query/key norms and defaults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    Llama,
    Qwen2,
    Qwen3,
}

impl Family {
    pub const ALL: [Family; 3] = [Family::Llama, Family::Qwen2, Family::Qwen3];

    /// Value of `model_type` in config.json, which is also the architecture's name in GGUF.
    pub fn name(self) -> &'static str {
        match self {
            Family::Llama => "llama",
            Family::Qwen2 => "qwen2",
            Family::Qwen3 => "qwen3",
        }
    }

    /// Family of a `model_type`; `None` if it is unsupported.
    pub fn from_name(name: &str) -> Option<Family> {
        Family::ALL.into_iter().find(|family| family.name() == name)
    }
}

/// Scaling of the rotary frequencies for long contexts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    None,
    /// All frequencies are divided by `factor`.
    Linear {
        factor: f64,
    },
    /// Llama 3.1's rule: low frequencies are divided by `factor`, high ones kept, those between interpolated.
    Llama3 {
        factor: f64,
        low_freq_factor: f64,
        high_freq_factor: f64,
        original_max_position_embeddings: usize,
    },
}

/// Shape and settings of a target.
#[derive(Clone, Debug, PartialEq)]
pub struct TargetConfig {
    pub family: Family,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    pub num_key_value_heads: usize,
    pub head_dim: usize,
    pub rms_norm_eps: f64,
    pub rope_theta: f64,
    pub rope_scaling: RopeScaling,
    /// Rows of the embedding, including padding rows.
    pub vocab_size: usize,
    pub max_position_embeddings: usize,
    /// True if the head is the embedding; the files have no `lm_head.weight` then.
    pub tie_word_embeddings: bool,
    /// Biases on the query, key and value projections.
    pub qkv_bias: bool,
    /// Bias on the attention's output projection.
    pub output_bias: bool,
    pub mlp_bias: bool,
    /// RMS norms on the heads of queries and keys.
    pub qk_norm: bool,
    pub bos_token_id: Option<u32>,
    pub eos_token_ids: Vec<u32>,
    pub pad_token_id: Option<u32>,
    /// Dtype of the weights; float32 if the config has none.
    pub dtype: Dtype,
}

impl TargetConfig {
    /// Reads `config.json` of a model folder.
    ///
    /// # Errors
    /// As [`TargetConfig::from_named_json`], or an unreadable file.
    pub fn load(folder: &Path) -> Result<TargetConfig, HfError> {
        let path = folder.join("config.json");
        TargetConfig::from_named_json(&path.display().to_string(), &read_json(&path)?)
    }

    /// Parses a config.
    ///
    /// # Errors
    /// As [`TargetConfig::from_named_json`].
    pub fn from_json(value: &Value) -> Result<TargetConfig, HfError> {
        TargetConfig::from_named_json("config.json", value)
    }

    /// Parses a config; errors name `file`.
    ///
    /// # Errors
    /// A missing or invalid key, or an unsupported setting that changes the model's output.
    pub fn from_named_json(file: &str, value: &Value) -> Result<TargetConfig, HfError> {
        let top = Fields::new(file, value)?;
        let family = family(&top)?;
        refuse_unsupported(&top, family)?;
        let hidden_size = top.size_to("hidden_size", MAX_WIDTH)?;
        let heads = top.size_to("num_attention_heads", MAX_HEADS)?;
        let kv_heads = match top.count_to("num_key_value_heads", MAX_HEADS)? {
            Some(0) => return Err(top.bad("num_key_value_heads", "at least 1")),
            Some(count) => count,
            None if family == Family::Llama => heads,
            None => return Err(top.missing("num_key_value_heads", "a divisor of num_attention_heads")),
        };
        if !heads.is_multiple_of(kv_heads) {
            return Err(top.bad("num_key_value_heads", &format!("a divisor of num_attention_heads ({heads})")));
        }
        let head_dim = match (top.count_to("head_dim", MAX_HEAD_DIM)?, family) {
            (Some(dim), _) => dim,
            // Default of transformers, independent of the hidden size.
            (None, Family::Qwen3) => 128,
            (None, _) if hidden_size.is_multiple_of(heads) => hidden_size / heads,
            (None, _) => return Err(top.bad("hidden_size", &format!("a multiple of num_attention_heads ({heads})"))),
        };
        if head_dim == 0 || !head_dim.is_multiple_of(2) {
            return Err(top.bad("head_dim", "even and at least 2, for the rotary halves"));
        }
        let attention_bias = top.flag("attention_bias")?.unwrap_or(false);
        let (rope_theta, rope_scaling) = rope(&top)?;
        Ok(TargetConfig {
            family,
            hidden_size,
            intermediate_size: top.size_to("intermediate_size", MAX_WIDTH)?,
            num_hidden_layers: top.size_to("num_hidden_layers", MAX_LAYERS)?,
            num_attention_heads: heads,
            num_key_value_heads: kv_heads,
            head_dim,
            rms_norm_eps: top.positive("rms_norm_eps")?.unwrap_or(1e-6),
            rope_theta,
            rope_scaling,
            vocab_size: top.size_to("vocab_size", MAX_WIDTH)?,
            max_position_embeddings: top.size("max_position_embeddings")?,
            tie_word_embeddings: top.flag("tie_word_embeddings")?.unwrap_or(false),
            qkv_bias: attention_bias || family == Family::Qwen2,
            output_bias: attention_bias && family != Family::Qwen2,
            mlp_bias: family == Family::Llama && top.flag("mlp_bias")?.unwrap_or(false),
            qk_norm: family == Family::Qwen3,
            bos_token_id: top.ids("bos_token_id")?.first().copied(),
            eos_token_ids: top.ids("eos_token_id")?,
            pad_token_id: top.padding_id()?,
            dtype: top.dtype()?.unwrap_or(Dtype::F32),
        })
    }

    /// Shapes of all tensors of the model by name, including those that a forward up to a tap does not need.
    pub fn tensor_shapes(&self) -> BTreeMap<String, Vec<usize>> {
        let (hidden, inner) = (self.hidden_size, self.intermediate_size);
        let query = self.num_attention_heads * self.head_dim;
        let key = self.num_key_value_heads * self.head_dim;
        let mut shapes = BTreeMap::from([
            (EMBEDDING.to_string(), vec![self.vocab_size, hidden]),
            ("model.norm.weight".to_string(), vec![hidden]),
        ]);
        if !self.tie_word_embeddings {
            shapes.insert(HEAD.into(), vec![self.vocab_size, hidden]);
        }
        for layer in 0..self.num_hidden_layers {
            let mut add = |name: &str, shape: &[usize]| {
                shapes.insert(format!("model.layers.{layer}.{name}"), shape.to_vec());
            };
            add("input_layernorm.weight", &[hidden]);
            add("post_attention_layernorm.weight", &[hidden]);
            for (name, out, input, bias) in [
                ("self_attn.q_proj", query, hidden, self.qkv_bias),
                ("self_attn.k_proj", key, hidden, self.qkv_bias),
                ("self_attn.v_proj", key, hidden, self.qkv_bias),
                ("self_attn.o_proj", hidden, query, self.output_bias),
                ("mlp.gate_proj", inner, hidden, self.mlp_bias),
                ("mlp.up_proj", inner, hidden, self.mlp_bias),
                ("mlp.down_proj", hidden, inner, self.mlp_bias),
            ] {
                add(&format!("{name}.weight"), &[out, input]);
                if bias {
                    add(&format!("{name}.bias"), &[out]);
                }
            }
            if self.qk_norm {
                add("self_attn.q_norm.weight", &[self.head_dim]);
                add("self_attn.k_norm.weight", &[self.head_dim]);
            }
        }
        shapes
    }
}

/// Names of the embedding and of the head.
pub(super) const EMBEDDING: &str = "model.embed_tokens.weight";
pub(super) const HEAD: &str = "lm_head.weight";

impl DraftConfig {
    /// Checks by configuration that this drafter is for `target`.
    ///
    /// # Errors
    /// A sentence with the key that differs.
    pub fn check_target(&self, target: &TargetConfig) -> Result<(), String> {
        for (name, of_target, draft, target) in [
            ("hidden_size", "hidden_size", self.hidden_size, target.hidden_size),
            // A head padded to another size cannot be shared; acceptance is 0 (vllm#46435).
            ("vocab_size", "vocab_size", self.vocab_size, target.vocab_size),
            ("num_target_layers", "num_hidden_layers", self.num_target_layers, target.num_hidden_layers),
        ] {
            if draft != target {
                return Err(format!(
                    "its `{name}` is {draft}, but the target's `{of_target}` is {target}; give the drafter's own target"
                ));
            }
        }
        Ok(())
    }

    /// Creates a drafter for `target` with its widths, heads, rotary base and vocabulary. All layers have full attention, and the
    /// rotary embedding is unscaled.
    pub fn for_target(
        target: &TargetConfig,
        num_hidden_layers: usize,
        target_layer_ids: Vec<usize>,
        block_size: usize,
        mask_token_id: u32,
    ) -> DraftConfig {
        DraftConfig {
            hidden_size: target.hidden_size,
            intermediate_size: target.intermediate_size,
            head: HeadConfig::Dflash,
            num_hidden_layers,
            num_attention_heads: target.num_attention_heads,
            num_key_value_heads: target.num_key_value_heads,
            head_dim: target.head_dim,
            rms_norm_eps: target.rms_norm_eps,
            rope_theta: target.rope_theta,
            vocab_size: target.vocab_size,
            block_size,
            mask_token_id,
            target_layer_ids,
            num_target_layers: target.num_hidden_layers,
            max_position_embeddings: target.max_position_embeddings,
            layer_types: vec![LayerType::Full; num_hidden_layers],
            sliding_window: None,
            sliding_causal: true,
            bos_token_id: target.bos_token_id,
            eos_token_ids: target.eos_token_ids.clone(),
            pad_token_id: target.pad_token_id,
            dtype: Dtype::Bf16,
        }
    }
}

fn family(top: &Fields<'_>) -> Result<Family, HfError> {
    let name = top.text("model_type")?.ok_or_else(|| top.missing("model_type", "llama, qwen2 or qwen3"))?;
    Family::from_name(name).ok_or_else(|| top.unsupported("model_type", "llama, qwen2 and qwen3 are"))
}

fn refuse_unsupported(top: &Fields<'_>, family: Family) -> Result<(), HfError> {
    if top.text("hidden_act")?.is_some_and(|name| name != "silu") {
        return Err(top.unsupported("hidden_act", "only silu is"));
    }
    for key in ["quantization_config", "num_experts", "num_local_experts", "attn_logit_softcapping"] {
        if top.get(key).is_some() {
            return Err(top.unsupported(key, "only dense, unquantised models are"));
        }
    }
    if top.get("partial_rotary_factor").is_some_and(|value| value.as_f64() != Some(1.0)) {
        return Err(top.unsupported("partial_rotary_factor", "only 1 is"));
    }
    // In the Qwen families `sliding_window` has no effect without this flag. Llama has no window.
    if family != Family::Llama && top.flag("use_sliding_window")?.unwrap_or(false) {
        return Err(top.unsupported("use_sliding_window", "only full attention is"));
    }
    let full = |value: &Value| value.as_array().is_some_and(|list| list.iter().all(|kind| kind == "full_attention"));
    if top.get("layer_types").is_some_and(|value| !full(value)) {
        return Err(top.unsupported("layer_types", "only \"full_attention\" is"));
    }
    Ok(())
}

/// Reads `rope_theta` and `rope_scaling` at the top level (transformers 4), or both in `rope_parameters` (transformers 5).
fn rope(top: &Fields<'_>) -> Result<(f64, RopeScaling), HfError> {
    let mut theta = top.positive("rope_theta")?;
    let mut scaling = RopeScaling::None;
    for key in ["rope_scaling", "rope_parameters"] {
        let Some(rope) = top.nested(key)? else { continue };
        // One set of parameters for each type of layer, whose bases would be ignored.
        if let Some(layers) = rope.first_object() {
            return Err(rope.unsupported(layers, "one base for all layers is"));
        }
        if let Some(inner) = rope.positive("rope_theta")? {
            theta = Some(inner);
        }
        if rope.get("partial_rotary_factor").is_some_and(|value| value.as_f64() != Some(1.0)) {
            return Err(rope.unsupported("partial_rotary_factor", "only 1 is"));
        }
        if rope.get("mrope_section").is_some() {
            return Err(rope.unsupported("mrope_section", "only text positions are"));
        }
        let kind = if rope.get("rope_type").is_some() { "rope_type" } else { "type" };
        match rope.text(kind)?.unwrap_or("default") {
            "default" => {}
            "llama3" => scaling = llama3(&rope)?,
            _ => return Err(rope.unsupported(kind, "default and llama3 are")),
        }
    }
    // 10000 is the default of transformers for all three families.
    Ok((theta.unwrap_or(10_000.0), scaling))
}

fn llama3(rope: &Fields<'_>) -> Result<RopeScaling, HfError> {
    let need = |key: &str| rope.positive(key)?.ok_or_else(|| rope.missing(key, "a number above 0"));
    let (low, high) = (need("low_freq_factor")?, need("high_freq_factor")?);
    if high <= low {
        return Err(rope.bad("high_freq_factor", &format!("above low_freq_factor ({low})")));
    }
    Ok(RopeScaling::Llama3 {
        factor: need("factor")?,
        low_freq_factor: low,
        high_freq_factor: high,
        original_max_position_embeddings: rope.size("original_max_position_embeddings")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn qwen3() -> Value {
        json!({
            "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 100,
            "max_position_embeddings": 256, "rope_theta": 2e5, "dtype": "bfloat16", "eos_token_id": [7, 8],
        })
    }

    #[test]
    fn absurd_sizes_are_refused_by_name() {
        for key in [
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "vocab_size",
            "max_position_embeddings",
        ] {
            for size in [1_u64 << 31, 1 << 62, u64::MAX] {
                let mut value = qwen3();
                value[key] = json!(size);
                let text = TargetConfig::from_json(&value).unwrap_err().to_string();
                assert!(text.contains(&format!("`{key}` = {size}")) && text.contains("at most"), "{text}");
            }
        }
    }

    #[test]
    fn families_differ_in_biases_norms_and_defaults() {
        let config = TargetConfig::from_json(&qwen3()).unwrap();
        assert!(config.qk_norm && !config.qkv_bias);
        assert_eq!((config.dtype, config.eos_token_ids.as_slice()), (Dtype::Bf16, [7, 8].as_slice()));

        let mut value = qwen3();
        value["model_type"] = json!("qwen2");
        value.as_object_mut().unwrap().remove("head_dim");
        let config = TargetConfig::from_json(&value).unwrap();
        assert!(config.qkv_bias && !config.output_bias && !config.qk_norm);
        assert_eq!(config.head_dim, 16);
        assert_eq!(config.tensor_shapes()["model.layers.4.self_attn.k_proj.bias"], [32]);

        value["model_type"] = json!("llama");
        value["attention_bias"] = json!(true);
        value["mlp_bias"] = json!(true);
        let config = TargetConfig::from_json(&value).unwrap();
        assert!(config.qkv_bias && config.output_bias && config.mlp_bias);
        assert_eq!(config.tensor_shapes()["model.layers.0.mlp.down_proj.bias"], [64]);

        let mut value = qwen3();
        value.as_object_mut().unwrap().remove("head_dim");
        assert_eq!(TargetConfig::from_json(&value).unwrap().head_dim, 128);
    }

    #[test]
    fn both_rope_spellings_give_one_config() {
        let scaling = json!({
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        });
        let mut four = qwen3();
        four["rope_scaling"] = scaling.clone();
        let mut five = qwen3();
        five.as_object_mut().unwrap().remove("rope_theta");
        five["rope_parameters"] = scaling;
        five["rope_parameters"]["rope_theta"] = json!(2e5);
        let config = TargetConfig::from_json(&four).unwrap();
        assert_eq!(config, TargetConfig::from_json(&five).unwrap());
        assert!(matches!(config.rope_scaling, RopeScaling::Llama3 { factor: 8.0, .. }));
    }

    #[test]
    fn unsupported_settings_are_refused_with_key_and_value() {
        for (key, value, shown) in [
            ("model_type", json!("gpt_oss"), "gpt_oss"),
            ("hidden_act", json!("gelu"), "gelu"),
            ("use_sliding_window", json!(true), "true"),
            ("layer_types", json!(["full_attention", "sliding_attention"]), "sliding_attention"),
            ("quantization_config", json!({"quant_method": "gptq"}), "gptq"),
            ("num_experts", json!(64), "64"),
            ("rope_scaling", json!({"rope_type": "yarn", "factor": 4.0}), "yarn"),
            ("rope_scaling", json!({"type": "linear", "factor": 2.0}), "linear"),
            ("rope_parameters", json!({"rope_theta": 1e6, "partial_rotary_factor": 0.25}), "0.25"),
            ("dtype", json!("float8_e4m3fn"), "float8_e4m3fn"),
            ("num_key_value_heads", json!(3), "3"),
            ("hidden_size", json!("wide"), "wide"),
            ("vocab_size", json!(null), "vocab_size"),
        ] {
            let mut config = qwen3();
            config[key] = value;
            let text = TargetConfig::from_json(&config).unwrap_err().to_string();
            assert!(text.contains(shown) && text.contains("config.json"), "{key}: {text}");
        }
    }

    #[test]
    fn torchtitan_3395_rope_parameters_of_each_layer_type_are_refused_by_name() {
        let mut value = qwen3();
        value.as_object_mut().unwrap().remove("rope_theta");
        value["rope_parameters"] = json!({"full_attention": {"rope_theta": 1e6, "rope_type": "default"}});
        let text = TargetConfig::from_json(&value).unwrap_err().to_string();
        assert!(text.contains("rope_parameters.full_attention") && text.contains("1000000"), "{text}");
    }

    /// Old Llama files have no padding token and write -1.
    #[test]
    fn automodel_2376_a_padding_id_of_minus_one_is_none() {
        let mut value = qwen3();
        value["pad_token_id"] = json!(-1);
        assert_eq!(TargetConfig::from_json(&value).unwrap().pad_token_id, None);
        value["pad_token_id"] = json!(-2);
        assert!(TargetConfig::from_json(&value).is_err());
    }

    #[test]
    fn a_sliding_window_without_its_flag_is_accepted() {
        let mut value = qwen3();
        value["sliding_window"] = json!(4096);
        value["use_sliding_window"] = json!(false);
        assert!(TargetConfig::from_json(&value).is_ok());
    }
}
