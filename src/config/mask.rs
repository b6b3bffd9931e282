//! Rule for `drafter.mask_token_id = "auto"`: selects a row of the target's embedding that ordinary text never uses.
//!
//! The row is frozen with the target, so text must not give it a meaning. A fallback to the padding token, which is often
//! the end of text, reduces acceptance without an error (Automodel#2461).

use crate::common::fs::read_input_text;
use crate::hf::{HfError, config::TargetConfig, read_json};
use serde::Serialize;
use serde_json::Value;
use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

/// Embedding row that marks a slot to predict, and the reason for the choice.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MaskToken {
    pub id: u32,
    /// Phrase for the report: "the first embedding row that has no token".
    pub reason: String,
}

/// Spellings of a tokenizer's mask token.
const MASK_WORDS: [&str; 5] = ["<|MASK|>", "<|mask|>", "<mask>", "[MASK]", "<|mask_token|>"];

/// Selects the row for the model folder that `target` was read from; `None` as in [`mask_token`].
///
/// # Errors
/// If tokenizer.json is missing or malformed.
pub fn mask_token_of(folder: &Path, target: &TargetConfig) -> Result<Option<MaskToken>, HfError> {
    let tokenizer = read_json(&folder.join("tokenizer.json"))?;
    let template = read_input_text(&folder.join("chat_template.jinja"), 16 << 20).unwrap_or_default();
    let settings = read_json(&folder.join("tokenizer_config.json")).unwrap_or_default();
    // Older folders store the template, or a list of templates, in this key. Its JSON text contains every token it uses.
    let template = template + &settings.get("chat_template").map(Value::to_string).unwrap_or_default();
    let mut taken = target.eos_token_ids.clone();
    taken.extend([target.bos_token_id, target.pad_token_id].into_iter().flatten());
    let rows = u32::try_from(target.vocab_size).unwrap_or(u32::MAX);
    Ok(mask_token(&tokenizer, rows, &taken, &template))
}

/// Selects the row. `tokenizer` is the content of tokenizer.json, `rows` the number of embedding rows, `taken` the ids
/// with a role in config.json (begin, end, padding), `template` the chat template.
///
/// Returns `None` if text may use every row; then the id must be configured.
pub fn mask_token(tokenizer: &Value, rows: u32, taken: &[u32], template: &str) -> Option<MaskToken> {
    let mut tokens = BTreeMap::new();
    for (text, id) in tokenizer.pointer("/model/vocab").and_then(Value::as_object).into_iter().flatten() {
        tokens.extend(id.as_u64().map(|id| (id, text.as_str())));
    }
    let mut special = BTreeSet::new();
    for token in tokenizer.get("added_tokens").and_then(Value::as_array).into_iter().flatten() {
        let text = token.get("content").and_then(Value::as_str).unwrap_or_default();
        let Some(id) = token.get("id").and_then(Value::as_u64) else { continue };
        tokens.insert(id, text);
        if token.get("special").and_then(Value::as_bool).unwrap_or(false) {
            special.insert(id);
        }
    }
    let free = |id: &u64, text: &str| {
        *id < u64::from(rows) && !taken.iter().any(|taken| u64::from(*taken) == *id) && !template.contains(text)
    };
    let found = |id: u64, reason: String| Some(MaskToken { id: u32::try_from(id).ok()?, reason });

    if let Some((id, text)) = tokens.iter().find(|(id, text)| MASK_WORDS.contains(text) && **id < u64::from(rows)) {
        return found(*id, format!("the tokenizer's mask token {text}"));
    }
    if let Some(id) = (0..u64::from(rows)).find(|id| !tokens.contains_key(id)).filter(|_| !tokens.is_empty()) {
        return found(id, "the first embedding row that has no token".into());
    }
    let special = || special.iter().filter_map(|id| tokens.get(id).map(|text| (*id, *text)));
    let reserved = |text: &str| text.contains("reserved") || text.contains("unused");
    if let Some((id, text)) = special().find(|(id, text)| reserved(text) && free(id, text)) {
        return found(id, format!("the reserved token {text}"));
    }
    let (id, text) = special().rfind(|(id, text)| free(id, text))?;
    found(id, format!("the last special token that the chat template does not use, {text}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn tokenizer(words: &[&str], special: &[(&str, u64)]) -> Value {
        let vocab: serde_json::Map<_, _> =
            words.iter().enumerate().map(|(id, word)| (word.to_string(), json!(id))).collect();
        let added: Vec<_> =
            special.iter().map(|(text, id)| json!({"content": text, "id": id, "special": true})).collect();
        json!({"model": {"vocab": vocab}, "added_tokens": added})
    }

    fn id(tokenizer: &Value, rows: u32) -> Option<u32> {
        mask_token(tokenizer, rows, &[2, 3], "{{ '<start>' }}").map(|mask| mask.id)
    }

    #[test]
    fn rules_apply_in_order() {
        let special = [("<end>", 2), ("<start>", 3), ("<reserved_7>", 4), ("<repo>", 5), ("[MASK]", 6)];
        assert_eq!(id(&tokenizer(&["a", "b"], &special), 9), Some(6), "a mask token");
        assert_eq!(id(&tokenizer(&["a", "b"], &special[..4]), 9), Some(6), "a padded row, as in Qwen3");
        assert_eq!(id(&tokenizer(&["a", "b"], &special[..4]), 6), Some(4), "a reserved token, as in Llama 3");
        assert_eq!(id(&tokenizer(&["a", "b", "c", "d", "<repo>"], &[("<end>", 2), ("<repo>", 4)]), 5), Some(4));
    }

    #[test]
    fn rows_used_by_text_or_template_are_never_selected() {
        assert_eq!(id(&tokenizer(&["a", "b"], &[("<end>", 2), ("<start>", 3)]), 4), None);
        assert_eq!(id(&tokenizer(&["a", "b", "c", "d", "<repo>"], &[("<repo>", 4)]), 4), None, "row 4 does not exist");
        assert_eq!(id(&json!({}), 8), None, "no tokenizer");
    }
}
