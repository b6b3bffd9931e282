//! Prompts as their packages bring them: OpenAI `messages`, MT-Bench `turns`, HumanEval `prompt`.

use crate::{
    config::UnknownRole,
    data::{
        chat::{Conversation, Role, Turn},
        input::{Inputs, Placed},
        row::{self, Row},
    },
};
use serde_json::{Map, Value};
use std::{
    collections::VecDeque,
    io,
    path::{Path, PathBuf},
};
use thiserror::Error;

/// Rows that are longer than this are no prompts.
pub const MAX_ROW_BYTES: u64 = 64 << 20;

/// One prompt, of one turn or more.
#[derive(Clone, Debug, PartialEq)]
pub struct Prompt {
    /// Line of the file, from 1.
    pub line: u64,
    pub category: Option<String>,
    /// Ends with what the assistant is to answer.
    pub conversation: Conversation,
    /// What the user says after each answer.
    pub then: VecDeque<String>,
}

/// Why prompts cannot be used.
#[derive(Debug, Error)]
pub enum PromptError {
    #[error("{} cannot be read ({source}); give a JSONL file of prompts", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{}, line {line}: {why}; write a row of `messages`, of `turns` (MT-Bench) or of `prompt` (HumanEval)", path.display())]
    Row { path: PathBuf, line: u64, why: String },
    #[error("{} holds no prompt; give a JSONL file with one in each line", .0.display())]
    Empty(PathBuf),
}

/// Reads at most `limit` prompts of a JSONL file, gzipped or not. A row that is no prompt is an error, never left out.
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
        for Placed { row, .. } in chunk.into_iter().take(limit - prompts.len()) {
            let line = row.line;
            let bytes = row.content.map_err(|size| format!("the row has {size} bytes"));
            let prompt = bytes.and_then(|bytes| parse(&bytes, row.open, line));
            prompts.push(prompt.map_err(|why| PromptError::Row { path: path.into(), line, why })?);
        }
    }
    if prompts.is_empty() { Err(PromptError::Empty(path.into())) } else { Ok(prompts) }
}

/// One row. `open`: the file ended in it.
pub fn parse(bytes: &[u8], open: bool, line: u64) -> Result<Prompt, String> {
    let value: Value = serde_json::from_slice(bytes).map_err(|error| match open {
        true => format!("the file ends inside the row ({error})"),
        false => format!("it is not valid JSON ({error})"),
    })?;
    let Value::Object(fields) = &value else { return Err("it is no JSON object".into()) };
    let category = fields.get("category").and_then(Value::as_str).map(String::from);
    let (conversation, then) = if let Some(turns) = fields.get("turns") {
        let mut turns = texts(turns)?;
        let first = turns.pop_front().ok_or("`turns` is empty")?;
        (asked(first), turns)
    } else if let Some(prompt) = fields.get("prompt") {
        let text = prompt.as_str().ok_or("`prompt` is no text")?;
        (asked(code_question(text)), VecDeque::new())
    } else {
        (messages(bytes, open)?, VecDeque::new())
    };
    if conversation.turns.iter().all(|turn| turn.content.trim().is_empty()) {
        return Err("it asks nothing".into());
    }
    Ok(Prompt { line, category, conversation, then })
}

/// A conversation up to the last thing that the assistant did not say itself.
fn messages(bytes: &[u8], open: bool) -> Result<Conversation, String> {
    let row = row::parse(bytes, open, UnknownRole::Reject, &mut Default::default());
    match row.map_err(|reject| format!("{} ({})", reject.reason, reject.detail))? {
        Row::Chat(mut conversation) => {
            while conversation.turns.last().is_some_and(|turn| turn.role == Role::Assistant) {
                conversation.turns.pop();
            }
            Ok(conversation)
        }
        Row::Tokens { .. } => Err("it holds token ids, which say not where an answer begins".into()),
    }
}

fn texts(value: &Value) -> Result<VecDeque<String>, String> {
    let list = value.as_array().ok_or("`turns` is no list")?;
    list.iter().map(|turn| turn.as_str().map(String::from).ok_or("`turns` holds what is no text".into())).collect()
}

/// HumanEval's rows are the beginning of a Python file, which a chat model has to be asked to complete.
fn code_question(code: &str) -> String {
    format!("Complete this Python function. Answer with the whole function in one code block.\n```python\n{code}\n```")
}

fn asked(content: String) -> Conversation {
    Conversation { turns: vec![turn(Role::User, content)], tools: None }
}

fn turn(role: Role, content: String) -> Turn {
    Turn { role, content, extra: Map::new() }
}

impl Prompt {
    /// Goes on with the next thing that the user says, where there is one.
    pub fn answered(mut self, answer: String) -> Option<Prompt> {
        let next = self.then.pop_front()?;
        self.conversation.turns.extend([turn(Role::Assistant, answer), turn(Role::User, next)]);
        Some(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(prompt: &Prompt) -> Vec<(&str, &str)> {
        prompt.conversation.turns.iter().map(|turn| (turn.role.as_str(), turn.content.as_str())).collect()
    }

    #[test]
    fn rows_of_all_three_kinds_are_prompts() {
        let row = br#"{"question_id": 81, "category": "writing", "turns": ["Write.", "Again."], "reference": []}"#;
        let first = parse(row, false, 1).unwrap();
        assert_eq!((said(&first), first.category.as_deref()), (vec![("user", "Write.")], Some("writing")));
        let second = first.answered("Done.".into()).unwrap();
        assert_eq!(said(&second), [("user", "Write."), ("assistant", "Done."), ("user", "Again.")]);
        assert_eq!(second.answered("Done.".into()), None);

        let row = br#"{"task_id": "HumanEval/0", "prompt": "def f(x):\n", "entry_point": "f", "test": ""}"#;
        let code = parse(row, false, 2).unwrap();
        assert!(said(&code)[0].1.contains("```python\ndef f(x):\n\n```"), "{code:?}");
        assert_eq!((code.category, code.line), (None, 2));

        let row = br#"{"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"},
                      {"role": "assistant", "content": "Hello"}], "category": "chat"}"#;
        let chat = parse(row, false, 3).unwrap();
        assert_eq!(said(&chat), [("system", "Be brief."), ("user", "Hi")]);
        assert_eq!(chat.category.as_deref(), Some("chat"));
    }

    #[test]
    fn what_is_no_prompt_is_an_error_that_says_why() {
        for (row, why) in [
            ("{", "not valid JSON"),
            ("[]", "no JSON object"),
            (r#"{"turns": []}"#, "empty"),
            (r#"{"turns": [1]}"#, "no text"),
            (r#"{"turns": "Hi"}"#, "no list"),
            (r#"{"prompt": 3}"#, "no text"),
            (r#"{"question": "Hi"}"#, "question"),
            (r#"{"messages": [{"role": "user", "content": "  "}]}"#, "asks nothing"),
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
        assert!(matches!(read(&folder.path().join("none"), None), Err(PromptError::Read { .. })));
    }
}
