//! Draft heads and losses through the binary: training, resume, evaluation, export, import.

use crate::eval::Scene;
use crate::train::{Run, text};
use serde_json::Value;
use std::path::Path;

/// Settings of a run that every head and loss below can train.
const TAUGHT: [&str; 8] = [
    "data.validation_fraction=0.3",
    "drafter.labels=target",
    "drafter.label_top_k=all",
    "run.epochs=8",
    "eval.max_new_tokens=8",
    "eval.max_share=1.0",
    "drafter.markov_rank=8",
    "checkpoint.every_steps=5",
];

fn trained(sets: &[&str]) -> Run {
    let run = Run::new(&[&TAUGHT, sets].concat());
    let output = run.train(&[]);
    assert_eq!(output.status.code(), Some(0), "{sets:?}: {}", text(&output));
    run
}

fn evaluations(run: &Run) -> Vec<Value> {
    let history = draftmill::run_dir::eval_log::read(&run.dir()).unwrap();
    history.0.into_iter().map(|evaluation| serde_json::to_value(evaluation).unwrap()).collect()
}

#[test]
fn each_loss_is_learned() {
    for loss in ["ce", "kl", "reverse-kl", "tv", "lk", "e2e-tv", "{ ce = 0.1, tv = 1.8 }", "{ kl = 1.0, e2e-tv = 0.5 }"]
    {
        let run = trained(&[&format!("drafter.loss={loss}")]);
        let evaluations = evaluations(&run);
        let value = |evaluation: &Value| evaluation["held_out"]["loss"].as_f64().unwrap();
        let (first, last) = (value(&evaluations[0]), value(evaluations.last().unwrap()));
        assert!(last < first, "{loss}: {first} -> {last}");
    }
}

/// Each form of DSpark trains, is evaluated by decoding, and its export serves as it was trained (the self-test of
/// `train` refuses another result).
#[test]
fn each_form_of_dspark_trains_and_is_exported() {
    for sets in [
        &["drafter.markov_head=vanilla"][..],
        &["drafter.markov_head=gated", "drafter.confidence_head=hidden"],
        &["drafter.markov_head=rnn", "drafter.slot_weights=none"],
        &["drafter.markov_rank=0", "drafter.confidence_head=none", "drafter.slot_weights=d-pace"],
    ] {
        let run = trained(&[&["drafter.head=dspark"], sets].concat());
        let evaluations = evaluations(&run);
        let last = evaluations.last().unwrap();
        let positions = last["held_out"]["accuracy_by_position"].as_array().unwrap();
        // All slots of a block of 4 predict, and the target adds its own token.
        assert_eq!(positions.len(), 4, "{last}");
        assert!((0.0..=4.0).contains(&last["held_out"]["leading_run"].as_f64().unwrap()), "{last}");
        assert!((1.0..=5.0).contains(&last["decoded"]["acceptance"].as_f64().unwrap()), "{last}");
        let export = run.dir().join("export");
        let checked = run.plain(&["export", "--check", export.to_str().unwrap()]);
        assert_eq!(checked.status.code(), Some(0), "{sets:?}: {}", text(&checked));
        let config = config(&export);
        assert_eq!(
            (&config["architectures"][0], &config["sample_from_anchor"]),
            (&"Qwen3DSparkModel".into(), &true.into())
        );
    }
}

fn config(folder: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(folder.join("config.json")).unwrap()).unwrap()
}

/// One head in either layout is the same bits again, and another run starts from it.
#[test]
fn dspark_goes_through_both_layouts_and_starts_a_run() {
    let run = trained(&["drafter.head=dspark", "drafter.markov_head=gated"]);
    let dir = run.dir();
    let target = std::path::absolute("tests/golden/target_qwen3").unwrap();
    let (run_dir, target) = (dir.to_str().unwrap(), target.to_str().unwrap());
    let folder = |name: &str| dir.join(name).to_str().unwrap().to_owned();
    let (zlab, speculators, again) = (folder("zlab"), folder("speculators"), folder("again"));
    for (format, out) in [("zlab", &zlab), ("speculators", &speculators)] {
        let written = run.plain(&[
            "export", "--run", run_dir, "--out", out, "--format", format, "--target", target, "--dtype", "f32",
        ]);
        assert_eq!(written.status.code(), Some(0), "{}", text(&written));
        assert!(text(&written).contains(r#""method": "dspark""#), "{}", text(&written));
    }
    let imported = run.plain(&["import", "--draft", &speculators, "--target", target, "--out", &again]);
    assert_eq!(imported.status.code(), Some(0), "{}", text(&imported));
    for name in ["config.json", "model.safetensors"] {
        let bytes = |folder: &str| std::fs::read(Path::new(folder).join(name)).unwrap();
        assert!(bytes(&zlab) == bytes(&again), "{name}");
    }
    let start = format!("drafter.init_from={zlab}");
    let refused = Run::new(&[&TAUGHT[..], &[&start]].concat()).train(&[]);
    assert_eq!(refused.status.code(), Some(5), "{}", text(&refused));
    assert!(text(&refused).contains("drafter.head = \"dspark\""), "{}", text(&refused));
    let on = trained(&["drafter.head=dspark", "drafter.markov_head=gated", &start]);
    let loss = |run: &Run, at: usize| {
        let all = evaluations(run);
        all[at.min(all.len() - 1)]["held_out"]["loss"].as_f64().unwrap()
    };
    assert!(loss(&on, 0) < loss(&run, 0), "{} and {}", loss(&on, 0), loss(&run, 0));
}

/// `eval` compares the predictions of the confidence head with the acceptance. A cut by them verifies fewer tokens and
/// leaves the output as it is.
#[test]
fn the_confidence_head_is_compared_with_acceptance_and_cuts_blocks() {
    let run = trained(&["drafter.head=dspark"]);
    let scene = Scene::new();
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(run.dir().join("export").join(name), scene.path("draft").join(name)).unwrap();
    }
    let report = |more: &[&str]| -> Value {
        let output = scene.eval(&[&["--json"], more].concat());
        assert_eq!(output.status.code(), Some(0), "{}", text(&output));
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let verified = |report: &Value, cut: usize| report["confidence"]["cuts"][cut]["verified"].as_f64().unwrap();
    let whole = report(&[]);
    let bins = whole["confidence"]["calibration"].as_array().unwrap();
    let tokens: f64 = bins.iter().map(|bin| bin["tokens"].as_f64().unwrap()).sum();
    assert!((tokens / whole["steps"].as_f64().unwrap() - verified(&whole, 0)).abs() < 1e-9, "{whole}");
    assert!(verified(&whole, 0) > 3.0, "{whole}");
    let highest = bins.iter().filter_map(|bin| bin["predicted"].as_f64()).fold(0.0, f64::max);
    let cut = report(&["--min-survival", &format!("{:.3}", highest / 2.0)]);
    assert!(verified(&cut, 0) < verified(&whole, 0), "{cut}");
    assert_eq!((&cut["greedy_identical"], &cut["tokens"]), (&true.into(), &whole["tokens"]));
    let table = scene.eval(&["--limit", "1"]);
    assert!(text(&table).contains("confidence: mean distance"), "{}", text(&table));
    let nonsense = scene.eval(&["--min-survival", "1.5"]);
    assert_eq!(nonsense.status.code(), Some(2), "{}", text(&nonsense));
    assert!(text(&nonsense).contains("write a number from 0 to 1, such as 0.5"), "{}", text(&nonsense));
}

/// DFlash 2 trains with both treatments of a missing label, and its export serves as it was trained.
#[test]
fn dflash2_trains_and_is_exported() {
    for missing in ["skip", "inject"] {
        let sets =
            ["drafter.head=dflash2", "drafter.conv_group=8", "drafter.selector_rank=6", "drafter.selector_top_k=5"];
        let run = trained(&[&sets[..], &[&format!("drafter.selector_missing_label={missing}")]].concat());
        let evaluations = evaluations(&run);
        let loss = |at: usize| evaluations[at]["held_out"]["loss"].as_f64().unwrap();
        assert!(loss(evaluations.len() - 1) < loss(0), "{missing}: {evaluations:?}");
        let held_out = &evaluations[evaluations.len() - 1]["held_out"];
        assert!((0.0..=1.0).contains(&held_out["candidate_recall"].as_f64().unwrap()), "{held_out}");
        assert!(held_out["selector_gain"].as_f64().unwrap().abs() <= 3.0, "{held_out}");
        let export = run.dir().join("export");
        let checked = run.plain(&["export", "--check", export.to_str().unwrap()]);
        assert_eq!(checked.status.code(), Some(0), "{missing}: {}", text(&checked));
        let config = config(&export);
        assert_eq!(config["architectures"][0], "DFlash2DraftModel");
        assert_eq!(config["dflash_config"]["selector_top_k"], 5);
    }
}

/// Sliding layers are trained, exported, and kept by a run that starts from the export.
#[test]
fn sliding_layers_are_trained_and_exported() {
    let sets = ["drafter.layer_types=[\"full\", \"sliding\"]", "drafter.sliding_window=6"];
    let run = trained(&sets);
    let export = run.dir().join("export");
    let config = config(&export);
    assert_eq!((&config["layer_types"][1], &config["sliding_window"]), (&"sliding_attention".into(), &6.into()));
    let start = format!("drafter.init_from={}", export.display());
    let refused = Run::new(&[&TAUGHT[..], &[&start]].concat()).train(&[]);
    assert!(text(&refused).contains("drafter.layer_types = [\"full\", \"sliding\"]"), "{}", text(&refused));
    trained(&[&sets[..], &[&start]].concat());

    // The other definitions: bidirectional blocks are part of the shape, the start of the window is not.
    let other = [&sets[..], &["drafter.sliding_causal=false", "drafter.sliding_start=anchor"]].concat();
    let run = trained(&other);
    let export = run.dir().join("export");
    assert_eq!(self::config(&export)["is_causal"], false);
    let start = format!("drafter.init_from={}", export.display());
    let refused = Run::new(&[&TAUGHT[..], &sets, &[&start]].concat()).train(&[]);
    assert!(text(&refused).contains("drafter.sliding_causal = false"), "{}", text(&refused));
    trained(&[&other[..], &[&start]].concat());
}

/// A run that was stopped has the weights of one that was not, bit for bit, and keeps its head and its optimizer.
#[test]
fn a_stopped_run_resumes_with_the_same_bits_head_and_optimizer() {
    for (sets, other, key) in [
        (&["drafter.head=dspark", "drafter.markov_head=rnn"][..], "drafter.markov_head=gated", "drafter.head"),
        (&["optimizer.kind=muon"], "optimizer.kind=adamw", "optimizer.kind"),
        (
            &["drafter.head=dflash2", "drafter.conv_group=8", "optimizer.kind=muon"],
            "drafter.conv_group=24",
            "drafter.head",
        ),
    ] {
        resumes(sets, other, key);
    }
}

/// Checks that a killed run ends with the weights of a whole one, and that the setting `other` is refused under `key`.
fn resumes(sets: &[&str], other: &str, key: &str) {
    let sets = [&["pool.draw_policy=replay", "drafter.devices=[\"cpu\"]"], sets].concat();
    let whole = trained(&sets);
    let mut stopped = Run::new(&[&TAUGHT[..], &sets].concat());
    let mut child = stopped.train_until(6);
    child.kill().unwrap();
    child.wait().unwrap();
    stopped.sets.push(other.into());
    let refused = stopped.train(&[]);
    stopped.sets.pop();
    assert_eq!(refused.status.code(), Some(3), "{other}: {}", text(&refused));
    assert!(text(&refused).contains(key), "{other}: {}", text(&refused));
    let resumed = stopped.train(&[]);
    assert_eq!(resumed.status.code(), Some(0), "{sets:?}: {}", text(&resumed));
    let weights = |run: &Run| std::fs::read(run.dir().join("export/model.safetensors")).unwrap();
    assert!(weights(&whole) == weights(&stopped), "{sets:?}");
}

#[test]
fn settings_that_cannot_work_are_refused_by_name() {
    for (sets, key) in [
        (&["drafter.loss=huber"][..], "drafter.loss"),
        (&["drafter.loss=reverse-kl"], "drafter.loss"),
        (&["drafter.loss={ kl = -1.0 }"], "drafter.loss"),
        (&["drafter.lk_eta=-1.0"], "drafter.lk_eta"),
        (&["drafter.head=eagle"], "drafter.head"),
        (&["drafter.head=dspark", "drafter.markov_rank=0"], "drafter.markov_rank"),
        (&["drafter.markov_rank=999999"], "drafter.markov_rank"),
        (&["drafter.head=dflash2", "drafter.conv_group=7"], "drafter.conv_group"),
        (&["drafter.head=dflash2", "drafter.selector_top_k=1000"], "drafter.selector_top_k"),
        (&["drafter.confidence_loss_weight=nan"], "drafter.confidence_loss_weight"),
    ] {
        let run = Run::new(&["run.epochs=1"]);
        let more: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
        let refused = run.draftmill("check", &more).output().unwrap();
        assert_eq!(refused.status.code(), Some(3), "{sets:?}: {}", text(&refused));
        assert!(text(&refused).contains(key), "{sets:?}: {}", text(&refused));
    }
}
