//! Sentences for rows that are no conversation: the form that was found, and its remedy.

use super::{CONVERSATIONS, kind, names};
use crate::data::reject::{Reason, Reject};
use serde::de::IgnoredAny;
use serde_json::{Map, Value};

/// Names the damage of a text that is not JSON.
pub fn invalid_json(text: &str, error: &serde_json::Error) -> Reject {
    let text = text.trim();
    if let Some(detail) = trailing_comma(text, error) {
        return Reason::TrailingComma.because(detail);
    }
    if let Some(detail) = not_a_number(text) {
        return Reason::NotANumber.because(detail);
    }
    let invalid = |detail: &str| Reason::InvalidJson.because(detail);
    if text.starts_with('#') || text.starts_with("//") {
        return invalid("it is a comment, which JSON lacks; remove the line");
    }
    if text.starts_with("{'") {
        return invalid("it has single quotes, as Python prints a dict; write it with json.dumps");
    }
    let said = error.to_string();
    if text.contains("\\u") && (said.contains("hex escape") || said.contains("surrogate")) {
        return invalid(&format!("{said}: half of a surrogate pair, so a text was cut inside a character"));
    }
    let values = serde_json::Deserializer::from_str(text).into_iter::<IgnoredAny>();
    let count = values.map_while(Result::ok).count();
    if count > 1 {
        return invalid(&format!("{count} values in one line; write one row in each line"));
    }
    Reason::InvalidJson.because(format!("in the row: {error}"))
}

/// Names the form of a row that is no object.
pub fn not_an_object(value: &Value) -> Reject {
    let first = value.as_array().and_then(|list| list.first());
    let remedy = match first {
        Some(first) if is_turn(first) => " of turns; write it as the value of `messages` in an object",
        Some(Value::Object(_)) => " of rows; write one row in each line",
        Some(Value::Array(_)) => " of lists; write one object in each line",
        _ => "",
    };
    Reason::NotAnObject.because(format!("it is {}{remedy}", kind(value)))
}

/// Names the form of a value of `messages` or `conversations` that is no list.
pub fn not_a_list(key: &str, value: &Value) -> Reject {
    let remedy = match value {
        Value::Object(columns) if columns.values().all(Value::is_array) => {
            "; it holds columns, so write the rows as objects (pandas: to_json(orient=\"records\", lines=True))"
        }
        Value::String(text) if text.trim_start().starts_with('[') => {
            "; its text is not JSON either: write a list, or the text with json.dumps"
        }
        _ => "",
    };
    Reason::NoConversation.because(format!("`{key}` is {}, not a list{remedy}", kind(value)))
}

/// Names the form of an object without a conversation.
pub fn no_conversation(row: &Map<String, Value>) -> Reject {
    if row.get("input_ids").is_some_and(Value::is_null) {
        return Reason::Empty.because("`input_ids` is null");
    }
    let first = |value: &Value| value.as_array().and_then(|list| list.first().cloned());
    let holds = |test: fn(&Value) -> bool| {
        row.iter().find(|(_, value)| first(value).is_some_and(|first| test(&first))).map(|(key, _)| key)
    };
    let remedy = if is_turn(&Value::Object(row.clone())) {
        "; it is a turn: write the turns of a conversation as a list under `messages`".into()
    } else if let Some(key) = holds(is_row) {
        format!("; `{key}` holds rows: write each one in its own line, for example with jq -c '.{key}[]'")
    } else if row.contains_key("prompt") || row.contains_key("chosen") || row.contains_key("instruction") {
        "; write question and answer as turns under `messages`".into()
    } else if let Some(key) = holds(is_turn) {
        format!("; `{key}` holds turns: rename it to `messages`")
    } else {
        String::new()
    };
    Reason::NoConversation.because(format!("its keys are {}{remedy}", names(row)))
}

fn is_turn(value: &Value) -> bool {
    [("role", "content"), ("from", "value")]
        .iter()
        .any(|(role, text)| value[*role].is_string() && !value[*text].is_null())
}

fn is_row(value: &Value) -> bool {
    CONVERSATIONS.iter().any(|key| value[*key].is_array()) || value["input_ids"].is_array()
}

fn trailing_comma(text: &str, error: &serde_json::Error) -> Option<String> {
    if let Some(row) = text.strip_suffix(',')
        && is_json(&with_null_numbers(row).0)
    {
        return Some("a comma follows the row; remove it, or put the rows into an array".into());
    }
    let inside = error.to_string().starts_with("trailing comma");
    inside.then(|| format!("{error}; remove the comma"))
}

fn not_a_number(text: &str) -> Option<String> {
    let (fixed, first) = with_null_numbers(text);
    let (word, column) = first.filter(|_| is_json(&fixed))?;
    Some(format!("`{word}` at byte {column} of the row; write null or a number (Python: allow_nan=False)"))
}

fn is_json(text: &str) -> bool {
    serde_json::from_str::<IgnoredAny>(text).is_ok()
}

/// Text with null instead of each NaN and Infinity outside strings, and the first of them with its byte, from 1.
fn with_null_numbers(text: &str) -> (String, Option<(&'static str, usize)>) {
    let (mut fixed, mut first) = (String::with_capacity(text.len()), None);
    let (mut in_string, mut escaped, mut skip) = (false, false, 0);
    for (at, c) in text.char_indices() {
        if at < skip {
            continue;
        }
        let word = ["NaN", "-NaN", "Infinity", "-Infinity"].into_iter().find(|word| text[at..].starts_with(word));
        if let Some(word) = word.filter(|_| !in_string) {
            fixed.push_str("null");
            first = first.or(Some((word, at + 1)));
            skip = at + word.len();
            continue;
        }
        in_string ^= c == '"' && !escaped;
        escaped = in_string && c == '\\' && !escaped;
        fixed.push(c);
    }
    (fixed, first)
}
