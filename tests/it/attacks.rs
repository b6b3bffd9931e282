//! Faults of issue 17, section E, that were found by attack: each test has the number of its item.

use crate::train::{Guarded, Run, SLOW, interrupt, signal, text};
use draftmill::run_dir::checkpoint::{self, Verified};
use serde_json::{Value, json};
use std::{
    fs,
    io::{Read, Write},
    net::TcpListener,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    time::Duration,
};
use tokio::time::Instant;

fn killed_at(steps: usize, more: &[&str]) -> Run {
    let run = Run::new(&[SLOW, &["checkpoint.keep_last=100"], more].concat());
    kill(&run, steps);
    run
}

fn kill(run: &Run, steps: usize) {
    let mut child = run.train_until(steps);
    child.kill().unwrap();
    child.wait().unwrap();
}

fn step_folder(run: &Run, step: u64) -> PathBuf {
    run.dir().join("checkpoints").join(checkpoint::name_of(step))
}

fn newest(run: &Run) -> u64 {
    *checkpoint::steps(&run.dir().join("checkpoints")).unwrap().last().unwrap()
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

fn verify(run: &Run) -> Output {
    run.plain(&["ledger", run.dir().to_str().unwrap(), "--verify"])
}

fn assert_finishes(run: &Run) -> String {
    let end = run.train(&[]);
    assert_eq!(end.status.code(), Some(0), "{}", text(&end));
    assert_eq!(verify(run).status.code(), Some(0), "{}", text(&verify(run)));
    text(&end)
}

fn pipe(path: &Path) {
    let path = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
    // SAFETY: the path is a C string that outlives the call.
    assert_eq!(unsafe { libc::mkfifo(path.as_ptr(), 0o600) }, 0);
}

/// Whole files of an older step, and whole files of another run with the same settings.
#[test]
fn e2_a_checkpoint_of_another_step_or_run_is_damage() {
    let run = killed_at(10, &[]);
    let other = killed_at(10, &[]);
    let (last, step) = (newest(&run), newest(&run).min(newest(&other)));
    assert!(step >= 8);
    let whole = run.dir().with_extension("whole");
    for (from, at, reason) in [
        (step_folder(&run, 4), last, "it is of step 4, but the folder's name says"),
        (step_folder(&other, step), step, "it is of the run "),
    ] {
        copy(&step_folder(&run, at), &whole);
        copy(&from, &step_folder(&run, at));
        let verified = verify(&run);
        assert!(verified.status.code() == Some(6) && text(&verified).contains(reason), "{}", text(&verified));
        copy(&whole, &step_folder(&run, at));
        assert_eq!(verify(&run).status.code(), Some(0), "{}", text(&verify(&run)));
    }
    copy(&step_folder(&other, step), &step_folder(&run, step));
    if step != last {
        copy(&step_folder(&run, 4), &step_folder(&run, last));
    }
    let told = assert_finishes(&run);
    assert!(told.contains("it is of the run ") && told.contains("resuming from step-4"), "{told}");
}

/// A state.db that was restored from a copy does not know the checkpoints that came later.
#[test]
fn e3_checkpoints_that_a_restored_state_does_not_list_are_put_aside() {
    let run = killed_at(6, &[]);
    let db = run.dir().join("state.db");
    // Moves the log into the file.
    rusqlite::Connection::open(&db).unwrap().execute_batch("PRAGMA wal_checkpoint(TRUNCATE)").unwrap();
    let saved = fs::read(&db).unwrap();
    let known = newest(&run);
    kill(&run, 14);
    let later = newest(&run);
    assert!(later > known);
    for name in ["state.db-wal", "state.db-shm"] {
        let _ = fs::remove_file(run.dir().join(name));
    }
    fs::write(&db, saved).unwrap();
    let torn = step_folder(&run, later + 1000);
    copy(&step_folder(&run, later), &torn);
    fs::remove_file(torn.join("weights.safetensors")).unwrap();
    let told = assert_finishes(&run);
    let aside = run.dir().join("checkpoints").join(checkpoint::aside_name(later));
    assert!(told.contains(aside.to_str().unwrap()) && told.contains("draftmill export can read it"), "{told}");
    assert_eq!(Verified::open(&aside).unwrap().state.step, later);
    assert!(!torn.exists(), "it never was whole");
}

/// An error that may pass is no damage: nothing is given up.
#[test]
fn e4_a_checkpoint_that_cannot_be_read_is_refused_and_kept() {
    let run = killed_at(10, &[]);
    let (last, steps) = (newest(&run), checkpoint::steps(&run.dir().join("checkpoints")).unwrap());
    for name in ["manifest.json", "weights.safetensors", "state.json"] {
        let path = step_folder(&run, last).join(name);
        let aside = run.dir().join("aside");
        fs::rename(&path, &aside).unwrap();
        symlink(&path, &path).unwrap();
        for refused in [run.train(&[]), verify(&run)] {
            let told = text(&refused);
            assert!(matches!(refused.status.code(), Some(5 | 6)), "{told}");
            assert!(told.contains("cannot be read") && told.contains(name) && !told.contains("--fresh"), "{told}");
        }
        fs::remove_file(&path).unwrap();
        fs::rename(&aside, &path).unwrap();
    }
    assert_eq!(checkpoint::steps(&run.dir().join("checkpoints")).unwrap(), steps, "nothing is put aside");
    let told = assert_finishes(&run);
    assert!(told.contains(&format!("resuming from checkpoint step-{last}")), "{told}");
}

#[test]
fn e4_a_run_folder_that_cannot_be_read_is_not_called_empty() {
    let folder = tempfile::tempdir().unwrap();
    let endless = folder.path().join("endless");
    fs::create_dir(&endless).unwrap();
    symlink("state.db", endless.join("state.db")).unwrap();
    for (command, dir) in [("ledger", endless.as_path()), ("runs", endless.as_path()), ("runs", folder.path())] {
        let refused = Command::new(env!("CARGO_BIN_EXE_draftmill")).arg(command).arg(dir).output().unwrap();
        let told = text(&refused);
        assert_eq!(refused.status.code(), Some(6), "{told}");
        assert!(!told.contains("no run") && (told.contains("symbolic links") || command == "runs"), "{told}");
    }
}

#[test]
fn e5_a_fresh_start_removes_the_evaluations() {
    let run = killed_at(6, &[]);
    let evals = run.dir().join("evals.jsonl");
    fs::write(&evals, "{\"step\":4}\n").unwrap();
    let fresh = run.train(&["--fresh", "--force"]);
    assert!(fresh.status.success() && !evals.exists(), "{}", text(&fresh));
}

#[test]
fn e8_a_byte_that_is_no_utf8_in_a_log_does_not_stop_a_run() {
    let run = killed_at(6, &[]);
    for name in ["steps.jsonl", "evals.jsonl"] {
        let path = run.dir().join(name);
        let mut bytes = fs::read(&path).unwrap_or_default();
        bytes.splice(0..0, b"\xff{\n".iter().copied());
        fs::write(path, bytes).unwrap();
    }
    assert!(assert_finishes(&run).contains("step log has damaged lines"));
    assert!(fs::read(run.dir().join("steps.jsonl")).unwrap().starts_with(b"\xff{\n"), "it stays");
}

/// Without a reader of stderr the run trains, obeys its signals and ends.
#[test]
fn e6_a_reader_of_stderr_that_stalls_freezes_nothing() {
    for second in [false, true] {
        let run = Run::new(&[SLOW, &["run.epochs=50", "log.progress_every=1ms"]].concat());
        let (reader, stderr) = std::io::pipe().unwrap();
        // SAFETY: the descriptor is open, and the call takes an integer.
        unsafe { libc::fcntl(std::os::fd::AsRawFd::as_raw_fd(&stderr), libc::F_SETPIPE_SZ, 4096) };
        let mut train = run.draftmill("train", &["--log-level", "trace"]);
        let mut child = Guarded(train.stdout(Stdio::null()).stderr(stderr).spawn().unwrap());
        drop(train);
        let steps = || fs::read_to_string(run.dir().join("steps.jsonl")).map_or(0, |log| log.lines().count());
        let begun = Instant::now();
        while steps() < 12 {
            assert!(begun.elapsed() < Duration::from_secs(120), "training is frozen at step {}", steps());
            std::thread::sleep(Duration::from_millis(20));
        }
        interrupt(&child);
        if second {
            std::thread::sleep(Duration::from_millis(1100));
            signal(&child, libc::SIGINT);
        }
        let signalled = Instant::now();
        let status = loop {
            if let Some(status) = child.try_wait().unwrap() {
                break status;
            }
            assert!(signalled.elapsed() < Duration::from_secs(60), "the signal is not heard");
            std::thread::sleep(Duration::from_millis(20));
        };
        assert_eq!(status.code(), Some(130));
        drop(reader);
    }
}

/// `printf ... | nc`.
#[test]
fn e10_a_command_from_a_client_that_half_closes_is_carried_out_and_answered() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let listen = format!("admin.listen={port}");
    let run = Run::new(&[SLOW, &["run.epochs=50", &listen]].concat());
    let child = Guarded(run.train_until(2));
    for command in ["pause", "resume", "checkpoint"] {
        let mut stream = std::net::TcpStream::connect(port).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        write!(stream, "POST /{command} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 200"), "{command}: {answer:?}");
    }
    drop(child);
}

#[test]
fn e11_a_start_that_cannot_take_its_port_has_failed() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let run = Run::new(SLOW);
    let refused = run.train(&["--set", &format!("admin.listen={}", taken.local_addr().unwrap())]);
    assert!(refused.status.code() == Some(3) && text(&refused).contains("is in use"), "{}", text(&refused));
    let listed = run.plain(&["runs", run.dir().to_str().unwrap(), "--json"]);
    let listed: Value = serde_json::from_slice(&listed.stdout).unwrap();
    assert_eq!(listed[0]["state"], json!("failed"), "{listed}");
    assert!(listed[0]["problem"].as_str().unwrap().contains("is in use"), "{listed}");
}

#[test]
fn e13_a_state_that_is_replaced_during_a_run_ends_it_with_a_sentence() {
    let run = killed_at(6, &[]);
    let db = run.dir().join("state.db");
    let copied = run.dir().join("copied");
    rusqlite::Connection::open(&db).unwrap().execute_batch("PRAGMA wal_checkpoint(TRUNCATE)").unwrap();
    fs::copy(&db, &copied).unwrap();
    let before = fs::read(&copied).unwrap();
    let mut train = run.draftmill("train", &["--set", "run.epochs=50"]);
    let child = train.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let begun = Instant::now();
    while run.steps().len() < 12 && begun.elapsed() < Duration::from_secs(120) {
        std::thread::sleep(Duration::from_millis(10));
    }
    fs::rename(&copied, &db).unwrap();
    let ended = child.wait_with_output().unwrap();
    assert_eq!(ended.status.code(), Some(6), "{}", text(&ended));
    assert!(text(&ended).contains("another file has taken its place"), "{}", text(&ended));
    assert!(fs::read(&db).unwrap() == before, "nothing is written to the other file");
}

/// A pipe in the place of each file that is read.
#[test]
fn e14_a_pipe_in_place_of_a_file_is_refused_and_not_waited_for() {
    let run = Run::new(SLOW);
    let folder = tempfile::tempdir().unwrap();
    let fifo = folder.path().join("pipe");
    pipe(&fifo);
    let fifo = fifo.to_str().unwrap();
    let model = folder.path().join("model");
    let (target, token, store) =
        (format!("target.dir={}", model.display()), format!("admin.token_file={fifo}"), format!("data.store={fifo}"));
    let mut commands = vec![
        ("token", run.draftmill("check", &["--set", &token])),
        ("store", run.draftmill("check", &["--set", &store])),
        ("config", Command::new(env!("CARGO_BIN_EXE_draftmill"))),
    ];
    commands[2].1.args(["check", "--config", fifo]);
    fs::create_dir(&model).unwrap();
    for name in ["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"] {
        let name = model.join(name);
        pipe(&name);
    }
    let mut check = run.draftmill("check", &["--set", &target]);
    check.args(["--set", "run.engine=torch"]);
    commands.push(("model", check));
    commands.push(("tokenizer", run.draftmill("prepare", &["--set", &target])));
    for (what, mut command) in commands {
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut child = Guarded(child);
        let begun = Instant::now();
        while child.try_wait().unwrap().is_none() {
            assert!(begun.elapsed() < Duration::from_secs(60), "{what}: it waits");
            std::thread::sleep(Duration::from_millis(20));
        }
        let (mut told, mut errors) = (String::new(), String::new());
        child.stdout.take().unwrap().read_to_string(&mut told).unwrap();
        child.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
        told += &errors;
        assert!(!child.wait().unwrap().success() && told.contains("not a regular file"), "{what}: {told}");
    }
}

#[test]
fn e16_a_limit_of_file_sizes_is_a_sentence() {
    let run = Run::new(SLOW);
    let train = run.draftmill("train", &[]);
    let mut limited = Command::new("sh");
    limited.current_dir(env!("CARGO_MANIFEST_DIR")).args(["-c", "ulimit -f 8; exec \"$@\"", "sh"]);
    let ended = limited.arg(train.get_program()).args(train.get_args()).output().unwrap();
    assert!(matches!(ended.status.code(), Some(6 | 7)), "{:?} {}", ended.status, text(&ended));
    assert!(text(&ended).contains("error"), "{}", text(&ended));
}

/// The signal comes while the start reads its files; before that, the process has no say.
#[test]
fn e16_a_signal_early_in_a_start_is_heard() {
    let run = Run::new(SLOW);
    for (number, code) in [(libc::SIGTERM, 0), (libc::SIGINT, 130)] {
        let child = run.draftmill("train", &[]).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let status = format!("/proc/{}/status", child.id());
        let holds = || {
            let text = fs::read_to_string(&status).unwrap();
            let masks = text.lines().filter(|line| line.starts_with("SigBlk:") || line.starts_with("SigCgt:"));
            let mut masks = masks.map(|line| u64::from_str_radix(line.split_whitespace().last().unwrap(), 16).unwrap());
            masks.any(|mask| mask & (1 << (number - 1)) != 0)
        };
        while !holds() {
            std::thread::sleep(Duration::from_micros(200));
        }
        signal(&child, number);
        let ended = child.wait_with_output().unwrap();
        assert_eq!(ended.status.code(), Some(code), "{}", text(&ended));
    }
}

#[test]
fn e16_worker_threads_of_zero_are_refused() {
    let run = Run::new(SLOW);
    let refused = run.draftmill("train", &[]).env("TOKIO_WORKER_THREADS", "0").output().unwrap();
    assert_eq!(refused.status.code(), Some(2), "{}", text(&refused));
    assert!(
        text(&refused).contains("TOKIO_WORKER_THREADS") && !text(&refused).contains("panicked"),
        "{}",
        text(&refused)
    );
}

#[test]
fn e16_check_names_a_run_folder_that_cannot_be_written() {
    let run = Run::new(SLOW);
    let below = format!("run.dir={}", run.dir().parent().unwrap().join("smoke.toml/run").display());
    let mut check = run.draftmill("check", &[]);
    let refused = check.args(["--set", &below]).output().unwrap();
    assert!(!refused.status.success() && text(&refused).contains("cannot be written"), "{}", text(&refused));
}

#[test]
fn e16_an_escape_character_of_a_folder_does_not_reach_the_terminal() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("a\u{1b}[31mb");
    fs::create_dir(&dir).unwrap();
    fs::write(dir.join("state.db"), "x".repeat(5000)).unwrap();
    for dir in [folder.path(), &dir] {
        let listed = Command::new(env!("CARGO_BIN_EXE_draftmill")).arg("runs").arg(dir).output().unwrap();
        assert!(text(&listed).contains("u{1b}[31mb") && !text(&listed).contains('\u{1b}'), "{}", text(&listed));
    }
}
