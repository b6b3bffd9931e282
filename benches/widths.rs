//! Shapes of the measured models by name: a target and its drafter.

use crate::machine::{Failed, Outcome};
use draftmill::hf::{
    Dtype,
    config::TargetConfig,
    draft::{DraftConfig, LayerType},
};
use serde_json::{Value, json};

/// Slots of a block.
const BLOCK: usize = 16;

/// Shapes that a drafter takes from its target, and the tapped layers.
#[derive(Clone, Copy)]
pub struct Widths {
    hidden: usize,
    intermediate: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    pub vocab: usize,
    layers: usize,
    pub taps: [usize; 5],
    family: &'static str,
}

/// Shapes by name: `smollm2` (135M), `qwen3-8b`, or `tiny`, which runs on any machine.
pub fn widths(name: &str) -> Outcome<Widths> {
    Ok(match name {
        "tiny" => Widths {
            hidden: 64,
            intermediate: 96,
            heads: 4,
            kv_heads: 2,
            head_dim: 16,
            vocab: 512,
            layers: 6,
            taps: [0, 1, 2, 3, 4],
            family: "qwen3",
        },
        "smollm2" => Widths {
            hidden: 576,
            intermediate: 1536,
            heads: 9,
            kv_heads: 3,
            head_dim: 64,
            vocab: 49_152,
            layers: 30,
            taps: [1, 7, 14, 20, 27],
            family: "llama",
        },
        "qwen3-8b" => Widths {
            hidden: 4096,
            intermediate: 12_288,
            heads: 32,
            kv_heads: 8,
            head_dim: 128,
            vocab: 151_936,
            layers: 36,
            taps: [1, 9, 17, 25, 33],
            family: "qwen3",
        },
        other => return Err(format!("--widths is tiny, smollm2 or qwen3-8b, not {other}")),
    })
}

impl Widths {
    pub fn drafter(&self, layers: usize) -> DraftConfig {
        DraftConfig {
            head: Default::default(),
            hidden_size: self.hidden,
            intermediate_size: self.intermediate,
            num_hidden_layers: layers,
            num_attention_heads: self.heads,
            num_key_value_heads: self.kv_heads,
            head_dim: self.head_dim,
            rms_norm_eps: 1e-6,
            rope_theta: 1e4,
            vocab_size: self.vocab,
            block_size: BLOCK,
            mask_token_id: self.vocab as u32 - 1,
            target_layer_ids: self.taps.to_vec(),
            num_target_layers: self.layers,
            max_position_embeddings: 8192,
            layer_types: vec![LayerType::Full; layers],
            sliding_window: None,
            sliding_causal: true,
            bos_token_id: None,
            eos_token_ids: Vec::new(),
            pad_token_id: None,
            dtype: Dtype::F32,
        }
    }

    pub fn target(&self) -> Outcome<TargetConfig> {
        TargetConfig::from_json(&self.target_json()).failed("make a target's configuration")
    }

    /// Configuration as in a model folder.
    pub fn target_json(&self) -> Value {
        json!({
            "model_type": self.family, "hidden_size": self.hidden, "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers, "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim, "vocab_size": self.vocab, "max_position_embeddings": 8192, "rope_theta": 1e4,
            "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": false, "eos_token_id": 2,
        })
    }
}
