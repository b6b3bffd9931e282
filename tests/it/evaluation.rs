//! Evaluations during training, through the binary: their content, their use, and no effect on training.

use crate::train::{Run, text};
use serde_json::Value;

const MEASURED: &[&str] = &[
    "data.validation_fraction=0.3",
    "checkpoint.every_steps=5",
    "eval.every_steps=4",
    "eval.max_new_tokens=8",
    "eval.max_share=1.0",
];

fn measures(run: &Run) -> Vec<Value> {
    let history = draftmill::run_dir::eval_log::read(&run.dir()).unwrap();
    history.0.into_iter().map(|measured| serde_json::to_value(measured).unwrap()).collect()
}

#[test]
fn a_run_is_evaluated_to_its_end_and_keeps_the_best_checkpoint() {
    let run = Run::new(MEASURED);
    let trained = run.train(&["--json"]);
    assert_eq!(trained.status.code(), Some(0), "{}", text(&trained));
    let (summary, measures) = (run.summary(), measures(&run));
    let steps: Vec<u64> = measures.iter().map(|m| m["step"].as_u64().unwrap()).collect();
    let last = summary["steps"].as_u64().unwrap();
    assert_eq!((steps[0], *steps.last().unwrap()), (0, last), "{steps:?}");
    assert!(steps.windows(2).all(|pair| pair[0] < pair[1]), "{steps:?}");
    assert!(steps[1..steps.len() - 1].iter().all(|step| step % 4 == 0 || step % 5 == 0), "{steps:?}");
    for measured in [&measures[0], measures.last().unwrap()] {
        let held_out = &measured["held_out"];
        let positions = held_out["accuracy_by_position"].as_array().unwrap();
        assert!(positions.len() == 3 && held_out["samples"].as_u64().unwrap() > 0, "{measured}");
        for acceptance in [&held_out["predicted_acceptance"], &measured["decoded"]["acceptance"]] {
            assert!((1.0..=4.0).contains(&acceptance.as_f64().unwrap()), "{measured}");
        }
    }
    // Training improves held-out samples too, as the rows are of one kind.
    let loss = |measured: &Value| measured["held_out"]["loss"].as_f64().unwrap();
    assert!(loss(measures.last().unwrap()) < 0.9 * loss(&measures[0]), "{measures:#?}");

    let evaluation = &summary["evaluation"];
    let scores: Vec<(u64, f64)> =
        measures.iter().filter_map(|m| Some((m["step"].as_u64()?, m["decoded"]["acceptance"].as_f64()?))).collect();
    let best = *scores.iter().max_by(|a, b| a.1.total_cmp(&b.1).then(a.0.cmp(&b.0))).unwrap();
    assert_eq!(
        (evaluation["best_step"].as_u64(), evaluation["acceptance_best"].as_f64()),
        (Some(best.0), Some(best.1))
    );
    assert_eq!(evaluation["acceptance_first"].as_f64(), Some(scores[0].1));
    assert_eq!(evaluation["acceptance_last"].as_f64(), Some(scores.last().unwrap().1));

    // The last checkpoint is kept, and the best of the evaluated ones.
    let dir = run.dir();
    let kept = draftmill::run_dir::checkpoint::steps(&dir.join("checkpoints")).unwrap();
    let scored: Vec<_> = scores.iter().filter(|(step, _)| step % 5 == 0 && *step > 0 || *step == last).collect();
    let best = scored.iter().max_by(|a, b| a.1.total_cmp(&b.1).then(a.0.cmp(&b.0))).unwrap().0;
    assert!(kept.contains(&best) && kept.len() <= 2, "{kept:?} of {scored:?}");
    let out = dir.join("best");
    let (dir, out) = (dir.to_str().unwrap(), out.to_str().unwrap());
    let exported = run.plain(&["export", "--run", dir, "--out", out, "--checkpoint", "best", "--json"]);
    assert_eq!(exported.status.code(), Some(0), "{}", text(&exported));
    let report: Value = serde_json::from_slice(&exported.stdout).unwrap();
    assert_eq!(report["step"].as_u64(), Some(best), "{report}");
}

/// Evaluations must not change training.
#[test]
fn the_steps_are_the_same_with_and_without_measures() {
    let replay = ["pool.draw_policy=replay", "drafter.devices=[\"cpu\"]", "data.validation_fraction=0.3"];
    let with = Run::new(&[MEASURED, &replay[..2]].concat());
    let without = Run::new(&[&replay[..], &["eval.every_steps=0", "eval.decode_every_steps=0"]].concat());
    assert!(with.train(&[]).status.success() && without.train(&[]).status.success());
    let losses = |run: &Run| (run.summary()["loss_first"].clone(), run.summary()["loss_last"].clone());
    assert_eq!(losses(&with), losses(&without));
    assert!(!measures(&with).is_empty() && measures(&without).is_empty());
    assert_eq!(without.summary()["evaluation"], Value::Null);
}

#[test]
fn without_anything_held_out_nothing_is_measured_and_none_is_the_best() {
    let run = Run::new(&["run.epochs=1"]);
    assert!(run.train(&[]).status.success());
    let dir = run.dir();
    let dir = dir.to_str().unwrap();
    let refused = run.plain(&["export", "--run", dir, "--out", "unused", "--checkpoint", "best"]);
    assert_eq!(refused.status.code(), Some(5));
    assert!(text(&refused).contains("there is no best one") && text(&refused).contains("[eval]"), "{}", text(&refused));
}

/// A failed evaluation costs no step.
#[test]
fn prompts_that_cannot_be_used_cost_the_measure_and_not_the_run() {
    let prompts = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(prompts.path(), "{\"turns\": [\"t4\"]}\n").unwrap();
    let set = format!("eval.prompt_file={}", prompts.path().display());
    // The tiny target has no chat template.
    let run = Run::new(&["run.epochs=1", &set]);
    let trained = run.train(&[]);
    assert_eq!(trained.status.code(), Some(0), "{}", text(&trained));
    assert!(text(&trained).contains("eval.prompt_file"), "{}", text(&trained));
    assert!(measures(&run).is_empty());
}

/// speculators#477: on data that the target did not generate, its own labels are used in training and evaluation. Batch
/// bytes that are not counted would end a debug build.
#[test]
fn speculators_477_a_run_learns_what_the_target_says_or_all_of_it() {
    for top_k in ["1", "all"] {
        let labels = ["drafter.labels=target", "run.epochs=8", &format!("drafter.label_top_k={top_k}")];
        let run = Run::new(&[MEASURED, &labels].concat());
        let trained = run.train(&[]);
        assert_eq!(trained.status.code(), Some(0), "{top_k}: {}", text(&trained));
        let (summary, measures) = (run.summary(), measures(&run));
        let number = |key: &str| summary[key].as_f64().unwrap();
        assert!(number("loss_last") < 0.9 * number("loss_first"), "{top_k}: {summary}");
        let loss = |measured: &Value| measured["held_out"]["loss"].as_f64().unwrap();
        assert!(loss(measures.last().unwrap()) < loss(&measures[0]), "{top_k}: {measures:#?}");
    }
}

/// Least-squares initialisation starts nearer to the target than random weights, supports top-k labels, and runs once.
#[test]
fn least_squares_weights_start_nearer_and_are_computed_once() {
    let taught = ["drafter.layers=2", "drafter.labels=target", "drafter.label_top_k=4", "run.epochs=8"];
    let random = Run::new(&[MEASURED, &taught, &["run.max_steps=1"]].concat());
    let fitted = Run::new(&[MEASURED, &taught, &["drafter.init_method=least-squares"]].concat());
    let (first, second) = (random.train(&[]), fitted.train(&["--set", "run.max_steps=6"]));
    for trained in [&first, &second] {
        assert_eq!(trained.status.code(), Some(0), "{}", text(trained));
    }
    const SAID: &str = "least-squares initialisation finished";
    assert!(!text(&first).contains(SAID) && text(&second).contains(SAID), "{}", text(&second));
    let loss = |run: &Run| measures(run)[0]["held_out"]["loss"].as_f64().unwrap();
    assert!(loss(&fitted) < 0.9 * loss(&random), "fitted: {}, random: {}", loss(&fitted), loss(&random));

    let on = fitted.train(&[]);
    assert_eq!(on.status.code(), Some(0), "{}", text(&on));
    assert!(!text(&on).contains(SAID), "{}", text(&on));
    assert!(fitted.summary()["steps"].as_u64().unwrap() > 6);
}
