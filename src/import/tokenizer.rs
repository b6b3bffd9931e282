//! Builds `tokenizer.json` and `tokenizer_config.json` from the vocabulary, merges and token types of a GGUF file.

use super::ImportError;
use super::config::Architecture;
use super::gguf::Gguf;
use super::special_tokens::SpecialTokens;
use serde_json::{Map, Value, json};
use std::str::FromStr;

/// Values of `tokenizer.ggml.token_type` (llama.cpp's `llama_token_type`).
const UNKNOWN: i64 = 2;
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;
/// Filler such as `[PAD151670]`, which pads the vocabulary to the rows of the embedding table.
const UNUSED: i64 = 5;

/// Pre-tokenizer, which splits text into words before the merges. `tokenizer.ggml.pre` names it.
struct PreTokenizer {
    names: &'static [&'static str],
    normalizer: fn() -> Value,
    steps: fn() -> Value,
    trim_offsets: bool,
    /// A word that is in the vocabulary becomes one token without merges.
    ignore_merges: bool,
    /// llama.cpp's default if the file has no `add_bos_token`.
    add_bos: bool,
}

/// Pre-tokenizers as in the `tokenizer.json` of the original models. SmolLM splits digits, which transformers' GGUF
/// reader omits. Qwen normalises to NFC, which GGUF does not record.
const PRE_TOKENIZERS: [PreTokenizer; 4] = [
    PreTokenizer {
        names: &["smollm"],
        normalizer: || Value::Null,
        steps: || json!([{"type": "Digits", "individual_digits": true}, byte_level(true, true)]),
        trim_offsets: true,
        ignore_merges: false,
        add_bos: false,
    },
    PreTokenizer {
        names: &["qwen2", "deepseek-r1-qwen"],
        normalizer: || json!({"type": "NFC"}),
        steps: || json!([split(r"\p{N}"), byte_level(false, false)]),
        trim_offsets: false,
        ignore_merges: false,
        add_bos: false,
    },
    PreTokenizer {
        names: &["llama-bpe", "llama3", "llama-v3"],
        normalizer: || Value::Null,
        steps: || json!([split(r"\p{N}{1,3}"), byte_level(true, false)]),
        trim_offsets: false,
        ignore_merges: true,
        add_bos: true,
    },
    PreTokenizer {
        names: &["gpt-2"],
        normalizer: || Value::Null,
        steps: || json!([byte_level(true, true)]),
        trim_offsets: true,
        ignore_merges: false,
        add_bos: false,
    },
];

/// Tokenizer of the model in Hugging Face format, checked by loading it.
pub(super) struct HfTokenizer {
    pub json: String,
    pub chat_template: Option<String>,
    pub special: SpecialTokens,
    /// Number of tokens, without fillers.
    pub vocabulary: usize,
    added: Vec<(u32, Value)>,
}

/// Reads the tokenizer.
///
/// # Errors
///
/// Fails if the tokenizer model or pre-tokenizer is not supported, or if tokens, types and merges are inconsistent.
pub(super) fn read(gguf: &Gguf, model: &Architecture) -> Result<HfTokenizer, ImportError> {
    match gguf.text("tokenizer.ggml.model")? {
        Some("gpt2") => {}
        Some(other) => return Err(gguf.unsupported("the tokenizer model", other, "gpt2 (byte-level BPE)")),
        None => return Err(gguf.inconsistent("the key tokenizer.ggml.model is missing: the file has no tokenizer")),
    }
    let pre = gguf.text("tokenizer.ggml.pre")?.unwrap_or("without name (tokenizer.ggml.pre is missing)");
    let Some(pre) = PRE_TOKENIZERS.iter().find(|p| p.names.contains(&pre)) else {
        let known: Vec<_> = PRE_TOKENIZERS.iter().flat_map(|p| p.names).copied().collect();
        return Err(gguf.unsupported("the pre-tokenizer", pre, &known.join(", ")));
    };
    let tokens = gguf.texts("tokenizer.ggml.tokens")?;
    if tokens.is_empty() || tokens.len() > model.vocab {
        let why = format!("it has {} tokens and {} rows of embeddings", tokens.len(), model.vocab);
        return Err(gguf.inconsistent(why));
    }
    let types = match gguf.has("tokenizer.ggml.token_type") {
        true => gguf.numbers("tokenizer.ggml.token_type")?,
        false => vec![1; tokens.len()],
    };
    if types.len() != tokens.len() {
        return Err(gguf.inconsistent(format!("it has {} tokens and {} token types", tokens.len(), types.len())));
    }

    let special = SpecialTokens::read(gguf, tokens)?;
    let mut vocab = Map::new();
    let mut added = Vec::new();
    for (id, (token, &token_type)) in tokens.iter().zip(&types).enumerate() {
        if token_type == UNUSED {
            continue;
        }
        if let Some(first) = vocab.insert(token.clone(), json!(id)) {
            return Err(gguf.inconsistent(format!("the tokens {first} and {id} are both {token:?}")));
        }
        let is_special = [UNKNOWN, CONTROL].contains(&token_type) || special.is_boundary(id);
        if is_special || token_type == USER_DEFINED {
            let entry = json!({
                "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": is_special,
            });
            added.push((id as u32, entry));
        }
    }
    let vocabulary = vocab.len();
    let whole = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added.iter().map(|(id, entry)| with_id(*id, entry)).collect::<Vec<_>>(),
        "normalizer": (pre.normalizer)(),
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": (pre.steps)()},
        "post_processor": post_processor(gguf, pre, &special)?,
        "decoder": byte_level(pre.trim_offsets, true),
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "ignore_merges": pre.ignore_merges,
            "vocab": vocab,
            // Every version of the tokenizers library reads a merge as the text "a b".
            "merges": gguf.texts("tokenizer.ggml.merges")?,
        },
    });
    let json = format!("{whole:#}\n");
    check(gguf, &json, &added)?;
    let chat_template = gguf.text("tokenizer.chat_template")?.map(str::to_string);
    Ok(HfTokenizer { json, chat_template, special, vocabulary, added })
}

impl HfTokenizer {
    /// Content of `tokenizer_config.json`. The generic class keeps the pre-tokenizer of `tokenizer.json`. The class of
    /// a family would replace it.
    pub(super) fn config(&self, model: &Architecture) -> Value {
        let text = |token: &Option<(u32, String)>| token.as_ref().map(|(_, text)| text.clone());
        let added: Map<String, Value> = self.added.iter().map(|(id, entry)| (id.to_string(), entry.clone())).collect();
        let mut config = json!({
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": model.context,
            "clean_up_tokenization_spaces": false,
            "add_prefix_space": false,
            "bos_token": text(&self.special.bos),
            "eos_token": text(&self.special.eos),
            "pad_token": text(&self.special.padding),
            "unk_token": text(&self.special.unknown),
            "added_tokens_decoder": added,
        });
        // Older readers do not know chat_template.jinja and read this key.
        if let (Some(template), Value::Object(config)) = (&self.chat_template, &mut config) {
            config.insert("chat_template".into(), json!(template));
        }
        config
    }
}

/// Checks that the tokenizers library loads the file and that each added token keeps its id.
fn check(gguf: &Gguf, json: &str, added: &[(u32, Value)]) -> Result<(), ImportError> {
    let loaded = tokenizers::Tokenizer::from_str(json)
        .map_err(|e| gguf.inconsistent(format!("its tokens and merges are not a valid tokenizer ({e})")))?;
    for (id, entry) in added {
        let text = entry["content"].as_str().unwrap_or_default();
        if loaded.token_to_id(text) != Some(*id) {
            let got = loaded.token_to_id(text);
            return Err(gguf.inconsistent(format!("the token {text:?} has the id {id}, but loads as {got:?}")));
        }
    }
    Ok(())
}

/// Post-processor: adds the bos and eos tokens that the file requests.
fn post_processor(gguf: &Gguf, pre: &PreTokenizer, special: &SpecialTokens) -> Result<Value, ImportError> {
    let requested = |name: &str, default: bool, token: &Option<(u32, String)>| match (
        gguf.flag(&format!("tokenizer.ggml.add_{name}_token"))?.unwrap_or(default),
        token,
    ) {
        (false, _) => Ok(None),
        (true, Some(token)) => Ok(Some(token.clone())),
        (true, None) => Err(gguf
            .inconsistent(format!("it adds the {name} token to texts, but tokenizer.ggml.{name}_token_id is missing"))),
    };
    let bos = requested("bos", pre.add_bos, &special.bos)?;
    let eos = requested("eos", false, &special.eos)?;
    let offsets = byte_level(false, true);
    if bos.is_none() && eos.is_none() {
        return Ok(offsets);
    }
    let special_token = |token: &Option<(u32, String)>, sequence: u8| {
        token.as_ref().map(|(_, text)| json!({"SpecialToken": {"id": text, "type_id": sequence}}))
    };
    let around = |name: &str, sequence: u8| {
        let middle = json!({"Sequence": {"id": name, "type_id": sequence}});
        [special_token(&bos, sequence), Some(middle), special_token(&eos, sequence)]
            .into_iter()
            .flatten()
            .collect::<Vec<_>>()
    };
    let ids: Map<String, Value> = [&bos, &eos]
        .into_iter()
        .flatten()
        .map(|(id, text)| (text.clone(), json!({"id": text, "ids": [id], "tokens": [text]})))
        .collect();
    let pair = [around("A", 0), around("B", 1)].concat();
    let template = json!({
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": pair,
        "special_tokens": ids,
    });
    Ok(json!({"type": "Sequence", "processors": [offsets, template]}))
}

fn with_id(id: u32, entry: &Value) -> Value {
    let mut whole = Map::from_iter([("id".to_string(), json!(id))]);
    whole.extend(entry.as_object().cloned().unwrap_or_default());
    Value::Object(whole)
}

fn byte_level(trim_offsets: bool, use_regex: bool) -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": trim_offsets, "use_regex": use_regex})
}

/// Split pattern of Llama 3 and Qwen. They differ only in the number of digits in one word.
fn split(digits: &str) -> Value {
    let pattern = format!(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    );
    json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false})
}
