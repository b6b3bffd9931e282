//! What a row says: a conversation in one of the two common forms, or tokens with their loss mask.

use super::{
    chat::{Conversation, Role, Turn},
    reject::{Reason, Reject},
};
use crate::config::UnknownRole;
use serde_json::{Map, Value};
use std::fmt::Display;

/// A row that could be read.
#[derive(Clone, Debug, PartialEq)]
pub enum Row {
    Chat(Conversation),
    /// Token ids and a loss mask of 0 and 1, equally long and not empty.
    Tokens {
        ids: Vec<i32>,
        mask: Vec<u8>,
    },
}

/// The names of roles that are known, in small letters: OpenAI's, and those found in ShareGPT files.
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

/// The roles that were met in a row, for the closing table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RolesMet {
    /// Turns by their place in [`ROLES`].
    pub known: [u64; ROLES.len()],
    /// Names that are not known, one for each turn.
    pub unknown: Vec<String>,
}

/// Reads a row. `open`: the file ended in it. What roles it has is noted even if it is rejected.
pub fn parse(bytes: &[u8], open: bool, policy: UnknownRole, roles: &mut RolesMet) -> Result<Row, Reject> {
    let text = std::str::from_utf8(bytes).map_err(|error| match error.error_len() {
        None if open => Reason::Truncated.because("the file ends inside a character"),
        _ => Reason::InvalidUtf8.because(format!("byte {} of the row begins no character", error.valid_up_to())),
    })?;
    let value: Value = serde_json::from_str(text).map_err(|error| match open && error.is_eof() {
        true if bytes.is_empty() => {
            Reason::Truncated.because("the file ends where another row or its end should follow")
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
    conversation(turns, row.get("tools"), policy, roles).map(Row::Chat)
}

fn conversation(
    list: &[Value],
    tools: Option<&Value>,
    policy: UnknownRole,
    roles: &mut RolesMet,
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
            Err(Reason::AssistantFirst.because(at(first, &"there is nothing that it answers")))
        }
        Some(_) => Ok(Conversation { turns, tools: self::tools(tools)? }),
    }
}

/// A turn, or `None` where its role is not known and such turns are skipped.
fn turn(value: &Value, policy: UnknownRole, roles: &mut RolesMet) -> Result<Option<Turn>, Reject> {
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
    let Some(place) = ROLES.iter().position(|(known, _)| *known == lower) else {
        let shown: String = name.chars().take(40).collect();
        roles.unknown.push(shown.clone());
        return match policy {
            UnknownRole::Reject => Err(Reason::UnknownRole.because(format!("{shown:?}"))),
            UnknownRole::Skip => Ok(None),
        };
    };
    roles.known[place] += 1;
    let content = match turn.get(content_key) {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => parts.iter().map(part).collect::<Result<_, _>>()?,
        // As OpenAI writes a turn that only calls tools.
        None | Some(Value::Null) if turn.get("tool_calls").is_some_and(|calls| !calls.is_null()) => String::new(),
        Some(Value::Null) => return Err(Reason::NullContent.because(format!("`{content_key}` is null"))),
        None => return Err(Reason::NullContent.because(format!("there is no `{content_key}`"))),
        Some(other) => {
            return Err(Reason::UnsupportedContent.because(format!("`{content_key}` is {}", kind(other))));
        }
    };
    let extra = turn.iter().filter(|(key, _)| *key != role_key && *key != content_key);
    let extra = extra.map(|(key, value)| (key.clone(), value.clone())).collect();
    Ok(Some(Turn { role: ROLES[place].1, content, extra }))
}

/// The text of one part of a content in parts.
fn part(value: &Value) -> Result<&str, Reject> {
    match (value["type"].as_str(), value["text"].as_str()) {
        (Some("text"), Some(text)) => Ok(text),
        (Some("text"), None) => Err(Reason::UnsupportedContent.because("a part of type \"text\" has no `text`")),
        (Some(other), _) => Err(Reason::UnsupportedContent.because(format!("a part has the type {other:?}"))),
        (None, _) => Err(Reason::UnsupportedContent.because("a part has no `type`")),
    }
}

/// A list of tools, as it is or written as a string of JSON.
fn tools(value: Option<&Value>) -> Result<Option<Value>, Reject> {
    match value {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Array(list)) if list.is_empty() => Ok(None),
        Some(list @ Value::Array(_)) => Ok(Some(list.clone())),
        Some(Value::String(text)) if text.trim().is_empty() => Ok(None),
        Some(Value::String(text)) => match serde_json::from_str(text) {
            Ok(Value::String(_)) => Err(Reason::BadTools.because("`tools` is a string in a string")),
            Ok(value) => tools(Some(&value)),
            Err(error) => Err(Reason::BadTools.because(format!("`tools` is a string that is not JSON: {error}"))),
        },
        Some(other) => Err(Reason::BadTools.because(format!("`tools` is {}", kind(other)))),
    }
}

fn tokens(row: &Map<String, Value>) -> Result<Row, Reject> {
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
        // A whole list in the place of a number would fill the rejects file.
        let shown: String = value.to_string().chars().take(40).collect();
        Reason::BadTokens.because(format!("`{key}` has {shown} at place {i}"))
    };
    let id = |(i, value): (usize, &Value)| {
        let number = value.as_i64().ok_or_else(|| bad("input_ids", i, value))?;
        i32::try_from(number).map_err(|_| Reason::TokenRange.because(format!("id {number} at place {i}")))
    };
    let bit = |(i, value): (usize, &Value)| match (value.as_bool(), value.as_f64()) {
        (Some(false), _) | (_, Some(0.0)) => Ok(0),
        (Some(true), _) | (_, Some(1.0)) => Ok(1),
        _ => Err(bad("loss_mask", i, value)),
    };
    Ok(Row::Tokens {
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

/// The first keys of an object.
fn names(object: &Map<String, Value>) -> String {
    let names: Vec<_> =
        object.keys().take(8).map(|key| format!("{:?}", key.chars().take(40).collect::<String>())).collect();
    format!("[{}{}]", names.join(", "), if object.len() > 8 { ", ..." } else { "" })
}
