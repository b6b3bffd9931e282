//! Imports of a model of a few kilobytes, stored as llama.cpp's converter stores it.

use super::gguf_file::{self, Meta, Stored, Tensor};
use super::*;
use rand::{RngExt, SeedableRng};
use safetensors::SafeTensors;
use std::collections::BTreeMap;

pub const HIDDEN: usize = 32;
pub const HEADS: usize = 4;
pub const KV_HEADS: usize = 2;
pub const HEAD_DIM: usize = 8;
pub const INTERMEDIATE: usize = 64;
pub const LAYERS: usize = 2;

/// Metadata and tensors of a GGUF file, which a test changes before it writes the file.
pub struct Tiny {
    pub meta: BTreeMap<String, Meta>,
    pub tensors: BTreeMap<String, Tensor>,
}

/// Tokens, merges and token types: three control tokens, the 256 letters of the byte-level alphabet and a few merges.
fn vocabulary() -> (Vec<String>, Vec<String>, Vec<i32>) {
    let mut tokens: Vec<String> = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"].map(String::from).to_vec();
    let mut letters: Vec<char> = tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet().into_iter().collect();
    letters.sort();
    tokens.extend(letters.iter().map(char::to_string));
    let merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2"].map(String::from).to_vec();
    tokens.extend(merges.iter().map(|m| m.replace(' ', "")));
    tokens.push("<tool>".into());
    tokens.push("[PAD266]".into());
    let mut types = vec![1; tokens.len()];
    types[..3].fill(3);
    types[tokens.len() - 2] = 4;
    types[tokens.len() - 1] = 5;
    (tokens, merges, types)
}

impl Tiny {
    /// Random model of a family (`llama`, `qwen2`, `qwen3`) with the pre-tokenizer `pre`.
    pub fn new(family: &str, pre: &str) -> Self {
        let (tokens, merges, types) = vocabulary();
        let vocab = tokens.len();
        let text = |s: &str| Meta::Text(s.into());
        let mut meta = BTreeMap::from([
            ("general.architecture".into(), text(family)),
            ("tokenizer.ggml.model".into(), text("gpt2")),
            ("tokenizer.ggml.pre".into(), text(pre)),
            ("tokenizer.ggml.tokens".into(), Meta::Texts(tokens)),
            ("tokenizer.ggml.merges".into(), Meta::Texts(merges)),
            ("tokenizer.ggml.token_type".into(), Meta::I32s(types)),
            ("tokenizer.ggml.bos_token_id".into(), Meta::U32(1)),
            ("tokenizer.ggml.eos_token_id".into(), Meta::U32(2)),
            ("tokenizer.chat_template".into(), text("{{ messages }}")),
        ]);
        for (key, value) in [
            ("block_count", LAYERS),
            ("context_length", 128),
            ("embedding_length", HIDDEN),
            ("feed_forward_length", INTERMEDIATE),
            ("attention.head_count", HEADS),
            ("attention.head_count_kv", KV_HEADS),
        ] {
            meta.insert(format!("{family}.{key}"), Meta::U32(value as u32));
        }
        meta.insert(format!("{family}.rope.freq_base"), Meta::F32(1e6));
        meta.insert(format!("{family}.attention.layer_norm_rms_epsilon"), Meta::F32(1e-5));

        let mut random = rand_chacha::ChaCha8Rng::seed_from_u64(7);
        let mut tensors = BTreeMap::new();
        let mut add = |name: String, shape: &[usize]| {
            let values = (0..shape.iter().product()).map(|_| random.random_range(-1.0..1.0)).collect();
            tensors.insert(name, (shape.to_vec(), values, Stored::F32));
        };
        add("token_embd.weight".into(), &[vocab, HIDDEN]);
        add("output_norm.weight".into(), &[HIDDEN]);
        for n in 0..LAYERS {
            let (q, kv) = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM);
            let mut parts: Vec<(&str, Vec<usize>)> = vec![
                ("attn_norm.weight", vec![HIDDEN]),
                ("attn_q.weight", vec![q, HIDDEN]),
                ("attn_k.weight", vec![kv, HIDDEN]),
                ("attn_v.weight", vec![kv, HIDDEN]),
                ("attn_output.weight", vec![HIDDEN, q]),
                ("ffn_norm.weight", vec![HIDDEN]),
                ("ffn_gate.weight", vec![INTERMEDIATE, HIDDEN]),
                ("ffn_up.weight", vec![INTERMEDIATE, HIDDEN]),
                ("ffn_down.weight", vec![HIDDEN, INTERMEDIATE]),
            ];
            match family {
                "qwen2" => {
                    parts.extend([("attn_q.bias", vec![q]), ("attn_k.bias", vec![kv]), ("attn_v.bias", vec![kv])])
                }
                "qwen3" => {
                    parts.extend([("attn_q_norm.weight", vec![HEAD_DIM]), ("attn_k_norm.weight", vec![HEAD_DIM])])
                }
                _ => {}
            }
            for (part, shape) in parts {
                add(format!("blk.{n}.{part}"), &shape);
            }
        }
        Self { meta, tensors }
    }

    pub fn set(mut self, key: &str, value: Meta) -> Self {
        self.meta.insert(key.into(), value);
        self
    }

    pub fn write(&self, path: &Path) {
        std::fs::write(path, gguf_file::bytes(&self.meta, &self.tensors)).unwrap();
    }

    /// Writes and imports the file in a new temporary folder.
    pub fn import(&self, dtype: WeightType) -> (tempfile::TempDir, PathBuf, Result<ImportReport, ImportError>) {
        let folder = tempfile::tempdir().unwrap();
        let gguf = folder.path().join("tiny.gguf");
        self.write(&gguf);
        let out = folder.path().join("out");
        let report = import(&gguf, &out, dtype, false);
        (folder, out, report)
    }
}

/// Row order that llama.cpp's converter gives q and k of a Llama model: row `j · head_dim / 2 + i` of a head becomes
/// row `2 i + j`.
fn interleave(rows: &[f32], heads: usize, columns: usize) -> Vec<f32> {
    let head_dim = rows.len() / heads / columns;
    let mut moved = vec![0.0; rows.len()];
    for head in 0..heads {
        for j in 0..2 {
            for i in 0..head_dim / 2 {
                let (from, to) = (head * head_dim + j * head_dim / 2 + i, head * head_dim + 2 * i + j);
                moved[to * columns..][..columns].copy_from_slice(&rows[from * columns..][..columns]);
            }
        }
    }
    moved
}

/// Shapes and values of the tensors in `model.safetensors`.
pub fn weights(out: &Path) -> BTreeMap<String, (Vec<usize>, Vec<f32>)> {
    let bytes = std::fs::read(out.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    file.iter()
        .map(|(name, view)| {
            let values = match view.dtype() {
                safetensors::Dtype::F32 => {
                    view.data().chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
                }
                safetensors::Dtype::BF16 => {
                    view.data().chunks(2).map(|b| half::bf16::from_le_bytes(b.try_into().unwrap()).to_f32()).collect()
                }
                safetensors::Dtype::F16 => {
                    view.data().chunks(2).map(|b| half::f16::from_le_bytes(b.try_into().unwrap()).to_f32()).collect()
                }
                other => panic!("unexpected {other:?}"),
            };
            (name.to_string(), (view.shape().to_vec(), values))
        })
        .collect()
}

#[test]
fn llama_rows_of_q_and_k_get_hugging_face_order() {
    let mut tiny = Tiny::new("llama", "smollm");
    let mut original = BTreeMap::new();
    for (part, heads) in [("attn_q.weight", HEADS), ("attn_k.weight", KV_HEADS)] {
        let name = format!("blk.1.{part}");
        let (_, values, _) = tiny.tensors.get_mut(&name).unwrap();
        let moved = interleave(values, heads, HIDDEN);
        assert_ne!(&moved, values);
        original.insert(part, std::mem::replace(values, moved));
    }
    let (_folder, out, report) = tiny.import(WeightType::F32);
    let (weights, report) = (weights(&out), report.unwrap());
    assert_eq!(weights["model.layers.1.self_attn.q_proj.weight"].1, original["attn_q.weight"]);
    assert_eq!(weights["model.layers.1.self_attn.k_proj.weight"].1, original["attn_k.weight"]);
    let v = &tiny.tensors["blk.1.attn_v.weight"];
    assert_eq!(weights["model.layers.1.self_attn.v_proj.weight"], (v.0.clone(), v.1.clone()), "v is not rotated");
    assert_eq!((report.tensors, weights.len()), (2 + 9 * LAYERS, 2 + 9 * LAYERS));
    assert!(report.tied_embeddings && report.chat_template);
    assert_eq!(report.parameters, weights.values().map(|w| w.1.len() as u64).sum::<u64>());
    assert_eq!(report.weight_bytes, std::fs::metadata(out.join("model.safetensors")).unwrap().len());
    assert!(!weights.contains_key("lm_head.weight"));
    assert_eq!(json(out.join("config.json"))["tie_word_embeddings"], true);
}

#[test]
fn qwen_rows_keep_their_order() {
    for (family, extra) in [("qwen2", "self_attn.q_proj.bias"), ("qwen3", "self_attn.q_norm.weight")] {
        let tiny = Tiny::new(family, "qwen2");
        let (_folder, out, report) = tiny.import(WeightType::F32);
        assert_eq!(report.unwrap().architecture, family);
        let weights = weights(&out);
        assert_eq!(weights["model.layers.0.self_attn.q_proj.weight"].1, tiny.tensors["blk.0.attn_q.weight"].1);
        assert!(weights.contains_key(&format!("model.layers.0.{extra}")));
    }
}

#[test]
fn configuration_has_keys_of_both_transformers_versions() {
    let tiny = Tiny::new("qwen3", "qwen2").set("qwen3.attention.key_length", Meta::U32(HEAD_DIM as u32));
    let (_folder, out, report) = tiny.import(WeightType::Bf16);
    report.unwrap();
    let config = json(out.join("config.json"));
    for (key, value) in [
        ("architectures", serde_json::json!(["Qwen3ForCausalLM"])),
        ("model_type", "qwen3".into()),
        ("hidden_size", HIDDEN.into()),
        ("intermediate_size", INTERMEDIATE.into()),
        ("num_hidden_layers", LAYERS.into()),
        ("num_attention_heads", HEADS.into()),
        ("num_key_value_heads", KV_HEADS.into()),
        ("head_dim", HEAD_DIM.into()),
        ("max_position_embeddings", 128.into()),
        ("rms_norm_eps", 1e-5.into()),
        ("rope_theta", 1e6.into()),
        ("rope_scaling", Value::Null),
        ("rope_parameters", serde_json::json!({"rope_theta": 1e6, "rope_type": "default"})),
        ("dtype", "bfloat16".into()),
        ("torch_dtype", "bfloat16".into()),
        ("bos_token_id", 1.into()),
        ("eos_token_id", 2.into()),
        ("use_sliding_window", false.into()),
        ("attention_bias", false.into()),
    ] {
        assert_eq!(config[key], value, "{key}");
    }
}

#[test]
fn a_separate_output_head_is_kept() {
    let mut tiny = Tiny::new("llama", "llama-bpe");
    let (shape, mut values, stored) = tiny.tensors["token_embd.weight"].clone();
    values.iter_mut().for_each(|v| *v *= 2.0);
    tiny.tensors.insert("output.weight".into(), (shape, values.clone(), stored));
    let (_folder, out, report) = tiny.import(WeightType::F32);
    assert!(!report.unwrap().tied_embeddings);
    assert_eq!(weights(&out)["lm_head.weight"].1, values);
    assert_eq!(json(out.join("config.json"))["tie_word_embeddings"], false);
}

#[test]
fn every_dtype_rounds_to_nearest() {
    let tiny = Tiny::new("llama", "smollm");
    let exact = &tiny.tensors["blk.0.ffn_up.weight"].1;
    for (dtype, bits) in [(WeightType::Bf16, 8), (WeightType::F16, 11)] {
        let (_folder, out, report) = tiny.import(dtype);
        report.unwrap();
        let stored = &weights(&out)["model.layers.0.mlp.up_proj.weight"].1;
        for (a, b) in exact.iter().zip(stored) {
            assert!((a - b).abs() <= a.abs() * 0.5_f32.powi(bits) + 1e-7, "{dtype:?}: {a} became {b}");
        }
    }
}

#[test]
fn quantised_tensors_are_dequantised() {
    let mut tiny = Tiny::new("llama", "smollm");
    tiny.tensors.get_mut("blk.0.ffn_up.weight").unwrap().2 = Stored::Q8_0;
    tiny.tensors.get_mut("blk.0.ffn_gate.weight").unwrap().2 = Stored::Q4_1;
    let (_folder, out, report) = tiny.import(WeightType::F32);
    let report = report.unwrap();
    assert_eq!(report.stored_types, [("F32".into(), 18), ("Q4_1".into(), 1), ("Q8_0".into(), 1)]);
    let weights = weights(&out);
    for (part, name, step) in [("ffn_up", "up_proj", 2.0 / 254.0), ("ffn_gate", "gate_proj", 2.0 / 15.0)] {
        let exact = &tiny.tensors[&format!("blk.0.{part}.weight")].1;
        let stored = &weights[&format!("model.layers.0.mlp.{name}.weight")].1;
        let worst = exact.iter().zip(stored).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst > 0.0 && worst <= step, "{part}: off by {worst}, one step is {step}");
    }
}

#[test]
fn pre_tokenizers_split_digits_as_their_models_do() {
    // The merge "1 2" applies only if the pre-tokenizer keeps digits together.
    for (family, pre, digits) in
        [("llama", "smollm", false), ("llama", "gpt-2", true), ("llama", "llama-bpe", true), ("qwen2", "qwen2", false)]
    {
        let (_folder, out, report) = Tiny::new(family, pre).import(WeightType::F32);
        report.unwrap();
        let tokenizer = tokenizers::Tokenizer::from_file(out.join("tokenizer.json")).unwrap();
        let tokens = |text: &str, special| tokenizer.encode(text, special).unwrap().get_tokens().to_vec();
        let expected: &[&str] = if digits { &["12"] } else { &["1", "2"] };
        assert_eq!(tokens("12", false), expected, "{pre}");
        assert_eq!(tokens("hello<tool><|im_end|>", false), ["hello", "<tool>", "<|im_end|>"], "{pre}");
        let bos: &[&str] = if pre == "llama-bpe" { &["<|im_start|>", "hello"] } else { &["hello"] };
        assert_eq!(tokens("hello", true), bos, "{pre}");
        // Qwen normalises to NFC first; the others keep the letter and the accent apart.
        let accent = tokenizer.decode(tokenizer.encode("e\u{301}", false).unwrap().get_ids(), true).unwrap();
        assert_eq!(accent, if pre == "qwen2" { "\u{e9}" } else { "e\u{301}" });
        assert_eq!(tokenizer.token_to_id("[PAD266]"), None, "a filler is not a token");
        let special = tokenizer.decode(&[1, 265], true).unwrap();
        assert_eq!(special, "<tool>", "control tokens are special, user-defined tokens are text");
    }
}

#[test]
fn llama_3_1_scaling_and_end_of_turn_are_kept() {
    let mut tiny = Tiny::new("llama", "llama-bpe")
        .set("llama.rope.freq_base", Meta::F32(500_000.0))
        .set("tokenizer.ggml.eos_token_id", Meta::U32(0))
        .set("tokenizer.ggml.eot_token_id", Meta::U32(2));
    // With base 500000, two of 4 pairs have a high frequency, one a low one, and one is interpolated (values of
    // transformers).
    tiny.tensors.insert("rope_freqs.weight".into(), (vec![4], vec![1.0, 1.0, 2.694_530_2, 8.0], Stored::F32));
    let (_folder, out, report) = tiny.import(WeightType::F32);
    report.unwrap();
    let config = json(out.join("config.json"));
    let scaling = serde_json::json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192});
    assert_eq!(config["rope_scaling"], scaling);
    assert_eq!(config["rope_parameters"]["rope_type"], "llama3");
    assert_eq!(config["rope_parameters"]["rope_theta"], 500_000.0);
    assert_eq!(config["eos_token_id"], 0);
    assert_eq!(json(out.join("generation_config.json"))["eos_token_id"], serde_json::json!([0, 2]));
}
