//! System prompt, tools and functions that a row holds next to its turns.

use super::{RowNotes, kind, turn};
use crate::data::{
    change::Change,
    chat::{Role, Turn},
    reject::{Reason, Reject},
};
use serde_json::{Map, Value, json};

/// Keys of a system prompt.
const SYSTEM: [&str; 3] = ["system", "system_prompt", "system_message"];

/// Puts a system prompt next to the turns before them. A conversation that begins with a system turn keeps that one.
///
/// # Errors
/// A prompt that is no text.
pub fn add_system(row: &Map<String, Value>, turns: &mut Vec<Turn>, notes: &mut RowNotes) -> Result<(), Reject> {
    for key in SYSTEM {
        let Some(value) = row.get(key).filter(|value| !value.is_null()) else { continue };
        let text = turn::text(key, value)?;
        if text.trim().is_empty() {
            continue;
        }
        match turns.first() {
            Some(first) if first.role == Role::System => {
                if first.content.trim() != text.trim() {
                    notes.changes.insert(Change::SystemUnused);
                }
            }
            _ => {
                turns.insert(0, Turn { role: Role::System, content: text, extra: Map::new() });
                notes.changes.insert(Change::SystemBeside);
            }
        }
    }
    Ok(())
}

/// Parses `tools`, given as JSON or as a string of JSON; else `functions`, the older form.
///
/// # Errors
/// A value that is no list.
pub fn tools(row: &Map<String, Value>, notes: &mut RowNotes) -> Result<Option<Value>, Reject> {
    if let Some(tools) = list("tools", row.get("tools"))? {
        return Ok(Some(Value::Array(tools)));
    }
    let Some(functions) = list("functions", row.get("functions"))? else { return Ok(None) };
    notes.changes.insert(Change::FunctionsBeside);
    let tool = |function: Value| match function.get("function") {
        Some(_) => function,
        None => json!({"type": "function", "function": function}),
    };
    Ok(Some(functions.into_iter().map(tool).collect()))
}

fn list(key: &str, value: Option<&Value>) -> Result<Option<Vec<Value>>, Reject> {
    let bad = |detail: String| Err(Reason::BadTools.because(detail));
    match value {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Array(list)) if list.iter().all(Value::is_null) => Ok(None),
        Some(Value::Array(list)) => Ok(Some(list.clone())),
        Some(Value::String(text)) if text.trim().is_empty() => Ok(None),
        Some(Value::String(text)) => match serde_json::from_str(text) {
            Ok(Value::String(_)) => bad(format!("`{key}` is a string inside a string")),
            Ok(value) => list(key, Some(&value)),
            Err(error) => bad(format!("`{key}` is a string that is not JSON: {error}")),
        },
        Some(other) => bad(format!("`{key}` is {}", kind(other))),
    }
}
