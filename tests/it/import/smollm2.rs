//! The demo's target, imported from the GGUF file that `scripts/fetch.py smollm2` downloads.

use super::*;
use draftmill::data::chat::{ChatTemplate, Conversation, Role, Turn};
use safetensors::{Dtype, SafeTensors};
use serde_json::{Map, json};
use std::sync::LazyLock;
use tokenizers::Tokenizer;

/// Question, token ids of the prompt after the chat template, and token ids of the greedy answer in f32. The ids were
/// measured with transformers.
#[rustfmt::skip]
pub const GREEDY: [(&str, &[u32], &[u32]); 2] = [
    (
        "What is the capital of France?",
        &[1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2, 198,
          1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198],
        &[504, 3575, 282, 4649, 314, 7042, 30, 2],
    ),
    (
        "Write a Python function that returns the sum of two numbers.",
        &[1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2, 198,
          1, 4093, 198, 19161, 253, 5905, 1517, 338, 6765, 260, 2028, 282, 827, 2966, 30, 2, 198, 1, 520, 9531, 198],
        &[3725, 5367, 198, 1604, 2028, 79, 11355, 79, 28707, 24, 81, 28, 278, 727, 472, 1003, 253, 1232, 278, 198],
    ),
];

/// Folder of the imported model, written once for all tests of this binary.
pub fn folder() -> &'static Path {
    static FOLDER: LazyLock<(tempfile::TempDir, ImportReport)> = LazyLock::new(|| {
        let gguf = std::env::var_os("DRAFTMILL_SMOLLM2_GGUF").expect(
            "DRAFTMILL_SMOLLM2_GGUF does not name the demo's GGUF file: run `make test`, which fetches it and sets the \
             variable, or set it to what `python3 scripts/fetch.py smollm2` prints",
        );
        // A static is never dropped. The target folder of the build keeps the import until the next run removes it.
        let parent = Path::new(env!("CARGO_TARGET_TMPDIR"));
        for left in std::fs::read_dir(parent).unwrap().map(|e| e.unwrap().path()) {
            if left.file_name().is_some_and(|n| n.to_string_lossy().starts_with("smollm2-")) {
                std::fs::remove_dir_all(left).unwrap();
            }
        }
        let folder = tempfile::Builder::new().prefix("smollm2-").tempdir_in(parent).unwrap();
        let report = import(Path::new(&gguf), folder.path(), WeightType::F32, false).unwrap();
        (folder, report)
    });
    assert_eq!((FOLDER.1.tensors, FOLDER.1.parameters), (272, 134_515_008));
    FOLDER.0.path()
}

fn tokenizer() -> Tokenizer {
    Tokenizer::from_file(folder().join("tokenizer.json")).unwrap()
}

fn ids(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    tokenizer.encode(text, true).unwrap().get_ids().to_vec()
}

#[test]
fn prompt_ids_equal_those_of_transformers() {
    let template = ChatTemplate::load(folder()).unwrap();
    let tokenizer = tokenizer();
    for (question, prompt, continuation) in GREEDY {
        let turns = vec![Turn { role: Role::User, content: question.into(), extra: Map::new() }];
        let text = template.prompt(&Conversation { turns, tools: None }).unwrap();
        assert_eq!(ids(&tokenizer, &text), prompt);
        let answer = tokenizer.decode(continuation, false).unwrap();
        assert!(
            ["The capital of France is Paris.<|im_end|>", "```python\ndef sum_two_numbers(a, b):\n    return a + b\n"]
                .contains(&answer.as_str())
        );
    }
}

#[test]
fn digits_are_single_tokens_and_text_round_trips() {
    let tokenizer = tokenizer();
    // transformers' GGUF reader omits the split of digits: it returns [81, 216, 216, 33].
    assert_eq!(ids(&tokenizer, "a  1"), [81, 256, 33]);
    assert_eq!(ids(&tokenizer, "1234567890"), [33, 34, 35, 36, 37, 38, 39, 40, 41, 32]);
    for text in [
        "Hello world! 123",
        "  leading, trailing  ",
        "tabs\tand\r\nlines\n\n\n",
        "caf\u{e9} e\u{301} \u{65e5}\u{672c}\u{8a9e} \u{ff11}\u{ff12} \u{bd} \u{1f469}\u{200d}\u{1f467}",
        "\u{645}\u{631}\u{62d}\u{628}\u{627} \u{663}\u{664}",
        "<|IM_START|> is not <|im_start|",
        "",
    ] {
        let back = tokenizer.decode(&ids(&tokenizer, text), false).unwrap();
        assert_eq!(back, text);
    }
    let control = ids(&tokenizer, "<|endoftext|><|im_start|>user\nhi<|im_end|>");
    assert_eq!(control, [0, 1, 4093, 198, 6004, 2]);
    assert_eq!(tokenizer.decode(&control, true).unwrap(), "user\nhi", "control tokens are skipped on request");
}

#[test]
fn configuration_equals_the_models_own() {
    let config = json(folder().join("config.json"));
    for (key, value) in [
        ("model_type", json!("llama")),
        ("hidden_size", json!(576)),
        ("intermediate_size", json!(1536)),
        ("num_hidden_layers", json!(30)),
        ("num_attention_heads", json!(9)),
        ("num_key_value_heads", json!(3)),
        ("head_dim", json!(64)),
        ("vocab_size", json!(49152)),
        ("max_position_embeddings", json!(8192)),
        ("rms_norm_eps", json!(1e-5)),
        ("rope_theta", json!(100_000.0)),
        ("rope_parameters", json!({"rope_theta": 100_000.0, "rope_type": "default"})),
        ("tie_word_embeddings", json!(true)),
        ("dtype", json!("float32")),
        ("torch_dtype", json!("float32")),
    ] {
        assert_eq!(config[key], value, "{key}");
    }
    let tokenizer = json(folder().join("tokenizer_config.json"));
    for (key, value) in [("bos_token", "<|im_start|>"), ("eos_token", "<|im_end|>"), ("unk_token", "<|endoftext|>")] {
        assert_eq!(tokenizer[key], value, "{key}");
    }
    assert_eq!(tokenizer["added_tokens_decoder"].as_object().unwrap().len(), 17);
    assert_eq!(json(folder().join("generation_config.json"))["eos_token_id"], 2);
}

#[test]
fn weights_have_hugging_face_names_and_shapes() {
    let file = std::fs::File::open(folder().join("model.safetensors")).unwrap();
    // SAFETY: the file is in a temporary folder of this process and is no longer written.
    let bytes = unsafe { memmap2::Mmap::map(&file) }.unwrap();
    let weights = SafeTensors::deserialize(&bytes).unwrap();
    let mut expected =
        vec![("model.embed_tokens.weight".to_string(), vec![49152, 576]), ("model.norm.weight".into(), vec![576])];
    for n in 0..30 {
        for (name, shape) in [
            ("input_layernorm", vec![576]),
            ("post_attention_layernorm", vec![576]),
            ("self_attn.q_proj", vec![576, 576]),
            ("self_attn.k_proj", vec![192, 576]),
            ("self_attn.v_proj", vec![192, 576]),
            ("self_attn.o_proj", vec![576, 576]),
            ("mlp.gate_proj", vec![1536, 576]),
            ("mlp.up_proj", vec![1536, 576]),
            ("mlp.down_proj", vec![576, 1536]),
        ] {
            expected.push((format!("model.layers.{n}.{name}.weight"), shape));
        }
    }
    assert_eq!(weights.len(), expected.len());
    for (name, shape) in expected {
        let tensor = weights.tensor(&name).unwrap();
        assert_eq!((tensor.dtype(), tensor.shape()), (Dtype::F32, shape.as_slice()), "{name}");
    }
}
