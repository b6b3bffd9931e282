//! The systemd unit and the container recipe in `configs/`, checked against the program's defaults.

use draftmill::config::{Admin, Shutdown};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

fn config(name: &str) -> String {
    fs::read_to_string(PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("configs").join(name)).unwrap()
}

/// The value of `key=` in the unit.
fn value<'a>(unit: &'a str, key: &str) -> &'a str {
    let line = unit.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
    line.unwrap_or_else(|| panic!("the unit has no {key}"))
}

#[test]
fn the_unit_waits_longer_than_the_service_takes_to_end() {
    let unit = config("draftmill.service");
    let stop: u64 = value(&unit, "TimeoutStopSec").trim_end_matches('s').parse().unwrap();
    // After the grace period the immediate stop takes two more seconds.
    assert!(stop > Shutdown::default().grace.0.as_secs() + 2, "TimeoutStopSec={stop}s");
    for (key, expected) in [("Type", "notify"), ("KillSignal", "SIGTERM"), ("ExecReload", "/bin/kill -HUP $MAINPID")] {
        assert_eq!(value(&unit, key), expected);
    }
    // Orderly ends return 0; a restart does not help against these codes.
    assert_eq!(value(&unit, "RestartPreventExitStatus"), "2 3 4 5");
}

/// Validates the unit with systemd if it is installed.
#[test]
fn systemd_finds_nothing_wrong_with_the_unit() {
    let folder = tempfile::tempdir().unwrap();
    let verify = |text: &str| {
        let path = folder.path().join("draftmill.service");
        // systemd checks the program's path, and the program is not installed here.
        fs::write(&path, text.replace("/usr/local/bin/draftmill", env!("CARGO_BIN_EXE_draftmill"))).unwrap();
        let verified = Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&path).output().ok()?;
        let said = String::from_utf8_lossy(&verified.stderr).into_owned();
        let about = |line: &&str| line.contains(path.to_str().unwrap()) || line.contains("draftmill.service");
        Some((verified.status.success(), said.lines().filter(about).map(str::to_owned).collect::<Vec<_>>()))
    };
    let unit = config("draftmill.service");
    let Some((well, said)) = verify(&unit) else {
        println!("systemd-analyze is not on this machine");
        return;
    };
    assert!(well && said.is_empty(), "{said:#?}");
    let (_, said) = verify(&unit.replace("WatchdogSec=60s", "WatchdogSeconds=60s")).unwrap();
    assert!(!said.is_empty(), "a mistake would be seen");
}

#[test]
fn the_container_has_an_unprivileged_user_and_existing_files() {
    let recipe = config("Containerfile");
    let line = |start: &str| recipe.lines().rfind(|line| line.starts_with(start)).unwrap_or_default();
    assert_eq!(recipe.lines().filter(|line| line.starts_with("FROM ")).count(), 2, "no compiler in what runs");
    assert_eq!((line("USER"), line("STOPSIGNAL")), ("USER draftmill", "STOPSIGNAL SIGTERM"));
    assert!(line("CMD").starts_with("CMD [\"train\""), "{}", line("CMD"));
    assert_eq!(line("EXPOSE"), format!("EXPOSE {}", Admin::default().listen.0.unwrap().port()));
    let rust = env!("CARGO_PKG_RUST_VERSION");
    assert!(recipe.contains(&format!("FROM rust:{rust}-")), "the recipe builds with another Rust than {rust}");
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    assert!(fs::read_to_string(root.join("Makefile")).unwrap().contains("\nbuild: "), "it runs make build");
    assert!(fs::read_to_string(root.join(".dockerignore")).unwrap().contains("/target\n"));
}
