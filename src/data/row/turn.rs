//! Parser of one turn: role, text, further fields, and the weight of the turn.

use super::{RowNotes, kind, names};
use crate::{
    config::UnknownRole,
    data::{
        change::Change,
        chat::{Role, Turn, Weight},
        reject::{Reason, Reject},
    },
};
use serde_json::{Map, Value};

/// Known names of roles in lower case: OpenAI's, and those found in ShareGPT files.
pub const ROLES: [(&str, Role); 15] = [
    ("system", Role::System),
    ("developer", Role::System),
    ("user", Role::User),
    ("human", Role::User),
    ("assistant", Role::Assistant),
    ("gpt", Role::Assistant),
    ("chatgpt", Role::Assistant),
    ("bing", Role::Assistant),
    ("bard", Role::Assistant),
    ("model", Role::Assistant),
    ("tool", Role::Tool),
    ("function", Role::Tool),
    ("observation", Role::Tool),
    ("function_response", Role::Tool),
    ("ipython", Role::Tool),
];

/// Turns of a row by role, for the report.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RoleCounts {
    /// Number of turns by index in [`ROLES`].
    pub known: [u64; ROLES.len()],
    /// Unknown names, one for each turn.
    pub unknown: Vec<String>,
}

/// Names of an answer's reasoning. Templates read the first; gpt-oss reads the second.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// Parses a turn; `None` if its role is unknown and the policy skips such turns.
///
/// # Errors
/// A reject with the key and the value found.
pub fn parse(value: &Value, policy: UnknownRole, notes: &mut RowNotes) -> Result<Option<Turn>, Reject> {
    let Value::Object(turn) = value else {
        return Err(Reason::BadTurn.because(format!("it is {}, not an object", kind(value))));
    };
    let present = |key: &str| turn.get(key).filter(|value| !value.is_null());
    // Files of both forms that were joined have all four keys, two of them null.
    let (role_key, content_key, other_key) =
        match present("role").or(turn.get("role").filter(|_| present("from").is_none())) {
            Some(_) => ("role", "content", "value"),
            None => ("from", "value", "content"),
        };
    let content_key =
        if present(content_key).is_none() && present(other_key).is_some() { other_key } else { content_key };
    let name = match turn.get(role_key) {
        Some(Value::String(name)) => name,
        Some(other) => return Err(Reason::BadTurn.because(format!("`{role_key}` is {}", kind(other)))),
        None => return Err(Reason::BadTurn.because(format!("it has neither `role` nor `from`, but {}", names(turn)))),
    };
    let lower = name.trim().to_ascii_lowercase();
    let Some(index) = ROLES.iter().position(|(known, _)| *known == lower) else {
        let shown: String = name.chars().take(40).collect();
        notes.roles.unknown.push(shown.clone());
        return match policy {
            UnknownRole::Reject => Err(Reason::UnknownRole.because(format!("{shown:?}"))),
            UnknownRole::Skip => Ok(None),
        };
    };
    notes.roles.known[index] += 1;
    let called = |key: &str| present(key).is_some_and(|calls| calls.as_array().is_none_or(|calls| !calls.is_empty()));
    let content = match present(content_key) {
        Some(value) => text(content_key, value)?,
        // OpenAI's form of a turn that only calls tools.
        None if called("tool_calls") || called("function_call") => String::new(),
        None if turn.contains_key(content_key) => {
            return Err(Reason::NullContent.because(format!("`{content_key}` is null")));
        }
        None => return Err(Reason::NullContent.because(format!("there is no `{content_key}`, but {}", names(turn)))),
    };
    let keys = ["role", "from", "content", "value"];
    let extra = turn.iter().filter(|(key, value)| !keys.contains(&key.as_str()) && !value.is_null());
    let mut turn =
        Turn { role: ROLES[index].1, content, extra: extra.map(|(key, value)| (key.clone(), value.clone())).collect() };
    alias_reasoning(&mut turn.extra);
    if turn.role == Role::Assistant {
        weigh(&turn, notes)?;
        check_arguments(&turn)?;
    }
    Ok(Some(turn))
}

/// Text of a content: a string, or a list of parts of text.
///
/// # Errors
/// Content other than text.
pub fn text(key: &str, value: &Value) -> Result<String, Reject> {
    match value {
        Value::String(text) => Ok(text.clone()),
        Value::Array(parts) => parts.iter().map(part).collect(),
        other => Err(Reason::UnsupportedContent.because(format!("`{key}` is {}", kind(other)))),
    }
}

/// Text of one part of a multi-part content.
fn part(value: &Value) -> Result<&str, Reject> {
    match (value["type"].as_str(), value["text"].as_str()) {
        (Some("text" | "input_text" | "output_text"), Some(text)) => Ok(text),
        (Some("text"), None) => Err(Reason::UnsupportedContent.because("a part of type \"text\" has no `text`")),
        (Some(other), _) => Err(Reason::UnsupportedContent.because(format!("a part has the type {other:?}"))),
        (None, _) => Err(Reason::UnsupportedContent.because("a part has no `type`")),
    }
}

/// Gives the reasoning of a turn the names that templates read, as transformers does.
fn alias_reasoning(extra: &mut Map<String, Value>) {
    let blank = |value: &&Value| value.as_str().is_some_and(|text| text.trim().is_empty());
    let found = REASONING.iter().filter_map(|key| extra.get(*key));
    let Some(reasoning) = found.clone().find(|value| !blank(value)).or_else(|| found.clone().next()).cloned() else {
        return;
    };
    if !extra.contains_key("thinking") {
        extra.insert("thinking".into(), reasoning.clone());
    }
    extra.insert("reasoning_content".into(), reasoning);
}

/// Notes a turn that is context only, and refuses a weight that means nothing.
fn weigh(turn: &Turn, notes: &mut RowNotes) -> Result<(), Reject> {
    match turn.weight() {
        Ok(Weight::One) => {}
        Ok(Weight::Zero) => drop(notes.changes.insert(Change::NotSupervised)),
        Ok(Weight::Other) => drop(notes.changes.insert(Change::WeightIsOne)),
        Err((key, value)) => {
            let shown: String = value.to_string().chars().take(40).collect();
            return Err(Reason::BadTurn.because(format!("`{key}` is {shown}, expected 0, 1, true, false or null")));
        }
    }
    Ok(())
}

/// Refuses tool arguments whose text is not JSON: engines parse it before a template sees it.
fn check_arguments(turn: &Turn) -> Result<(), Reject> {
    let calls = turn.extra.get("tool_calls").and_then(Value::as_array).into_iter().flatten();
    for (i, call) in calls.enumerate() {
        let function = call.get("function").unwrap_or(call);
        if let Some(Value::String(text)) = function.get("arguments")
            && !text.trim().is_empty()
            && let Err(error) = serde_json::from_str::<Value>(text)
        {
            return Err(
                Reason::BadToolArguments.because(format!("the arguments of tool call {} are no JSON: {error}", i + 1))
            );
        }
    }
    Ok(())
}
