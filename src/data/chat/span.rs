//! Byte ranges of the assistant's turns in a rendered conversation.
//!
//! A turn is found by rendering the conversation again with a sentinel instead of its content. The text before and after the
//! sentinel is the template's, and must surround the turn as well. A mismatch is an error, never a guess.

use super::{ChatError, ChatTemplate, Conversation, Turn, python::is_space};
use minijinja::value::{Serde, Value as Jinja};
use serde_json::{Map, Value};
use std::ops::Range;

/// Search for the turns of a rendered conversation.
pub struct Spans<'a> {
    template: &'a ChatTemplate,
    turns: &'a [Turn],
    messages: Vec<Jinja>,
    tools: Jinja,
    text: String,
    sentinel: String,
}

impl<'a> Spans<'a> {
    /// Renders the conversation.
    pub fn new(template: &'a ChatTemplate, conversation: &'a Conversation) -> Result<Spans<'a>, ChatError> {
        let turns = conversation.turns.as_slice();
        let messages: Vec<_> = turns.iter().map(|turn| message(turn, &turn.content, &turn.extra)).collect();
        let tools = Jinja::from(Serde(&conversation.tools));
        let text = template.call(&messages, &tools, false)?;
        let sentinel = sentinel(turns, &text);
        Ok(Spans { template, turns, messages, tools, text, sentinel })
    }

    pub fn into_text(self) -> String {
        self.text
    }

    /// Finds the range of the assistant's turn `at`, including its end token.
    ///
    /// # Errors
    /// [`ChatError::Uncertain`], if the rendering does not determine the range.
    pub fn find(&self, at: usize) -> Result<Range<usize>, ChatError> {
        let uncertain = |why| ChatError::Uncertain { turn: at, why };
        let turn = &self.turns[at];
        let (before, after) = self.around(at, self.messages.len())?;
        let end = match self.text.strip_suffix(&after) {
            Some(kept) => kept.len(),
            None => return Err(uncertain("the text after it depends on it")),
        };
        let start = if self.text.starts_with(&before) { before.len() } else { self.header(at)? };
        let Some(shown) = self.text.get(start..end) else {
            return Err(uncertain("the text around it depends on it"));
        };
        // The template formats other fields, such as tool calls, so only plain turns can be compared.
        if turn.extra.values().all(is_blank) && !is_end_of(shown, &turn.content) {
            return Err(uncertain("it is rendered changed or not at all"));
        }
        Ok(start..end + self.end_token(at, &self.text[end..])?)
    }

    /// Text of the template before and after a turn's content, in the first `until` turns. The turn is rendered without its
    /// other fields, so that their text counts as the assistant's. Blank fields stay: an empty think block is the
    /// template's.
    fn around(&self, at: usize, until: usize) -> Result<(String, String), ChatError> {
        let uncertain = |why| ChatError::Uncertain { turn: at, why };
        let mut messages = self.messages[..until].to_vec();
        let turn = &self.turns[at];
        let blank =
            turn.extra.iter().filter(|(_, value)| is_blank(value)).map(|(key, value)| (key.clone(), value.clone()));
        messages[at] = message(turn, &self.sentinel, &blank.collect());
        let marked = self.template.call(&messages, &self.tools, false);
        let marked = marked.map_err(|_| uncertain("the template refuses plain text instead of it"))?;
        let mut parts = marked.split(&self.sentinel);
        match (parts.next(), parts.next(), parts.next()) {
            (Some(before), Some(after), None) => Ok((before.into(), after.into())),
            _ => Err(uncertain("the template does not render its content exactly once")),
        }
    }

    /// End of the header of a turn that starts with template-formatted thinking instead of its content. The generation prompt
    /// ends there.
    fn header(&self, at: usize) -> Result<usize, ChatError> {
        let prompt = self.template.call(&self.messages[..at], &self.tools, true);
        let header = prompt.ok().filter(|prompt| self.text.starts_with(prompt.as_str()));
        let uncertain = || ChatError::Uncertain { turn: at, why: "its header depends on it" };
        header.map(|header| header.len()).ok_or_else(uncertain)
    }

    /// Bytes of `rest`, the text after turn `at`, up to the end of its end token; 0 if the template has none.
    fn end_token(&self, at: usize, rest: &str) -> Result<usize, ChatError> {
        match self.template.leading_special(rest) {
            None => Ok(0),
            Some((len, token)) if token == self.template.eos => Ok(len),
            // A token of the next turn's header is absent if this turn is the last one.
            Some((len, _)) => {
                let (_, last) = self.around(at, at + 1)?;
                Ok(if last.starts_with(&rest[..len]) { len } else { 0 })
            }
        }
    }
}

/// Message of a turn as templates expect it.
pub fn plain_message(turn: &Turn) -> Jinja {
    message(turn, &turn.content, &turn.extra)
}

fn message(turn: &Turn, content: &str, extra: &Map<String, Value>) -> Jinja {
    let mut message = Map::new();
    message.insert("role".into(), turn.role.as_str().into());
    message.insert("content".into(), content.into());
    for (key, value) in extra {
        message.entry(key).or_insert_with(|| value.clone());
    }
    Jinja::from(Serde(message))
}

/// True if a field of a turn has no content.
pub fn is_blank(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => text.chars().all(is_space),
        Value::Array(items) => items.is_empty(),
        Value::Object(items) => items.is_empty(),
        Value::Bool(_) | Value::Number(_) => false,
    }
}

/// Unique text that the conversation does not contain and no template treats specially.
fn sentinel(turns: &[Turn], text: &str) -> String {
    let taken = |name: &str| text.contains(name) || turns.iter().any(|turn| turn.content.contains(name));
    let mut candidates = (0_u64..).map(|n| format!("\u{f8f0}draftmill{n}\u{f8f1}"));
    candidates.find(|name| !taken(name)).unwrap_or_default()
}

/// True if `shown` is `content` or its end, apart from white space: a template may trim it and drop earlier thinking, but not
/// the whole answer.
fn is_end_of(shown: &str, content: &str) -> bool {
    if shown.chars().all(is_space) {
        return content.chars().all(is_space);
    }
    let mut content = content.chars().rev().filter(|&c| !is_space(c));
    shown.chars().rev().filter(|&c| !is_space(c)).all(|c| content.next() == Some(c))
}
