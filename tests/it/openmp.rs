//! Threads of libtorch's operations wait without spinning, unless the user chooses.

use std::process::Command;

/// What libgomp reports of its settings in a process of `draftmill` with these variables.
fn settings(arguments: &[&str], variables: &[(&str, &str)]) -> String {
    let mut draftmill = Command::new(env!("CARGO_BIN_EXE_draftmill"));
        draftmill.env_remove(name);
    }
    let ended = draftmill.args(arguments).envs(variables.iter().copied()).env("OMP_DISPLAY_ENV", "VERBOSE").output();
    String::from_utf8(ended.unwrap().stderr).unwrap()
}

/// Issue 17, F4 (pytorch#35803): on busy cores, decoding took four times its processor time, all of it in libgomp's barriers.
#[test]
fn threads_wait_passively_unless_the_user_chooses() {
    // `--help` ends a command before it begins.
    for command in ["check", "doctor", "eval", "export", "generate", "train"] {
        let report = settings(&[command, "--help"], &[]);
        assert!(report.contains("GOMP_SPINCOUNT = '0'"), "{command}: {report}");
        assert_eq!(report.matches("OPENMP DISPLAY ENVIRONMENT BEGIN").count(), 1, "{report}");
    }
        assert!(!settings(&["eval", "--help"], &[variables]).contains("GOMP_SPINCOUNT = '0'"), "{variables:?}");
    }
    assert!(settings(&["eval", "--help"], &[("GOMP_SPINCOUNT", "4711")]).contains("GOMP_SPINCOUNT = '4711'"));
}

/// The program that starts again is the same process, under its own name and with its own arguments.
#[test]
fn the_process_keeps_its_id_name_and_arguments() {
    let root = tempfile::tempdir().unwrap();
    let fifo = root.path().join("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    // The command reads the prompts, so it stands here until the FIFO has a writer.
    let draft = ["--target", "", "--draft", "a b", "--prompts", fifo.to_str().unwrap()];
    let mut child = Command::new(env!("CARGO_BIN_EXE_draftmill"));
    child.arg("eval").args(draft).env_remove("OMP_WAIT_POLICY").env_remove("GOMP_SPINCOUNT");
    let mut child = child.stderr(Stdio::null()).spawn().unwrap();
    drop(child.kill());
    drop(child.wait());
}
