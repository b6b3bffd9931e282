//! Reads the architecture from GGUF metadata and returns it as a Hugging Face `config.json`.

use super::ImportError;
use super::folder::MARK;
use super::gguf::Gguf;
use super::special_tokens::SpecialTokens;
use crate::hf::{
    Dtype,
    config::{Family, RopeScaling},
    dtype_name,
};
use serde_json::{Value, json};

/// Constants of Llama 3.1's scaling, equal in every published model. A frequency is low if it completes fewer than
/// `LLAMA3_LOW` turns in `LLAMA3_ORIGINAL` positions, and high if it completes more than `LLAMA3_HIGH`.
const LLAMA3_LOW: f64 = 1.0;
const LLAMA3_HIGH: f64 = 4.0;
const LLAMA3_ORIGINAL: usize = 8192;

/// Architecture of a model: sizes, rotary embedding and biases.
#[derive(Clone, Debug)]
pub(super) struct Architecture {
    pub family: Family,
    pub hidden: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub intermediate: usize,
    pub vocab: usize,
    pub context: usize,
    pub norm_eps: f64,
    pub rope_theta: f64,
    pub rope_scaling: RopeScaling,
    /// `true` if the output head is the embedding table.
    pub tied: bool,
    /// `true` if q, k and v have biases. In the llama and qwen3 families the output projection has one too.
    pub attention_bias: bool,
}

impl Architecture {
    /// Reads the architecture.
    ///
    /// # Errors
    ///
    /// Fails if a required key is missing or inconsistent, or if the model has an unsupported family or setting.
    pub(super) fn read(gguf: &Gguf) -> Result<Self, ImportError> {
        let mut model = Self::read_metadata(gguf)?;
        model.rope_scaling = read_rope_scaling(gguf, &model)?;
        Ok(model)
    }

    fn read_metadata(gguf: &Gguf) -> Result<Self, ImportError> {
        let name = gguf.text("general.architecture")?.ok_or_else(|| gguf.missing_key("general.architecture"))?;
        let Some(family) = Family::from_name(name) else {
            return Err(gguf.unsupported("the architecture", name, "llama, qwen2 and qwen3"));
        };
        if let Some(parts @ 2..) = gguf.count("split.count")? {
            let found = format!("1 of {parts} files of a split model");
            return Err(gguf.unsupported("only", found, "single files: join them with llama-gguf-split --merge"));
        }
        let key = |name: &str| format!("{}.{name}", family.name());
        let need = |name: &str| match gguf.need_count(&key(name))? {
            0 => Err(gguf.inconsistent(format!("{} is 0", key(name)))),
            count => Ok(count),
        };
        refuse_settings(gguf, &key)?;

        let (hidden, heads) = (need("embedding_length")?, need("attention.head_count")?);
        let kv_heads = gguf.count(&key("attention.head_count_kv"))?.unwrap_or(heads);
        if kv_heads == 0 || heads % kv_heads != 0 {
            return Err(gguf.inconsistent(format!("{heads} heads cannot share {kv_heads} key-value heads")));
        }
        let head_dim = gguf.count(&key("attention.key_length"))?.unwrap_or(hidden / heads);
        if head_dim == 0 || head_dim % 2 != 0 {
            return Err(gguf.inconsistent(format!("the head dimension {head_dim} is not a positive even number")));
        }
        for name in ["attention.value_length", "rope.dimension_count"] {
            if let Some(other) = gguf.count(&key(name))?.filter(|&n| n != head_dim) {
                let found = format!("{other} and the head dimension {head_dim}");
                return Err(gguf.unsupported(
                    key(name),
                    found,
                    "one head dimension for keys, values and rotary embedding",
                ));
            }
        }
        let Some(&[vocab, _]) = gguf.shape("token_embd.weight") else {
            return Err(gguf.inconsistent("the tensor token_embd.weight is missing or not a matrix"));
        };
        let eps = key("attention.layer_norm_rms_epsilon");
        Ok(Self {
            family,
            hidden,
            layers: need("block_count")?,
            heads,
            kv_heads,
            head_dim,
            intermediate: need("feed_forward_length")?,
            vocab,
            context: need("context_length")?,
            norm_eps: gguf.real(&eps)?.ok_or_else(|| gguf.missing_key(&eps))?,
            rope_theta: gguf.real(&key("rope.freq_base"))?.unwrap_or(10_000.0),
            rope_scaling: RopeScaling::None,
            tied: gguf.shape("output.weight").is_none(),
            attention_bias: family == Family::Qwen2 || gguf.shape("blk.0.attn_q.bias").is_some(),
        })
    }

    /// Content of `config.json` with the keys of two versions: transformers 5 reads `rope_parameters` and `dtype`.
    /// transformers 4 and other readers read `rope_theta`, `rope_scaling` and `torch_dtype`.
    pub(super) fn config(&self, special: &SpecialTokens, dtype: Dtype) -> Value {
        let mut config = json!({
            "architectures": [class(self.family)],
            "model_type": self.family.name(),
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.context,
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": rope_scaling_json(self.rope_scaling),
            "rope_parameters": rope_parameters_json(self.rope_scaling, self.rope_theta),
            "tie_word_embeddings": self.tied,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "use_cache": true,
            "dtype": dtype_name(dtype),
            "torch_dtype": dtype_name(dtype),
        });
        let extra = match self.family {
            Family::Llama => json!({"attention_bias": self.attention_bias, "mlp_bias": false}),
            // transformers has no key for the biases of Qwen2, which are part of its definition.
            Family::Qwen2 => full_attention(self.layers),
            Family::Qwen3 => {
                let mut extra = full_attention(self.layers);
                merge(&mut extra, json!({"attention_bias": self.attention_bias}));
                extra
            }
        };
        merge(&mut config, extra);
        merge(&mut config, special.ids());
        merge(&mut config, json!({ MARK: env!("CARGO_PKG_VERSION") }));
        config
    }
}

/// Class of the family in transformers.
fn class(family: Family) -> &'static str {
    match family {
        Family::Llama => "LlamaForCausalLM",
        Family::Qwen2 => "Qwen2ForCausalLM",
        Family::Qwen3 => "Qwen3ForCausalLM",
    }
}

fn read_rope_scaling(gguf: &Gguf, model: &Architecture) -> Result<RopeScaling, ImportError> {
    let key = |name: &str| format!("{}.rope.{name}", model.family.name());
    let factor = match gguf.real(&key("scaling.factor"))? {
        None => gguf.real(&key("scale_linear"))?,
        some => some,
    };
    let kind = gguf.text(&key("scaling.type"))?;
    let scaling = match (kind, factor) {
        (Some("none"), _) | (None, None) | (None | Some("linear"), Some(1.0)) => RopeScaling::None,
        // Targets with such a scaling cannot be loaded (Automodel#2376).
        (Some("linear") | None, factor) => {
            let found = factor.map_or("linear".into(), |factor| format!("linear by {factor}"));
            return Err(gguf.unsupported("the rope scaling", found, "none and Llama 3.1's"));
        }
        (Some(kind), _) => {
            return Err(gguf.unsupported("the rope scaling", kind, "none and Llama 3.1's"));
        }
    };
    let Some(shape) = gguf.shape("rope_freqs.weight") else { return Ok(scaling) };
    if shape != [model.head_dim / 2] || scaling != RopeScaling::None {
        return Err(gguf.unsupported(
            "the rope scaling",
            "by rope_freqs.weight",
            "one divisor for each rotated pair and no other scaling",
        ));
    }
    let divisors = gguf.dequantize("rope_freqs.weight")?;
    recognise_llama3(&divisors, model.rope_theta)
        .ok_or_else(|| gguf.unsupported("the rope scaling", format!("{divisors:?}"), "Llama 3.1's"))
}

/// Finds the factor of Llama 3.1's scaling: GGUF stores the divisor of each frequency, Hugging Face the factor.
fn recognise_llama3(divisors: &[f32], theta: f64) -> Option<RopeScaling> {
    let factor = divisors.iter().copied().map(f64::from).fold(1.0, f64::max);
    let expected = llama3_divisors(factor, theta, divisors.len());
    let same = divisors.iter().zip(expected).all(|(&d, e)| (f64::from(d) - e).abs() <= 1e-3 * e);
    same.then_some(if factor == 1.0 { RopeScaling::None } else { llama3(factor) })
}

/// `rope_parameters`, the form of transformers 5.
fn rope_parameters_json(scaling: RopeScaling, theta: f64) -> Value {
    let mut rope = json!({"rope_theta": theta, "rope_type": "default"});
    if let Value::Object(scaling) = rope_scaling_json(scaling) {
        merge(&mut rope, Value::Object(scaling));
    }
    rope
}

/// `rope_scaling`, the form of transformers 4.
fn rope_scaling_json(scaling: RopeScaling) -> Value {
    match scaling {
        RopeScaling::None => Value::Null,
        RopeScaling::Linear { factor } => json!({"rope_type": "linear", "factor": factor}),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } => {
            json!({
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low_freq_factor,
                "high_freq_factor": high_freq_factor,
                "original_max_position_embeddings": original_max_position_embeddings,
            })
        }
    }
}

/// Llama 3.1's scaling by `factor`.
fn llama3(factor: f64) -> RopeScaling {
    RopeScaling::Llama3 {
        factor,
        low_freq_factor: LLAMA3_LOW,
        high_freq_factor: LLAMA3_HIGH,
        original_max_position_embeddings: LLAMA3_ORIGINAL,
    }
}

/// Divisor of each rotary frequency in Llama 3.1's scaling, for `pairs = head_dim / 2`.
fn llama3_divisors(factor: f64, theta: f64, pairs: usize) -> impl Iterator<Item = f64> {
    (0..pairs).map(move |i| {
        let frequency = theta.powf(-(i as f64) / pairs as f64);
        let turns = LLAMA3_ORIGINAL as f64 * frequency / std::f64::consts::TAU;
        let kept = ((turns - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW)).clamp(0.0, 1.0);
        1.0 / ((1.0 - kept) / factor + kept)
    })
}

/// Refuses settings that change the forward pass and that the Hugging Face families do not have.
fn refuse_settings(gguf: &Gguf, key: &impl Fn(&str) -> String) -> Result<(), ImportError> {
    for name in ["attention.sliding_window", "expert_count", "attention.max_alibi_bias", "attention.clamp_kqv"] {
        let name = key(name);
        let set = gguf.has(&name) && gguf.count(&name).map_or(true, |n| n != Some(0));
        if set {
            return Err(gguf.unsupported("the setting", name, "dense models with full attention in every layer"));
        }
    }
    for name in ["logit_scale", "residual_scale", "embedding_scale", "attention.scale"] {
        if gguf.has(&key(name)) {
            return Err(gguf.unsupported("the setting", key(name), "models without such scales"));
        }
    }
    Ok(())
}

/// Keys of full attention in every layer: GGUF has no sliding window for the Qwen families.
fn full_attention(layers: usize) -> Value {
    json!({"use_sliding_window": false, "sliding_window": null, "max_window_layers": layers})
}

/// Adds the keys of `from` to `into`.
fn merge(into: &mut Value, from: Value) {
    if let (Value::Object(into), Value::Object(from)) = (into, from) {
        into.extend(from);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llama3_scaling_is_read_from_its_divisors() {
        for (factor, pairs) in [(8.0, 64), (32.0, 32)] {
            let divisors: Vec<f32> = llama3_divisors(factor, 500_000.0, pairs).map(|d| d as f32).collect();
            assert_eq!(divisors[0], 1.0, "the highest frequency is kept");
            assert_eq!(f64::from(divisors[pairs - 1]), factor, "the lowest frequency is divided by the factor");
            assert!(divisors.iter().any(|&d| d > 1.0 && f64::from(d) < factor), "some are interpolated");
            assert_eq!(recognise_llama3(&divisors, 500_000.0), Some(llama3(factor)));
            assert_eq!(recognise_llama3(&divisors, 10_000.0), None, "another base gives other divisors");
        }
        assert_eq!(recognise_llama3(&[1.0; 8], 1e4), Some(RopeScaling::None));
        assert_eq!(recognise_llama3(&[f32::NAN; 8], 1e4), None);
    }
}
