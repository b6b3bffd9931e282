//! Reloads of a running service, through the binary: applied, refused, and recorded in the log, the metrics and state.db.

use crate::{
    scrape::{get, without_run},
    train::{Guarded, interrupt, signal},
};
use draftmill::run_dir::db::{STEP_SIZE, StateReader};
use rusqlite::Connection;
use serde_json::Value;
use std::{
    fs,
    io::{BufRead, BufReader},
    path::PathBuf,
    process::{Command, ExitStatus, Stdio},
    sync::mpsc::{Receiver, channel},
    time::Duration,
};

/// Maximum number of polls, far more than a passing test needs.
const LOOKS: usize = 2000;
const LOOK: Duration = Duration::from_millis(20);

const CONFIG: &str = r#"
[run]
epochs = 10000
engine = "simulated"
[data]
inputs = ["tests/data/smoke.jsonl"]
max_length = 64
min_supervised = 4
validation_fraction = 0.0
[target]
dir = "tests/golden/target_qwen3"
devices = ["cpu", "cpu"]
layer_ids = [1, 5]
[plan]
job_tokens = 256
buckets = 2
[pool]
max_bytes = "16 MiB"
max_batches = 4
min_ready = 2
[drafter]
devices = ["cpu", "cpu"]
layers = 2
block_size = 4
mask_token_id = 319
[simulate]
micro_batch = "20ms"
feature_bytes_per_token = "1 KiB"
[optimizer]
warmup_fraction = 0.0
[checkpoint]
every_steps = 1000000
[log]
progress_every = "1h"
[reload]
poll = "50ms"
"#;

/// Service that trains until a signal, with a separate configuration file.
struct Service {
    folder: tempfile::TempDir,
    child: Guarded,
    lines: Receiver<Value>,
    metrics: String,
}

impl Service {
    fn start(config: &str) -> Service {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("my.toml");
        fs::write(&file, config).unwrap();
        let draftmill = |command: &str| {
            let mut run = Command::new(env!("CARGO_BIN_EXE_draftmill"));
            run.current_dir(env!("CARGO_MANIFEST_DIR")).args([command, "--config"]).arg(&file);
            run.arg("--set").arg(format!("run.dir={}", folder.path().join("run").display()));
            run.args(["--set", "admin.listen=127.0.0.1:0", "--set", "optimizer.learning_rate=1e-3"]);
            run
        };
        assert!(draftmill("prepare").output().unwrap().status.success());
        let mut child = draftmill("train").stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let (tell, lines) = channel();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        std::thread::spawn(move || {
            for line in stderr.lines().map_while(Result::ok) {
                let line = serde_json::from_str(&line).unwrap_or_else(|_| Value::String(line));
                if tell.send(line).is_err() {
                    return;
                }
            }
        });
        let mut service = Service { folder, child: Guarded(child), lines, metrics: String::new() };
        let started = service.wait_for(|line| line["metrics"].is_string(), "the address of its metrics");
        service.metrics = started["metrics"].as_str().unwrap().trim_start_matches("http://").to_owned();
        service.until_metric("draftmill_step ", |step| step >= 2.0);
        service
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("my.toml")
    }

    fn run(&self) -> PathBuf {
        self.folder.path().join("run")
    }

    /// Returns the next matching log line.
    fn wait_for(&mut self, fits: impl Fn(&Value) -> bool, what: &str) -> Value {
        let mut seen = Vec::new();
        for _ in 0..LOOKS {
            match self.lines.recv_timeout(LOOK) {
                Ok(line) if fits(&line) => return line,
                Ok(line) => {
                    seen.truncate(9);
                    seen.insert(0, line.to_string());
                }
                Err(_) => assert!(self.child.try_wait().unwrap().is_none(), "it ended: {seen:?}"),
            }
        }
        panic!("it never logged {what}: {seen:?}");
    }

    fn says(&mut self, text: &str) -> String {
        let has = |line: &Value| line["message"].as_str().is_some_and(|message| message.contains(text));
        let line = self.wait_for(has, text);
        ["message", "changes", "reason"].map(|key| line[key].as_str().unwrap_or_default()).join(" ")
    }

    fn metric(&self, name: &str) -> f64 {
        let text = without_run(&get(self.metrics.trim_end_matches("/metrics"), "/metrics"));
        let line = text.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("no {name} in\n{text}"));
        line.rsplit(' ').next().unwrap().parse().unwrap()
    }

    fn until_metric(&self, name: &str, fits: impl Fn(f64) -> bool) {
        let fitting = (0..LOOKS).find(|_| {
            let fits = fits(self.metric(name));
            if !fits {
                std::thread::sleep(LOOK);
            }
            fits
        });
        assert!(fitting.is_some(), "{name} stays {}", self.metric(name));
    }

    /// Checks that the service continues with some more steps.
    fn trains(&self) {
        let step = self.metric("draftmill_step ");
        self.until_metric("draftmill_step ", |now| now >= step + 3.0);
    }

    fn changes(&self) -> Vec<(String, String, String)> {
        let state = Connection::open(self.run().join("state.db")).unwrap();
        let mut rows = state.prepare("SELECT key, old, new FROM config_changes ORDER BY id").unwrap();
        let rows = rows.query_map([], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?))).unwrap();
        rows.map(Result::unwrap).collect()
    }

    fn events(&self, kind: &str) -> Vec<String> {
        let state = Connection::open(self.run().join("state.db")).unwrap();
        let mut rows = state.prepare("SELECT text FROM events WHERE kind = ?1 ORDER BY id").unwrap();
        let rows = rows.query_map([kind], |row| row.get(0)).unwrap();
        rows.map(Result::unwrap).collect()
    }

    fn wait(&mut self) -> ExitStatus {
        for _ in 0..LOOKS {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            std::thread::sleep(LOOK);
        }
        panic!("it does not end");
    }
}

const APPLIED: &str = "draftmill_config_reloads_total{result=\"applied\"}";
const REFUSED: &str = "draftmill_config_reloads_total{result=\"refused\"}";
const UNCHANGED: &str = "draftmill_config_reloads_total{result=\"unchanged\"}";

#[test]
fn a_saved_file_is_in_force_and_log_metrics_and_state_say_so() {
    let mut service = Service::start(CONFIG);
    let (hash, since) =
        (service.metric("draftmill_config_hash"), service.metric("draftmill_config_applied_timestamp_seconds"));
    // As editors do it: written next to the old file, then renamed.
    let fresh = service.folder.path().join("fresh.toml");
    fs::write(&fresh, CONFIG.replace("min_ready = 2", "min_ready = 1\ndraw_policy = \"uniform\"")).unwrap();
    fs::rename(&fresh, service.file()).unwrap();
    let said = service.says("settings changed");
    assert!(
        said.contains("pool.min_ready: 2 -> 1") && said.contains("pool.draw_policy: \"proportional\" -> \"uniform\""),
        "{said}"
    );
    service.until_metric("draftmill_pool_min_ready", |ready| ready == 1.0);
    assert_eq!((service.metric(APPLIED), service.metric(REFUSED), service.metric(UNCHANGED)), (1.0, 0.0, 0.0));
    assert_ne!(service.metric("draftmill_config_hash"), hash);
    assert!(service.metric("draftmill_config_applied_timestamp_seconds") >= since);
    service.trains();
    let changes = service.changes();
    let pairs: Vec<_> = changes.iter().map(|(key, old, new)| (key.as_str(), old.as_str(), new.as_str())).collect();
    assert_eq!(pairs, [("pool.min_ready", "2", "1"), ("pool.draw_policy", "\"proportional\"", "\"uniform\"")]);

    // In place, with a learning rate that the command line overrides, and steps of another size.
    let more = "learning_rate = 0.5
accumulation = 3
schedule = \"constant\"
warmup_fraction";
    fs::write(service.file(), CONFIG.replace("warmup_fraction", more)).unwrap();
    let said = service.says("settings changed");
    assert!(said.contains("optimizer.accumulation: 1 -> 3") && !said.contains("learning_rate"), "{said}");
    service.trains();
    let log = fs::read_to_string(service.run().join("steps.jsonl")).unwrap();
    let steps: Vec<Value> = log.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    assert!(steps.iter().all(|s| s["micro_batches"] == 2 || s["micro_batches"] == 6), "a step of two sizes");
    let last = steps.last().unwrap();
    assert_eq!((last["micro_batches"].as_u64(), last["learning_rate"].as_f64()), (Some(6), Some(1e-3)));

    // The same again, at once.
    signal(&service.child, libc::SIGHUP);
    service.says("configuration unchanged");
    service.until_metric(UNCHANGED, |n| n == 1.0);
    interrupt(&service.child);
    assert_eq!(service.wait().code(), Some(130));
    // The run reports the final settings.
    let kept = fs::read_to_string(service.run().join("run.toml")).unwrap();
    assert!(kept.contains("\naccumulation = 3") && kept.contains("\nmin_ready = 2"), "{kept}");
    assert_eq!(StateReader::open(&service.run()).unwrap().verify().unwrap(), []);
    let sizes: Vec<_> = service.changes().into_iter().filter(|(key, _, _)| key == STEP_SIZE).collect();
    assert_eq!(sizes, [(STEP_SIZE.into(), "2".into(), "6".into())]);
}

#[test]
fn an_invalid_file_is_refused_and_training_continues() {
    let mut service = Service::start(CONFIG);
    let hash = service.metric("draftmill_config_hash");
    for (broken, sentences) in [
        (CONFIG.replace("min_ready = 2", "min_ready = = 2"), &["this is not TOML", "my.toml:20"][..]),
        (CONFIG.replace("min_ready = 2", "min_ready = 3\nmax_batch = 9"), &["did you mean pool.max_batches?"]),
        (CONFIG.replace("min_ready = 2", "min_ready = 9"), &["pool.min_ready = 9", "would stop permanently"]),
        (
            CONFIG.replace("job_tokens = 256", "job_tokens = 512").replace("buckets = 2", "buckets = 3"),
            &["plan.job_tokens = 512: it is 256 in the running service and needs a restart", "plan.buckets = 3"],
        ),
        (CONFIG.replace("16 MiB", "300 KiB"), &["pool.max_bytes = \"300 KiB\"", "could stop permanently"]),
        (CONFIG.replace("layers = 2", "layers = 2\npaused = [0, 1]"), &["drafter.paused", "pauses every drafter"]),
    ] {
        let before = service.metric(REFUSED);
        fs::write(service.file(), broken).unwrap();
        let said = service.says("configuration refused");
        for sentence in sentences {
            assert!(said.contains(sentence), "{sentence} is not in {said}");
        }
        assert_eq!(service.metric(REFUSED), before + 1.0);
        service.trains();
    }
    assert_eq!((service.metric(APPLIED), service.metric("draftmill_config_hash")), (0.0, hash));
    assert_eq!((service.metric("draftmill_pool_min_ready"), service.changes().len()), (2.0, 0));
    assert_eq!(service.events("reload-refused").len(), 6);
    // The file is removed, returns corrected, and applies from then on.
    fs::remove_file(service.file()).unwrap();
    assert!(service.says("configuration refused").contains("cannot be read"));
    fs::write(service.file(), CONFIG.replace("max_batches = 4", "max_batches = 6")).unwrap();
    assert!(service.says("settings changed").contains("pool.max_batches: 4 -> 6"));
    service.trains();
}

#[test]
fn the_log_level_changes_and_workers_are_paused_and_added_back() {
    let mut service = Service::start(CONFIG);
    let paused = CONFIG
        .replace("layers = 2", "layers = 2\npaused = [1]")
        .replace("layer_ids = [1, 5]", "layer_ids = [1, 5]\npaused = [0]")
        .replace("[log]\n", "[log]\nlevel = \"warn\"\n");
    fs::write(service.file(), paused).unwrap();
    let one = "draftmill_drafter_micro_batches_total{index=\"1\"}";
    service.until_metric("draftmill_drafter_paused{index=\"1\"}", |paused| paused == 1.0);
    assert_eq!(service.metric("draftmill_target_paused{index=\"0\"}"), 1.0);
    assert_eq!(service.metric("draftmill_target_paused{index=\"1\"}"), 0.0);
    // Its prefetched batches are trained, and then no more.
    service.trains();
    service.trains();
    let (drafted, extracted) = (service.metric(one), service.metric("draftmill_target_tokens_total{index=\"0\"}"));
    service.trains();
    service.trains();
    assert_eq!(service.metric(one), drafted);
    assert_eq!(service.metric("draftmill_target_tokens_total{index=\"0\"}"), extracted);
    fs::write(service.file(), CONFIG).unwrap();
    service.until_metric(one, |n| n > drafted);
    service.until_metric("draftmill_target_tokens_total{index=\"0\"}", |n| n > extracted);
    // The log has no entry for the change that reduced its level, and for the change back only the level.
    let said = service.says("settings changed");
    assert!(said.contains("log.level: \"warn\" -> \"info\""), "{said}");
}
