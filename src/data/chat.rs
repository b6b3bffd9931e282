//! Chat templates of models, and the supervised characters of a rendered conversation.
//!
//! The assistant's turns are supervised, up to and including the end-of-turn token. Headers and text that a template adds
//! (such as empty think blocks, Automodel#3738) are not. The range of a turn is found by rendering the conversation again
//! with a sentinel instead of the turn, so no template has to be known by name.

mod fit;
mod jinja;
mod span;
mod turn;

use self::{jinja::Value as Jinja, span::Spans};
use crate::common::fs::read_input_text;
use crate::hf::{HfError, read_json};
use serde_json::Value;
use std::{io::ErrorKind, ops::Range, path::Path};
use thiserror::Error;

pub use self::{
    fit::Notes,
    turn::{Role, Turn, Weight},
};

/// A conversation.
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
    /// Supervised byte ranges of `text`: ascending, disjoint, on character boundaries.
    pub supervised: Vec<Range<usize>>,
    pub notes: Notes,
}

/// Failure to load a template or to render a conversation.
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
    /// The range of a turn in the rendered text is uncertain, so the turn must not be trained on.
    #[error("the position of turn {turn} in the rendered text is uncertain: {why}")]
    Uncertain { turn: usize, why: &'static str },
    /// A raw completion of a thinking model, without the tag that the prompt opened.
    #[error(
        "turn {} closes a block of thinking that it does not open, and the template does not open it; write the text before \
         `</think>` as `reasoning_content`, or add the opening tag", .turn + 1
    )]
    UnopenedThinking { turn: usize },
}

/// Compiled chat template of a model.
pub struct ChatTemplate {
    template: jinja::Template,
    /// Template for conversations with tools, if there is a second one.
    with_tools: Option<jinja::Template>,
    text: String,
    /// Special tokens by the names that templates have for them, such as `bos_token`.
    named: Vec<(String, String)>,
    eos: String,
    /// Special tokens, longest first. One of them ends a turn.
    special: Vec<String>,
}

/// Names of the templates of a model. The second one is optional and serves conversations with tools.
const NAME: &str = "default";
const WITH_TOOLS: &str = "tool_use";

impl ChatTemplate {
    /// Reads the template of a model folder from `chat_template.jinja` or `tokenizer_config.json`.
    ///
    /// # Errors
    /// A missing or malformed template, or an unreadable file.
    pub fn load(folder: &Path) -> Result<ChatTemplate, ChatError> {
        let settings = optional(&folder.join("tokenizer_config.json"))?;
        let path = folder.join("chat_template.jinja");
        let (text, with_tools) = match read_input_text(&path, 16 << 20) {
            Ok(text) => (text, None),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                let named = |name| template_of(&settings["chat_template"], name);
                (named(NAME).ok_or_else(|| ChatError::Missing(folder.display().to_string()))?, named(WITH_TOOLS))
            }
            Err(source) => return Err(HfError::Read { path, source }.into()),
        };
        // Older folders list their special tokens in a separate file.
        let map = optional(&folder.join("special_tokens_map.json"))?;
        let token = |key: &str| token_of(&settings[key]).or(token_of(&map[key])).unwrap_or_default();
        let tokenizer = read_json(&folder.join("tokenizer.json"))?;
        let added = tokenizer["added_tokens"].as_array().into_iter().flatten();
        let special = added.filter(|t| t["special"] == true).filter_map(token_of);
        let mut template = ChatTemplate::from_text(&text, &token("bos_token"), &token("eos_token"), special.collect())?;
        let others =
            ["unk_token", "sep_token", "pad_token", "cls_token", "mask_token"].map(|key| (key.into(), token(key)));
        template.named.extend(others.into_iter().filter(|(_, token)| !token.is_empty()));
        if let Some(text) = with_tools.filter(|with_tools| *with_tools != text) {
            template.with_tools = Some(compiled(&text)?);
            template.text.push_str(&text);
        }
        Ok(template)
    }

    /// Compiles a template from its text, the begin and end tokens (empty if there is none), and all special tokens.
    ///
    /// # Errors
    /// A syntax error of the template.
    pub fn from_text(text: &str, bos: &str, eos: &str, mut special: Vec<String>) -> Result<ChatTemplate, ChatError> {
        let template = compiled(text)?;
        special.push(eos.into());
        special.retain(|token| !token.is_empty());
        special.sort_by(|a, b| b.len().cmp(&a.len()).then(a.cmp(b)));
        special.dedup();
        let named = [("bos_token", bos), ("eos_token", eos)].into_iter().filter(|(_, token)| !token.is_empty());
        let named = named.map(|(name, token)| (name.to_owned(), token.to_owned())).collect();
        Ok(ChatTemplate { template, with_tools: None, text: text.into(), named, eos: eos.into(), special })
    }

    /// Source text of the template, for fingerprints.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Renders the whole conversation and finds its supervised ranges. The notes name the differences.
    ///
    /// # Errors
    /// The template's refusal, a turn whose range is uncertain, or thinking without its opening tag.
    pub fn render(&self, conversation: &Conversation) -> Result<Rendered, ChatError> {
        let mut notes = Notes::default();
        let fitted = self.fit(conversation, &mut notes)?;
        let conversation = fitted.as_ref();
        let spans = Spans::new(self, conversation)?;
        let mut supervised: Vec<Range<usize>> = Vec::new();
        for (at, _) in conversation.turns.iter().enumerate().filter(|(_, turn)| turn.is_supervised()) {
            let span = spans.find(at)?;
            if supervised.last().is_some_and(|last| last.end > span.start) {
                return Err(ChatError::Uncertain { turn: at, why: "it overlaps the previous turn" });
            }
            supervised.push(span);
        }
        supervised.retain(|span| !span.is_empty());
        let text = spans.into_text();
        self.note_hidden(conversation, &text, &mut notes);
        Ok(Rendered { text, supervised, notes })
    }

    /// Renders a conversation up to the assistant's next answer, with `enable_thinking` off: drafters are trained and evaluated
    /// on answers (z-lab#133).
    ///
    /// # Errors
    /// The template's refusal.
    pub fn prompt(&self, conversation: &Conversation) -> Result<String, ChatError> {
        let fitted = self.fit_arguments(conversation, &mut Notes::default());
        let conversation = fitted.as_ref().unwrap_or(conversation);
        let messages: Vec<_> = conversation.turns.iter().map(span::plain_message).collect();
        let quiet = [("enable_thinking", Jinja::Bool(false))];
        self.call_with(&messages, &tools_value(conversation), true, &quiet)
    }

    fn call(&self, messages: &[Jinja], tools: &Jinja, add_generation_prompt: bool) -> Result<String, ChatError> {
        self.call_with(messages, tools, add_generation_prompt, &[])
    }

    fn call_with(
        &self,
        messages: &[Jinja],
        tools: &Jinja,
        prompt: bool,
        more: &[(&str, Jinja)],
    ) -> Result<String, ChatError> {
        let mut variables = vec![
            ("messages", Jinja::list(messages.to_vec())),
            ("tools", tools.clone()),
            ("documents", Jinja::None),
            ("add_generation_prompt", Jinja::Bool(prompt)),
        ];
        variables.extend(self.named.iter().map(|(name, token)| (name.as_str(), Jinja::text(token.as_str()))));
        variables.extend_from_slice(more);
        let with_tools = self.with_tools.as_ref().filter(|_| !matches!(tools, Jinja::None));
        let template = with_tools.unwrap_or(&self.template);
        template.render(&variables).map_err(|error| ChatError::Refused(error.to_string()))
    }

    /// Special token at the start of `text`, after optional white space: the bytes up to its end, and the token.
    fn leading_special<'a>(&'a self, text: &str) -> Option<(usize, &'a str)> {
        let trimmed = text.trim_start();
        let token = self.special.iter().find(|token| trimmed.starts_with(token.as_str()))?;
        Some((text.len() - trimmed.len() + token.len(), token))
    }
}

/// Loss mask: 1 for each token that starts inside a supervised range, else 0. `offsets` are ascending byte ranges of the
/// rendered text. An empty range comes from a tokenizer that trims white space from offsets; that token starts at the end
/// of the previous one. Tokens without text get 0.
pub fn loss_mask(offsets: &[(usize, usize)], supervised: &[Range<usize>]) -> Vec<u8> {
    let mut ranges = supervised.iter().peekable();
    let mut reached = 0;
    let inside = |&(start, end): &(usize, usize)| {
        let start = if start == end { reached.min(start) } else { start };
        reached = reached.max(end);
        while ranges.next_if(|range| range.end <= start).is_some() {}
        u8::from(start < end && ranges.peek().is_some_and(|range| range.contains(&start)))
    };
    offsets.iter().map(inside).collect()
}

fn compiled(text: &str) -> Result<jinja::Template, ChatError> {
    jinja::Template::new(text).map_err(|error| ChatError::Template(error.to_string()))
}

/// Tools of a conversation as templates expect them.
fn tools_value(conversation: &Conversation) -> Jinja {
    conversation.tools.as_ref().map_or(Jinja::None, Jinja::from)
}

/// Reads an optional JSON file; returns null if it is missing.
fn optional(path: &Path) -> Result<Value, ChatError> {
    match read_json(path) {
        Err(HfError::Read { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(Value::Null),
        other => Ok(other?),
    }
}

/// Text of a token, given as a string or as an object.
fn token_of(value: &Value) -> Option<String> {
    value.as_str().or(value["content"].as_str()).map(String::from)
}

/// Template of this name in `tokenizer_config.json`: a string is the default template, a list has names.
fn template_of(value: &Value, name: &str) -> Option<String> {
    match value {
        Value::String(text) if name == NAME => Some(text.clone()),
        Value::Array(list) => list.iter().find(|t| t["name"] == name)?["template"].as_str().map(String::from),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Map;

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
        assert!(changed.render(&talk(&[(Assistant, "b")])).is_err(), "a changed answer is not the model's");
    }

    #[test]
    fn what_a_template_makes_of_other_fields_is_said_by_the_assistant() {
        // Tool calls replace the text, as in Llama 3.1's own template.
        let text = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if 'tool_calls' in m %}{{ m.tool_calls[0] | tojson }}\
                    {% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}";
        let mut talk = talk(&[(User, "Hi"), (Assistant, "dropped"), (User, "<|im_end|>"), (Assistant, "Bye")]);
        talk.turns[1].extra.insert("tool_calls".into(), serde_json::json!([{"a": "<|im_end|>\n"}]));
        let rendered = template(text).render(&talk).unwrap();
        let said: Vec<_> = rendered.supervised.iter().map(|range| &rendered.text[range.clone()]).collect();
        assert_eq!(said, ["{\"a\": \"<|im_end|>\\n\"}<|im_end|>", "Bye<|im_end|>"]);
    }

    #[test]
    fn an_end_token_may_stand_apart_and_the_next_header_is_none() {
        let turns = [(User, "a"), (Assistant, "b"), (User, "c"), (Assistant, "d")];
        let apart = CHATML.replace("+ '<|im_end|>", "+ ' <|im_end|>");
        assert_eq!(supervised(&template(&apart), &turns), ["b <|im_end|>", "d <|im_end|>"]);
        // A template without end tokens: the next special token begins a header.
        let none = CHATML.replace("<|im_end|>", "");
        assert_eq!(supervised(&template(&none), &turns), ["b", "d"]);
        // The token that ends a turn need not be the one that ends a text.
        let other =
            ChatTemplate::from_text(CHATML, "", "</s>", vec!["<|im_start|>".into(), "<|im_end|>".into()]).unwrap();
        assert_eq!(supervised(&other, &turns), ["b<|im_end|>", "d<|im_end|>"]);
    }

    #[test]
    fn a_template_that_looks_at_the_content_is_uncertain() {
        let turns = [(User, "a"), (Assistant, "b"), (User, "c")];
        for text in [
            "{% for m in messages %}{{ m.content }}{% endfor %}{{ messages[1].content | length }}",
            "{{ messages[1].content | length }}{% for m in messages %}{{ m.content }}{% endfor %}",
            "{% for m in messages %}{% if m.content != 'b' %}{{ m.content }}{% endif %}{% endfor %}",
        ] {
            let error = template(text).render(&talk(&turns)).unwrap_err();
            assert!(matches!(error, ChatError::Uncertain { turn: 1, .. }), "{text}: {error}");
        }
    }

    #[test]
    fn generation_blocks_are_shown_and_keep_their_white_space_control() {
        let text = "{% for m in messages %}{{ m.role }}: \n{%- generation -%} \n{{ m.content }}{%- endgeneration %}\n{% endfor %}";
        let rendered = template(text).render(&talk(&[(User, "a"), (Assistant, "b")])).unwrap();
        assert_eq!(rendered.text, "user:aassistant:b");
    }

    #[test]
    fn folders_are_read_in_both_spellings_and_broken_ones_refused() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        let load = || ChatTemplate::load(folder.path());
        let said = |tools| {
            let talk = Conversation { tools, ..talk(&[(Assistant, "a")]) };
            load().unwrap().render(&talk).unwrap()
        };
        write(
            "tokenizer.json",
            r#"{"added_tokens": [{"content": "<e>", "special": true}, {"content": "<n>", "special": false}]}"#,
        );
        assert!(matches!(load(), Err(ChatError::Missing(_))));
        write(
            "tokenizer_config.json",
            r#"{"bos_token": {"content": "<s>"}, "eos_token": null, "chat_template": [
                {"name": "tool_use", "template": "tools {{ messages[0].content }}"},
                {"name": "default", "template": "{{ bos_token }}{{ messages[0].content }}<e><n>"}]}"#,
        );
        let rendered = said(None);
        assert_eq!(rendered.text, "<s>a<e><n>");
        assert_eq!(rendered.supervised, std::slice::from_ref(&(3..7)));
        assert_eq!(said(Some(serde_json::json!([]))).text, "tools a");
        write("chat_template.jinja", "{{ eos_token }}{{ messages[0].content }}");
        write("special_tokens_map.json", r#"{"eos_token": "<e>", "pad_token": {"content": "<p>"}}"#);
        assert_eq!(said(None).text, "<e>a");
        // transformers leaves a token undefined that the tokenizer lacks.
        write("chat_template.jinja", "{{ pad_token }}{{ unk_token is defined }}{{ messages[0].content }}");
        assert_eq!(said(None).text, "<p>Falsea");
        write("tokenizer_config.json", r#"{"bos_token": "#);
        assert!(matches!(load(), Err(ChatError::Folder(_))), "a lost begin token would spoil every row");
        write("tokenizer_config.json", "{}");
        write("chat_template.jinja", "{% if %}");
        assert!(matches!(load(), Err(ChatError::Template(_))));
    }

    #[test]
    fn tokens_are_supervised_by_where_they_begin() {
        let offsets = [(0, 2), (2, 5), (5, 5), (5, 9), (9, 12)];
        assert_eq!(loss_mask(&offsets, &[2..6, 9..10]), [0, 1, 0, 1, 1]);
        assert_eq!(loss_mask(&offsets, &[]), [0; 5]);
        // Offsets without white space: the header's line end, a line end inside, a begin token.
        let trimmed = [(0, 0), (0, 2), (3, 3), (3, 5), (6, 6), (6, 8)];
        assert_eq!(loss_mask(&trimmed, std::slice::from_ref(&(3..8))), [0, 0, 0, 1, 1, 1]);
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
