//! Non-finite numbers: the reaction of a run, its checkpoints, and its end.

use crate::train::{Run, text};
use std::{fs, path::Path};

/// Names of the checkpoints on disk.
fn checkpoints(run: &Run) -> Vec<String> {
    let entries = fs::read_dir(run.dir().join("checkpoints")).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

/// The same run with other settings.
fn with(run: &mut Run, sets: &[&str]) -> (Option<i32>, String) {
    let before = run.sets.clone();
    run.sets.extend(sets.iter().map(|set| (*set).to_owned()));
    let ended = run.train(&[]);
    run.sets = before;
    (ended.status.code(), text(&ended))
}

/// A checkpoint of such weights would replace the last good one, and no later run could resume from it.
#[test]
fn weights_that_are_not_finite_are_never_a_checkpoint() {
    let mut run = Run::new(&["checkpoint.keep_last=1", "checkpoint.every_steps=1", "optimizer.warmup_fraction=0"]);
    assert_eq!(with(&mut run, &["run.max_steps=2"]).0, Some(0));
    assert_eq!(checkpoints(&run), ["step-2"]);
    let (code, told) = with(&mut run, &["run.max_steps=3", "optimizer.learning_rate=1e300"]);
    assert_eq!(code, Some(6), "{told}");
    assert!(told.contains("the training diverged; lower optimizer.learning_rate"), "{told}");
    assert_eq!(checkpoints(&run), ["step-2"]);
    let (code, told) = with(&mut run, &["run.max_steps=4"]);
    assert_eq!(code, Some(0), "{told}");
    assert_eq!(checkpoints(&run), ["step-4"]);
}

/// After a failure other threads may still compute, and cannot be cancelled. oneDNN, which computes bf16 products, freed
/// their memory at the end of the process, which crashed in about every second run.
#[test]
fn a_run_that_fails_while_others_compute_ends_with_its_code() {
    for turn in 0..6 {
        let mut run = Run::new(&["target.dtype=bf16", "drafter.labels=target", "optimizer.warmup_fraction=0"]);
        let (code, told) = with(&mut run, &["optimizer.learning_rate=1e30"]);
        assert_eq!(code, Some(6), "turn {turn}: {told}");
        assert!(told.contains("NaN"), "{told}");
    }
}

#[test]
fn a_start_from_weights_that_are_not_finite_is_refused_by_the_name_of_the_tensor() {
    let first = Run::new(&["run.max_steps=1", "checkpoint.export_dtype=f32"]);
    assert!(first.train(&[]).status.success());
    let export = first.dir().join("export");
    spoil(&export.join("model.safetensors"));
    let init = format!("drafter.init_from={}", export.display());
    let second = Run::new(&[&init]);
    for command in ["check", "train"] {
        let refused = second.draftmill(command, &[]).output().unwrap();
        assert_eq!(refused.status.code(), Some(5), "{command}: {}", text(&refused));
        for part in ["drafter.init_from", "holds a NaN", "before its training diverged"] {
            assert!(text(&refused).contains(part), "{command}: {}", text(&refused));
        }
    }
}

/// Makes the last value of a safetensors file of f32 a NaN.
fn spoil(file: &Path) {
    let mut bytes = fs::read(file).unwrap();
    let last = bytes.len() - 4;
    bytes[last..].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(file, bytes).unwrap();
}
