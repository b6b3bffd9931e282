//! Rule for `drafter.mask_token_id = "auto"`: selects a row of the target's embedding that ordinary text never uses.
//!
//! The row is frozen with the target, so text must not give it a meaning. A fallback to the padding token, which is often
//! the end of text, reduces acceptance without an error (Automodel#2461).

use crate::common::fs::read_input_text;
use crate::hf::{HfError, config::TargetConfig, read_json, stop_tokens::role_tokens};
use serde::Serialize;
use serde_json::Value;
use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};
use tokenizers::Tokenizer;

/// Embedding row that marks a slot to predict, and the reason for the choice.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MaskToken {
    pub id: u32,
    /// Phrase for the report: "the first embedding row that has no token".
    pub reason: String,
}

/// Tokens of a tokenizer by id, as the tokenizers library reads them: of any model type, added tokens included
/// (autotiktokenizer#19).
#[derive(Clone, Debug, Default)]
pub struct Vocabulary {
    tokens: BTreeMap<u32, String>,
    /// Added tokens that no text is split into.
    special: BTreeSet<u32>,
    /// Ids that the tokenizer itself writes around a text.
    around: BTreeSet<u32>,
}

/// Spellings of a tokenizer's mask token.
const MASK_WORDS: [&str; 5] = ["<|MASK|>", "<|mask|>", "<mask>", "[MASK]", "<|mask_token|>"];

impl Vocabulary {
    /// Reads tokenizer.json of a model folder.
    ///
    /// # Errors
    /// A missing file, or one that is not a tokenizer.
    pub fn load(folder: &Path) -> Result<Vocabulary, HfError> {
        let path = folder.join("tokenizer.json");
        let bytes = std::fs::read(&path).map_err(|source| HfError::Read { path: path.clone(), source })?;
        Vocabulary::parse(&bytes)
            .map_err(|reason| HfError::Tokenizer { file: path.display().to_string(), reason: reason.to_string() })
    }

    /// Parses the content of tokenizer.json. A file that the library refuses is read by its shape, if it has a vocabulary.
    ///
    /// # Errors
    /// The reason why it is not a tokenizer.
    pub fn parse(bytes: &[u8]) -> tokenizers::Result<Vocabulary> {
        let tokenizer = match Tokenizer::from_bytes(bytes) {
            Ok(tokenizer) => tokenizer,
            Err(error) => return Vocabulary::by_shape(bytes).ok_or(error),
        };
        let tokens = tokenizer.get_vocab(true).into_iter().map(|(text, id)| (id, text)).collect();
        let added = tokenizer.get_added_tokens_decoder();
        let special = added.into_iter().filter(|(_, token)| token.special).map(|(id, _)| id).collect();
        let around = tokenizer.encode("", true)?.get_ids().iter().copied().collect();
        Ok(Vocabulary { tokens, special, around })
    }

    /// Reads `model.vocab`, an object of ids or a list in the order of ids, and `added_tokens`; `None` without a token.
    fn by_shape(bytes: &[u8]) -> Option<Vocabulary> {
        let value: Value = serde_json::from_slice(bytes).ok()?;
        let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
        let mut found = Vocabulary::default();
        match &value["model"]["vocab"] {
            Value::Object(by_text) => {
                found.tokens.extend(by_text.iter().filter_map(|(text, value)| Some((id(value)?, text.clone()))));
            }
            Value::Array(pieces) => {
                let text = |piece: &Value| piece.as_str().or(piece[0].as_str()).unwrap_or_default().to_owned();
                found.tokens.extend((0..).zip(pieces.iter().map(text)));
            }
            _ => {}
        }
        for token in value["added_tokens"].as_array().into_iter().flatten() {
            let Some(id) = id(&token["id"]) else { continue };
            found.tokens.insert(id, token["content"].as_str().unwrap_or_default().to_owned());
            if token["special"] == true {
                found.special.insert(id);
            }
        }
        (!found.tokens.is_empty()).then_some(found)
    }

    /// Ids of the tokens with these texts.
    fn ids_of(&self, texts: &[String]) -> impl Iterator<Item = u32> {
        self.tokens.iter().filter(|(_, token)| texts.contains(token)).map(|(id, _)| *id)
    }
}

/// Selects the row for the model folder that `target` was read from; `None` as in [`mask_token`].
///
/// # Errors
/// If tokenizer.json is missing or malformed, or generation_config.json is malformed.
pub fn mask_token_of(folder: &Path, target: &TargetConfig) -> Result<Option<MaskToken>, HfError> {
    let vocabulary = Vocabulary::load(folder)?;
    let template = read_input_text(&folder.join("chat_template.jinja"), 16 << 20).unwrap_or_default();
    let settings = read_json(&folder.join("tokenizer_config.json")).unwrap_or_default();
    // Older folders store the template, or a list of templates, in this key. Its JSON text contains every token it uses.
    let template = template + &settings.get("chat_template").map(Value::to_string).unwrap_or_default();
    let mut taken = role_tokens(folder, target)?;
    let named = ["bos_token", "eos_token", "pad_token", "unk_token"].map(|key| &settings[key]);
    let named = named.iter().filter_map(|value| value.as_str().or(value["content"].as_str()).map(String::from));
    taken.extend(vocabulary.ids_of(&named.collect::<Vec<_>>()));
    let rows = u32::try_from(target.vocab_size).unwrap_or(u32::MAX);
    Ok(mask_token(&vocabulary, rows, &taken, &template))
}

/// Selects the row. `rows` is the number of embedding rows, `taken` has the ids with a role (begin, end, padding),
/// `template` is the chat template.
///
/// Returns `None` if text may use every row; then the id must be configured.
pub fn mask_token(vocabulary: &Vocabulary, rows: u32, taken: &[u32], template: &str) -> Option<MaskToken> {
    let Vocabulary { tokens, special, around } = vocabulary;
    if tokens.is_empty() {
        return None;
    }
    let unused = |id: u32| id < rows && !taken.contains(&id) && !around.contains(&id);
    let free = |id: u32, text: &str| unused(id) && !template.contains(text);
    let found = |id: u32, reason: String| Some(MaskToken { id, reason });
    let special = || special.iter().filter_map(|id| tokens.get(id).map(|text| (*id, text.as_str())));

    if let Some((id, text)) = special().find(|(id, text)| MASK_WORDS.contains(text) && free(*id, text)) {
        return found(id, format!("the tokenizer's mask token {text}"));
    }
    if let Some(id) = (0..rows).find(|id| !tokens.contains_key(id) && unused(*id)) {
        return found(id, "the first embedding row that has no token".into());
    }
    let reserved = |text: &str| text.contains("reserved") || text.contains("unused");
    if let Some((id, text)) = special().find(|(id, text)| reserved(text) && free(*id, text)) {
        return found(id, format!("the reserved token {text}"));
    }
    let (id, text) = special().rfind(|(id, text)| free(*id, text))?;
    found(id, format!("the last special token that the chat template does not use, {text}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    /// Model types of the tokenizers library.
    const TYPES: [&str; 4] = ["BPE", "WordLevel", "WordPiece", "Unigram"];

    fn vocabulary(kind: &str, words: &[&str], special: &[(&str, u64)]) -> Vocabulary {
        let by_word: serde_json::Map<_, _> =
            words.iter().enumerate().map(|(id, word)| (word.to_string(), json!(id))).collect();
        let model = match kind {
            "BPE" => json!({"type": kind, "vocab": by_word, "merges": []}),
            "WordLevel" => json!({"type": kind, "vocab": by_word, "unk_token": words[0]}),
            "WordPiece" => json!({"type": kind, "vocab": by_word, "unk_token": words[0],
                                  "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}),
            _ => json!({"type": kind, "unk_id": 0, "byte_fallback": false,
                        "vocab": words.iter().map(|word| json!([word, -1.0])).collect::<Vec<_>>()}),
        };
        let added: Vec<_> = special
            .iter()
            .map(|(text, id)| {
                json!({"content": text, "id": id, "special": true, "single_word": false, "lstrip": false, "rstrip": false,
                       "normalized": false})
            })
            .collect();
        let json = json!({"version": "1.0", "truncation": null, "padding": null, "normalizer": null,
                          "pre_tokenizer": null, "post_processor": null, "decoder": null, "model": model,
                          "added_tokens": added});
        Vocabulary::parse(json.to_string().as_bytes()).unwrap()
    }

    fn id(vocabulary: &Vocabulary, rows: u32) -> Option<u32> {
        mask_token(vocabulary, rows, &[2, 3], "{{ '<start>' }}").map(|mask| mask.id)
    }

    #[test]
    fn autotiktokenizer_19_rules_apply_in_order_to_every_model_type() {
        let special = [("<end>", 2), ("<start>", 3), ("<reserved_7>", 4), ("<repo>", 5), ("[MASK]", 6)];
        for kind in TYPES {
            let of = |words: &[&str], special| vocabulary(kind, words, special);
            assert_eq!(id(&of(&["a", "b"], &special), 9), Some(6), "{kind}: a mask token");
            assert_eq!(id(&of(&["a", "b"], &special[..4]), 9), Some(6), "{kind}: a padded row, as in Qwen3");
            assert_eq!(id(&of(&["a", "b"], &special[..4]), 6), Some(4), "{kind}: a reserved token, as in Llama 3");
            let words = ["a", "b", "<end>", "d", "<repo>"];
            assert_eq!(id(&of(&words, &[("<end>", 2), ("<repo>", 4)]), 5), Some(4), "{kind}: the last special token");
        }
    }

    #[test]
    fn rows_used_by_text_or_template_are_never_selected() {
        assert_eq!(id(&vocabulary("BPE", &["a", "b"], &[("<end>", 2), ("<start>", 3)]), 4), None);
        let fifth = vocabulary("BPE", &["a", "b", "c", "d", "<repo>"], &[("<repo>", 4)]);
        assert_eq!(id(&fifth, 4), None, "row 4 does not exist");
        assert_eq!(id(&Vocabulary::default(), 8), None, "no tokenizer");
        assert!(Vocabulary::parse(b"{}").is_err());
        for vocab in [json!({"a": 0, "b": 1}), json!([["a", 0.0], ["b", -1.5]]), json!(["a", "b"])] {
            let unknown = json!({"model": {"type": "Novel", "vocab": vocab}}).to_string();
            assert_eq!(id(&Vocabulary::parse(unknown.as_bytes()).unwrap(), 5), Some(4), "{unknown}");
        }
        // A word that is spelt like a mask token, and one that generation_config.json stops at.
        assert_eq!(id(&vocabulary("Unigram", &["a", "<mask>", "c", "d"], &[]), 4), None);
        let masked = vocabulary("Unigram", &["a", "b"], &[("<mask>", 2), ("<x>", 3)]);
        assert_eq!(id(&masked, 4), None, "both ids have a role");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        /// A word of the text is never selected, in whichever model type it is stored.
        #[test]
        fn no_word_is_ever_a_mask(kind in 0..4usize, words in 1..30usize, special in 0..6u64, padding in 0..3u32) {
            let words: Vec<String> = (0..words).map(|i| format!("w{i}")).collect();
            let texts: Vec<_> = words.iter().map(String::as_str).collect();
            let names: Vec<_> = (0..special).map(|i| format!("<s{i}>")).collect();
            let added: Vec<_> = names.iter().zip(words.len() as u64..).map(|(name, id)| (name.as_str(), id)).collect();
            let rows = (words.len() + added.len()) as u32 + padding;
            let mask = mask_token(&vocabulary(TYPES[kind], &texts, &added), rows, &[], "").map(|mask| mask.id);
            prop_assert_eq!(mask.is_some(), special > 0 || padding > 0);
            prop_assert!(mask.is_none_or(|id| id as usize >= words.len() && id < rows));
        }
    }
}
