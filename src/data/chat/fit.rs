//! Fits a conversation to its template: the form of tool arguments, raw thinking, and fields that the template hides.
//!
//! All of it is found by rendering with and without, so no template has to be known by name.

use super::{ChatError, ChatTemplate, Conversation, Role, Turn, python, span::is_blank, turn::WEIGHTS};
use crate::data::change::Change;
use minijinja::value::{Serde, Value as Jinja};
use serde_json::{Map, Value};
use std::{borrow::Cow, collections::BTreeSet};

/// Tags around a block of thinking.
const THINKING: [(&str, &str); 3] =
    [("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>")];
/// Fields in which an assistant speaks. Fields of one group hold the same.
const SPOKEN: [&[&str]; 5] =
    [&["tool_calls"], &["function_call"], &["reasoning_content", "thinking", "reasoning"], &["refusal"], &["audio"]];

/// Differences between a conversation and its rendering.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Notes {
    pub changes: BTreeSet<Change>,
    /// Content that the template does not show, as "`tool_calls` of turn 2".
    pub hidden: Vec<String>,
    /// Names of metadata that the template does not show.
    pub unseen: BTreeSet<String>,
}

impl ChatTemplate {
    /// Conversation in the form that the template takes.
    ///
    /// # Errors
    /// A thinking block without its opening tag, if the template does not open it.
    pub(super) fn fit<'a>(
        &self,
        conversation: &'a Conversation,
        notes: &mut Notes,
    ) -> Result<Cow<'a, Conversation>, ChatError> {
        let split = self.split_thinking(conversation, notes)?;
        let fitted = match &split {
            Some(split) => self.fit_arguments(split, notes),
            None => self.fit_arguments(conversation, notes),
        };
        Ok(match (fitted, split) {
            (Some(fitted), _) | (None, Some(fitted)) => Cow::Owned(fitted),
            (None, None) => Cow::Borrowed(conversation),
        })
    }

    /// Conversation with tool arguments as objects, or as text if the template needs text; `None` if it is so already.
    pub(super) fn fit_arguments(&self, conversation: &Conversation, notes: &mut Notes) -> Option<Conversation> {
        let mut objects = conversation.clone();
        let mut found = Vec::new();
        for arguments in arguments(&mut objects) {
            *arguments = as_object(arguments);
            found.push(arguments.clone());
        }
        if found.is_empty() {
            return None;
        }
        let mut texts = conversation.clone();
        for arguments in arguments(&mut texts) {
            *arguments = match arguments.as_str() {
                Some(text) => inner_text(text).unwrap_or_else(|| text.to_owned()),
                None => self.json_text(arguments)?,
            }
            .into();
        }
        let given = self.whole(conversation);
        let (by_object, by_text) = (self.whole(&objects), || self.whole(&texts).ok());
        // A template that prints an object prints it as Python does, which no model writes.
        let printed = |text: &str| found.iter().any(|object| prints_python(text, object));
        let (fitted, text, change) = match by_object {
            Ok(text) if !printed(&text) => (objects, text, Change::ArgumentsParsed),
            by_object => match (by_text(), by_object) {
                (Some(text), by_object) if by_object.is_err() || !printed(&text) => {
                    (texts, text, Change::ArgumentsText)
                }
                (_, Ok(text)) => (objects, text, Change::ArgumentsParsed),
                // The template refuses both, and its own words about the row as it is explain it best.
                (_, Err(_)) => return None,
            },
        };
        if given.is_ok_and(|given| given == text) {
            return None;
        }
        notes.changes.insert(change);
        Some(fitted)
    }

    /// Conversation with reasoning and answer of each raw completion apart; `None` if there is none.
    fn split_thinking(
        &self,
        conversation: &Conversation,
        notes: &mut Notes,
    ) -> Result<Option<Conversation>, ChatError> {
        let mut split: Option<Conversation> = None;
        for at in 0..conversation.turns.len() {
            let Some((open, turn)) = without_opening(&conversation.turns[at]) else { continue };
            let fixed = split.get_or_insert_with(|| conversation.clone());
            let prompt = self.call(&messages(&fixed.turns[..at]), &tools(fixed), true).unwrap_or_default();
            fixed.turns[at] = turn;
            let shows = || {
                let text = self.call(&messages(&fixed.turns[..=at]), &tools(fixed), false).unwrap_or_default();
                let reasoning = fixed.turns[at].extra.get("reasoning_content")?.as_str()?.trim().to_owned();
                let mut places = text.match_indices(&reasoning);
                places.find(|(place, _)| text[..*place].trim_end().ends_with(open)).map(drop)
            };
            if !prompt.trim_end().ends_with(open) && shows().is_none() {
                return Err(ChatError::UnopenedThinking { turn: at });
            }
            notes.changes.insert(Change::RawThinking);
        }
        Ok(split)
    }

    /// Notes the fields, turns and tools without an effect on `text`, the rendering of the conversation.
    pub(super) fn note_hidden(&self, conversation: &Conversation, text: &str, notes: &mut Notes) {
        let same = |changed: &Conversation| self.whole(changed).is_ok_and(|other| other == text);
        if conversation.tools.as_ref().is_some_and(|tools| !is_blank(tools))
            && same(&Conversation { tools: None, ..conversation.clone() })
        {
            notes.hidden.push("`tools`".into());
        }
        for (at, turn) in conversation.turns.iter().enumerate() {
            let with = |turn: Turn| {
                let mut changed = conversation.clone();
                changed.turns[at] = turn;
                changed
            };
            let mut speaks = false;
            for group in SPOKEN.iter().filter(|_| turn.role == Role::Assistant) {
                let Some(name) = group.iter().find(|key| turn.extra.get(**key).is_some_and(|v| !is_blank(v))) else {
                    continue;
                };
                speaks = true;
                let mut less = turn.clone();
                less.extra.retain(|key, _| !group.contains(&key.as_str()));
                let changed = with(less);
                if !same(&changed) {
                    continue;
                }
                let ends = |conversation: &Conversation| {
                    self.call(&messages(&conversation.turns[..=at]), &tools(conversation), false).ok()
                };
                match (*name, ends(conversation), ends(&changed)) {
                    ("reasoning_content" | "thinking" | "reasoning", Some(with), Some(without)) if with != without => {
                        notes.changes.insert(Change::EarlierReasoning);
                    }
                    _ => notes.hidden.push(format!("`{name}` of turn {}", at + 1)),
                }
            }
            // The search for the span compares the text of an assistant's turn that has no other field.
            let plain = turn.role == Role::Assistant && !speaks;
            let content = turn.content.trim();
            if !plain && !content.is_empty() && (speaks || !text.contains(content)) {
                let silent = with(Turn { content: String::new(), ..turn.clone() });
                if same(&silent) {
                    notes.hidden.push(format!("the text of turn {} ({})", at + 1, turn.role.as_str()));
                }
            }
        }
        self.note_unseen(conversation, same, notes);
    }

    /// Notes the names of metadata without an effect on the rendering.
    fn note_unseen(&self, conversation: &Conversation, same: impl Fn(&Conversation) -> bool, notes: &mut Notes) {
        let spoken = |turn: &Turn, key: &str| {
            turn.role == Role::Assistant && SPOKEN.iter().any(|group| group.contains(&key)) || WEIGHTS.contains(&key)
        };
        let names = |turn: &Turn| {
            let fields = turn.extra.iter().filter(|(key, value)| !spoken(turn, key) && !is_blank(value));
            fields.map(|(key, _)| key.clone()).collect::<Vec<_>>()
        };
        let names: BTreeSet<String> = conversation.turns.iter().flat_map(names).collect();
        let without = |gone: &dyn Fn(&str) -> bool| {
            let mut changed = conversation.clone();
            for turn in &mut changed.turns {
                let kept = turn.clone();
                turn.extra.retain(|key, _| spoken(&kept, key) || !gone(key));
            }
            changed
        };
        if names.is_empty() {
            return;
        }
        if same(&without(&|key| names.contains(key))) {
            notes.unseen = names;
        } else if names.len() > 1 {
            notes.unseen = names.into_iter().filter(|name| same(&without(&|key| key == name))).collect();
        }
    }

    fn whole(&self, conversation: &Conversation) -> Result<String, ChatError> {
        self.call(&messages(&conversation.turns), &tools(conversation), false)
    }

    /// JSON as the filter `tojson` writes it.
    fn json_text(&self, value: &Value) -> Option<String> {
        let context = minijinja::context! { value => Jinja::from(Serde(value)) };
        self.environment.render_str("{{ value | tojson }}", context).ok()
    }
}

fn messages(turns: &[Turn]) -> Vec<Jinja> {
    turns.iter().map(super::span::plain_message).collect()
}

fn tools(conversation: &Conversation) -> Jinja {
    Jinja::from(Serde(&conversation.tools))
}

/// Arguments of all tool calls of a conversation.
fn arguments(conversation: &mut Conversation) -> impl Iterator<Item = &mut Value> {
    let turns = conversation.turns.iter_mut().filter(|turn| turn.role == Role::Assistant);
    let calls = turns.filter_map(|turn| turn.extra.get_mut("tool_calls")?.as_array_mut()).flatten();
    calls.filter_map(|call| {
        let function = match call.get("function").is_some() {
            true => call.get_mut("function")?,
            false => call,
        };
        function.get_mut("arguments").filter(|arguments| !arguments.is_null())
    })
}

/// Value of arguments that are given as text, also as the text of a text. Text that is no JSON stays.
fn as_object(arguments: &Value) -> Value {
    let Value::String(text) = arguments else { return arguments.clone() };
    if text.trim().is_empty() {
        return Value::Object(Map::new());
    }
    let inner = inner_text(text);
    serde_json::from_str(inner.as_ref().unwrap_or(text)).unwrap_or_else(|_| arguments.clone())
}

/// Text of an object that is encoded twice.
fn inner_text(text: &str) -> Option<String> {
    let Ok(Value::String(inner)) = serde_json::from_str(text) else { return None };
    serde_json::from_str::<Map<String, Value>>(&inner).is_ok().then_some(inner)
}

/// True if `text` has the arguments as Python prints them, in a form that is not JSON.
fn prints_python(text: &str, arguments: &Value) -> bool {
    let printed = python::text(&Jinja::from(Serde(arguments))).unwrap_or_default();
    arguments.is_object() && serde_json::from_str::<Value>(&printed).is_err() && text.contains(&printed)
}

/// Opening tag, and the turn with reasoning and answer apart, if an assistant's text ends a block that it does not open.
fn without_opening(turn: &Turn) -> Option<(&'static str, Turn)> {
    let reasons = turn.extra.get("reasoning_content").is_some_and(|reasoning| !is_blank(reasoning));
    if turn.role != Role::Assistant || reasons {
        return None;
    }
    let (open, close) = THINKING
        .into_iter()
        .find(|(open, close)| turn.content.split_once(close).is_some_and(|(before, _)| !before.contains(open)))?;
    let (reasoning, answer) = turn.content.split_once(close)?;
    let mut split = turn.clone();
    split.content = answer.trim_start_matches('\n').to_owned();
    let reasoning = reasoning.trim_matches('\n');
    if !reasoning.trim().is_empty() {
        for key in ["reasoning_content", "thinking"] {
            split.extra.insert(key.into(), reasoning.into());
        }
    }
    Some((open, split))
}
