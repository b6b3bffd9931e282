//! `prepare` from files to store: samples, splits, roles, policies, and the state after an error.

mod files;
mod rejects;
mod turns;
pub mod world;

use self::world::{World, answer, chat, gzip, jsonl};
use draftmill::{
    config::{Overlong, UnknownRole},
    data::{PrepareError, Reason, Split, Store, prepare},
};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::{collections::BTreeMap, fs, ops::ControlFlow, process::Command};

#[test]
fn exactly_the_assistants_words_and_their_end_are_supervised() {
    let world = World::new();
    let row = json!({"messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "héllo\nwörld"},
        {"role": "assistant", "content": "first änswer"},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": "second"},
    ]});
    world.write("a.jsonl", jsonl(&[row]));
    world.prepare(&["a.jsonl"]).unwrap();
    let store = world.store();
    let (ids, mask) = store.sample(Split::Train, 0);
    assert_eq!(
        world.text(ids),
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhéllo\nwörld<|im_end|>\n<|im_start|>assistant\nfirst \
         änswer<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\nsecond<|im_end|>\n"
    );
    let supervised: Vec<i32> = ids.iter().zip(mask).filter(|(_, bit)| **bit == 1).map(|(id, _)| *id).collect();
    assert_eq!(world.text(&supervised), "first änswer<|im_end|>second<|im_end|>");
}

#[test]
fn every_form_of_the_same_conversations_gives_the_same_samples() {
    let world = World::new();
    let openai: Vec<_> = (0..20).map(chat).collect();
    let sharegpt: Vec<_> = (0..20)
        .map(|i| {
            json!({"id": "x", "conversations": [
                {"from": "human", "value": format!("question {i}")}, {"from": "gpt", "value": answer(i)},
            ]})
        })
        .collect();
    let parts: Vec<_> = (0..20)
        .map(|i| json!({"messages": [
            {"role": "user", "content": [{"type": "text", "text": "question "}, {"type": "text", "text": i.to_string()}]},
            {"role": "assistant", "content": answer(i)},
        ]}))
        .collect();
    let pretty = |rows: &[Value]| serde_json::to_vec_pretty(rows).unwrap();
    world.write("a.jsonl", jsonl(&openai));
    world.write("b.json", pretty(&openai));
    world.write("c.json", jsonl(&sharegpt));
    world.write("d.json.gz", gzip(&pretty(&sharegpt)));
    world.write("e.jsonl", pretty(&parts));
    let samples = |name: &str| {
        let report = world.prepare(&[name]).unwrap();
        assert_eq!((report.rows, report.samples(), report.rejects_file), (20, 20, None), "{name}");
        world.samples()
    };
    let first = samples("a.jsonl");
    for name in ["b.json", "c.json", "d.json.gz", "e.jsonl"] {
        assert_eq!(samples(name), first, "{name}");
    }
}

#[test]
fn the_same_inputs_give_the_same_bytes_anywhere() {
    let bytes = [World::new(), World::new()].map(|world| {
        world.write("a.jsonl", jsonl(&(0..300).map(chat).collect::<Vec<_>>()));
        world.prepare(&["a.jsonl"]).unwrap();
        world.store().verify().unwrap();
        fs::read(world.path("data.safetensors")).unwrap()
    });
    assert!(bytes[0] == bytes[1]);
}

#[test]
fn every_part_of_the_identity_changes_the_fingerprint() {
    let world = World::new();
    world.write("a.jsonl", jsonl(&[chat(0), chat(1)]));
    world.prepare(&["a.jsonl"]).unwrap();
    let mut seen = vec![world.store().fingerprint().to_string()];
    let mut changed = |world: &World, what: &str| {
        world.prepare(&["a.jsonl"]).unwrap();
        let fingerprint = world.store().fingerprint().to_string();
        assert!(!seen.contains(&fingerprint), "{what} did not change it");
        seen.push(fingerprint);
    };
    world.write("a.jsonl", jsonl(&[chat(0), chat(2)]));
    changed(&world, "data");
    world.write("model/chat_template.jinja", world::TEMPLATE.replace("\\n", "\\n\\n"));
    changed(&world, "template");
    let tokenizer = fs::read_to_string(world.path("model/tokenizer.json")).unwrap();
    world.write("model/tokenizer.json", tokenizer + " ");
    changed(&world, "tokenizer");
    let mut world = world;
    world.options.data.max_length -= 1;
    changed(&world, "max_length");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]
    #[test]
    fn the_split_of_a_sample_follows_from_its_content(order in Just((0..60usize).collect::<Vec<_>>()).prop_shuffle()) {
        let mut world = World::new();
        world.options.data.validation_fraction = 0.3;
        let split_of = |world: &World, rows: &[usize]| -> BTreeMap<Vec<i32>, Split> {
            world.write("a.jsonl", jsonl(&rows.iter().map(|&i| chat(i)).collect::<Vec<_>>()));
            world.prepare(&["a.jsonl"]).unwrap();
            let samples = world.samples().into_iter();
            samples.map(|(split, ids, _)| (ids, split)).collect()
        };
        let straight = split_of(&world, &(0..60).collect::<Vec<_>>());
        prop_assert_eq!(&split_of(&world, &order), &straight);
        for (ids, split) in split_of(&world, &order[..30]) {
            prop_assert_eq!(straight[&ids], split);
        }
        let share = straight.values().filter(|split| **split == Split::Validation).count();
        prop_assert!((6..=30).contains(&share), "{share} of 60 at a share of 0.3");
        world.options.data.validation_fraction = 0.5;
        for (ids, split) in split_of(&world, &order) {
            prop_assert!(split == Split::Validation || straight[&ids] == Split::Train, "a larger share only adds");
        }
    }
}

#[test]
fn overlong_samples_are_cut_or_dropped_as_the_setting_says() {
    let mut world = World::new();
    world.write("a.jsonl", jsonl(&[chat(0)]));
    world.prepare(&["a.jsonl"]).unwrap();
    let whole = world.samples().remove(0);
    world.options.data.max_length = whole.1.len() as u32;
    assert_eq!(world.prepare(&["a.jsonl"]).unwrap().cut, 0);
    world.options.data.max_length -= 3;
    assert_eq!(world.prepare(&["a.jsonl"]).unwrap().cut, 1);
    let cut = world.samples().remove(0);
    let end = whole.1.len() - 3;
    assert_eq!((&cut.1[..], &cut.2[..]), (&whole.1[..end], &whole.2[..end]));
    world.options.data.overlong = Overlong::Drop;
    world.write("a.jsonl", jsonl(&[chat(0), json!({"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]})]));
    let report = world.prepare(&["a.jsonl"]).unwrap();
    assert_eq!((report.samples(), report.left_out), (1, BTreeMap::from([(Reason::TooLong, 1)])));
}

#[test]
fn rows_of_tokens_need_no_tokenizer_and_are_stored_as_they_are() {
    let world = World::new();
    fs::remove_dir_all(world.path("model")).unwrap();
    let rows = [
        json!({"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}),
        json!({"input_ids": [4, 5], "loss_mask": [true, true], "source": "x"}),
    ];
    world.write("a.jsonl", jsonl(&rows));
    world.prepare(&["a.jsonl"]).unwrap();
    let samples = world.samples();
    let expected = [(Split::Train, vec![1, 2, 3], vec![0, 1, 1]), (Split::Train, vec![4, 5], vec![1, 1])];
    assert_eq!(samples, expected);
    assert_eq!(world.store().metadata()["tokenizer_sha256"], "unused");
    world.write("a.jsonl", jsonl(&[rows[0].clone(), chat(0)]));
    let error = world.prepare(&["a.jsonl"]).unwrap_err();
    assert!(matches!(error, PrepareError::Model(_)) && error.to_string().contains("target.dir: "), "{error}");
}

#[test]
fn every_known_name_of_a_role_is_counted() {
    let world = World::new();
    let names = [("human", "gpt"), ("user", "chatgpt"), ("User", "bing"), ("human", "bard"), ("human", "Assistant")];
    let row = |(user, assistant): &(&str, &str)| {
        json!({"conversations": [{"from": "system", "value": "s"}, {"from": user, "value": "q"},
                                 {"from": assistant, "value": "an answer"}, {"from": "tool", "value": "r"}]})
    };
    world.write("a.json", json!(names.iter().map(row).collect::<Vec<_>>()).to_string());
    let report = world.prepare(&["a.json"]).unwrap();
    let counts = [
        ("assistant", 1),
        ("bard", 1),
        ("bing", 1),
        ("chatgpt", 1),
        ("gpt", 1),
        ("human", 3),
        ("system", 5),
        ("tool", 5),
        ("user", 2),
    ];
    assert_eq!(report.roles, counts.map(|(name, count)| (name.to_string(), count)).into());
    assert!(report.unknown_roles.is_empty());
}

/// A data set named the assistant after its model, and all its turns were dropped without a message.
#[test]
fn speculators_907_a_role_that_is_a_models_name_is_never_dropped_in_silence() {
    let mut world = World::new();
    let row = json!({"messages": [{"role": "user", "content": "q"}, {"role": "llama-70b", "content": "an answer"}]});
    world.write("a.jsonl", jsonl(&[row, chat(0)]));
    world.options.data.max_reject_fraction = 0.5;
    let named = BTreeMap::from([("llama-70b".to_string(), 1)]);
    let report = world.prepare(&["a.jsonl"]).unwrap();
    assert_eq!((report.rejected, &report.unknown_roles), (BTreeMap::from([(Reason::UnknownRole, 1)]), &named));
    world.options.data.unknown_role = UnknownRole::Skip;
    let report = world.prepare(&["a.jsonl"]).unwrap();
    assert_eq!((&report.rejected, &report.unknown_roles), (&BTreeMap::from([(Reason::NothingSupervised, 1)]), &named));
    assert!(report.to_string().contains("llama-70b 1"));
}

/// Tools as a list crashed the parser, which accepted only strings.
#[test]
fn specforge_738_tools_may_be_a_list_or_a_string() {
    let mut world = World::new();
    world.options.data.max_reject_fraction = 0.5;
    let tools = json!([{"type": "function", "function": {"name": "look_up", "parameters": {}}}]);
    let row = |tools: Value| {
        let mut row = chat(0);
        row["tools"] = tools;
        row
    };
    world.write(
        "a.jsonl",
        jsonl(&[row(tools.clone()), row(json!(tools.to_string())), row(json!("[{\"type\":")), row(json!(7))]),
    );
    let report = world.prepare(&["a.jsonl"]).unwrap();
    assert_eq!(report.rejected, BTreeMap::from([(Reason::BadTools, 2)]));
    let samples = world.samples();
    assert_eq!(samples.len(), 2);
    assert_eq!(samples[0], samples[1]);
    assert!(world.text(&samples[0].1).contains("look_up"));
    world.write("a.jsonl", jsonl(&[row(Value::Null), row(json!("")), row(json!([])), chat(0)]));
    world.prepare(&["a.jsonl"]).unwrap();
    let samples = world.samples();
    assert!(samples.iter().all(|sample| *sample == samples[3]) && samples.len() == 4);
}

/// 600 000 files were opened before the first step, without a message. Here the first message precedes the first file,
/// and each file is opened only when it is read.
#[test]
fn specforge_732_nothing_is_read_before_its_turn() {
    let world = World::new();
    let rows: Vec<_> = (0..2000).map(chat).collect();
    world.write("b.jsonl", "this is no row");
    let options = world.with_inputs(&["a.jsonl", "b.jsonl"]);
    let mut calls = 0;
    let report = prepare(&options, &mut |progress| {
        calls += 1;
        if calls == 1 {
            assert_eq!(progress.rows, 0);
            world.write("a.jsonl", jsonl(&rows));
        } else if progress.rows < 1000 {
            world.write("b.jsonl", jsonl(&[chat(5000)]));
        }
        ControlFlow::Continue(())
    });
    assert_eq!(report.unwrap().samples(), 2001);
}

#[test]
fn what_cannot_be_read_or_used_is_named_and_leaves_nothing() {
    let mut world = World::new();
    world.write("a.jsonl", jsonl(&[chat(0)]));
    let fails = |world: &World, inputs: &[&str], words: &[&str]| {
        let text = world.prepare(inputs).unwrap_err().to_string();
        assert!(words.iter().all(|word| text.contains(word)), "{words:?}: {text}");
        assert!(!world.files().iter().any(|name| name.starts_with("data.")), "{:?}", world.files());
    };
    fails(&world, &[], &["data.inputs"]);
    fails(&world, &["a.jsonl", "gone.jsonl"], &["gone.jsonl"]);
    fails(&world, &["a.jsonl", "model"], &["model", "folder"]);
    let mut broken = gzip(&jsonl(&[chat(0)]));
    let end = broken.len() - 6;
    broken[end] ^= 1;
    world.write("b.gz", broken);
    fails(&world, &["b.gz"], &["b.gz", "checksum"]);
    world.write("model/config.json", "{");
    fails(&world, &["a.jsonl"], &["config.json"]);
    world.write("model/config.json", "{}");
    world.options.data.validation_fraction = 1.0;
    fails(&world, &["a.jsonl"], &["validation_fraction"]);
    world.options.data.store = world.path("a.jsonl/data.safetensors");
    fails(&world, &["a.jsonl"], &["a.jsonl/data.safetensors", "data.store"]);
}

#[test]
fn an_interrupted_run_leaves_nothing_and_the_old_store_as_it_was() {
    let world = World::new();
    world.write("a.jsonl", jsonl(&(0..2000).map(chat).collect::<Vec<_>>()));
    let options = world.with_inputs(&["a.jsonl"]);
    let stopped = |after: u32| {
        let mut calls = 0;
        let result = prepare(&options, &mut |_| {
            calls += 1;
            if calls > after { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        assert!(matches!(result, Err(PrepareError::Interrupted)), "after {after}: {result:?}");
    };
    (0..3).for_each(stopped);
    assert_eq!(world.files(), ["a.jsonl", "model"]);
    world.prepare(&["a.jsonl"]).unwrap();
    let before = fs::read(world.path("data.safetensors")).unwrap();
    stopped(2);
    assert!(before == fs::read(world.path("data.safetensors")).unwrap());
    assert_eq!(world.files(), ["a.jsonl", "data.safetensors", "model"]);
}

#[test]
fn the_command_prints_its_table_or_json_and_tells_bad_data_by_its_code() {
    let world = World::new();
    world.write("good.jsonl", jsonl(&[chat(0), chat(1)]));
    world.write("bad.jsonl", "{}\n{}\n");
    let run = |input: &str, more: &[&str]| {
        let sets = [
            format!("data.inputs={}", world.path(input).display()),
            format!("data.store={}", world.path("data.safetensors").display()),
            format!("target.dir={}", world.path("model").display()),
            "data.min_supervised=1".into(),
            "data.validation_fraction=0.0".into(),
        ];
        let sets = sets.iter().flat_map(|set| ["--set", set]);
        let output =
            Command::new(env!("CARGO_BIN_EXE_draftmill")).arg("prepare").args(sets).args(more).output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (output.status.code(), text(output.stdout), text(output.stderr))
    };
    let (code, table, _) = run("good.jsonl", &[]);
    assert_eq!(code, Some(0));
    assert!(table.contains("to train                         2"), "{table}");
    let (code, out, _) = run("good.jsonl", &["--json"]);
    let report: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, &report["train_samples"]), (Some(0), &json!(2)));
    assert_eq!(report["fingerprint"], Store::open(&world.path("data.safetensors")).unwrap().fingerprint());
    let (code, out, errors) = run("bad.jsonl", &["--json"]);
    let report: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, &report["rejected"]), (Some(4), &json!({"no_conversation": 2})));
    assert!(errors.contains("none of 2 rows") && errors.contains("rejects.jsonl"), "{errors}");
}
