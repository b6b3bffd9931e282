//! What a run makes of damage: files that are gone, cut short or of another time, and signals at awkward moments.

use crate::train::{Run, SLOW, interrupt, text};
use std::{fs, process::Stdio};

fn kill_at(run: &Run, steps: usize) {
    let mut child = run.train_until(steps);
    child.kill().unwrap();
    child.wait().unwrap();
}

fn assert_whole(run: &Run) {
    let steps = run.steps();
    assert_eq!(steps, (1..=steps.len() as u64).collect::<Vec<_>>(), "every step is in the log once");
    let (trained, open) = run.ledger();
    assert_eq!((trained.div_ceil(2), open), (steps.len() as u64, 0), "two micro-batches a step");
    assert_eq!(run.summary()["finished"], true);
}

#[cfg(feature = "torch")]
/// As if the process had been killed between its last step and its export.
#[cfg(feature = "torch")]
fn undo_the_end(run: &Run) {
    fs::remove_file(run.dir().join("summary.json")).unwrap();
    fs::remove_dir_all(run.dir().join("export")).unwrap();
}

#[cfg(feature = "torch")]
#[test]
fn a_kill_before_the_export_is_made_good() {
    let run = Run::new(&["run.epochs=1"]);
    assert!(run.train(&[]).status.success());
    undo_the_end(&run);
    let again = run.train(&[]);
    assert_eq!(again.status.code(), Some(0), "{}", text(&again));
    assert_eq!(draftmill::export::check(&run.dir().join("export")), []);
    assert_whole(&run);

    // The summary of an earlier, shorter end does not hide that the export of this one is missing.
    let old = fs::read(run.dir().join("summary.json")).unwrap();
    let longer = run.train(&["--set", "run.epochs=2"]);
    assert!(longer.status.success(), "{}", text(&longer));
    undo_the_end(&run);
    fs::write(run.dir().join("summary.json"), old).unwrap();
    assert!(run.train(&["--set", "run.epochs=2"]).status.success());
    assert_eq!(draftmill::export::check(&run.dir().join("export")), []);
    assert_whole(&run);
}

#[cfg(feature = "torch")]
#[test]
fn a_damaged_checkpoint_is_refused_and_its_remedy_works() {
    let run = Run::new(&["run.epochs=1", "checkpoint.every_steps=2", "checkpoint.keep_last=2"]);
    assert!(run.train(&[]).status.success());
    let last = run.steps().len();
    let newest = run.dir().join(format!("checkpoints/step-{last}"));
    let weights = newest.join("weights.safetensors");
    let whole = fs::read(&weights).unwrap();
    fs::write(&weights, &whole[..whole.len() / 2]).unwrap();
    undo_the_end(&run);
    let refused = run.train(&[]);
    assert_eq!(refused.status.code(), Some(5), "{}", text(&refused));
    assert!(text(&refused).contains(&format!("delete the folder {}", newest.display())), "{}", text(&refused));

    fs::remove_dir_all(&newest).unwrap();
    let again = run.train(&[]);
    assert_eq!(again.status.code(), Some(0), "{}", text(&again));
    assert!(newest.is_dir());
    assert_eq!(draftmill::export::check(&run.dir().join("export")), []);
    assert_whole(&run);

    fs::remove_dir_all(run.dir().join("checkpoints")).unwrap();
    let refused = run.train(&[]);
    assert_eq!(refused.status.code(), Some(5), "{}", text(&refused));
    assert!(text(&refused).contains("--fresh --force"), "{}", text(&refused));
    assert!(run.train(&["--fresh", "--force"]).status.success());
    assert_whole(&run);
}

#[cfg(feature = "torch")]
#[test]
fn a_run_without_its_state_is_not_begun_anew_over_its_checkpoints() {
    let run = Run::new(&["run.epochs=1"]);
    assert!(run.train(&[]).status.success());
    for empty in [true, false] {
        match empty {
            true => fs::write(run.dir().join("state.db"), "").unwrap(),
            false => fs::remove_file(run.dir().join("state.db")).unwrap(),
        }
        let refused = run.train(&[]);
        assert_eq!(refused.status.code(), Some(6), "{}", text(&refused));
        assert!(text(&refused).contains("--fresh --force"), "{}", text(&refused));
        let unforced = run.train(&["--fresh"]);
        assert_eq!(unforced.status.code(), Some(3), "{}", text(&unforced));
    }
    assert!(run.train(&["--fresh", "--force"]).status.success());
    assert_whole(&run);
}

#[cfg(feature = "torch")]
#[test]
fn a_checkpoint_that_never_came_to_exist_is_removed() {
    let run = Run::new(&["run.epochs=1", "checkpoint.every_steps=2"]);
    assert!(run.train(&[]).status.success());
    let checkpoints = run.dir().join("checkpoints");
    let last = run.steps().len();
    fs::create_dir(checkpoints.join("step-99999")).unwrap();
    fs::create_dir(checkpoints.join("step-7.tmp")).unwrap();
    fs::write(checkpoints.join("notes.tmp"), "a person's").unwrap();
    undo_the_end(&run);
    assert!(run.train(&[]).status.success());
    assert_eq!(draftmill::checkpoint::steps(&checkpoints).unwrap().last(), Some(&(last as u64)));
    assert!(!checkpoints.join("step-7.tmp").exists() && checkpoints.join("notes.tmp").exists());
}

#[test]
fn a_damaged_state_is_told_and_can_be_thrown_away() {
    let run = Run::new(SLOW);
    kill_at(&run, 6);
    for name in ["state.db-wal", "state.db-shm"] {
        let _ = fs::remove_file(run.dir().join(name));
    }
    fs::write(
        run.dir().join("state.db"),
        "this is no database, and longer than a header of one hundred bytes ".repeat(9),
    )
    .unwrap();
    let refused = run.train(&[]);
    assert_eq!(refused.status.code(), Some(6), "{}", text(&refused));
    assert!(text(&refused).contains("not an SQLite database"), "{}", text(&refused));
    let fresh = run.train(&["--fresh", "--force"]);
    assert_eq!(fresh.status.code(), Some(0), "{}", text(&fresh));
    assert_whole(&run);
}

#[test]
fn other_numbers_of_workers_do_not_end_a_run_early() {
    let run = Run::new(SLOW);
    kill_at(&run, 22);
    // Cut to the checkpoint, so that the next line tells that the run goes on.
    let log = fs::read_to_string(run.dir().join("steps.jsonl")).unwrap();
    fs::write(run.dir().join("steps.jsonl"), log.lines().take(20).map(|l| format!("{l}\n")).collect::<String>())
        .unwrap();
    // Four drafters instead of two: half as many steps, and more than that are in the weights already.
    let more = ["--set", "drafter.devices=[\"cpu\", \"cpu\", \"cpu\", \"cpu\"]"];
    let mut child = run.draftmill("train", &more).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    while run.steps().len() < 21 {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    interrupt(&child);
    assert_eq!(child.wait().unwrap().code(), Some(130), "it was stopped, not finished");
    assert_eq!(run.summary()["finished"], false);
    assert!(run.train(&more).status.success());
    assert_eq!(run.ledger().1, 0);
}

#[test]
fn a_signal_while_it_starts_ends_with_130() {
    let run = Run::new(SLOW);
    for _ in 0..4 {
        let mut child = run.draftmill("train", &[]).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        // The lock is the first thing that a start leaves behind; the signals are heard before.
        while !run.dir().join("lock").exists() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        interrupt(&child);
        assert_eq!(child.wait().unwrap().code(), Some(130));
        fs::remove_file(run.dir().join("lock")).unwrap();
    }
    assert!(run.train(&[]).status.success());
    assert_whole(&run);
}

#[test]
fn a_pipe_or_device_as_input_is_refused_and_not_waited_for() {
    let run = Run::new(SLOW);
    let pipe = run.dir().join("pipe");
    let path = std::ffi::CString::new(pipe.to_str().unwrap()).unwrap();
    // SAFETY: the path is a C string that outlives the call.
    assert_eq!(unsafe { libc::mkfifo(path.as_ptr(), 0o600) }, 0);
    for input in [pipe.to_str().unwrap(), "/dev/zero"] {
        let inputs = format!("data.inputs={input}");
        for (command, store) in [("prepare", "data.store=auto"), ("check", "data.store=nowhere")] {
            let refused = run.draftmill(command, &["--set", &inputs, "--set", store]).output().unwrap();
            assert_eq!(refused.status.code(), Some(4), "{}", text(&refused));
            assert!(text(&refused).contains("it is not a regular file"), "{}", text(&refused));
        }
    }
}
