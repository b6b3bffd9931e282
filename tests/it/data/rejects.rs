//! Rejected rows: each kind by name, with its position, and without effect on other rows.

use super::world::{World, chat, gzip, jsonl};
use draftmill::{
    config::{HiddenFields, Overlong},
    data::{PrepareError, Reason},
};
use serde_json::{Value, json};
use std::{collections::BTreeMap, fs, path::Path};

/// Rows as in a file, each with its reason and a part of the detail.
fn table() -> Vec<(String, String, String)> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/rows/rejects.jsonl");
    let text = fs::read_to_string(path).unwrap();
    let read = |line: &str| {
        let case: Value = serde_json::from_str(line).unwrap();
        let word = |key: &str| case[key].as_str().unwrap().to_string();
        (word("reason"), word("detail"), word("row"))
    };
    text.lines().map(read).collect()
}

/// World that requires two supervised tokens, accepts any fraction of bad rows, and knows the vocabulary.
fn tolerant() -> World {
    let mut world = World::new();
    world.options.data.min_supervised = 2;
    world.options.data.max_reject_fraction = 1.0;
    world.write("model/config.json", json!({"vocab_size": 259}).to_string());
    world
}

#[test]
fn each_kind_is_rejected_by_its_name_at_its_line_and_costs_no_other_row() {
    let world = tolerant();
    for (reason, detail, row) in table() {
        // As one line among others, and, if possible there, as an element of an array.
        for text in [format!("{}\n\n{row}\n{}\n", chat(0), chat(1)), format!("[{},\n\n{row},\n{}]", chat(0), chat(1))] {
            world.write("a.json", &text);
            let report = world.prepare(&["a.json"]).unwrap();
            assert_eq!((report.rows, report.samples()), (3, 2), "{text}");
            let [(line, number, word, said)] = &world.rejects()[..] else { panic!("{text}") };
            assert_eq!((*line, *number, word), (3, 2, &reason), "{text}\n{said}");
            assert!(said.contains(&detail) || text.starts_with('['), "{said:?} does not say {detail:?}");
            if reason == "invalid_json" && row.contains("\"us") {
                break; // An unterminated string extends into the next rows of an array.
            }
        }
    }
}

/// One such row, with an error type that was not listed, ended the preparation.
#[test]
fn speculators_801_all_kinds_together_are_counted_and_the_run_goes_on() {
    let world = tolerant();
    let table = table();
    let mut text = String::new();
    let mut expected = BTreeMap::<String, u64>::new();
    for (i, (reason, _, row)) in table.iter().enumerate() {
        text += &format!("{}\n{row}\n", chat(i));
        *expected.entry(reason.clone()).or_default() += 1;
    }
    world.write("a.jsonl", text);
    let report = world.prepare(&["a.jsonl"]).unwrap();
    assert_eq!(report.samples(), table.len() as u64);
    let found = report.rejected.iter().chain(&report.left_out);
    assert_eq!(found.map(|(reason, count)| (reason.word().to_string(), *count)).collect::<BTreeMap<_, _>>(), expected);
    let shown = report.to_string();
    assert!(expected.keys().all(|word| shown.contains(&format!("  {word} "))), "{shown}");
    let lines: Vec<_> = world.rejects().into_iter().map(|reject| reject.0).collect();
    assert_eq!(lines, (0..table.len() as u64).map(|i| 2 * i + 2).collect::<Vec<_>>());
}

/// Kinds that need bytes, sizes or settings that a line of the table cannot have.
#[test]
fn the_remaining_kinds_have_their_names_too() {
    let mut world = tolerant();
    world.options.data.allow_truncated = true;
    let mut seen: Vec<String> = table().into_iter().map(|case| case.0).collect();
    let mut only = |world: &World, file: &str, line: u64, reason: Reason| {
        let report = world.prepare(&[file]).unwrap();
        let rejects = world.rejects();
        assert_eq!(rejects.len(), 1, "{rejects:?}");
        assert_eq!((rejects[0].0, rejects[0].2.as_str()), (line, reason.word()), "{rejects:?}");
        assert_eq!(report.rejected.contains_key(&reason), !reason.by_policy());
        seen.push(rejects[0].2.clone());
        report.samples()
    };
    let good = chat(0).to_string();
    world.write("a", [good.as_bytes(), b"\n{\"messages\": \"\xff\"}\n", good.as_bytes()].concat());
    assert_eq!(only(&world, "a", 2, Reason::InvalidUtf8), 2);

    let huge = json!({"messages": [{"role": "user", "content": "x".repeat(200_000)}]}).to_string();
    world.options.data.max_row_bytes = 100_000;
    for text in [format!("{good}\n{huge}\n{good}\n"), format!("[{good},\n{huge},{good}]")] {
        world.write("a", text);
        assert_eq!(only(&world, "a", 2, Reason::TooLarge), 2);
    }

    // Cut at every position in the last row: the others stay.
    let whole = format!("[{good},\n{good},\n{{\"id\": \"é\", {}", &good[1..]);
    let last = whole.rfind("\n").unwrap() + 1;
    for end in last..whole.len() {
        world.write("a", &whole.as_bytes()[..end]);
        assert_eq!(only(&world, "a", 3, Reason::Truncated), 2, "{end}");
    }
    world.write("a", &whole.as_bytes()[..last - 3]);
    assert_eq!(only(&world, "a", 2, Reason::Truncated), 1);
    world.write("a", format!("{good}\n{}", &good[..20]));
    assert_eq!(only(&world, "a", 2, Reason::Truncated), 1);
    let packed = gzip(&jsonl(&(0..50).map(chat).collect::<Vec<_>>()));
    world.write("a", &packed[..packed.len() - 1]);
    assert_eq!(only(&world, "a", 51, Reason::Truncated), 50);

    world.write("a", jsonl(&[chat(0), json!({"input_ids": vec![1; 200], "loss_mask": vec![1; 200]})]));
    (world.options.data.max_length, world.options.data.overlong) = (150, Overlong::Drop);
    assert_eq!(only(&world, "a", 2, Reason::TooLong), 1);

    // A tokenizer of whole words without an unknown token.
    let words = json!({"<|im_start|>user": 0, "q<|im_end|>": 1, "<|im_start|>assistant": 2, "yes": 3, "and": 4, "no<|im_end|>": 5});
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"},
    });
    world.write("model/tokenizer.json", tokenizer.to_string());
    let row =
        |text: &str| json!({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]});
    world.write("a", jsonl(&[row("yes and no"), row("perhaps")]));
    assert_eq!(only(&world, "a", 2, Reason::Tokenizer), 1);

    // `Fault` is a panic, which no known row causes; its test is next to the code.
    for reason in Reason::ALL.iter().filter(|reason| **reason != Reason::Fault) {
        assert!(seen.iter().any(|word| word == reason.word()), "no test has {}", reason.word());
    }
}

#[test]
fn only_bad_rows_or_too_many_are_an_error_that_leaves_no_store_but_the_rejects() {
    let mut world = tolerant();
    let bad = json!({"messages": []});
    world.write("a.jsonl", jsonl(&[bad.clone(), bad.clone()]));
    let error = world.prepare(&["a.jsonl"]).unwrap_err();
    assert!(matches!(error, PrepareError::NothingLeft { .. }), "{error}");
    assert_eq!(world.files(), ["a.jsonl", "data.safetensors.rejects.jsonl", "model"]);
    assert_eq!(world.rejects().len(), 2);
    world.write("empty", "");
    let error = world.prepare(&["empty"]).unwrap_err();
    assert!(
        matches!(&error, PrepareError::Empty { .. }) && error.to_string().contains("empty of data.inputs"),
        "{error}"
    );
    fs::remove_file(world.path("empty")).unwrap();

    world.options.data.max_reject_fraction = 0.25;
    world.write("a.jsonl", jsonl(&[chat(0), chat(1), chat(2), bad.clone()]));
    world.prepare(&["a.jsonl"]).unwrap();
    let before = fs::read(world.path("data.safetensors")).unwrap();
    world.write("a.jsonl", jsonl(&[chat(0), chat(1), chat(2), bad.clone(), bad]));
    let error = world.prepare(&["a.jsonl"]).unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains("2 of 5 rows (40.0 %)") && text.contains("= 0.25") && text.contains("rejects.jsonl"),
        "{text}"
    );
    assert_eq!(error.report().unwrap().rejected, BTreeMap::from([(Reason::Empty, 2)]));
    // The previous store is complete and stays.
    assert!(before == fs::read(world.path("data.safetensors")).unwrap());
    assert_eq!(world.files(), ["a.jsonl", "data.safetensors", "data.safetensors.rejects.jsonl", "model"]);
}

#[test]
fn sound_rows_that_a_setting_leaves_out_are_no_sign_of_bad_data() {
    let mut world = World::new();
    world.options.data.min_supervised = 20;
    let short = json!({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "no"}]});
    world.write("a.jsonl", jsonl(&[short.clone(), short.clone(), chat(0)]));
    let report = world.prepare(&["a.jsonl"]).unwrap();
    assert_eq!((report.rejected_rows(), report.left_out_rows(), report.samples()), (0, 2, 1));
    world.write("a.jsonl", jsonl(&[short]));
    let text = world.prepare(&["a.jsonl"]).unwrap_err().to_string();
    assert!(text.contains("data.min_supervised"), "{text}");
}

#[test]
fn a_turn_that_only_calls_tools_needs_no_content() {
    let mut world = World::new();
    world.options.data.hidden_fields = HiddenFields::Keep;
    let row = json!({"messages": [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": null, "tool_calls": [{"type": "function"}]},
        {"role": "tool", "content": "found"},
        {"role": "assistant", "content": "the answer"},
    ]});
    world.write("a.jsonl", jsonl(&[row]));
    assert_eq!(world.prepare(&["a.jsonl"]).unwrap().samples(), 1);
}
