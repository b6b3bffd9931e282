//! Parser of a row: a conversation in one of the two common forms, or token ids with their loss mask.

mod beside;
mod fault;
mod tokens;
mod turn;

use super::{
    change::Change,
    chat::{Conversation, Role, Turn},
    reject::{Reason, Reject},
};
use crate::config::{LeadingAssistant, UnknownRole};
use serde_json::{Map, Value};
use std::collections::BTreeSet;

pub use turn::{ROLES, RoleCounts};

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

/// Settings of the parser.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowPolicy {
    pub unknown_role: UnknownRole,
    pub leading_assistant: LeadingAssistant,
}

impl Default for RowPolicy {
    fn default() -> RowPolicy {
        RowPolicy { unknown_role: UnknownRole::Reject, leading_assistant: LeadingAssistant::Drop }
    }
}

/// Facts about a row for the report.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RowNotes {
    /// Turns by role, also those of a rejected row.
    pub roles: RoleCounts,
    pub changes: BTreeSet<Change>,
    /// Names of metadata that the template does not show.
    pub unseen: BTreeSet<String>,
}

/// Keys of a conversation.
const CONVERSATIONS: [&str; 2] = ["messages", "conversations"];

/// Parses a row. `truncated` states that the file ended inside it. `notes` is filled even if the row is rejected.
///
/// A null is an absent key at the top of the row and in a turn: formats with columns fill each row with the keys of all rows.
///
/// # Errors
/// A reject with its reason.
pub fn parse(bytes: &[u8], truncated: bool, policy: RowPolicy, notes: &mut RowNotes) -> Result<ParsedRow, Reject> {
    let text = std::str::from_utf8(bytes).map_err(|error| match error.error_len() {
        None if truncated => Reason::Truncated.because("the file ends inside a character"),
        _ => Reason::InvalidUtf8.because(format!(
            "byte {} of the row starts no character; convert the file to UTF-8, for example with iconv -f latin1 -t UTF-8",
            error.valid_up_to()
        )),
    })?;
    // Files with a byte order mark were joined.
    let text = text.trim_start_matches('\u{feff}');
    let value: Value = serde_json::from_str(text).map_err(|error| match truncated && error.is_eof() {
        true if bytes.is_empty() => {
            Reason::Truncated.because("the file ends before another row or the end of the array")
        }
        true => Reason::Truncated.because(format!("{} bytes of the row, then the file ends", bytes.len())),
        false => fault::invalid_json(text, &error),
    })?;
    let row = match value {
        Value::Object(row) => row,
        other => return Err(fault::not_an_object(&other)),
    };
    let list = conversation_list(&row);
    if let Some(ids) = row.get("input_ids").filter(|ids| !ids.is_null()) {
        let is_empty = ids.as_array().is_some_and(Vec::is_empty);
        if !(is_empty && matches!(&list, Some(Ok(_)))) {
            return tokens::parse(&row);
        }
    }
    let turns = list.unwrap_or_else(|| Err(fault::no_conversation(&row)))?;
    conversation(&turns, &row, policy, notes).map(ParsedRow::Chat)
}

/// List of turns of a row, or the reason for which none can be used; `None` if no key of a conversation is present.
fn conversation_list(row: &Map<String, Value>) -> Option<Result<Vec<Value>, Reject>> {
    let mut failed = None;
    for key in CONVERSATIONS {
        let found = match row.get(key) {
            None => continue,
            Some(Value::Array(turns)) if turns.is_empty() => {
                Err(Reason::Empty.because(format!("the list of turns `{key}` is empty")))
            }
            Some(Value::Array(turns)) => Ok(turns.clone()),
            Some(Value::Null) => Err(Reason::Empty.because(format!("`{key}` is null"))),
            // Tables of plain columns hold a list as its JSON text.
            Some(Value::String(text)) => match serde_json::from_str(text) {
                Ok(Value::Array(turns)) if !turns.is_empty() => Ok(turns),
                _ => Err(fault::not_a_list(key, &row[key])),
            },
            Some(other) => Err(fault::not_a_list(key, other)),
        };
        match (found, &failed) {
            (Ok(turns), _) => return Some(Ok(turns)),
            // A wrong value explains more than an empty one.
            (Err(Reject { reason: Reason::Empty, .. }), Some(_)) => {}
            (Err(reject), _) => failed = Some(reject),
        }
    }
    failed.map(Err)
}

fn conversation(
    list: &[Value],
    row: &Map<String, Value>,
    policy: RowPolicy,
    notes: &mut RowNotes,
) -> Result<Conversation, Reject> {
    let mut turns = Vec::with_capacity(list.len());
    for (i, value) in list.iter().enumerate() {
        let parsed = turn::parse(value, policy.unknown_role, notes);
        turns.extend(parsed.map_err(|reject| reject.reason.because(at(i, &reject.detail)))?);
    }
    if turns.is_empty() {
        return Err(Reason::Empty.because("all turns have unknown roles and were skipped"));
    }
    drop_leading_assistant(&mut turns, policy.leading_assistant, notes)?;
    beside::add_system(row, &mut turns, notes)?;
    if turns.iter().all(|turn| turn.role == Role::System) {
        return Err(Reason::NothingSupervised.because("there are only system turns"));
    }
    Ok(Conversation { turns, tools: beside::tools(row, notes)? })
}

/// Removes assistant turns, and the results of their tool calls, before the first user turn.
fn drop_leading_assistant(turns: &mut Vec<Turn>, policy: LeadingAssistant, notes: &mut RowNotes) -> Result<(), Reject> {
    let first = turns.iter().position(|turn| turn.role != Role::System);
    let Some(first) = first.filter(|&first| turns[first].role == Role::Assistant) else { return Ok(()) };
    let answers = |turn: &Turn| matches!(turn.role, Role::Assistant | Role::Tool | Role::System);
    let end = turns.iter().position(|turn| !answers(turn)).unwrap_or(turns.len());
    if policy == LeadingAssistant::Reject {
        return Err(Reason::AssistantFirst.because(at(first, "there is no user turn before it")));
    }
    if !turns[end..].iter().any(|turn| turn.role == Role::Assistant) {
        return Err(
            Reason::AssistantFirst.because(at(first, "there is no user turn before it, and no answer after one"))
        );
    }
    let mut index = 0;
    turns.retain(|turn| {
        index += 1;
        turn.role == Role::System || index > end
    });
    notes.changes.insert(Change::LeadingAssistant);
    Ok(())
}

fn at(turn: usize, detail: &str) -> String {
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
