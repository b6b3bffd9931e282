//! Threads of libtorch's operations wait without spinning, unless the user chooses.

use crate::train::{Guarded, Run, SLOW};
use std::{
    process::{Command, Stdio},
    time::Duration,
};
use tokio::time::Instant;

/// Settings that libgomp reports in a process of `draftmill` with these variables.
fn settings(arguments: &[&str], variables: &[(&str, &str)]) -> String {
    let mut draftmill = Command::new(env!("CARGO_BIN_EXE_draftmill"));
    draftmill.args(arguments).env_remove("OMP_WAIT_POLICY").env_remove("GOMP_SPINCOUNT");
    draftmill.envs(variables.iter().copied()).env("OMP_DISPLAY_ENV", "VERBOSE");
    String::from_utf8(draftmill.output().unwrap().stderr).unwrap()
}

/// Issue 17, F4: on busy cores, decoding took four times its processor time, all of it in libgomp's barriers.
#[test]
fn threads_wait_passively_unless_the_user_chooses() {
    // `--help` ends a command before it begins.
    for command in ["check", "doctor", "eval", "export", "generate", "train"] {
        let report = settings(&[command, "--help"], &[]);
        assert!(report.contains("GOMP_SPINCOUNT = '0'"), "{command}: {report}");
        assert_eq!(report.matches("OPENMP DISPLAY ENVIRONMENT BEGIN").count(), 1, "{report}");
    }
    assert!(settings(&["eval", "--help"], &[("OMP_WAIT_POLICY", "ACTIVE")]).contains("OMP_WAIT_POLICY = 'ACTIVE'"));
    assert!(settings(&["eval", "--help"], &[("GOMP_SPINCOUNT", "4711")]).contains("GOMP_SPINCOUNT = '4711'"));
}

/// A service manager and a shell know a run by its process id, name and arguments.
#[test]
fn the_process_keeps_its_id_name_and_arguments() {
    let run = Run::new(SLOW);
    let mut train = run.draftmill("train", &[]);
    train.env_remove("OMP_WAIT_POLICY").env_remove("GOMP_SPINCOUNT").env("TOKEN", "a b=c");
    let wanted: Vec<String> = train.get_args().map(|word| word.to_str().unwrap().to_owned()).collect();
    let child = Guarded(train.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
    let read = |name: &str| std::fs::read_to_string(format!("/proc/{}/{name}", child.id())).unwrap_or_default();
    let list = |name: &str| read(name).split_terminator('\0').map(String::from).collect::<Vec<_>>();
    let began = Instant::now();
    while !list("environ").contains(&"OMP_WAIT_POLICY=PASSIVE".into()) {
        assert!(began.elapsed() < Duration::from_secs(60), "{:?}", list("environ"));
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(list("environ").contains(&"TOKEN=a b=c".into()));
    assert_eq!(read("comm").trim(), "draftmill");
    assert_eq!(list("cmdline")[1..], wanted);
}
