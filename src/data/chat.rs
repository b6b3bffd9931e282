//! The model's own chat template, and which characters of its rendering the drafter is trained on.
//!
//! Supervised are the assistant's turns: what the model itself would say, up to and with its end-of-turn token. Headers and
//! whatever a template adds on its own (such as empty think blocks, Automodel#3738) are not. The place of a turn is found by
//! rendering the conversation once more with a sentinel in its stead, so no template has to be known by name.

mod jinja;

use crate::hf::{HfError, read_json};
use minijinja::{
    Environment,
    value::{Serde, Value as Jinja},
};
use serde_json::{Map, Value};
use std::{ops::Range, path::Path};
use thiserror::Error;

/// Who speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    System,
    User,
    Assistant,
    Tool,
}

impl Role {
    /// The word that chat templates use.
    pub fn as_str(self) -> &'static str {
        match self {
            Role::System => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
            Role::Tool => "tool",
        }
    }
}

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq)]
pub struct Turn {
    pub role: Role,
    pub content: String,
    /// What else the row said of the turn (`tool_calls`, `reasoning_content`, ...), passed on to the template.
    pub extra: Map<String, Value>,
}

/// A whole conversation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Conversation {
    pub turns: Vec<Turn>,
    /// Descriptions of tools, passed on to the template.
    pub tools: Option<Value>,
}

/// A rendered conversation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rendered {
    pub text: String,
    /// Byte ranges of `text` that are supervised: ascending, disjoint, on character borders.
    pub supervised: Vec<Range<usize>>,
}

/// Why a template cannot be used, or a conversation not be rendered.
#[derive(Debug, Error)]
pub enum ChatError {
    #[error(transparent)]
    Folder(#[from] HfError),
    #[error(
        "{0} has no chat template (chat_template.jinja, or `chat_template` in tokenizer_config.json); \
         add one, or prepare rows of `input_ids` and `loss_mask`"
    )]
    Missing(String),
    #[error("the chat template cannot be read ({0}); correct it")]
    Template(String),
    /// The template refused this conversation.
    #[error("{0}")]
    Refused(String),
    /// Where a turn stands in the rendering is not certain, so it must not be trained on.
    #[error("the place of turn {turn} in the rendered text is not certain: {why}")]
    Uncertain { turn: usize, why: &'static str },
}

/// A chat template, ready to render.
pub struct ChatTemplate {
    environment: Environment<'static>,
    text: String,
    bos: String,
    eos: String,
    /// Special tokens, longest first: one of them ends a turn.
    special: Vec<String>,
}

/// The name under which the environment keeps the template.
const NAME: &str = "chat";

impl ChatTemplate {
    /// Reads the template of a model folder, from `chat_template.jinja` or `tokenizer_config.json`.
    pub fn load(folder: &Path) -> Result<ChatTemplate, ChatError> {
        let settings = read_json(&folder.join("tokenizer_config.json")).unwrap_or_default();
        let text = match std::fs::read_to_string(folder.join("chat_template.jinja")) {
            Ok(text) => text,
            Err(_) => template_of(&settings["chat_template"])
                .ok_or_else(|| ChatError::Missing(folder.display().to_string()))?,
        };
        let token = |key: &str| match &settings[key] {
            Value::String(text) => text.clone(),
            other => other["content"].as_str().unwrap_or_default().to_owned(),
        };
        let tokenizer = read_json(&folder.join("tokenizer.json"))?;
        let added = tokenizer["added_tokens"].as_array().into_iter().flatten();
        let special = added.filter(|t| t["special"] == true).filter_map(|t| t["content"].as_str().map(String::from));
        ChatTemplate::from_text(&text, &token("bos_token"), &token("eos_token"), special.collect())
    }

    /// Takes a template's text, the texts of the begin and end tokens, and all special tokens.
    pub fn from_text(text: &str, bos: &str, eos: &str, mut special: Vec<String>) -> Result<ChatTemplate, ChatError> {
        let environment = jinja::environment(NAME, text).map_err(|e| ChatError::Template(e.to_string()))?;
        if !eos.is_empty() {
            special.push(eos.into());
        }
        special.retain(|token| !token.is_empty());
        special.sort_by(|a, b| b.len().cmp(&a.len()).then(a.cmp(b)));
        special.dedup();
        Ok(ChatTemplate { environment, text: text.into(), bos: bos.into(), eos: eos.into(), special })
    }

    /// The template itself, for fingerprints.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Renders the whole conversation and finds what is supervised in it.
    pub fn render(&self, conversation: &Conversation) -> Result<Rendered, ChatError> {
        let text = self.plain(conversation, None)?;
        let mut supervised: Vec<Range<usize>> = Vec::new();
        for (at, turn) in conversation.turns.iter().enumerate().filter(|(_, t)| t.role == Role::Assistant) {
            let content = self.place(conversation, at, &text)?;
            let end = content.end + self.end_token(&text[content.end..]).map_or(0, str::len);
            if supervised.last().is_some_and(|last| last.end > content.start) {
                return Err(ChatError::Uncertain { turn: at, why: "it overlaps the turn before" });
            }
            if !turn.content.is_empty() || end > content.end {
                supervised.push(content.start..end);
            }
        }
        supervised.retain(|range| !range.is_empty());
        Ok(Rendered { text, supervised })
    }

    /// Where the template put the content of a turn.
    fn place(&self, conversation: &Conversation, at: usize, text: &str) -> Result<Range<usize>, ChatError> {
        let uncertain = |why| ChatError::Uncertain { turn: at, why };
        let sentinel = sentinel(conversation);
        let marked = self.plain(conversation, Some((at, &sentinel)))?;
        let mut parts = marked.split(&sentinel);
        let (Some(before), Some(after), None) = (parts.next(), parts.next(), parts.next()) else {
            return Err(uncertain("the template does not show its content exactly once"));
        };
        // What differs is what the content made of itself: its thinking may be moved, its ends may be trimmed.
        let start = common_prefix(text, before);
        let end = text.len() - common_suffix(&text[start..], after);
        let shown = &text[start..end];
        let content = &conversation.turns[at].content;
        if start == before.len() && text.len() - end == after.len() {
            // Everything around the content is as the template makes it.
            return if is_end_of(shown, content) { Ok(start..end) } else { Err(uncertain("it is shown changed")) };
        }
        // The surroundings changed with the content (thinking that the template lays out itself): the header ends where
        // the prompt for this turn would end.
        if text.len() - end != after.len() {
            return Err(uncertain("what follows it depends on it"));
        }
        let mut prompt = conversation.clone();
        prompt.turns.truncate(at);
        let header = self.prompt(&prompt)?;
        match text.strip_prefix(&header).map(|_| header.len()) {
            Some(header) if header <= start && is_end_of(&text[header..end], content) => Ok(header..end),
            _ => Err(uncertain("its header depends on it")),
        }
    }

    fn end_token<'a>(&'a self, rest: &str) -> Option<&'a str> {
        self.special.iter().map(String::as_str).find(|token| rest.starts_with(token))
    }

    fn plain(&self, conversation: &Conversation, replace: Option<(usize, &str)>) -> Result<String, ChatError> {
        self.call(conversation, replace, false)
    }

    /// The conversation with the header of the assistant's next turn.
    fn prompt(&self, conversation: &Conversation) -> Result<String, ChatError> {
        self.call(conversation, None, true)
    }

    fn call(
        &self,
        conversation: &Conversation,
        replace: Option<(usize, &str)>,
        add_generation_prompt: bool,
    ) -> Result<String, ChatError> {
        let messages = conversation
            .turns
            .iter()
            .enumerate()
            .map(|(at, turn)| {
                let content = replace.filter(|(i, _)| *i == at).map_or(turn.content.as_str(), |(_, text)| text);
                let mut message = Map::new();
                message.insert("role".into(), turn.role.as_str().into());
                message.insert("content".into(), content.into());
                message.extend(turn.extra.clone());
                Value::Object(message)
            })
            .collect::<Vec<_>>();
        let (messages, tools) = (Jinja::from(Serde(messages)), Jinja::from(Serde(&conversation.tools)));
        let context = minijinja::context! {
            messages, add_generation_prompt, tools, bos_token => self.bos.as_str(),
            eos_token => self.eos.as_str(),
        };
        let template = self.environment.get_template(NAME).map_err(|e| ChatError::Template(e.to_string()))?;
        template.render(context).map_err(|e| ChatError::Refused(jinja::sentence(&e)))
    }
}

/// 1 for every token that begins inside a supervised range. `offsets` are byte ranges of the rendered text, ascending.
pub fn loss_mask(offsets: &[(usize, usize)], supervised: &[Range<usize>]) -> Vec<u8> {
    let mut ranges = supervised.iter().peekable();
    let inside = |&(start, end): &(usize, usize)| {
        while ranges.next_if(|range| range.end <= start).is_some() {}
        u8::from(start < end && ranges.peek().is_some_and(|range| range.contains(&start)))
    };
    offsets.iter().map(inside).collect()
}

/// The template in `tokenizer_config.json`: a text, or a list of named ones.
fn template_of(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Array(list) => {
            let named = |name: &str| list.iter().find(|t| t["name"] == name);
            named("default").or(list.first())?["template"].as_str().map(String::from)
        }
        _ => None,
    }
}

/// A text that the conversation does not contain and that no template treats specially.
fn sentinel(conversation: &Conversation) -> String {
    let taken = |text: &str| conversation.turns.iter().any(|turn| turn.content.contains(text));
    let candidates = (0_u32..).map(|n| format!("\u{f8f0}draftmill{n}\u{f8f1}"));
    candidates.into_iter().find(|text| !taken(text)).unwrap_or_default()
}

/// Bytes that both texts begin with, cut at a character border.
fn common_prefix(a: &str, b: &str) -> usize {
    let n = a.bytes().zip(b.bytes()).take_while(|(x, y)| x == y).count();
    (0..=n).rev().find(|&i| a.is_char_boundary(i)).unwrap_or(0)
}

/// Bytes that both texts end with, cut at a character border.
fn common_suffix(a: &str, b: &str) -> usize {
    let n = a.bytes().rev().zip(b.bytes().rev()).take_while(|(x, y)| x == y).count();
    (0..=n).rev().find(|&i| a.is_char_boundary(a.len() - i)).unwrap_or(0)
}

/// Whether `shown` is `content`, or the end of it, white space aside: a template may trim, and may drop earlier thinking.
fn is_end_of(shown: &str, content: &str) -> bool {
    let mut content = content.chars().rev().filter(|c| !c.is_whitespace());
    shown.chars().rev().filter(|c| !c.is_whitespace()).all(|c| content.next() == Some(c))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHATML: &str = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content | trim + '<|im_end|>\n' }}\
                          {% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

    fn template(text: &str) -> ChatTemplate {
        ChatTemplate::from_text(text, "", "<|im_end|>", vec!["<|im_start|>".into()]).unwrap()
    }

    fn talk(turns: &[(Role, &str)]) -> Conversation {
        let turn = |&(role, content): &(Role, &str)| Turn { role, content: content.into(), extra: Map::new() };
        Conversation { turns: turns.iter().map(turn).collect(), tools: None }
    }

    fn supervised(template: &ChatTemplate, turns: &[(Role, &str)]) -> Vec<String> {
        let rendered = template.render(&talk(turns)).unwrap();
        rendered.supervised.iter().map(|range| rendered.text[range.clone()].to_owned()).collect()
    }

    use Role::{Assistant, System, User};

    #[test]
    fn specforge_885_every_answer_is_supervised_from_its_first_to_its_end_token() {
        let turns = [
            (System, "Be brief."),
            (User, "Hi"),
            (Assistant, "  Hello!\n"),
            (User, "Hello!"),
            (Assistant, "<|im_start|>assistant\nHello!"),
            (User, "Bye"),
            (Assistant, ""),
        ];
        let expected = ["Hello!<|im_end|>", "<|im_start|>assistant\nHello!<|im_end|>", "<|im_end|>"];
        assert_eq!(supervised(&template(CHATML), &turns), expected);
    }

    #[test]
    fn automodel_3738_what_the_template_adds_is_not_supervised() {
        let text = CHATML.replace(
            "m.role + '\n' +",
            "m.role + '\n' + ('<think>\n\n</think>\n\n' if m.role == 'assistant' else '') +",
        );
        assert_eq!(supervised(&template(&text), &[(User, "Hi"), (Assistant, "Hello")]), ["Hello<|im_end|>"]);
    }

    #[test]
    fn speculators_801_what_a_template_refuses_or_hides_is_an_error() {
        let refuses = template("{{ raise_exception('roles must alternate') }}");
        let error = refuses.render(&talk(&[(User, "a")])).unwrap_err();
        assert_eq!(error.to_string(), "roles must alternate");
        for text in ["no content at all", "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}"] {
            let error = template(text).render(&talk(&[(User, "a"), (Assistant, "b")])).unwrap_err();
            assert!(matches!(error, ChatError::Uncertain { turn: 1, .. }), "{error}");
        }
        let changed = template("{% for m in messages %}{{ m.content | upper }}{% endfor %}");
        assert!(
            changed.render(&talk(&[(Assistant, "b")])).is_err(),
            "a changed answer is not what the model would say"
        );
    }

    #[test]
    fn tokens_are_supervised_by_where_they_begin() {
        let offsets = [(0, 2), (2, 5), (5, 5), (5, 9), (9, 12)];
        assert_eq!(loss_mask(&offsets, &[2..6, 9..10]), [0, 1, 0, 1, 1]);
        assert_eq!(loss_mask(&offsets, &[]), [0; 5]);
    }

    #[test]
    fn json_is_written_as_python_writes_it() {
        let text = "{{ tools | tojson }} {{ tools | tojson(indent=2) }}";
        let tools = Some(serde_json::json!({"b": ["é<", 1], "a": {}}));
        let rendered = template(text).render(&Conversation { turns: Vec::new(), tools }).unwrap();
        assert_eq!(
            rendered.text,
            "{\"b\": [\"é<\", 1], \"a\": {}} {\n  \"b\": [\n    \"é<\",\n    1\n  ],\n  \"a\": {}\n}"
        );
    }
}
