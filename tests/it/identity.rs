//! Identity of a run: each part changed one at a time, through the binary, and the settings that may change.

use crate::{
    data::world::{TEMPLATE, World, chat, jsonl},
    train::{Run, text},
};

/// Checks that a resume is refused with the changed part, its old and its new value, and nothing else. An exception is the
/// data, whose fingerprint includes their preparation.
fn assert_refused(run: &Run, sets: &[&str], name: &str) {
    let more: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
    let refused = run.train(&more);
    let told = text(&refused);
    assert_eq!(refused.status.code(), Some(3), "{name}: {told}");
    let lines: Vec<&str> =
        told.lines().filter(|line| line.contains(": the run has ") && !line.contains("data: ")).collect();
    assert_eq!(lines.len(), 1, "{name}: {told}");
    let (old, new) = lines[0].split_once(": the run has ").unwrap().1.split_once(", now it is ").unwrap();
    assert!(lines[0].trim_start().starts_with(&format!("{name}: ")) && old != new, "{name}: {told}");
    assert!(told.contains("Undo the change") && told.contains("--fresh --force"), "{told}");
}

#[test]
fn automodel_3396_another_tokenizer_or_template_is_refused_by_name() {
    let world = World::new();
    world.write("a.jsonl", jsonl(&(0..60).map(chat).collect::<Vec<_>>()));
    let (model, rows) = (world.path("model"), world.path("a.jsonl"));
    let (target, inputs) = (format!("target.dir={}", model.display()), format!("data.inputs={}", rows.display()));
    let slow = ["run.engine=simulated", "simulate.micro_batch=30ms", "simulate.feature_bytes_per_token=1 KiB"];
    let sets = [&slow[..], &[target.as_str(), &inputs, "checkpoint.every_steps=2", "data.max_length=128"]].concat();
    let run = Run::new(&sets);
    let mut child = run.train_until(3);
    child.kill().unwrap();
    child.wait().unwrap();
    // Each has the same tokens; only their preparation differs.
    let tokenizer = std::fs::read_to_string(model.join("tokenizer.json")).unwrap();
    let changed = [
        ("tokenizer", "model/tokenizer.json", tokenizer.clone() + " ", tokenizer),
        ("template", "model/chat_template.jinja", format!("{TEMPLATE}{{# #}}"), TEMPLATE.to_owned()),
    ];
    for (name, file, new, old) in changed {
        world.write(file, new);
        assert!(run.draftmill("prepare", &[]).status().unwrap().success());
        assert_refused(&run, &[], name);
        world.write(file, old);
    }
    assert!(run.draftmill("prepare", &[]).status().unwrap().success());
    let end = run.train(&[]);
    assert!(end.status.success(), "{}", text(&end));
    assert_eq!(run.ledger().1, 0);
}

#[cfg(feature = "torch")]
mod torch {
    use super::*;
    use crate::torture::assert_verified;
    use draftmill::run_dir::checkpoint::{FIRST_MOMENTS, SECOND_MOMENTS, WEIGHTS};
    use std::{fs, path::Path};

    #[test]
    fn other_models_are_refused_and_other_worker_counts_are_not() {
        let target = tempfile::tempdir().unwrap();
        for name in ["config.json", "model.safetensors"] {
            let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/target_qwen3").join(name);
            fs::copy(golden, target.path().join(name)).unwrap();
        }
        let dir = format!("target.dir={}", target.path().display());
        let run = Run::new(&[&dir, "checkpoint.every_steps=3", "run.epochs=4", "drafter.labels=target"]);
        let mut child = run.train_until(5);
        child.kill().unwrap();
        child.wait().unwrap();
        for (set, name) in [
            ("target.layer_ids=[1,4]", "target.layer_ids"),
            ("drafter.intermediate_size=96", "drafter shape"),
            ("drafter.block_size=3", "drafter shape"),
            ("drafter.mask_token_id=318", "drafter shape"),
            ("drafter.label_top_k=all", "drafter.label_top_k"),
            ("run.seed=7", "run.seed"),
        ] {
            assert_refused(&run, &[set], name);
        }
        let weights = target.path().join("model.safetensors");
        let bytes = fs::read(&weights).unwrap();
        let mut flipped = bytes.clone();
        *flipped.last_mut().unwrap() ^= 1;
        fs::write(&weights, flipped).unwrap();
        assert_refused(&run, &[], "target weights");
        fs::write(&weights, bytes).unwrap();
        // One target instead of two, three drafters instead of two, and a setting that may change.
        let sets =
            ["target.devices=[\"cpu\"]", "drafter.devices=[\"cpu\", \"cpu\", \"cpu\"]", "optimizer.learning_rate=0.02"];
        let more: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
        let end = run.train(&more);
        let told = text(&end);
        assert_eq!(end.status.code(), Some(0), "{told}");
        for part in ["settings changed", "target.devices", "drafter.devices", "optimizer.learning_rate"] {
            assert!(told.contains(part), "{part}: {told}");
        }
        assert_verified(&run);
        assert!(run.step_of_each_job().iter().all(|(_, outcome)| outcome.is_some()));
        assert_eq!(run.steps(), (1..=run.steps().len() as u64).collect::<Vec<_>>());
    }

    /// Draw policy `replay`, one target and one drafter on CPU: weights and moments are independent of the number of kills.
    #[test]
    fn a_replayed_run_ends_with_the_same_bits_however_often_it_was_killed() {
        let sets = [
            "pool.draw_policy=replay",
            "target.devices=[\"cpu\"]",
            "drafter.devices=[\"cpu\"]",
            "checkpoint.every_steps=5",
            "optimizer.accumulation=2",
        ];
        let whole = Run::new(&sets);
        assert!(whole.train(&[]).status.success());
        let killed = Run::new(&sets);
        for at in [3, 9, 17, 26] {
            let mut child = killed.train_until(at);
            child.kill().unwrap();
            child.wait().unwrap();
        }
        let end = killed.train(&[]);
        assert!(end.status.success() && text(&end).contains("resuming from checkpoint step-"), "{}", text(&end));
        assert_eq!(killed.step_of_each_job(), whole.step_of_each_job());
        let last = *whole.steps().last().unwrap();
        assert!(last > 30, "{last} steps");
        for file in [WEIGHTS, FIRST_MOMENTS, SECOND_MOMENTS] {
            let bytes = |run: &Run| fs::read(run.dir().join(format!("checkpoints/step-{last}/{file}"))).unwrap();
            assert!(bytes(&whole) == bytes(&killed), "{file} differs");
        }
    }
}
