//! Parser of a row: a conversation in one of the two common forms, or token ids with their loss mask.

use super::{
    chat::{Conversation, Role, Turn},
    reject::{Reason, Reject},
};
use crate::config::UnknownRole;
use serde_json::{Map, Value};
use std::fmt::Display;

/// Parsed content of a row.
#[derive(Clone, Debug, PartialEq)]
pub enum ParsedRow {
    Chat(Conversation),
    /// Token ids and a loss mask of 0 and 1, of equal length and not empty.
    Tokens {
        ids: Vec<i32>,
        mask: Vec<u8>,
    },
}

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

/// Parses a row. `truncated` states that the file ended inside it. `roles` is filled even if the row is rejected.
///
/// # Errors
/// A reject with its reason.
pub fn parse(bytes: &[u8], truncated: bool, policy: UnknownRole, roles: &mut RoleCounts) -> Result<ParsedRow, Reject> {
    let text = std::str::from_utf8(bytes).map_err(|error| match error.error_len() {
        None if truncated => Reason::Truncated.because("the file ends inside a character"),
        _ => Reason::InvalidUtf8.because(format!("byte {} of the row starts no character", error.valid_up_to())),
    })?;
    let value: Value = serde_json::from_str(text).map_err(|error| match truncated && error.is_eof() {
        true if bytes.is_empty() => {
            Reason::Truncated.because("the file ends before another row or the end of the array")
        }
        true => Reason::Truncated.because(format!("{} bytes of the row, then the file ends", bytes.len())),
        false => Reason::InvalidJson.because(format!("in the row: {error}")),
    })?;
    let Value::Object(row) = value else {
        return Err(Reason::NotAnObject.because(format!("it is {}", kind(&value))));
    };
    if row.contains_key("input_ids") {
        return tokens(&row);
    }
    let (key, turns) = ["messages", "conversations"]
        .iter()
        .find_map(|key| Some((key, row.get(*key)?)))
        .ok_or_else(|| Reason::NoConversation.because(format!("its keys are {}", names(&row))))?;
    let turns = match turns {
        Value::Array(turns) => turns,
        Value::Null => return Err(Reason::Empty.because(format!("`{key}` is null"))),
        other => return Err(Reason::NoConversation.because(format!("`{key}` is {}, not a list", kind(other)))),
    };
    conversation(turns, row.get("tools"), policy, roles).map(ParsedRow::Chat)
}

fn conversation(
    list: &[Value],
    tools: Option<&Value>,
    policy: UnknownRole,
    roles: &mut RoleCounts,
) -> Result<Conversation, Reject> {
    if list.is_empty() {
        return Err(Reason::Empty.because("the list of turns is empty"));
    }
    let mut turns = Vec::with_capacity(list.len());
    for (i, value) in list.iter().enumerate() {
        turns.extend(turn(value, policy, roles).map_err(|reject| reject.reason.because(at(i, &reject.detail)))?);
    }
    match turns.iter().position(|turn| turn.role != Role::System) {
        None if turns.is_empty() => Err(Reason::Empty.because("all turns have unknown roles and were skipped")),
        None => Err(Reason::NothingSupervised.because("there are only system turns")),
        Some(first) if turns[first].role == Role::Assistant => {
            Err(Reason::AssistantFirst.because(at(first, &"there is no user turn before it")))
        }
        Some(_) => Ok(Conversation { turns, tools: self::tools(tools)? }),
    }
}

/// Parses a turn; `None` if its role is unknown and the policy skips such turns.
fn turn(value: &Value, policy: UnknownRole, roles: &mut RoleCounts) -> Result<Option<Turn>, Reject> {
    let Value::Object(turn) = value else {
        return Err(Reason::BadTurn.because(format!("it is {}, not an object", kind(value))));
    };
    let (role_key, content_key) = if turn.contains_key("role") { ("role", "content") } else { ("from", "value") };
    let name = match turn.get(role_key) {
        Some(Value::String(name)) => name,
        Some(other) => return Err(Reason::BadTurn.because(format!("`{role_key}` is {}", kind(other)))),
        None => return Err(Reason::BadTurn.because(format!("it has neither `role` nor `from`, but {}", names(turn)))),
    };
    let lower = name.trim().to_ascii_lowercase();
    let Some(index) = ROLES.iter().position(|(known, _)| *known == lower) else {
        let shown: String = name.chars().take(40).collect();
        roles.unknown.push(shown.clone());
        return match policy {
            UnknownRole::Reject => Err(Reason::UnknownRole.because(format!("{shown:?}"))),
            UnknownRole::Skip => Ok(None),
        };
    };
    roles.known[index] += 1;
    let content = match turn.get(content_key) {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => parts.iter().map(part).collect::<Result<_, _>>()?,
        // OpenAI's form of a turn that only calls tools.
        None | Some(Value::Null) if turn.get("tool_calls").is_some_and(|calls| !calls.is_null()) => String::new(),
        Some(Value::Null) => return Err(Reason::NullContent.because(format!("`{content_key}` is null"))),
        None => return Err(Reason::NullContent.because(format!("there is no `{content_key}`"))),
        Some(other) => {
            return Err(Reason::UnsupportedContent.because(format!("`{content_key}` is {}", kind(other))));
        }
    };
    let extra = turn.iter().filter(|(key, _)| *key != role_key && *key != content_key);
    let extra = extra.map(|(key, value)| (key.clone(), value.clone())).collect();
    Ok(Some(Turn { role: ROLES[index].1, content, extra }))
}

/// Text of one part of a multi-part content.
fn part(value: &Value) -> Result<&str, Reject> {
    match (value["type"].as_str(), value["text"].as_str()) {
        (Some("text"), Some(text)) => Ok(text),
        (Some("text"), None) => Err(Reason::UnsupportedContent.because("a part of type \"text\" has no `text`")),
        (Some(other), _) => Err(Reason::UnsupportedContent.because(format!("a part has the type {other:?}"))),
        (None, _) => Err(Reason::UnsupportedContent.because("a part has no `type`")),
    }
}

/// Parses a list of tools, given as JSON or as a string of JSON.
fn tools(value: Option<&Value>) -> Result<Option<Value>, Reject> {
    match value {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Array(list)) if list.is_empty() => Ok(None),
        Some(list @ Value::Array(_)) => Ok(Some(list.clone())),
        Some(Value::String(text)) if text.trim().is_empty() => Ok(None),
        Some(Value::String(text)) => match serde_json::from_str(text) {
            Ok(Value::String(_)) => Err(Reason::BadTools.because("`tools` is a string inside a string")),
            Ok(value) => tools(Some(&value)),
            Err(error) => Err(Reason::BadTools.because(format!("`tools` is a string that is not JSON: {error}"))),
        },
        Some(other) => Err(Reason::BadTools.because(format!("`tools` is {}", kind(other)))),
    }
}

fn tokens(row: &Map<String, Value>) -> Result<ParsedRow, Reject> {
    let list = |key: &str| match row.get(key) {
        Some(Value::Array(list)) => Ok(list),
        Some(other) => Err(Reason::BadTokens.because(format!("`{key}` is {}, not a list", kind(other)))),
        None => Err(Reason::MaskLength.because(format!("there is no `{key}`"))),
    };
    let (ids, mask) = (list("input_ids")?, list("loss_mask")?);
    if ids.len() != mask.len() {
        return Err(Reason::MaskLength.because(format!("{} ids and {} mask values", ids.len(), mask.len())));
    }
    if ids.is_empty() {
        return Err(Reason::Empty.because("`input_ids` is empty"));
    }
    let bad = |key: &str, i: usize, value: &Value| {
        // A list instead of a number would fill the rejects file.
        let shown: String = value.to_string().chars().take(40).collect();
        Reason::BadTokens.because(format!("`{key}` has {shown} at index {i}"))
    };
    let id = |(i, value): (usize, &Value)| {
        let number = value.as_i64().ok_or_else(|| bad("input_ids", i, value))?;
        i32::try_from(number).map_err(|_| Reason::TokenRange.because(format!("id {number} at index {i}")))
    };
    let bit = |(i, value): (usize, &Value)| match (value.as_bool(), value.as_f64()) {
        (Some(false), _) | (_, Some(0.0)) => Ok(0),
        (Some(true), _) | (_, Some(1.0)) => Ok(1),
        _ => Err(bad("loss_mask", i, value)),
    };
    Ok(ParsedRow::Tokens {
        ids: ids.iter().enumerate().map(id).collect::<Result<_, _>>()?,
        mask: mask.iter().enumerate().map(bit).collect::<Result<_, _>>()?,
    })
}

fn at(turn: usize, detail: &dyn Display) -> String {
    format!("turn {}: {detail}", turn + 1)
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// First keys of an object, for a message.
fn names(object: &Map<String, Value>) -> String {
    let names: Vec<_> =
        object.keys().take(8).map(|key| format!("{:?}", key.chars().take(40).collect::<String>())).collect();
    format!("[{}{}]", names.join(", "), if object.len() > 8 { ", ..." } else { "" })
}
