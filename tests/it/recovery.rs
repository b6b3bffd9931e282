//! Recovery from damage: missing, truncated or outdated files, and signals at awkward moments.

use crate::train::{Run, SLOW, interrupt, text};
use rusqlite::Connection;
use std::{
    fs,
    io::{BufRead, BufReader},
    path::Path,
    process::Stdio,
};

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

/// State after a kill between the last step and the export.
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
    assert_eq!(draftmill::hf::validate::check(&run.dir().join("export")), []);
    assert_whole(&run);

    // The summary of an earlier, shorter run does not hide the missing export of this one.
    let old = fs::read(run.dir().join("summary.json")).unwrap();
    let longer = run.train(&["--set", "run.epochs=2"]);
    assert!(longer.status.success(), "{}", text(&longer));
    undo_the_end(&run);
    fs::write(run.dir().join("summary.json"), old).unwrap();
    assert!(run.train(&["--set", "run.epochs=2"]).status.success());
    assert_eq!(draftmill::hf::validate::check(&run.dir().join("export")), []);
    assert_whole(&run);
}

/// A flipped bit in each file of a checkpoint, a missing file, and a truncated file.
#[test]
fn a_damaged_checkpoint_is_told_and_the_one_before_it_is_gone_on_from() {
    let run = Run::new(SLOW);
    kill_at(&run, 14);
    let checkpoints = run.dir().join("checkpoints");
    let newest = || *draftmill::run_dir::checkpoint::steps(&checkpoints).unwrap().last().unwrap();
    let names = [
        "weights.safetensors",
        "exp_avg.safetensors",
        "exp_avg_sq.safetensors",
        "state.json",
        "draft_config.json",
        "manifest.json",
        // Missing and truncated files.
        "exp_avg.safetensors",
        "state.json",
    ];
    let saved = tempfile::tempdir().unwrap();
    copy(&run.dir(), saved.path());
    for (at, name) in names.into_iter().enumerate() {
        let step = newest();
        let path = checkpoints.join(format!("step-{step}/{name}"));
        let mut bytes = fs::read(&path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1 << (at % 8);
        match at {
            6 => fs::remove_file(&path).unwrap(),
            7 => fs::write(&path, &bytes[..middle]).unwrap(),
            _ => fs::write(&path, bytes).unwrap(),
        }
        let told = interrupted(&run);
        for part in [&format!("checkpoint step-{step} is damaged: {name}"), "resuming from step-", "open again"] {
            assert!(told.contains(part), "{name}: {part}: {told}");
        }
        assert!(checkpoints.join(format!("step-{step}.damaged")).is_dir());
        fs::remove_dir_all(run.dir()).unwrap();
        copy(saved.path(), &run.dir());
    }
    fs::remove_dir_all(checkpoints.join(format!("step-{}", newest()))).unwrap();
    let again = run.train(&[]);
    assert_eq!(again.status.code(), Some(0), "{}", text(&again));
    assert!(text(&again).contains("is missing; resuming from step-"), "{}", text(&again));
    assert_whole(&run);
    let verified = run.plain(&["ledger", run.dir().to_str().unwrap(), "--verify"]);
    assert!(verified.status.success(), "{}", text(&verified));
}

#[test]
fn where_every_checkpoint_is_damaged_nothing_is_begun() {
    let run = Run::new(SLOW);
    kill_at(&run, 14);
    let checkpoints = run.dir().join("checkpoints");
    let steps = draftmill::run_dir::checkpoint::steps(&checkpoints).unwrap();
    for step in &steps {
        fs::write(checkpoints.join(format!("step-{step}/state.json")), "{}").unwrap();
    }
    for gone in [false, true] {
        if gone {
            fs::remove_dir_all(&checkpoints).unwrap();
        }
        let refused = run.train(&[]);
        assert_eq!(refused.status.code(), Some(5), "{}", text(&refused));
        assert!(text(&refused).contains("--fresh --force"), "{}", text(&refused));
        let last = if gone { "is missing" } else { "state.json" };
        assert!(text(&refused).contains(last), "{}", text(&refused));
        assert!(gone || draftmill::run_dir::checkpoint::steps(&checkpoints).unwrap() == steps, "nothing is touched");
    }
    assert!(run.train(&["--fresh", "--force"]).status.success());
    assert_whole(&run);
}

/// Starts the run and interrupts it after one more step; returns its output.
fn interrupted(run: &Run) -> String {
    let mut train = run.draftmill("train", &[]);
    let mut child = train.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut told = String::new();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
    for line in lines.by_ref() {
        told += &line;
        if line.contains("epoch planned") {
            interrupt(&child);
            break;
        }
    }
    told.extend(lines);
    assert_eq!(child.wait().unwrap().code(), Some(130), "{told}");
    told
}

pub fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap().map(Result::unwrap) {
        match entry.path().is_dir() {
            true => copy(&entry.path(), &to.join(entry.file_name())),
            false => drop(fs::copy(entry.path(), to.join(entry.file_name())).unwrap()),
        }
    }
}

/// state.db itself holds everything up to the last checkpoint; only outcomes that a kill undoes were in the log alone.
#[test]
fn a_deleted_log_of_a_killed_run_costs_nothing() {
    let run = Run::new(SLOW);
    kill_at(&run, 14);
    for name in ["state.db-wal", "state.db-shm"] {
        fs::remove_file(run.dir().join(name)).unwrap();
    }
    let end = run.train(&[]);
    assert_eq!(end.status.code(), Some(0), "{}", text(&end));
    assert!(text(&end).contains("resuming from checkpoint step-12"), "{}", text(&end));
    assert_whole(&run);
    let verified = run.plain(&["ledger", run.dir().to_str().unwrap(), "--verify"]);
    assert!(verified.status.success(), "{}", text(&verified));
}

/// SpecForge#678: a start after the end hung. Here it reports the end, returns 0, and changes no weight and no outcome.
#[test]
fn specforge_678_a_start_after_the_end_does_nothing() {
    let run = Run::new(SLOW);
    assert!(run.train(&[]).status.success());
    let (ledger, steps, summary) = (run.ledger(), run.steps(), run.summary());
    let again = run.train(&[]);
    assert!(again.status.success() && text(&again).contains("finished already"), "{}", text(&again));
    assert_eq!((run.ledger(), run.steps(), run.summary()), (ledger, steps, summary));
}

/// Automodel#2478, #3396: shapes match, so only a comparison detects other data.
#[test]
fn automodel_3396_other_data_or_another_way_to_prepare_it_is_refused_by_name() {
    let run = Run::new(SLOW);
    kill_at(&run, 6);
    let inputs = run.dir().join("other.jsonl");
    let rows = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/smoke.jsonl")).unwrap();
    fs::write(&inputs, rows.lines().skip(1).map(|line| format!("{line}\n")).collect::<String>()).unwrap();
    let inputs = format!("data.inputs={}", inputs.display());
    for (set, name) in
        [(inputs.as_str(), "data: "), ("data.max_length=60", "data.max_length: the run has 64, now it is 60")]
    {
        assert!(run.draftmill("prepare", &["--set", set]).output().unwrap().status.success());
        let refused = run.train(&["--set", set]);
        assert_eq!(refused.status.code(), Some(3), "{}", text(&refused));
        assert!(text(&refused).contains(name), "{name} is not named: {}", text(&refused));
    }
    assert!(run.draftmill("prepare", &[]).output().unwrap().status.success());
    assert!(run.train(&[]).status.success());
    assert_whole(&run);
}

#[test]
fn settings_that_may_change_are_listed_and_noted() {
    let run = Run::new(SLOW);
    kill_at(&run, 6);
    let told = text(&run.train(&["--set", "optimizer.learning_rate=0.5", "--set", "optimizer.accumulation=2"]));
    for part in ["settings changed", "optimizer.learning_rate: 0.01 -> 0.5", "optimizer.accumulation: 1 -> 2"] {
        assert!(told.contains(part), "{part}: {told}");
    }
    assert!(!told.contains("run.dir"), "{told}");
    let noted = Connection::open(run.dir().join("state.db")).unwrap();
    let noted: u32 =
        noted.query_row("SELECT count(*) FROM config_changes WHERE run = 2", [], |row| row.get(0)).unwrap();
    assert_eq!(noted, 2);
    let verified = run.plain(&["ledger", run.dir().to_str().unwrap(), "--verify"]);
    assert!(verified.status.success(), "steps before and after are of other sizes: {}", text(&verified));
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
    fs::create_dir(checkpoints.join(".step-7.draftmill-partial")).unwrap();
    fs::write(checkpoints.join("notes.tmp"), "a person's").unwrap();
    undo_the_end(&run);
    assert!(run.train(&[]).status.success());
    assert_eq!(draftmill::run_dir::checkpoint::steps(&checkpoints).unwrap().last(), Some(&(last as u64)));
    assert!(!checkpoints.join(".step-7.draftmill-partial").exists() && checkpoints.join("notes.tmp").exists());
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
    // Cut to the checkpoint, so that the next line shows that the run continues.
    let log = fs::read_to_string(run.dir().join("steps.jsonl")).unwrap();
    fs::write(run.dir().join("steps.jsonl"), log.lines().take(20).map(|l| format!("{l}\n")).collect::<String>())
        .unwrap();
    // Four drafters instead of two halve the number of steps, and the weights already contain more than that.
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
        // The lock is the first file of a start; signals are handled before.
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

/// The training diverged, and the newest checkpoints hold the result: a run continues from an earlier one on request.
#[test]
fn a_run_resumes_from_an_earlier_checkpoint_on_request() {
    let run = Run::new(SLOW);
    kill_at(&run, 14);
    let steps = draftmill::run_dir::checkpoint::steps(&run.dir().join("checkpoints")).unwrap();
    let earlier = steps[0];
    assert!(steps.len() > 1, "{steps:?}");
    let refused = run.train(&["--from-checkpoint", "step-3141"]);
    assert_eq!(refused.status.code(), Some(2), "{}", text(&refused));
    assert!(text(&refused).contains(&format!("it has step-{}", steps.last().unwrap())), "{}", text(&refused));
    let resumed = run.train(&["--from-checkpoint", &format!("step-{earlier}")]);
    assert_eq!(resumed.status.code(), Some(0), "{}", text(&resumed));
    assert!(text(&resumed).contains(&format!("resuming from checkpoint step-{earlier}")), "{}", text(&resumed));
    assert_whole(&run);
    crate::torture::assert_sound(&run.dir());
}
