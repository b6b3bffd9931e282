//! Faults of the file system: flipped bits, a truncated or missing state, a read-only, a missing and a full disk.

use crate::{
    torture::{assert_every_job_once, assert_sound, assert_verified},
    train::{Run, SLOW, text},
};
use draftmill::{
    engines::simulated::placeholder_draft,
    run_dir::checkpoint::{self, FIRST_MOMENTS, NamedTensor, SECOND_MOMENTS, State, Verified, WEIGHTS},
};
use std::{
    fs,
    path::Path,
    process::{Child, Command, Output, Stdio},
    thread::sleep,
    time::Duration,
};

/// Every bit of every file of a checkpoint.
#[test]
fn one_flipped_bit_anywhere_in_a_checkpoint_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let tensor = || vec![NamedTensor { name: "w".into(), shape: vec![2], data: vec![1.0, -2.0] }];
    let tensors = [(WEIGHTS, tensor()), (FIRST_MOMENTS, tensor()), (SECOND_MOMENTS, tensor())];
    let state = State::new(3, 1, "seed = 1".into());
    let name = checkpoint::write(&dir.path().join("checkpoints"), &state, &placeholder_draft(), &tensors).unwrap();
    let whole = dir.path().join("checkpoints").join(name);
    let (mut files, mut bits) = (0, 0);
    for entry in fs::read_dir(&whole).unwrap() {
        let path = entry.unwrap().path();
        let bytes = fs::read(&path).unwrap();
        files += 1;
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            fs::write(&path, flipped).unwrap();
            assert!(Verified::open(&whole).is_err(), "bit {bit} of {}", path.display());
            bits += 1;
        }
        fs::write(&path, bytes).unwrap();
    }
    Verified::open(&whole).unwrap();
    assert!(files == 6 && bits > 8000, "{files} files, {bits} bits");
}

/// The sentence names the file, not its folder.
#[test]
fn a_log_that_cannot_be_written_is_named() {
    let run = Run::new(SLOW);
    fs::create_dir_all(run.dir().join("steps.jsonl")).unwrap();
    let refused = run.train(&[]);
    assert_eq!(refused.status.code(), Some(6), "{}", text(&refused));
    assert!(text(&refused).contains("steps.jsonl cannot be written"), "{}", text(&refused));
}

fn killed() -> Run {
    let run = Run::new(SLOW);
    let mut child = run.train_until(14);
    child.kill().unwrap();
    child.wait().unwrap();
    run
}

fn assert_finished(run: &Run) {
    let end = run.train(&[]);
    assert_eq!(end.status.code(), Some(0), "{}", text(&end));
    assert_verified(run);
    assert_sound(&run.dir());
    assert_every_job_once(&run.dir(), 4);
}

#[test]
fn a_state_that_was_cut_short_is_refused_and_left_as_it_is() {
    let run = killed();
    let path = run.dir().join("state.db");
    for name in ["state.db-wal", "state.db-shm"] {
        fs::remove_file(run.dir().join(name)).unwrap();
    }
    let whole = fs::read(&path).unwrap();
    for length in [whole.len() - 4096, whole.len() / 2, 4096, 99] {
        fs::write(&path, &whole[..length]).unwrap();
        let refused = run.train(&[]);
        let told = text(&refused);
        assert_eq!(refused.status.code(), Some(6), "{length}: {told}");
        let why = ["is damaged", "not an SQLite database"];
        assert!(why.iter().any(|why| told.contains(why)) && told.contains("from a copy"), "{length}: {told}");
        assert_eq!(fs::read(&path).unwrap(), &whole[..length]);
    }
    fs::write(&path, whole).unwrap();
    assert_finished(&run);
}

/// Trains until `steps` are in the log, and keeps the output.
fn begun(run: &Run, steps: usize) -> Child {
    let mut train = run.draftmill("train", &[]);
    let child = train.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let log = || fs::read_to_string(run.dir().join("steps.jsonl")).map_or(0, |log| log.lines().count());
    while log() < steps {
        sleep(Duration::from_millis(2));
    }
    child
}

#[test]
fn a_folder_of_checkpoints_that_vanishes_is_made_again() {
    let run = Run::new(SLOW);
    let child = begun(&run, 6);
    // A checkpoint may be in progress.
    while fs::remove_dir_all(run.dir().join("checkpoints")).is_err() {}
    let ended = child.wait_with_output().unwrap();
    assert_eq!(ended.status.code(), Some(0), "{}", text(&ended));
    assert_verified(&run);
    assert_every_job_once(&run.dir(), 4);
}

#[test]
fn a_state_or_a_run_folder_that_vanishes_ends_the_run_with_a_sentence() {
    let run = Run::new(SLOW);
    let child = begun(&run, 6);
    fs::rename(run.dir().join("state.db"), run.dir().join("moved")).unwrap();
    let ended = child.wait_with_output().unwrap();
    assert_eq!(ended.status.code(), Some(6), "{}", text(&ended));
    assert!(text(&ended).contains("moved or deleted during the run"), "{}", text(&ended));
    assert!(!run.dir().join("state.db").exists(), "no other is begun in its place");

    let run = Run::new(SLOW);
    let child = begun(&run, 6);
    let aside = run.dir().with_extension("aside");
    fs::rename(run.dir(), &aside).unwrap();
    let ended = child.wait_with_output().unwrap();
    assert_eq!(ended.status.code(), Some(6), "{}", text(&ended));
    let told = text(&ended);
    assert!(told.contains("could not be written") || told.contains("moved or deleted"), "{told}");
    assert!(!run.dir().exists(), "nothing is written where the disk was");
    // The disk is back.
    fs::rename(&aside, run.dir()).unwrap();
    assert_finished(&run);
}

/// Runs a script in a separate mount namespace. `None` if this machine does not allow that.
fn with_mounts(script: &str, run: &Run) -> Option<Output> {
    let allowed = |flags: &str| {
        let tried = Command::new("unshare").args([flags, "sh", "-c", "mount -t tmpfs tmpfs /mnt"]).output();
        tried.is_ok_and(|tried| tried.status.success())
    };
    let Some(flags) = ["-m", "-rm"].into_iter().find(|flags| allowed(flags)) else {
        println!("skipped: no mounts are allowed here; the injected errors of failpoints.rs are the proof");
        return None;
    };
    let train = run.draftmill("train", &[]);
    let mut words: Vec<&std::ffi::OsStr> = vec![train.get_program()];
    words.extend(train.get_args());
    let mut shell = Command::new("unshare");
    shell.args([flags, "sh", "-c", script, "sh"]).args(words);
    let shell = shell.current_dir(env!("CARGO_MANIFEST_DIR")).env("FOLDER", run.dir().join("checkpoints"));
    Some(shell.output().unwrap())
}

fn assert_whole(dir: &Path) {
    let newest = *checkpoint::steps(dir).unwrap().last().unwrap();
    Verified::open(&dir.join(format!("step-{newest}"))).unwrap();
}

/// transformers#40691 and others: a disk that fills up, or turns read-only, during a run.
#[test]
fn transformers_40691_a_full_disk_costs_no_old_checkpoint() {
    let full = "mkdir $FOLDER && mount -t tmpfs -o size=60k tmpfs $FOLDER || exit 90
        \"$@\"; echo code $?; cp -r $FOLDER $FOLDER.then
        mount -o remount,size=10m $FOLDER && \"$@\"; echo code $?; cp -r $FOLDER $FOLDER.end";
    // Busy while a file is open for writing.
    let read_only = "mkdir $FOLDER && mount -t tmpfs tmpfs $FOLDER || exit 90
        \"$@\" & until [ -d $FOLDER/step-4 ]; do sleep 0.01; done
        until mount -o remount,ro $FOLDER; do :; done
        wait $!; echo code $?; cp -r $FOLDER $FOLDER.then
        mount -o remount,rw $FOLDER && \"$@\"; echo code $?; cp -r $FOLDER $FOLDER.end";
    for (script, reason) in [(full, "No space left on device"), (read_only, "Read-only file system")] {
        let run = Run::new(SLOW);
        let Some(output) = with_mounts(script, &run) else { return };
        let told = text(&output);
        let codes: Vec<&str> = told.lines().filter(|line| line.starts_with("code ")).collect();
        assert_eq!(codes, ["code 6", "code 0"], "{told}");
        for part in [reason, "checkpoint failed", "could not be written", "resuming from checkpoint step-"] {
            assert!(told.contains(part), "{part}: {told}");
        }
        // The mount ended with its shell.
        let checkpoints = run.dir().join("checkpoints");
        assert_whole(&checkpoints.with_extension("then"));
        fs::remove_dir(&checkpoints).unwrap();
        fs::rename(checkpoints.with_extension("end"), &checkpoints).unwrap();
        assert_verified(&run);
        assert_sound(&run.dir());
        assert_every_job_once(&run.dir(), 4);
    }
}
