//! Reads the architecture from GGUF metadata and writes it as a Hugging Face `config.json`.

use super::ImportError;
use super::gguf::{Gguf, first_line};
use super::special_tokens::SpecialTokens;
use crate::hf::{
    Dtype,
    config::{Family, RopeScaling},
    dtype_name,
};
use serde_json::{Value, json};

/// Constants of Llama 3.1's scaling, equal in every published model: a frequency with fewer than `LOW` rotations within
/// `ORIGINAL` positions is divided by the factor, and one with more than `HIGH` is kept.
const LLAMA3_LOW: f64 = 1.0;
const LLAMA3_HIGH: f64 = 4.0;
const LLAMA3_ORIGINAL: usize = 8192;

/// The shape of the model.
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
    /// The output head is the embedding table.
    pub tied: bool,
    /// Biases on q, k, v (Qwen2), and in Llama on the output projection too.
    pub attention_bias: bool,
}

impl Architecture {
    pub(super) fn read(gguf: &mut Gguf) -> Result<Self, ImportError> {
        let mut model = Self::read_metadata(gguf)?;
        model.rope_scaling = read_rope_scaling(gguf, &model)?;
        Ok(model)
    }

    fn read_metadata(gguf: &Gguf) -> Result<Self, ImportError> {
        let name = gguf.text("general.architecture")?;
        let name = name.ok_or_else(|| gguf.inconsistent("the key general.architecture is missing"))?;
        let Some(family) = Family::from_name(name) else {
            return Err(gguf.unsupported("the architecture", name, "llama, qwen2 and qwen3"));
        };
        if let Some(parts @ 2..) = gguf.count("split.count")? {
            let found = format!("1 of {parts} parts of a split model");
            return Err(gguf.unsupported("only", found, "whole files: join the parts with llama-gguf-split --merge"));
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
            return Err(gguf.inconsistent(format!("a head width of {head_dim} has no halves to rotate")));
        }
        for name in ["attention.value_length", "rope.dimension_count"] {
            if let Some(other) = gguf.count(&key(name))?.filter(|&n| n != head_dim) {
                let found = format!("{other} beside a head width of {head_dim}");
                return Err(gguf.unsupported(key(name), found, "one width for keys, values and rotary positions"));
            }
        }
        let Some(&[vocab, _]) = gguf.shape("token_embd.weight") else {
            return Err(gguf.inconsistent("the tensor token_embd.weight is missing or not a table"));
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
            norm_eps: gguf.real(&eps)?.ok_or_else(|| gguf.inconsistent(format!("the key {eps} is missing")))?,
            rope_theta: gguf.real(&key("rope.freq_base"))?.unwrap_or(10_000.0),
            rope_scaling: RopeScaling::None,
            tied: gguf.shape("output.weight").is_none(),
            attention_bias: family == Family::Qwen2 || gguf.shape("blk.0.attn_q.bias").is_some(),
        })
    }

    /// `config.json` in both spellings: transformers 5 reads `rope_parameters` and `dtype`, transformers 4 and the other
    /// readers `rope_theta`, `rope_scaling` and `torch_dtype`.
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
            // Qwen2 has its biases by definition: transformers knows no key for them.
            Family::Qwen2 => full_attention(self.layers),
            Family::Qwen3 => {
                let mut extra = full_attention(self.layers);
                merge(&mut extra, json!({"attention_bias": self.attention_bias}));
                extra
            }
        };
        merge(&mut config, extra);
        merge(&mut config, special.ids());
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

fn read_rope_scaling(gguf: &mut Gguf, model: &Architecture) -> Result<RopeScaling, ImportError> {
    let key = |name: &str| format!("{}.rope.{name}", model.family.name());
    let factor = match gguf.real(&key("scaling.factor"))? {
        None => gguf.real(&key("scale_linear"))?,
        some => some,
    };
    let kind = gguf.text(&key("scaling.type"))?;
    let scaling = match (kind, factor) {
        (Some("none"), _) | (None, None | Some(1.0)) => RopeScaling::None,
        (Some("linear") | None, Some(factor)) => RopeScaling::Linear { factor },
        (Some("linear"), None) => {
            return Err(gguf.inconsistent(format!("the key {} is missing", key("scaling.factor"))));
        }
        (Some(kind), _) => {
            return Err(gguf.unsupported("the rope scaling", kind, "none, linear and that of Llama 3.1"));
        }
    };
    let Some(shape) = gguf.shape("rope_freqs.weight") else { return Ok(scaling) };
    if shape != [model.head_dim / 2] || scaling != RopeScaling::None {
        return Err(gguf.unsupported(
            "the rope scaling",
            "by rope_freqs.weight",
            "one factor for each rotated pair, and no other scaling",
        ));
    }
    let freqs = gguf.dequantize("rope_freqs.weight")?.to_vec1::<f32>();
    let freqs = freqs.map_err(|e| gguf.damaged(format!("tensor rope_freqs.weight: {}", first_line(&e))))?;
    recognise_llama3(&freqs, model.rope_theta)
        .ok_or_else(|| gguf.unsupported("the rope scaling", format!("{freqs:?}"), "that of Llama 3.1"))
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

/// The divisor of each rotary frequency under Llama 3.1's scaling, for `pairs` = head width / 2.
fn llama3_divisors(factor: f64, theta: f64, pairs: usize) -> impl Iterator<Item = f64> {
    (0..pairs).map(move |i| {
        let frequency = theta.powf(-(i as f64) / pairs as f64);
        let turns = LLAMA3_ORIGINAL as f64 * frequency / std::f64::consts::TAU;
        let kept = ((turns - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW)).clamp(0.0, 1.0);
        1.0 / ((1.0 - kept) / factor + kept)
    })
}

/// Settings that change the numbers and that none of the three families has in Hugging Face form.
fn refuse_settings(gguf: &Gguf, key: &impl Fn(&str) -> String) -> Result<(), ImportError> {
    for name in ["attention.sliding_window", "expert_count", "attention.max_alibi_bias", "attention.clamp_kqv"] {
        let name = key(name);
        let set = gguf.has(&name) && gguf.count(&name).map_or(true, |n| n != Some(0));
        if set {
            return Err(gguf.unsupported("the setting", name, "dense models whose layers all attend to everything"));
        }
    }
    for name in ["logit_scale", "residual_scale", "embedding_scale", "attention.scale"] {
        if gguf.has(&key(name)) {
            return Err(gguf.unsupported("the setting", key(name), "models without such scales"));
        }
    }
    Ok(())
}

/// GGUF carries no sliding window for the Qwen families: every layer attends to everything.
fn full_attention(layers: usize) -> Value {
    json!({"use_sliding_window": false, "sliding_window": null, "max_window_layers": layers})
}

/// Adds the keys of one object to another.
fn merge(into: &mut Value, from: Value) {
    if let (Value::Object(into), Value::Object(from)) = (into, from) {
        into.extend(from);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llama3_scaling_is_recognised_from_its_divisors() {
        for (factor, pairs) in [(8.0, 64), (32.0, 32)] {
            let divisors: Vec<f32> = llama3_divisors(factor, 500_000.0, pairs).map(|d| d as f32).collect();
            assert_eq!(divisors[0], 1.0, "the fastest frequency is kept");
            assert_eq!(f64::from(divisors[pairs - 1]), factor, "the slowest is divided by the whole factor");
            assert!(divisors.iter().any(|&d| d > 1.0 && f64::from(d) < factor), "some lie between");
            assert_eq!(recognise_llama3(&divisors, 500_000.0), Some(llama3(factor)));
            assert_eq!(recognise_llama3(&divisors, 10_000.0), None, "another base gives other divisors");
        }
        assert_eq!(recognise_llama3(&[1.0; 8], 1e4), Some(RopeScaling::None));
        assert_eq!(recognise_llama3(&[f32::NAN; 8], 1e4), None);
    }
}
