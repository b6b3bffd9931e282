//! Reader of prompt files: OpenAI `messages`, MT-Bench `turns`, HumanEval `prompt`.

use crate::data::{
    chat::{Conversation, Role, Turn},
    input::{InputRow, Inputs},
    row::{self, ParsedRow, RowPolicy},
    split::RowContent,
};
use serde_json::{Map, Value};
use std::{
    collections::VecDeque,
    io,
    path::{Path, PathBuf},
};
use thiserror::Error;

/// Limit on the size of a row.
pub const MAX_ROW_BYTES: u64 = 64 << 20;

/// A prompt of one or more turns.
#[derive(Clone, Debug, PartialEq)]
pub struct Prompt {
    /// Line of the file, from 1.
    pub line: u64,
    pub category: Option<String>,
    /// Turns up to the first answer.
    pub conversation: Conversation,
    /// User turn after each answer.
    pub then: VecDeque<String>,
}

/// Failure to read prompts.
#[derive(Debug, Error)]
pub enum PromptError {
    #[error("{} cannot be read ({source}); give a JSONL file of prompts", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{}, line {line}: {why}; write a row of `messages`, of `turns` (MT-Bench) or of `prompt` (HumanEval)", path.display())]
    Row { path: PathBuf, line: u64, why: String },
    #[error("{} has no prompt; give a JSONL file with one in each line", .0.display())]
    Empty(PathBuf),
}

/// Reads at most `limit` prompts of a JSONL file, gzipped or not.
///
/// # Errors
/// An unreadable or empty file, or a row that is not a prompt.
pub fn read(path: &Path, limit: Option<usize>) -> Result<Vec<Prompt>, PromptError> {
    let limit = limit.unwrap_or(usize::MAX);
    let mut inputs = Inputs::new(vec![path.into()], MAX_ROW_BYTES);
    let mut prompts = Vec::new();
    while prompts.len() < limit {
        let chunk =
            inputs.read_chunk().map_err(|error| PromptError::Read { path: error.path, source: error.source })?;
        if chunk.is_empty() {
            break;
        }
        for InputRow { row, .. } in chunk.into_iter().take(limit - prompts.len()) {
            let line = row.line;
            let prompt = match &row.content {
                RowContent::Bytes(bytes) => parse(bytes, row.truncated, line),
                RowContent::TooLarge { bytes } => Err(format!("the row has {bytes} bytes")),
            };
            prompts.push(prompt.map_err(|why| PromptError::Row { path: path.into(), line, why })?);
        }
    }
    if prompts.is_empty() { Err(PromptError::Empty(path.into())) } else { Ok(prompts) }
}

/// Parses one row. `truncated` states that the file ended inside it.
///
/// # Errors
/// The reason for which the row is not a prompt.
pub fn parse(bytes: &[u8], truncated: bool, line: u64) -> Result<Prompt, String> {
    let value: Value = serde_json::from_slice(bytes).map_err(|error| match truncated {
        true => format!("the file ends inside the row ({error})"),
        false => format!("it is not valid JSON ({error})"),
    })?;
    let Value::Object(fields) = &value else { return Err("it is not a JSON object".into()) };
    let category = fields.get("category").and_then(Value::as_str).map(String::from);
    let (conversation, then) = if let Some(turns) = fields.get("turns") {
        let mut turns = texts(turns)?;
        let first = turns.pop_front().ok_or("`turns` is empty")?;
        (user_conversation(first), turns)
    } else if let Some(prompt) = fields.get("prompt") {
        let text = prompt.as_str().ok_or("`prompt` is not a string")?;
        (user_conversation(code_prompt(text)), VecDeque::new())
    } else {
        (messages(bytes, truncated)?, VecDeque::new())
    };
    if conversation.turns.iter().all(|turn| turn.content.trim().is_empty()) {
        return Err("it has no text".into());
    }
    Ok(Prompt { line, category, conversation, then })
}

/// Parses a conversation and drops the assistant's final turns.
fn messages(bytes: &[u8], truncated: bool) -> Result<Conversation, String> {
    let row = row::parse(bytes, truncated, RowPolicy::default(), &mut Default::default());
    match row.map_err(|reject| format!("{} ({})", reject.reason, reject.detail))? {
        ParsedRow::Chat(mut conversation) => {
            while conversation.turns.last().is_some_and(|turn| turn.role == Role::Assistant) {
                conversation.turns.pop();
            }
            Ok(conversation)
        }
        ParsedRow::Tokens { .. } => Err("it has token ids, which do not mark where an answer begins".into()),
    }
}

fn texts(value: &Value) -> Result<VecDeque<String>, String> {
    let list = value.as_array().ok_or("`turns` is not a list")?;
    list.iter()
        .map(|turn| turn.as_str().map(String::from).ok_or("`turns` has an element that is not a string".into()))
        .collect()
}

/// Prompt for a HumanEval row, the start of a Python file, that asks a chat model to complete it.
fn code_prompt(code: &str) -> String {
    format!("Complete this Python function. Answer with the whole function in one code block.\n```python\n{code}\n```")
}

fn user_conversation(content: String) -> Conversation {
    Conversation { turns: vec![turn(Role::User, content)], tools: None }
}

fn turn(role: Role, content: String) -> Turn {
    Turn { role, content, extra: Map::new() }
}

impl Prompt {
    /// Adds an answer and the next user turn; returns `None` if there is no further turn.
    pub fn answered(mut self, answer: String) -> Option<Prompt> {
        let next = self.then.pop_front()?;
        self.conversation.turns.extend([turn(Role::Assistant, answer), turn(Role::User, next)]);
        Some(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turns(prompt: &Prompt) -> Vec<(&str, &str)> {
        prompt.conversation.turns.iter().map(|turn| (turn.role.as_str(), turn.content.as_str())).collect()
    }

    #[test]
    fn rows_of_all_three_forms_are_prompts() {
        let row = br#"{"question_id": 81, "category": "writing", "turns": ["Write.", "Again."], "reference": []}"#;
        let first = parse(row, false, 1).unwrap();
        assert_eq!((turns(&first), first.category.as_deref()), (vec![("user", "Write.")], Some("writing")));
        let second = first.answered("Done.".into()).unwrap();
        assert_eq!(turns(&second), [("user", "Write."), ("assistant", "Done."), ("user", "Again.")]);
        assert_eq!(second.answered("Done.".into()), None);

        let row = br#"{"task_id": "HumanEval/0", "prompt": "def f(x):\n", "entry_point": "f", "test": ""}"#;
        let code = parse(row, false, 2).unwrap();
        assert!(turns(&code)[0].1.contains("```python\ndef f(x):\n\n```"), "{code:?}");
        assert_eq!((code.category, code.line), (None, 2));

        let row = br#"{"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"},
                      {"role": "assistant", "content": "Hello"}], "category": "chat"}"#;
        let chat = parse(row, false, 3).unwrap();
        assert_eq!(turns(&chat), [("system", "Be brief."), ("user", "Hi")]);
        assert_eq!(chat.category.as_deref(), Some("chat"));
    }

    #[test]
    fn a_row_without_a_prompt_is_an_error_with_a_reason() {
        for (row, why) in [
            ("{", "not valid JSON"),
            ("[]", "not a JSON object"),
            (r#"{"turns": []}"#, "empty"),
            (r#"{"turns": [1]}"#, "not a string"),
            (r#"{"turns": "Hi"}"#, "not a list"),
            (r#"{"prompt": 3}"#, "not a string"),
            (r#"{"question": "Hi"}"#, "question"),
            (r#"{"messages": [{"role": "user", "content": "  "}]}"#, "has no text"),
            (r#"{"input_ids": [1], "loss_mask": [1]}"#, "token ids"),
        ] {
            let found = parse(row.as_bytes(), false, 1).unwrap_err();
            assert!(found.contains(why), "{row}: {found}");
        }
        assert!(parse(b"{\"turns\"", true, 1).unwrap_err().contains("the file ends"));
    }

    #[test]
    fn files_are_read_up_to_the_limit_and_the_bad_line_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("prompts.jsonl");
        std::fs::write(&path, "{\"prompt\": \"a\"}\n\n{\"prompt\": \"b\"}\n{\"promt\": \"c\"}\n").unwrap();
        let lines: Vec<_> = read(&path, Some(2)).unwrap().iter().map(|prompt| prompt.line).collect();
        assert_eq!(lines, [1, 3]);
        let error = read(&path, None).unwrap_err().to_string();
        assert!(error.contains("prompts.jsonl, line 4: ") && error.contains("promt"), "{error}");
        std::fs::write(&path, "\n").unwrap();
        assert!(matches!(read(&path, None), Err(PromptError::Empty(_))));
        std::fs::write(&path, "PAR1").unwrap();
        assert!(read(&path, None).unwrap_err().to_string().contains("(it is a Parquet file"));
        assert!(matches!(read(&folder.path().join("none"), None), Err(PromptError::Read { .. })));
    }
}
