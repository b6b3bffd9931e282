//! Reader of prompts: conversations of the input files without their answers, and reasons to skip a row.

use crate::{
    data::{
        Reason,
        chat::{Role, Turn},
        input::{InputRow, Inputs, ReadError},
        row::{self, ParsedRow, RowPolicy},
    },
    eval,
};
use serde::Deserialize;
use serde_json::Value;
use std::{collections::VecDeque, fmt, path::PathBuf};

/// A conversation to be answered.
#[derive(Clone, Debug, PartialEq)]
pub struct PromptConversation {
    /// Index among the rows of all files, from 0.
    pub row: u64,
    /// Index of its file, and the line in it, from 1.
    pub file: usize,
    pub line: u64,
    pub category: Option<String>,
    pub tools: Option<Value>,
    /// Turns before each answer: a user turn, and system turns if any.
    pub prompts: VecDeque<Vec<Turn>>,
    /// Reason for which later prompts are skipped, and their number.
    pub skipped: Option<(SkipReason, u64)>,
}

/// Reason to skip a row, or its later prompts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SkipReason {
    /// Reason for which `prepare` rejects the row.
    Row(Reason),
    TooLarge,
    Tokens,
    NoPrompt,
    ToolTurn,
    TooLong,
}

impl SkipReason {
    /// Word of the reason for programs.
    pub fn word(self) -> &'static str {
        match self {
            SkipReason::Row(reason) => reason.word(),
            SkipReason::TooLarge => "row_too_large",
            SkipReason::Tokens => "tokens",
            SkipReason::NoPrompt => "no_question",
            SkipReason::ToolTurn => "tool_turn",
            SkipReason::TooLong => "too_long",
        }
    }
}

impl fmt::Display for SkipReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SkipReason::Row(reason) => reason.text(),
            SkipReason::TooLarge => "more than 64 MiB",
            SkipReason::Tokens => "token ids, which do not mark where an answer begins",
            SkipReason::NoPrompt => "no user turn with text",
            SkipReason::ToolTurn => "a tool turn, without a call by the target",
            SkipReason::TooLong => "longer than --max-prompt-tokens",
        })
    }
}

/// Reader of the rows of all files, in order.
pub struct PromptReader {
    inputs: Inputs,
    chunk: VecDeque<InputRow>,
    /// Number of rows read.
    pub rows: u64,
}

impl PromptReader {
    pub fn new(paths: Vec<PathBuf>) -> PromptReader {
        // A cut shows at the end of a file, after hours of work on its rows; the cut row is counted.
        let inputs = Inputs::new(paths, eval::MAX_ROW_BYTES).allow_truncated(true);
        PromptReader { inputs, chunk: VecDeque::new(), rows: 0 }
    }

    /// Bytes of the files read so far.
    pub fn bytes_read(&self) -> u64 {
        self.inputs.bytes_read()
    }

    /// Reads the prompts of the next row, or the reason to skip it; `None` after the last row.
    ///
    /// # Errors
    /// An I/O error with the path of the file.
    pub fn next_row(&mut self) -> Result<Option<Result<PromptConversation, SkipReason>>, ReadError> {
        if self.chunk.is_empty() {
            self.chunk = self.inputs.read_chunk()?.into();
        }
        let Some(input_row) = self.chunk.pop_front() else { return Ok(None) };
        self.rows += 1;
        Ok(Some(parse_prompts(&input_row, self.rows - 1)))
    }
}

/// Parses the prompts of a row and drops its answers. `index` is the row's index among all rows.
///
/// # Errors
/// The reason to skip the row.
pub fn parse_prompts(input_row: &InputRow, index: u64) -> Result<PromptConversation, SkipReason> {
    let row = &input_row.row;
    let bytes = row.content.bytes().ok_or(SkipReason::TooLarge)?;
    let parsed = row::parse(bytes, row.truncated, RowPolicy::default(), &mut Default::default());
    let (groups, tools) = match parsed.map_err(|reject| reject.reason) {
        Ok(ParsedRow::Chat(conversation)) => (groups(conversation.turns), conversation.tools),
        Ok(ParsedRow::Tokens { .. }) => return Err(SkipReason::Tokens),
        // Other forms of prompts, which are not training data.
        Err(reason @ Reason::NoConversation) => {
            let prompt = eval::parse(bytes, row.truncated, row.line).map_err(|_| SkipReason::Row(reason))?;
            let user = |content| Turn { role: Role::User, content, extra: Default::default() };
            let then = prompt.then.into_iter().map(|text| vec![user(text)]);
            (std::iter::once(prompt.conversation.turns).chain(then).collect(), None)
        }
        Err(Reason::NothingSupervised | Reason::Empty) => return Err(SkipReason::NoPrompt),
        Err(reason) => return Err(SkipReason::Row(reason)),
    };
    let bad = groups.iter().position(|group| skip_reason(group).is_some()).unwrap_or(groups.len());
    let why = groups.get(bad).and_then(|group| skip_reason(group));
    if let Some(why) = why.filter(|_| bad == 0) {
        return Err(why);
    }
    let left = (groups.len() - bad) as u64;
    Ok(PromptConversation {
        row: index,
        file: input_row.file,
        line: row.line,
        category: category(bytes),
        tools,
        prompts: groups.into_iter().take(bad).collect(),
        skipped: why.map(|why| (why, left)),
    })
}

/// Groups the turns before each assistant turn, and those after the last one.
fn groups(turns: Vec<Turn>) -> Vec<Vec<Turn>> {
    let mut groups = vec![Vec::new()];
    for turn in turns {
        match (turn.role, groups.last_mut()) {
            (Role::Assistant, Some(last)) if last.is_empty() => {}
            (Role::Assistant, _) => groups.push(Vec::new()),
            (_, Some(last)) => last.push(turn),
            (_, None) => {}
        }
    }
    if groups.last().is_some_and(Vec::is_empty) && groups.len() > 1 {
        groups.pop();
    }
    groups
}

fn skip_reason(group: &[Turn]) -> Option<SkipReason> {
    if group.iter().any(|turn| turn.role == Role::Tool) {
        return Some(SkipReason::ToolTurn);
    }
    let asks = group.iter().any(|turn| turn.role == Role::User && !turn.content.trim().is_empty());
    (!asks).then_some(SkipReason::NoPrompt)
}

fn category(bytes: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct Named {
        category: Option<Value>,
    }
    let named: Named = serde_json::from_slice(bytes).ok()?;
    named.category?.as_str().map(String::from)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::split::{RawRow, RowContent};

    fn parsed(row: &str) -> Result<PromptConversation, SkipReason> {
        let row = RawRow { line: 3, content: RowContent::Bytes(row.as_bytes().to_vec()), truncated: false };
        parse_prompts(&InputRow { file: 1, number: 2, row }, 9)
    }

    /// The prompts as "role: text" joined by " / ".
    fn prompts(row: &str) -> Vec<String> {
        let text = |turn: &Turn| format!("{}: {}", turn.role.as_str(), turn.content);
        let groups = parsed(row).unwrap().prompts;
        groups.iter().map(|group| group.iter().map(text).collect::<Vec<_>>().join(" / ")).collect()
    }

    #[test]
    fn prompts_of_every_form_are_read_without_answers() {
        let shared = r#"{"conversations": [{"from": "system", "value": "S"}, {"from": "human", "value": "A"},
            {"from": "gpt", "value": "x"}, {"from": "human", "value": "B"}, {"from": "gpt", "value": "y"}]}"#;
        assert_eq!(prompts(shared), ["system: S / user: A", "user: B"]);
        let openai = r#"{"messages": [{"role": "user", "content": "A"}, {"role": "assistant", "content": "x"},
            {"role": "assistant", "content": "x"}, {"role": "user", "content": "B"}, {"role": "user", "content": "C"}]}"#;
        assert_eq!(prompts(openai), ["user: A", "user: B / user: C"]);
        assert_eq!(prompts(r#"{"turns": ["A", "B"]}"#), ["user: A", "user: B"]);
        assert!(prompts(r#"{"task_id": "HumanEval/0", "prompt": "def f():"}"#)[0].contains("def f():"));
        // Rows of UltraChat repeat their first prompt.
        let both =
            r#"{"prompt": "A", "messages": [{"role": "user", "content": "A"}, {"role": "assistant", "content": "x"}]}"#;
        assert_eq!(prompts(both), ["user: A"]);
        let row = parsed(r#"{"turns": ["A"], "category": "writing"}"#).unwrap();
        assert_eq!((row.row, row.file, row.line, row.category.as_deref()), (9, 1, 3, Some("writing")));
    }

    #[test]
    fn rows_without_a_prompt_have_a_reason() {
        for (row, why) in [
            ("{", SkipReason::Row(Reason::InvalidJson)),
            ("[]", SkipReason::Row(Reason::NotAnObject)),
            (r#"{"text": "A"}"#, SkipReason::Row(Reason::NoConversation)),
            (r#"{"turns": []}"#, SkipReason::Row(Reason::NoConversation)),
            (r#"{"conversations": []}"#, SkipReason::NoPrompt),
            (r#"{"conversations": [{"from": "gpt", "value": "x"}]}"#, SkipReason::Row(Reason::AssistantFirst)),
            (r#"{"conversations": [{"from": "alien", "value": "x"}]}"#, SkipReason::Row(Reason::UnknownRole)),
            (r#"{"messages": [{"role": "system", "content": "S"}]}"#, SkipReason::NoPrompt),
            (r#"{"messages": [{"role": "user", "content": " \n"}]}"#, SkipReason::NoPrompt),
            (r#"{"messages": [{"role": "tool", "content": "4"}]}"#, SkipReason::ToolTurn),
            (r#"{"input_ids": [1], "loss_mask": [1]}"#, SkipReason::Tokens),
        ] {
            assert_eq!(parsed(row), Err(why), "{row}");
        }
    }

    #[test]
    fn a_conversation_ends_before_its_first_bad_prompt() {
        let row = |later: &str| {
            let turns = format!(
                r#"{{"messages": [{{"role": "user", "content": "A"}}, {{"role": "assistant", "content": "x"}}, {later},
                {{"role": "assistant", "content": "y"}}, {{"role": "user", "content": "C"}}]}}"#
            );
            let row = parsed(&turns).unwrap();
            (row.prompts.len(), row.skipped)
        };
        assert_eq!(row(r#"{"role": "user", "content": "B"}"#), (3, None));
        assert_eq!(row(r#"{"role": "user", "content": ""}"#), (1, Some((SkipReason::NoPrompt, 2))));
        assert_eq!(row(r#"{"role": "tool", "content": "4"}"#), (1, Some((SkipReason::ToolTurn, 2))));
    }

    /// The file of the demo is cut: its end must not lose the work on its rows (pydantic-ai#7159).
    #[test]
    fn a_cut_file_gives_its_whole_rows_and_counts_the_last() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cut.json");
        std::fs::write(&path, r#"[{"turns": ["A"]}, {"turns": ["B"]}, {"turns": ["#).unwrap();
        let mut reader = PromptReader::new(vec![path]);
        assert!(matches!(reader.next_row(), Ok(Some(Ok(_)))));
        assert!(matches!(reader.next_row(), Ok(Some(Ok(_)))));
        assert!(matches!(reader.next_row(), Ok(Some(Err(SkipReason::Row(Reason::Truncated))))));
        assert!(matches!(reader.next_row(), Ok(None)));
    }
}
