//! What is asked in the input files: conversations without their answers, and why a row is none.

use crate::{
    config::UnknownRole,
    data::{
        Reason,
        chat::{Role, Turn},
        input::{Inputs, Placed, ReadError},
        row::{self, Row},
    },
    eval,
};
use serde::Deserialize;
use serde_json::Value;
use std::{collections::VecDeque, fmt, path::PathBuf};

/// A conversation that is to be answered.
#[derive(Clone, Debug, PartialEq)]
pub struct Asked {
    /// Place among the rows of all files, from 0.
    pub place: u64,
    /// Index of its file, and the line there, from 1.
    pub file: usize,
    pub line: u64,
    pub category: Option<String>,
    pub tools: Option<Value>,
    /// What stands before each answer: a user's turn, and system turns where there are any.
    pub questions: VecDeque<Vec<Turn>>,
    /// Why later questions are none, and how many answers they stood before.
    pub left_out: Option<(LeftOut, u64)>,
}

/// Why a row, or a later question of it, is not answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LeftOut {
    /// As `prepare` would reject it.
    Row(Reason),
    TooLarge,
    Tokens,
    NoQuestion,
    ToolTurn,
    TooLong,
}

impl LeftOut {
    /// One word, as programs read it.
    pub fn word(self) -> &'static str {
        match self {
            LeftOut::Row(reason) => reason.word(),
            LeftOut::TooLarge => "row_too_large",
            LeftOut::Tokens => "tokens",
            LeftOut::NoQuestion => "no_question",
            LeftOut::ToolTurn => "tool_turn",
            LeftOut::TooLong => "too_long",
        }
    }
}

impl fmt::Display for LeftOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            LeftOut::Row(reason) => reason.text(),
            LeftOut::TooLarge => "more than 64 MiB",
            LeftOut::Tokens => "token ids, which say not where an answer begins",
            LeftOut::NoQuestion => "nobody asks anything",
            LeftOut::ToolTurn => "a tool answers a call that the target has not made",
            LeftOut::TooLong => "longer than --max-prompt-tokens",
        })
    }
}

/// The rows of all files, one after the other.
pub struct Questions {
    inputs: Inputs,
    chunk: VecDeque<Placed>,
    /// Rows that were taken.
    pub rows: u64,
}

impl Questions {
    pub fn new(paths: Vec<PathBuf>) -> Questions {
        Questions { inputs: Inputs::new(paths, eval::MAX_ROW_BYTES), chunk: VecDeque::new(), rows: 0 }
    }

    /// Bytes of the files that were read so far.
    pub fn bytes_read(&self) -> u64 {
        self.inputs.bytes_read()
    }

    /// What the next row asks, or why it asks nothing; `None` behind the last one.
    pub fn row(&mut self) -> Result<Option<Result<Asked, LeftOut>>, ReadError> {
        if self.chunk.is_empty() {
            self.chunk = self.inputs.read_chunk()?.into();
        }
        let Some(placed) = self.chunk.pop_front() else { return Ok(None) };
        self.rows += 1;
        Ok(Some(conversation(&placed, self.rows - 1)))
    }
}

/// What a row asks, without the answers that it brings along.
pub fn conversation(placed: &Placed, place: u64) -> Result<Asked, LeftOut> {
    let row = &placed.row;
    let bytes = row.content.as_ref().map_err(|_| LeftOut::TooLarge)?;
    let parsed = row::parse(bytes, row.open, UnknownRole::Reject, &mut Default::default());
    let (groups, tools) = match parsed.map_err(|reject| reject.reason) {
        Ok(Row::Chat(conversation)) => (groups(conversation.turns), conversation.tools),
        Ok(Row::Tokens { .. }) => return Err(LeftOut::Tokens),
        // The other forms of prompts, which are no data to train on.
        Err(reason @ Reason::NoConversation) => {
            let prompt = eval::parse(bytes, row.open, row.line).map_err(|_| LeftOut::Row(reason))?;
            let user = |content| Turn { role: Role::User, content, extra: Default::default() };
            let then = prompt.then.into_iter().map(|text| vec![user(text)]);
            (std::iter::once(prompt.conversation.turns).chain(then).collect(), None)
        }
        Err(Reason::NothingSupervised | Reason::Empty) => return Err(LeftOut::NoQuestion),
        Err(reason) => return Err(LeftOut::Row(reason)),
    };
    let bad = groups.iter().position(|group| why_none(group).is_some()).unwrap_or(groups.len());
    let why = groups.get(bad).and_then(|group| why_none(group));
    if let Some(why) = why.filter(|_| bad == 0) {
        return Err(why);
    }
    let left = (groups.len() - bad) as u64;
    Ok(Asked {
        place,
        file: placed.file,
        line: row.line,
        category: category(bytes),
        tools,
        questions: groups.into_iter().take(bad).collect(),
        left_out: why.map(|why| (why, left)),
    })
}

/// What stands before each of the assistant's turns, and behind the last one.
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

fn why_none(group: &[Turn]) -> Option<LeftOut> {
    if group.iter().any(|turn| turn.role == Role::Tool) {
        return Some(LeftOut::ToolTurn);
    }
    let asks = group.iter().any(|turn| turn.role == Role::User && !turn.content.trim().is_empty());
    (!asks).then_some(LeftOut::NoQuestion)
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
    use crate::data::split::RawRow;

    fn asked(row: &str) -> Result<Asked, LeftOut> {
        let row = RawRow { line: 3, content: Ok(row.as_bytes().to_vec()), open: false };
        conversation(&Placed { file: 1, number: 2, row }, 9)
    }

    /// The questions as "role: text" joined by " / ".
    fn questions(row: &str) -> Vec<String> {
        let text = |turn: &Turn| format!("{}: {}", turn.role.as_str(), turn.content);
        let groups = asked(row).unwrap().questions;
        groups.iter().map(|group| group.iter().map(text).collect::<Vec<_>>().join(" / ")).collect()
    }

    #[test]
    fn every_kind_of_row_asks_and_its_own_answers_are_dropped() {
        let shared = r#"{"conversations": [{"from": "system", "value": "S"}, {"from": "human", "value": "A"},
            {"from": "gpt", "value": "x"}, {"from": "human", "value": "B"}, {"from": "gpt", "value": "y"}]}"#;
        assert_eq!(questions(shared), ["system: S / user: A", "user: B"]);
        let open = r#"{"messages": [{"role": "user", "content": "A"}, {"role": "assistant", "content": "x"},
            {"role": "assistant", "content": "x"}, {"role": "user", "content": "B"}, {"role": "user", "content": "C"}]}"#;
        assert_eq!(questions(open), ["user: A", "user: B / user: C"]);
        assert_eq!(questions(r#"{"turns": ["A", "B"]}"#), ["user: A", "user: B"]);
        assert!(questions(r#"{"task_id": "HumanEval/0", "prompt": "def f():"}"#)[0].contains("def f():"));
        // Rows of UltraChat hold their first question once more.
        let both =
            r#"{"prompt": "A", "messages": [{"role": "user", "content": "A"}, {"role": "assistant", "content": "x"}]}"#;
        assert_eq!(questions(both), ["user: A"]);
        let row = asked(r#"{"turns": ["A"], "category": "writing"}"#).unwrap();
        assert_eq!((row.place, row.file, row.line, row.category.as_deref()), (9, 1, 3, Some("writing")));
    }

    #[test]
    fn what_asks_nothing_has_a_reason() {
        for (row, why) in [
            ("{", LeftOut::Row(Reason::InvalidJson)),
            ("[]", LeftOut::Row(Reason::NotAnObject)),
            (r#"{"text": "A"}"#, LeftOut::Row(Reason::NoConversation)),
            (r#"{"turns": []}"#, LeftOut::Row(Reason::NoConversation)),
            (r#"{"conversations": []}"#, LeftOut::NoQuestion),
            (r#"{"conversations": [{"from": "gpt", "value": "x"}]}"#, LeftOut::Row(Reason::AssistantFirst)),
            (r#"{"conversations": [{"from": "alien", "value": "x"}]}"#, LeftOut::Row(Reason::UnknownRole)),
            (r#"{"messages": [{"role": "system", "content": "S"}]}"#, LeftOut::NoQuestion),
            (r#"{"messages": [{"role": "user", "content": " \n"}]}"#, LeftOut::NoQuestion),
            (r#"{"messages": [{"role": "tool", "content": "4"}]}"#, LeftOut::ToolTurn),
            (r#"{"input_ids": [1], "loss_mask": [1]}"#, LeftOut::Tokens),
        ] {
            assert_eq!(asked(row), Err(why), "{row}");
        }
    }

    #[test]
    fn a_conversation_ends_where_it_can_no_longer_be_answered() {
        let row = |later: &str| {
            let turns = format!(
                r#"{{"messages": [{{"role": "user", "content": "A"}}, {{"role": "assistant", "content": "x"}}, {later},
                {{"role": "assistant", "content": "y"}}, {{"role": "user", "content": "C"}}]}}"#
            );
            let row = asked(&turns).unwrap();
            (row.questions.len(), row.left_out)
        };
        assert_eq!(row(r#"{"role": "user", "content": "B"}"#), (3, None));
        assert_eq!(row(r#"{"role": "user", "content": ""}"#), (1, Some((LeftOut::NoQuestion, 2))));
        assert_eq!(row(r#"{"role": "tool", "content": "4"}"#), (1, Some((LeftOut::ToolTurn, 2))));
    }
}
