//! Prepared store and its origin: what made it, what became of it, and what no command may overwrite. Through the binary.

use crate::data::world::{TEMPLATE, World, chat, jsonl};
use draftmill::{
    check::{Machine, Samples, Stored, examine, examine_store},
    common::exit::Exit,
    config,
    data::{PrepareError, PrepareOptions, Split, Store, prepare},
};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::{fs, ops::ControlFlow, path::Path, process::Command};

/// A prepared store of 40 rows, of which two are longer than `data.max_length`.
struct Made(World);

const LONG: usize = 120;

impl Made {
    fn new() -> Made {
        let mut world = World::new();
        world.options.data.max_length = LONG as u32;
        let mut rows: Vec<_> = (0..40).map(chat).collect();
        for row in &mut rows[..2] {
            row["messages"][1]["content"] = json!("long ".repeat(60));
        }
        world.write("rows.jsonl", jsonl(&rows));
        let made = Made(world);
        let report = made.0.prepare(&["rows.jsonl"]).unwrap();
        assert_eq!(report.cut, 2);
        made
    }

    fn store(&self) -> std::path::PathBuf {
        self.0.path("data.safetensors")
    }

    /// Exit code and stderr of a command with the settings of the store, then `sets`.
    fn run(&self, command: &str, sets: &[&str]) -> (Option<i32>, String) {
        let path = |name: &str| self.0.path(name).display().to_string();
        let own = [
            "run.engine=simulated".to_owned(),
            "run.epochs=1".into(),
            "admin.listen=off".into(),
            "simulate.micro_batch=1ms".into(),
            "simulate.feature_bytes_per_token=16 B".into(),
            format!("run.dir={}", path("run")),
            format!("data.inputs={}", path("rows.jsonl")),
            format!("data.store={}", path("data.safetensors")),
            format!("target.dir={}", path("model")),
            format!("data.max_length={LONG}"),
            "data.min_supervised=1".into(),
            "data.validation_fraction=0.0".into(),
            format!("data.max_row_bytes={}", 1 << 20),
        ];
        let _ = fs::remove_dir_all(self.0.path("run"));
        let sets = own.iter().map(String::as_str).chain(sets.iter().copied()).flat_map(|set| ["--set", set]);
        let output = Command::new(env!("CARGO_BIN_EXE_draftmill")).arg(command).args(sets).output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    }

    fn both(&self, sets: &[&str], code: i32, parts: &[&str]) {
        for command in ["check", "train"] {
            let (found, text) = self.run(command, sets);
            assert_eq!(found, Some(code), "{command}: {text}");
            for part in parts {
                assert!(text.contains(part), "{command}: {part} is not in {text}");
            }
        }
    }
}

#[test]
fn specforge_743_another_tokenizer_or_template_is_refused() {
    let made = Made::new();
    made.both(&[], 0, &[]);
    let tokenizer = fs::read_to_string(made.0.path("model/tokenizer.json")).unwrap();
    let swapped = tokenizer.replace("\"a\":97", "\"a\":98").replacen("\"b\":98", "\"b\":97", 1);
    assert_ne!(tokenizer, swapped);
    let settings = json!({"eos_token": "<|im_end|>"}).to_string();
    for (file, new, old, part) in [
        ("model/tokenizer.json", swapped, tokenizer, "tokenizer.json"),
        ("model/chat_template.jinja", TEMPLATE.replace("user", "User") + " ", TEMPLATE.to_owned(), "chat template"),
        ("model/chat_template.jinja", "{% for %}".into(), TEMPLATE.to_owned(), "chat template"),
        ("model/tokenizer_config.json", json!({"eos_token": "<|endoftext|>"}).to_string(), settings, "special tokens"),
    ] {
        made.0.write(file, new);
        made.both(&[], 4, &["target.dir", part, "draftmill prepare again"]);
        made.0.write(file, old);
        made.both(&[], 0, &[]);
    }
}

#[test]
fn specforge_743_token_rows_are_bound_to_the_tokenizer_of_their_target() {
    let made = Made::new();
    made.0.write("rows.jsonl", jsonl(&[json!({"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 1, 1]})]));
    made.0.prepare(&["rows.jsonl"]).unwrap();
    assert_eq!(made.run("check", &[]).0, Some(0));
    let tokenizer = fs::read_to_string(made.0.path("model/tokenizer.json")).unwrap();
    made.0.write("model/tokenizer.json", tokenizer + " ");
    let (code, text) = made.run("check", &[]);
    assert!(code == Some(4) && text.contains("tokenizer.json"), "{text}");
}

#[test]
fn axolotl_1265_changed_inputs_and_settings_are_named() {
    let made = Made::new();
    // Two rows were cut at data.max_length, so another one gives other ids.
    made.both(&["data.max_length=200"], 4, &["data.max_length", "ids or masks of 2 rows would differ"]);
    made.both(&["data.overlong=drop"], 4, &["data.overlong"]);
    // No row has an unknown role, so nothing would differ.
    made.both(&["data.unknown_role=skip"], 0, &["data.unknown_role", "no sample of the store would differ"]);
    made.both(&["data.min_supervised=2"], 0, &["data.min_supervised", "the store was made with 1"]);
    made.both(&["data.validation_fraction=0.5"], 0, &["data.validation_fraction"]);
    let rows = fs::read(made.0.path("rows.jsonl")).unwrap();
    let mut other = rows.clone();
    let at = other.iter().rposition(|&byte| byte == b'q').unwrap();
    other[at] = b'Q';
    for changed in [other, [&rows[..], &jsonl(&[chat(99)])].concat()] {
        made.0.write("rows.jsonl", changed);
        made.both(&[], 0, &["rows.jsonl", "draftmill prepare again"]);
    }
    made.0.write("rows.jsonl", &rows);
    made.0.write("more.jsonl", &rows);
    let names = ["rows.jsonl", "more.jsonl"].map(|name| made.0.path(name).display().to_string());
    made.both(&[&format!("data.inputs={names:?}")], 0, &["data.inputs", "more.jsonl"]);
    // A store may be moved without its inputs.
    fs::remove_file(made.0.path("rows.jsonl")).unwrap();
    let (code, text) = made.run("check", &[]);
    assert!(code == Some(0) && !text.contains("rows.jsonl is not"), "{text}");
}

/// Issue 17, E1: overwritten in place, the store keeps its header and its size.
#[test]
fn a_store_that_was_overwritten_in_place_is_refused() {
    let made = Made::new();
    let whole = fs::read(made.store()).unwrap();
    let store = Store::open(&made.store()).unwrap();
    let tokens: usize = store.lengths(Split::Train).iter().map(|&length| length as usize).sum();
    let (masks, ids) = (whole.len() - tokens, whole.len() - 5 * tokens);
    drop(store);
    type Change = fn(&mut [u8]);
    let changes: [(std::ops::Range<usize>, Change); 4] = [
        (ids..ids + 400, |bytes| bytes.fill(1)),
        (masks..whole.len(), |bytes| bytes.fill(0)),
        (masks..masks + 10, |bytes| bytes.fill(2)),
        // The start of the second sample.
        (ids - 8 * 40..ids - 8 * 40 + 1, |bytes| bytes[0] += 1),
    ];
    for (range, change) in changes {
        let mut bytes = whole.clone();
        change(&mut bytes[range]);
        assert_ne!(bytes, whole);
        fs::write(made.store(), bytes).unwrap();
        made.both(&[], 4, &["data.store", "draftmill prepare again"]);
    }
    // The damaged store is ours and may be replaced.
    assert_eq!(made.run("prepare", &[]).0, Some(0));
    made.both(&[], 0, &[]);
}

#[test]
fn a_store_without_supervised_tokens_is_refused() {
    let made = Made::new();
    let mut bytes = fs::read(made.store()).unwrap();
    let tokens: usize =
        Store::open(&made.store()).unwrap().lengths(Split::Train).iter().map(|&length| length as usize).sum();
    let masks = bytes.len() - tokens;
    bytes[masks..].fill(0);
    fs::write(made.store(), &bytes).unwrap();
    let error = Store::open(&made.store()).unwrap().verify().unwrap_err().to_string();
    let expected = error.split("fingerprint ").nth(1).unwrap().split(',').next().unwrap().to_owned();
    let text = String::from_utf8_lossy(&bytes[..masks.min(8192)]).into_owned();
    let old = text.split("\"fingerprint\":\"").nth(1).unwrap()[..64].to_owned();
    let at = bytes.windows(64).position(|part| part == old.as_bytes()).unwrap();
    bytes[at..at + 64].copy_from_slice(expected.as_bytes());
    fs::write(made.store(), &bytes).unwrap();
    made.both(&[], 4, &["no token of its training samples is supervised"]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// Any changed byte behind the header is found, and the counts are those of the samples.
    #[test]
    fn every_changed_byte_is_found(rows in 1..20usize, at in 0.0..1.0f64, bit in 0..8u32) {
        let world = World::new();
        world.write("a.jsonl", jsonl(&(0..rows).map(chat).collect::<Vec<_>>()));
        world.prepare(&["a.jsonl"]).unwrap();
        let path = world.path("data.safetensors");
        let contents = world.store().verify().unwrap();
        let ids: Vec<i32> = world.samples().into_iter().flat_map(|sample| sample.1).collect();
        for id in [b'q' as u32, b'1' as u32, 256, 258, 9999] {
            prop_assert_eq!(contents.count(id), ids.iter().filter(|&&other| other as u32 == id).count() as u64);
        }
        prop_assert_eq!(contents.largest_id, ids.iter().copied().max().unwrap());
        let mut bytes = fs::read(&path).unwrap();
        let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let at = header + ((bytes.len() - header) as f64 * at) as usize;
        bytes[at] ^= 1 << bit;
        fs::write(&path, bytes).unwrap();
        let found = Store::open(&path).and_then(|store| store.verify().map(drop));
        prop_assert!(found.is_err(), "byte {} bit {}", at, bit);
    }
}

fn write_golden(folder: &Path, change: impl FnOnce(&mut Value)) {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/target_qwen3");
    fs::create_dir_all(folder).unwrap();
    fs::copy(golden.join("model.safetensors"), folder.join("model.safetensors")).unwrap();
    let mut config: Value = serde_json::from_slice(&fs::read(golden.join("config.json")).unwrap()).unwrap();
    change(&mut config);
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
}

/// Report on the smoke configuration with the golden target after `change`: exit code and problems. As `check`, but also
/// without libtorch.
fn check(store: &Path, change: impl FnOnce(&mut Value), sets: &[&str]) -> (Exit, String) {
    let folder = tempfile::tempdir().unwrap();
    write_golden(folder.path(), change);
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/smoke.toml");
    let input = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/smoke.jsonl");
    let own = [
        format!("data.store={}", store.display()),
        format!("data.inputs={}", input.display()),
        format!("target.dir={}", folder.path().display()),
        format!("run.dir={}", store.with_file_name("run").display()),
    ];
    let sets: Vec<_> = own.into_iter().chain(sets.iter().map(|set| (*set).to_owned())).collect();
    let loaded = config::load(Some(&file), &sets).unwrap();
    if !store.exists() {
        prepare(&PrepareOptions::from(&loaded.config), &mut |_| ControlFlow::Continue(())).unwrap();
    }
    let store = Store::open(store).unwrap();
    let samples = Samples { lengths: store.lengths(Split::Train), validation: store.len(Split::Validation) };
    let machine = Machine { torch: true, check_port: false, ..Machine::detect(&loaded.config) };
    let mut report = examine(&loaded, &machine, &Stored::Ready(samples));
    examine_store(&loaded, &store, &mut report);
    (report.exit(), config::Problems(report.problems).to_string())
}

#[test]
fn automodel_2461_a_mask_token_in_the_data_is_counted() {
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().join("s");
    let (code, text) = check(&store, |_| (), &[]);
    assert_eq!(code, Exit::Done, "{text}");
    let (code, text) = check(&store, |_| (), &["drafter.mask_token_id=22"]);
    assert!(code == Exit::Config && text.contains("drafter.mask_token_id") && text.contains("138 of 3,184"), "{text}");
}

#[test]
fn torchtitan_3395_positions_and_rows_beyond_the_model_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().join("s");
    let (code, text) = check(&store, |config| config["max_position_embeddings"] = json!(64), &[]);
    assert_eq!(code, Exit::Done, "{text}");
    let (code, text) = check(&store, |config| config["max_position_embeddings"] = json!(63), &[]);
    assert!(code == Exit::Config && text.contains("data.max_length") && text.contains("data.store"), "{text}");
    let layers = json!({"full_attention": {"rope_theta": 1e6}});
    let (code, text) = check(&store, |config| config["rope_parameters"] = layers, &[]);
    assert!(code == Exit::Model && text.contains("rope_parameters.full_attention"), "{text}");
}

#[test]
fn torchtitan_3395_prepare_refuses_a_sample_beyond_the_target() {
    let world = World::new();
    world.write("a.jsonl", jsonl(&[chat(1)]));
    world.write("model/config.json", json!({"vocab_size": 300, "max_position_embeddings": 40}).to_string());
    let error = world.prepare(&["a.jsonl"]).unwrap_err();
    assert!(matches!(error, PrepareError::BeyondPositions { positions: 40, .. }), "{error}");
    assert!(!world.path("data.safetensors").exists());
}

#[test]
fn speculators_690_prepare_replaces_only_its_own_files() {
    let mut world = World::new();
    world.write("rows.jsonl", jsonl(&[chat(1), chat(2)]));
    world.write("model/model.safetensors", "weights");
    world.write("mine.rejects.jsonl", "{\"messages\": []}\n");
    world.write("notes.txt", "precious");
    let weights = safetensors::serialize(
        [("a", safetensors::tensor::TensorView::new(safetensors::Dtype::U8, vec![2], &[1, 2]).unwrap())],
        None,
    );
    world.write("weights.safetensors", weights.unwrap());
    let names =
        ["rows.jsonl", "model/model.safetensors", "model/new", "mine", "notes.txt", "weights.safetensors", "model"];
    for name in names {
        let before = world.files();
        let kept: Vec<_> =
            ["rows.jsonl", "model/model.safetensors", "mine.rejects.jsonl", "notes.txt", "weights.safetensors"]
                .map(|name| fs::read(world.path(name)).unwrap())
                .into();
        world.options.data.store = world.path(name);
        let error = world.prepare(&["rows.jsonl"]).unwrap_err();
        assert!(matches!(error, PrepareError::Refused(_)), "{name}: {error}");
        let after: Vec<_> =
            ["rows.jsonl", "model/model.safetensors", "mine.rejects.jsonl", "notes.txt", "weights.safetensors"]
                .map(|name| fs::read(world.path(name)).unwrap())
                .into();
        assert_eq!((world.files(), after), (before, kept), "{name}");
    }
    // Its own files are replaced, also a store that was cut and a list of rejects that is no longer needed.
    world.options.data.store = world.path("store");
    world.options.data.max_reject_fraction = 1.0;
    world.write("bad.jsonl", "{}\n{}\n");
    world.prepare(&["rows.jsonl", "bad.jsonl"]).unwrap();
    assert!(world.path("store.rejects.jsonl").exists());
    let whole = fs::read(world.path("store")).unwrap();
    for length in [0, whole.len() - 1, whole.len() / 2] {
        fs::write(world.path("store"), &whole[..length]).unwrap();
        world.prepare(&["rows.jsonl"]).unwrap();
    }
    assert!(!world.path("store.rejects.jsonl").exists());
}

#[test]
fn speculators_690_a_run_never_writes_into_a_model_or_its_inputs() {
    let made = Made::new();
    let path = |name: &str| made.0.path(name).display().to_string();
    let (code, text) = made.run("check", &[&format!("run.dir={}", path("model/run"))]);
    assert!(code == Some(3) && text.contains("run.dir") && text.contains("model folder"), "{text}");
    fs::create_dir(made.0.path("other")).unwrap();
    fs::copy(made.0.path("rows.jsonl"), made.0.path("other/steps.jsonl")).unwrap();
    let sets = [format!("run.dir={}", path("other")), format!("data.inputs={}", path("other/steps.jsonl"))];
    let (code, text) = made.run("train", &[&sets[0], &sets[1]]);
    assert!(code == Some(3) && text.contains("also an input"), "{text}");
}
