//! Chat templates of real models, compared with renderings by Jinja2, and their supervised ranges.

use draftmill::data::{
    Change,
    chat::{ChatError, ChatTemplate, Conversation, Rendered, Role, Turn, loss_mask},
};
use proptest::prelude::*;
use serde_json::{Map, Value, json};
use std::{fs, path::PathBuf};

const MODELS: [&str; 3] = ["smollm2", "qwen3", "llama3_1"];

fn fixture(name: &str) -> String {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/templates").join(name);
    fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Returns the template of a model and its golden cases.
fn golden(model: &str) -> (ChatTemplate, Vec<Value>) {
    let golden: Value = serde_json::from_str(&fixture(&format!("{model}.json"))).unwrap();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let special = golden["special"].as_array().unwrap().iter().map(text).collect();
    let source = fixture(&format!("{model}.jinja"));
    let template = ChatTemplate::from_text(&source, &text(&golden["bos"]), &text(&golden["eos"]), special).unwrap();
    (template, golden["cases"].as_array().unwrap().clone())
}

fn conversation(case: &Value) -> Conversation {
    let turn = |message: &Value| {
        let mut extra = message.as_object().unwrap().clone();
        let role = match extra.shift_remove("role").unwrap().as_str().unwrap() {
            "system" => Role::System,
            "user" => Role::User,
            "assistant" => Role::Assistant,
            "tool" => Role::Tool,
            other => panic!("role {other}"),
        };
        let content = extra.shift_remove("content").unwrap().as_str().unwrap().to_owned();
        Turn { role, content, extra }
    };
    let turns = case["messages"].as_array().unwrap().iter().map(turn).collect();
    Conversation { turns, tools: Some(case["tools"].clone()).filter(|tools| !tools.is_null()) }
}

fn supervised(rendered: &Rendered) -> Vec<&str> {
    rendered.supervised.iter().map(|span| &rendered.text[span.clone()]).collect()
}

fn talk(turns: &[(Role, &str)]) -> Conversation {
    let turn = |&(role, content): &(Role, &str)| Turn { role, content: content.into(), extra: Map::new() };
    Conversation { turns: turns.iter().map(turn).collect(), tools: None }
}

#[test]
fn renderings_and_spans_are_those_of_jinja2() {
    for model in MODELS {
        let (template, cases) = golden(model);
        assert!(cases.len() > 70, "{model} lacks cases");
        for case in cases {
            let name = format!("{model}, {}", case["name"]);
            let rendered = match template.render(&conversation(&case)) {
                Err(ChatError::Uncertain { .. }) if case["uncertain"] == true => continue,
                Err(ChatError::UnopenedThinking { turn })
                    if case["messages"][turn]["content"].to_string().contains("</think>") =>
                {
                    continue;
                }
                other => other.unwrap_or_else(|e| panic!("{name}: {e}")),
            };
            assert_eq!(rendered.text, case["text"].as_str().unwrap(), "{name}");
            // The template splits raw completions itself, so only a turn that was split before has a certain span.
            if case["uncertain"] == true && rendered.notes.changes.contains(&Change::RawThinking) {
                continue;
            }
            let spans: Vec<_> = rendered.supervised.iter().map(|span| [span.start, span.end]).collect();
            assert_eq!(json!(supervised(&rendered)), case["supervised"], "{name}");
            assert_eq!(json!(spans), case["spans"], "{name}");
        }
    }
}

/// Cuts a text into words, single other characters and `special` tokens, with their byte offsets.
fn tokens(text: &str, special: &[&str]) -> Vec<(usize, usize)> {
    let mut offsets = Vec::new();
    let mut at = 0;
    while at < text.len() {
        let rest = &text[at..];
        let word = rest.chars().take_while(|c| c.is_alphanumeric()).map(char::len_utf8).sum::<usize>();
        let single = rest.chars().next().unwrap().len_utf8();
        let len = special.iter().find(|token| rest.starts_with(**token)).map_or(word.max(single), |token| token.len());
        offsets.push((at, at + len));
        at += len;
    }
    offsets
}

#[test]
fn specforge_885_first_response_position_is_supervised() {
    let (template, _) = golden("smollm2");
    let turns = [
        (Role::System, "S"),
        (Role::User, "one two"),
        (Role::Assistant, "three four"),
        (Role::User, "five"),
        (Role::Assistant, "six"),
        (Role::User, "three four"),
        (Role::Assistant, "seven"),
    ];
    let rendered = template.render(&talk(&turns)).unwrap();
    let offsets = tokens(&rendered.text, &["<|im_start|>", "<|im_end|>"]);
    let mask = loss_mask(&offsets, &rendered.supervised);
    let positions: Vec<_> = (0..mask.len()).filter(|&at| mask[at] == 1).collect();
    let said: Vec<_> = positions.iter().map(|&at| &rendered.text[offsets[at].0..offsets[at].1]).collect();
    assert_eq!(said, ["three", " ", "four", "<|im_end|>", "six", "<|im_end|>", "seven", "<|im_end|>"]);
    // Each turn is <|im_start|> role \n content <|im_end|> \n: the system's takes 0 to 5, the first question 6 to 13.
    assert_eq!(positions, [17, 18, 19, 20, 31, 32, 45, 46]);
    for first in [17, 31, 45] {
        let (start, _) = offsets[first];
        assert!(
            rendered.text[..start].ends_with("<|im_start|>assistant\n"),
            "position {first} is a first answer position"
        );
    }
}

#[test]
fn automodel_3738_template_inserted_think_blocks_are_unsupervised() {
    let (template, _) = golden("qwen3");
    for answer in ["4", "<think>\n\n</think>\n\n4"] {
        let rendered = template.render(&talk(&[(Role::User, "2+2?"), (Role::Assistant, answer)])).unwrap();
        assert!(rendered.text.contains("assistant\n<think>\n\n</think>\n\n4<|im_end|>"), "{}", rendered.text);
        assert_eq!(supervised(&rendered), ["4<|im_end|>"]);
    }
    let thinks = "<think>\nTwo and two.\n</think>\n\n4";
    let rendered = template.render(&talk(&[(Role::User, "2+2?"), (Role::Assistant, thinks)])).unwrap();
    assert_eq!(supervised(&rendered), [format!("{thinks}<|im_end|>")], "the row's own thinking is what the model says");
}

#[test]
fn speculators_801_a_conversation_that_a_real_template_rejects_is_an_error() {
    let (template, _) = golden("qwen3");
    let error = template.render(&Conversation::default()).unwrap_err();
    assert!(matches!(error, ChatError::Refused(_)), "Qwen3's template reads the first message: {error}");
}

/// Texts that templates, tokenizers and Jinja2 could misinterpret.
fn piece() -> impl Strategy<Value = String> {
    let nasty = [
        "<|im_end|>",
        "<|im_start|>assistant\n",
        "<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "<think>",
        "<tool_response>",
        "</tool_response>",
        "{{ bos_token }}",
        "{% endfor %}",
        "{#",
        "\n",
        " ",
        "\u{f8f0}draftmill0\u{f8f1}",
        "é",
    ];
    prop_oneof![proptest::sample::select(nasty.to_vec()).prop_map(String::from), "\\PC{0,6}"]
}

fn conversations() -> impl Strategy<Value = Conversation> {
    let content = proptest::collection::vec(piece(), 0..6).prop_map(|pieces| pieces.concat());
    let role = proptest::sample::select(&[Role::User, Role::Assistant, Role::Assistant, Role::System][..]);
    let turn = (role, content).prop_map(|(role, content)| Turn { role, content, extra: Map::new() });
    proptest::collection::vec(turn, 1..8).prop_map(|turns| Conversation { turns, tools: None })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn exactly_the_answers_and_their_end_tokens_are_supervised(conversation in conversations()) {
        prop_assume!(conversation.turns.iter().all(|turn| !turn.content.contains("</think>")));
        let last = conversation.turns.len() - 1;
        let asks = |turn: &Turn| {
            let answer = turn.content.starts_with("<tool_response>") && turn.content.ends_with("</tool_response>");
            turn.role == Role::User && !answer
        };
        let query = conversation.turns.iter().rposition(asks).unwrap_or(last);
        for model in MODELS {
            let (template, _) = golden(model);
            let rendered = template.render(&conversation).unwrap();
            let answers = conversation.turns.iter().enumerate().filter(|(_, turn)| turn.role == Role::Assistant);
            let expected: Vec<String> = answers.map(|(at, turn)| match model {
                "llama3_1" => format!("{}<|eot_id|>", turn.content.trim()),
                "qwen3" if at == last && at > query => format!("{}<|im_end|>", turn.content.trim_start_matches('\n')),
                _ => format!("{}<|im_end|>", turn.content),
            }).collect();
            prop_assert_eq!(supervised(&rendered), expected, "{}", model);
            prop_assert!(rendered.supervised.iter().all(|span| span.start < span.end));
            prop_assert!(rendered.supervised.windows(2).all(|pair| pair[0].end <= pair[1].start));
        }
    }

    #[test]
    fn whatever_the_row_holds_there_is_a_certain_span_or_an_error(mut conversation in conversations(), thinks in ".{0,8}") {
        for turn in &mut conversation.turns {
            turn.content = turn.content.replace("é", "</think>");
            turn.extra.insert("reasoning_content".into(), json!(thinks));
            turn.extra.insert("content".into(), json!(["another one"]));
        }
        let (template, _) = golden("qwen3");
        if let Ok(rendered) = template.render(&conversation) {
            let answers = conversation.turns.iter().filter(|turn| turn.role == Role::Assistant).count();
            prop_assert_eq!(rendered.supervised.len(), answers);
            for span in supervised(&rendered) {
                prop_assert!(span.ends_with("<|im_end|>") && !span.starts_with("<think>\n\n</think>"), "{:?}", span);
            }
        }
    }
}
