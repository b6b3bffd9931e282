//! Fields of rows and turns that decide on supervision or on the text: weights, reasoning, system prompts, tool calls.

use super::world::{World, chat, jsonl};
use draftmill::{
    config::{HiddenFields, LeadingAssistant},
    data::{Change, Reason, Split},
};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::{collections::BTreeMap, fs, path::Path};

/// A world with a template of tests/data/templates.
fn with_template(name: &str) -> World {
    let world = World::new();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/templates").join(name);
    world.write("model/chat_template.jinja", fs::read(path).unwrap());
    world
}

/// Text and supervised text of the only row, and its changes.
fn sample(world: &World, row: &Value) -> (String, String, Vec<Change>) {
    world.write("a.jsonl", jsonl(std::slice::from_ref(row)));
    let report = world.prepare(&["a.jsonl"]).unwrap_or_else(|error| panic!("{row}: {error}"));
    let store = world.store();
    let (ids, mask) = store.sample(Split::Train, 0);
    let supervised: Vec<i32> = ids.iter().zip(mask).filter(|(_, bit)| **bit == 1).map(|(id, _)| *id).collect();
    assert!(report.changed.values().all(|count| *count == 1));
    (world.text(ids), world.text(&supervised), report.changed.into_keys().collect())
}

/// Reason and detail of the only row's reject.
fn reject(world: &World, row: &Value) -> (String, String) {
    world.write("a.jsonl", jsonl(std::slice::from_ref(row)));
    let result = world.prepare(&["a.jsonl"]);
    assert!(result.is_err(), "{row}: {result:?}");
    let (_, _, reason, detail) = world.rejects().remove(0);
    (reason, detail)
}

fn talk(assistant: Value) -> Value {
    let mut turn = json!({"role": "assistant", "content": "the answer"});
    turn.as_object_mut().unwrap().extend(assistant.as_object().unwrap().clone());
    json!({"messages": [{"role": "user", "content": "q"}, turn]})
}

#[test]
fn axolotl_1703_llamafactory_2571_a_turn_of_weight_0_is_context_only() {
    let world = World::new();
    let row = |key: &str, value: &Value| {
        json!({"messages": [
            {"role": "user", "content": "q", key: 0}, {"role": "assistant", "content": "a wrong answer", key: value},
            {"role": "user", "content": "again"}, {"role": "assistant", "content": "the right answer", key: null},
        ]})
    };
    for key in ["weight", "loss", "train", "trainable"] {
        for value in [json!(0), json!(0.0), json!(false), json!("0"), json!("False")] {
            let (text, supervised, changes) = sample(&world, &row(key, &value));
            assert_eq!((&supervised[..], &changes[..]), ("the right answer<|im_end|>", &[Change::NotSupervised][..]));
            assert!(text.contains("a wrong answer"), "{text}");
        }
        for value in [json!(1), json!(1.0), json!(true), json!(null), json!("true")] {
            let (_, supervised, changes) = sample(&world, &row(key, &value));
            assert_eq!(supervised, "a wrong answer<|im_end|>the right answer<|im_end|>", "{key} {value}");
            assert_eq!(changes, []);
        }
        assert_eq!(sample(&world, &row(key, &json!(0.5))).2, [Change::WeightIsOne]);
        for value in [json!("heavy"), json!(-1), json!([0]), json!({})] {
            let (reason, detail) = reject(&world, &row(key, &value));
            assert!(
                reason == "bad_turn" && detail.starts_with("turn 2: ") && detail.contains(key),
                "{reason}: {detail}"
            );
        }
    }
    let (reason, detail) = reject(&world, &talk(json!({"weight": 0})));
    assert_eq!((&reason[..], &detail[..]), ("nothing_supervised", "all assistant turns have weight 0"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    /// The supervised text is that of the turns of weight 1, whichever they are.
    #[test]
    fn supervision_follows_the_weights(weights in prop::collection::vec(any::<bool>(), 1..6)) {
        prop_assume!(weights.contains(&true));
        let world = World::new();
        let turns = weights.iter().enumerate().flat_map(|(i, weight)| [
            json!({"role": "user", "content": format!("question {i}")}),
            json!({"role": "assistant", "content": format!("answer {i}"), "weight": u8::from(*weight)}),
        ]);
        let row = json!({"messages": turns.collect::<Vec<_>>()});
        let wanted: String = weights.iter().enumerate().filter(|(_, weight)| **weight)
            .map(|(i, _)| format!("answer {i}<|im_end|>")).collect();
        prop_assert_eq!(sample(&world, &row).1, wanted);
    }
}

#[test]
fn vllm_27755_38488_reasoning_and_thinking_are_reasoning_content() {
    let world = with_template("qwen3.jinja");
    let named = sample(&world, &talk(json!({"reasoning_content": "I add."})));
    assert!(named.1.contains("<think>\nI add.\n</think>\n\nthe answer"), "{}", named.1);
    for fields in [
        json!({"reasoning": "I add."}),
        json!({"thinking": "I add."}),
        json!({"reasoning_content": null, "thinking": null, "reasoning": "I add."}),
        json!({"reasoning_content": "", "reasoning": "I add."}),
    ] {
        assert_eq!(sample(&world, &talk(fields)), named);
    }
    // gpt-oss reads `thinking`.
    let world = World::new();
    let template =
        "{% for m in messages %}{% if m.thinking %}[{{ m.thinking }}]{% endif %}{{ m.content }}<|im_end|>{% endfor %}";
    world.write("model/chat_template.jinja", template);
    assert!(sample(&world, &talk(json!({"reasoning": "I add."}))).1.contains("[I add.]the answer"));
}

#[test]
fn automodel_2375_null_is_absent_in_rows_and_turns() {
    let world = with_template("qwen3.jinja");
    let plain = sample(&world, &talk(json!({})));
    let nulls = json!({
        "name": null, "tool_calls": null, "tool_call_id": null, "reasoning_content": null, "function_call": null,
        "refusal": null, "audio": null, "annotations": null, "from": null, "value": null, "weight": null, "thinking": null,
    });
    assert_eq!(sample(&world, &talk(nulls)), plain);
    let turns = [("user", "q"), ("assistant", "the answer")];
    let openai = turns.map(|(role, text)| json!({"role": role, "content": text, "from": null, "value": null}));
    let shared = turns.map(|(role, text)| json!({"from": role, "value": text, "role": null, "content": null}));
    for row in [
        json!({"messages": null, "conversations": shared, "tools": null, "system": null, "functions": null}),
        json!({"messages": [], "conversations": shared}),
        json!({"messages": shared, "conversations": []}),
        json!({"conversations": openai, "messages": null, "input_ids": null, "loss_mask": null}),
        json!({"messages": openai, "input_ids": [], "loss_mask": []}),
        json!({"messages": serde_json::to_string(&openai).unwrap(), "tools": [null]}),
    ] {
        assert_eq!(sample(&world, &row), plain, "{row}");
    }
    // A template that lists the keys of a turn sees none of them.
    world.write(
        "model/chat_template.jinja",
        "{% for m in messages %}{{ m.content }}{{ m.keys() | list }}<|im_end|>{% endfor %}",
    );
    let row = talk(json!({"refusal": null, "tool_calls": null}));
    assert_eq!(sample(&world, &row).0.matches("['role', 'content']").count(), 2);
}

#[test]
fn angelslim_345_a_system_prompt_beside_the_turns_is_the_first_turn() {
    let world = World::new();
    let row = |beside: Value, first: Option<&str>| {
        let mut turns = vec![json!({"from": "human", "value": "q"}), json!({"from": "gpt", "value": "the answer"})];
        turns.splice(0..0, first.map(|text| json!({"from": "system", "value": text})));
        let mut row = json!({"conversations": turns});
        row.as_object_mut().unwrap().extend(beside.as_object().unwrap().clone());
        row
    };
    let wanted = sample(&world, &row(json!({}), Some("Be a pirate.")));
    for key in ["system", "system_prompt", "system_message"] {
        for value in [json!("Be a pirate."), json!([{"type": "text", "text": "Be a pirate."}])] {
            let (text, _, changes) = sample(&world, &row(json!({key: value}), None));
            assert_eq!((&text, &changes[..]), (&wanted.0, &[Change::SystemBeside][..]), "{key}");
        }
        let (text, _, changes) = sample(&world, &row(json!({key: "Be kind."}), Some("Be a pirate.")));
        assert_eq!((&text, &changes[..]), (&wanted.0, &[Change::SystemUnused][..]));
        assert_eq!(sample(&world, &row(json!({key: "Be a pirate."}), Some("Be a pirate."))), wanted);
        assert_eq!(sample(&world, &row(json!({key: " "}), Some("Be a pirate."))), wanted);
        assert_eq!(reject(&world, &row(json!({key: {"a": 1}}), None)).0, "unsupported_content");
    }
    let function = json!({"name": "look_up", "parameters": {}});
    let tools = sample(&world, &row(json!({"tools": [{"type": "function", "function": function}]}), None));
    let (text, _, changes) = sample(&world, &row(json!({"functions": [function]}), None));
    assert_eq!((text, &changes[..]), (tools.0, &[Change::FunctionsBeside][..]));
}

/// 6358 of 17 672 rows of ShareGPT begin with an answer.
#[test]
fn a_conversation_that_begins_with_the_assistant_keeps_its_rest() {
    let mut world = World::new();
    let said = |role: &str, text: &str| json!({"from": role, "value": text});
    let rest = [said("human", "q"), said("gpt", "the answer")];
    let wanted = sample(&world, &json!({"conversations": rest}));
    for first in [
        vec![said("gpt", "Hi!")],
        vec![said("gpt", "Hi!"), said("gpt", "How are you?")],
        vec![said("gpt", "I call."), said("tool", "4"), said("gpt", "It is 4.")],
    ] {
        let turns = [first, rest.to_vec()].concat();
        let row = json!({"conversations": turns});
        let (text, supervised, changes) = sample(&world, &row);
        assert_eq!((&text, &supervised), (&wanted.0, &wanted.1));
        assert_eq!(changes, [Change::LeadingAssistant]);
        world.options.data.leading_assistant = LeadingAssistant::Reject;
        assert_eq!(reject(&world, &row).0, "assistant_first");
        world.options.data.leading_assistant = LeadingAssistant::Drop;
    }
    let system = [said("system", "s"), said("gpt", "Hi!"), rest[0].clone(), rest[1].clone()];
    let (text, _, _) = sample(&world, &json!({"conversations": system}));
    assert!(text.starts_with("<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nq"), "{text}");
    assert_eq!(
        reject(&world, &json!({"conversations": [said("gpt", "Hi!"), said("human", "q")]})).0,
        "assistant_first"
    );
}

fn call(arguments: Value) -> Value {
    json!([{"id": "call_1abcdefg", "type": "function", "function": {"name": "look_up", "arguments": arguments}}])
}

#[test]
fn automodel_1644_axolotl_2115_what_the_template_hides_is_named() {
    // ChatML shows neither tool calls nor reasoning: an empty turn was supervised in their place.
    let mut world = World::new();
    for (fields, name) in [
        (json!({"content": "", "tool_calls": call(json!({"a": 1}))}), "`tool_calls` of turn 2"),
        (json!({"content": "", "function_call": {"name": "look_up", "arguments": "{}"}}), "`function_call` of turn 2"),
        (json!({"reasoning_content": "I add."}), "`reasoning_content` of turn 2"),
        (json!({"thinking": "I add."}), "`reasoning_content` of turn 2"),
        (json!({"refusal": "I cannot."}), "`refusal` of turn 2"),
    ] {
        world.options.data.hidden_fields = HiddenFields::Reject;
        let (reason, detail) = reject(&world, &talk(fields.clone()));
        assert!(reason == "hidden_by_template" && detail.contains(name), "{reason}: {detail}");
        assert!(detail.contains("data.hidden_fields"), "{detail}");
        world.options.data.hidden_fields = HiddenFields::Keep;
        world.write("a.jsonl", jsonl(&[talk(fields), chat(0)]));
        let report = world.prepare(&["a.jsonl"]);
        let report = match &report {
            Ok(report) => report,
            Err(error) => error.report().unwrap(),
        };
        assert!(!report.rejected.contains_key(&Reason::Hidden));
    }
    let (_, _, changes) = sample(&world, &talk(json!({"reasoning": "I add."})));
    assert_eq!(changes, [Change::Hidden]);
    world.options.data.hidden_fields = HiddenFields::Reject;

    // Tools, and turns of a role that the template leaves out.
    let template = "{% for m in messages if m.role in ['user', 'assistant'] %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}";
    world.write("model/chat_template.jinja", template);
    let mut row = chat(0);
    row["tools"] = json!([{"type": "function", "function": {"name": "look_up"}}]);
    assert!(reject(&world, &row).1.contains("`tools`"));
    let mut row = chat(0);
    row["system"] = json!("Be a pirate.");
    assert!(reject(&world, &row).1.contains("the text of turn 1 (system)"));

    // A template that replaces the text by the calls.
    let template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}\
                    {% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}";
    world.write("model/chat_template.jinja", template);
    assert!(
        reject(&world, &talk(json!({"tool_calls": call(json!({"a": 1}))})))
            .1
            .contains("the text of turn 2 (assistant)")
    );
    sample(&world, &talk(json!({"content": "", "tool_calls": call(json!({"a": 1}))})));
}

#[test]
fn metadata_never_rejects_a_row_and_is_counted_by_name() {
    let world = World::new();
    let mut row = talk(json!({"name": "Al", "score": 3, "id": "x", "weight": 1, "annotations": []}));
    row["messages"][0]["name"] = json!("Bob");
    world.write("a.jsonl", jsonl(&[row, chat(0)]));
    let report = world.prepare(&["a.jsonl"]).unwrap();
    let counts = ["id", "name", "score"].map(|name| (name.to_string(), 1));
    assert_eq!((report.samples(), &report.unseen_fields), (2, &BTreeMap::from(counts)));
    assert!(report.changed.is_empty() && report.to_string().contains("`name`"), "{report}");
    // A field that the template shows is not counted, others are.
    world.write(
        "model/chat_template.jinja",
        "{% for m in messages %}{{ m.name }}: {{ m.content }}<|im_end|>{% endfor %}",
    );
    let report = world.prepare(&["a.jsonl"]).unwrap();
    assert_eq!(report.unseen_fields.into_keys().collect::<Vec<_>>(), ["id", "score"]);
}

/// Qwen3 leaves the reasoning of earlier answers out on purpose.
#[test]
fn reasoning_of_earlier_answers_is_counted_and_kept() {
    let world = with_template("qwen3.jinja");
    let says =
        |text: &str| json!({"role": "assistant", "content": text, "reasoning_content": format!("I think {text}.")});
    let user = json!({"role": "user", "content": "q"});
    let (text, _, changes) = sample(&world, &json!({"messages": [user, says("one"), user, says("two")]}));
    assert_eq!(changes, [Change::EarlierReasoning]);
    assert!(!text.contains("I think one") && text.contains("I think two"), "{text}");
}

/// Templates and the text of a call with `{"city": "Zürich", "days": 2}`.
const CALLS: [(&str, &str, &str); 5] = [
    ("encodes", "{{ c.function.arguments | tojson }}", r#"{"city": "Zürich", "days": 2}"#),
    ("concatenates", "{{ '' + c.function.arguments }}", r#"{"city": "Zürich", "days": 2}"#),
    ("prints", "{{ c.function.arguments }}", r#"{"city": "Zürich", "days": 2}"#),
    (
        "either",
        "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}{{ c.function.arguments | tojson }}{% endif %}",
        r#"{"city": "Zürich", "days": 2}"#,
    ),
    ("iterates", "{% for k, v in c.function.arguments.items() %}<{{ k }}>{{ v }}{% endfor %}", "<city>Zürich<days>2"),
];

#[test]
fn oumi_2599_sglang_12123_arguments_are_encoded_once_in_any_form() {
    let world = World::new();
    let object = json!({"city": "Zürich", "days": 2});
    let spaced = r#"{"city": "Zürich", "days": 2}"#;
    for (name, expression, wanted) in CALLS {
        let template = format!(
            "{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n{{% for c in m.tool_calls or [] %}}{{{{ c.function.name }}}}[{expression}]{{% endfor %}}\
             {{{{ m.content }}}}<|im_end|>\n{{% endfor %}}"
        );
        world.write("model/chat_template.jinja", template);
        for arguments in [
            object.clone(),
            json!(spaced),
            json!(r#"{"city":"Zürich",   "days":2}"#),
            json!(r#"{"city": "Z\u00fcrich", "days": 2}"#),
            // Encoded twice in the row already.
            json!(json!(spaced).to_string()),
        ] {
            let (text, supervised, changes) = sample(&world, &talk(json!({"tool_calls": call(arguments.clone())})));
            let needs_text = ["concatenates", "prints"].contains(&name);
            // A template that only takes text gets the row's own text.
            let own = arguments.as_str().filter(|text| needs_text && text.starts_with('{')).unwrap_or(wanted);
            assert_eq!(
                changes.contains(&Change::ArgumentsText),
                needs_text && own == wanted && arguments != json!(spaced)
            );
            assert!(supervised.contains(&format!("[{own}]")), "{name}, {arguments}: {text}");
        }
        let (reason, detail) = reject(&world, &talk(json!({"tool_calls": call(json!("{'city': 'Zürich'}"))})));
        assert!(reason == "bad_tool_arguments" && detail.contains("turn 2"), "{reason}: {detail}");
        sample(&world, &talk(json!({"tool_calls": call(json!(""))})));
    }
    world.write(
        "model/chat_template.jinja",
        "{% for m in messages %}{{ m.tool_calls | tojson if m.tool_calls }}{{ m.content }}<|im_end|>{% endfor %}",
    );
    let (text, _, changes) = sample(&world, &talk(json!({"tool_calls": call(json!(spaced))})));
    assert!(text.contains(r#""arguments": {"city""#) && changes == [Change::ArgumentsParsed], "{text}");
}

#[test]
fn trl_6361_a_raw_completion_is_reasoning_and_answer() {
    let raw = json!({"content": "Let me add.\n</think>\n\nFour it is."});
    // The template shows reasoning in a block that it opens.
    let world = with_template("qwen3.jinja");
    let wanted = sample(&world, &talk(json!({"content": "Four it is.", "reasoning_content": "Let me add."})));
    let (text, supervised, changes) = sample(&world, &talk(raw.clone()));
    assert_eq!((&text, &supervised), (&wanted.0, &wanted.1));
    assert_eq!(changes, [Change::RawThinking]);
    assert!(supervised.contains("Let me add.\n</think>"), "{supervised}");
    // The block is whole.
    let whole = json!({"content": "<think>\nLet me add.\n</think>\n\nFour it is."});
    assert_eq!(sample(&world, &talk(whole)).1, supervised);
    // The template knows no thinking.
    let world = World::new();
    let (reason, detail) = reject(&world, &talk(raw.clone()));
    assert!(
        reason == "unopened_thinking" && detail.contains("turn 2") && detail.contains("reasoning_content"),
        "{detail}"
    );
    // The prompt opens the block, but the history of the template hides the reasoning: named, and kept if the setting says so.
    let mut world = World::new();
    let template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}\
                    {% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}";
    world.write("model/chat_template.jinja", template);
    let (reason, detail) = reject(&world, &talk(raw.clone()));
    assert!(reason == "hidden_by_template" && detail.contains("`reasoning_content`"), "{reason}: {detail}");
    world.options.data.hidden_fields = HiddenFields::Keep;
    let (_, supervised, changes) = sample(&world, &talk(raw));
    assert_eq!((&supervised[..], &changes[..]), ("Four it is.<|im_end|>", &[Change::RawThinking, Change::Hidden][..]));
}

#[test]
fn each_change_of_a_row_has_a_test_here() {
    let source = include_str!("turns.rs");
    for change in Change::ALL {
        let name = format!("Change::{change:?}");
        assert!(source.matches(&name).count() > 0, "no test has {name}");
    }
}
