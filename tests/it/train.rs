//! The binary from rows to export: a short real training on a tiny model, and runs that are stopped and resumed.

use draftmill::run_dir::db::StateReader;
use draftmill_actors::messages::types::{JobId, Outcome};
use serde_json::Value;
use std::{
    ops::{Deref, DerefMut},
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    time::Duration,
};

/// Temporary run folder, with the smoke configuration on top of the repository's files.
pub struct Run {
    folder: tempfile::TempDir,
    file: PathBuf,
    pub sets: Vec<String>,
}

impl Run {
    pub fn new(sets: &[&str]) -> Run {
        let folder = tempfile::tempdir().unwrap();
        let dir = format!("run.dir={}", folder.path().join("run").display());
        // A copy, so that a test can change it while a run reads it.
        let file = folder.path().join("smoke.toml");
        std::fs::copy(Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/smoke.toml"), &file).unwrap();
        let run = Run { sets: sets.iter().map(|s| (*s).to_owned()).chain([dir]).collect(), file, folder };
        let prepared = run.draftmill("prepare", &["--json"]).output().unwrap();
        let report: Value = serde_json::from_slice(&prepared.stdout).unwrap_or_else(|_| panic!("{}", text(&prepared)));
        assert!(prepared.status.success() && report.is_object(), "{}", text(&prepared));
        run
    }

    pub fn dir(&self) -> PathBuf {
        self.folder.path().join("run")
    }

    /// Corrupts the configuration file with a typing error.
    pub fn break_file(&self) {
        std::fs::write(&self.file, "[pool]\nmin_redy = 2\n").unwrap();
    }

    pub fn draftmill(&self, command: &str, more: &[&str]) -> Command {
        let mut run = Command::new(env!("CARGO_BIN_EXE_draftmill"));
        run.current_dir(env!("CARGO_MANIFEST_DIR")).args([command, "--config"]).arg(&self.file).args(more);
        for set in &self.sets {
            run.args(["--set", set]);
        }
        run
    }

    pub fn train(&self, more: &[&str]) -> Output {
        self.draftmill("train", more).output().unwrap()
    }

    /// Runs a command that takes no configuration.
    pub fn plain(&self, arguments: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_draftmill")).args(arguments).output().unwrap()
    }

    /// Starts training and waits until `steps` are in the log.
    pub fn train_until(&self, steps: usize) -> Child {
        let mut child = self.draftmill("train", &[]).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        loop {
            let log = std::fs::read_to_string(self.dir().join("steps.jsonl")).unwrap_or_default();
            if log.lines().count() >= steps {
                return child;
            }
            assert!(child.try_wait().unwrap().is_none(), "the run ended before step {steps}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub fn summary(&self) -> Value {
        serde_json::from_slice(&std::fs::read(self.dir().join("summary.json")).unwrap()).unwrap()
    }

    /// Jobs trained and open over all epochs.
    pub fn ledger(&self) -> (u64, u64) {
        let counts = StateReader::open(&self.dir()).unwrap().counts().unwrap();
        (counts.iter().map(|c| c.trained).sum(), counts.iter().map(|c| c.open()).sum())
    }

    /// Returns the step of every job, over all epochs.
    pub fn step_of_each_job(&self) -> Vec<(JobId, Option<Outcome>)> {
        let state = StateReader::open(&self.dir()).unwrap();
        let epochs = state.planned_epochs().unwrap();
        let jobs = epochs.into_iter().flat_map(|epoch| state.plan(epoch).unwrap().unwrap().jobs);
        jobs.map(|job| (job.id, state.outcome(job.id).unwrap())).collect()
    }

    pub fn steps(&self) -> Vec<u64> {
        let log = std::fs::read_to_string(self.dir().join("steps.jsonl")).unwrap();
        log.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["step"].as_u64().unwrap()).collect()
    }
}

pub fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// Child process that is killed on drop.
pub struct Guarded(pub Child);

impl Deref for Guarded {
    type Target = Child;

    fn deref(&self) -> &Child {
        &self.0
    }
}

impl DerefMut for Guarded {
    fn deref_mut(&mut self) -> &mut Child {
        &mut self.0
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // The child may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub fn interrupt(child: &Child) {
    signal(child, libc::SIGINT);
}

pub fn signal(child: &Child, signal: i32) {
    let pid = i32::try_from(child.id()).unwrap();
    // SAFETY: the process is our child and is not yet waited for, so its id is still valid.
    assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
}

pub const SLOW: &[&str] = &[
    "run.engine=simulated",
    "simulate.micro_batch=30ms",
    "simulate.feature_bytes_per_token=1 KiB",
    "checkpoint.every_steps=4",
];

#[cfg(feature = "torch")]
#[test]
fn a_short_real_training_learns_and_exports() {
    let run = Run::new(&[]);
    let trained = run.train(&["--json"]);
    assert_eq!(trained.status.code(), Some(0), "{}", text(&trained));
    let summary: Value = serde_json::from_slice(&trained.stdout).unwrap();
    assert_eq!(summary, run.summary());
    let number = |key: &str| summary[key].as_f64().unwrap_or_else(|| panic!("{key} is missing: {summary}"));
    assert!(number("loss_last") < 0.75 * number("loss_first"), "{summary}");
    assert!(number("accuracy_last") > number("accuracy_first"), "{summary}");
    for key in ["target_tokens_per_second", "drafter_tokens_per_second", "steps"] {
        assert!(number(key) > 0.0, "{key}: {summary}");
    }
    assert!((0.0..1.0).contains(&number("padding_share")));
    let (trained_jobs, open) = run.ledger();
    assert_eq!((trained_jobs as f64, open), (number("jobs_trained"), 0));
    assert_eq!(run.steps(), (1..=number("steps") as u64).collect::<Vec<_>>());
    let export = Path::new(summary["export_dir"].as_str().unwrap());
    assert_eq!(draftmill::hf::validate::check(export), []);
    let actors: Vec<_> = summary["actors"].as_array().unwrap().iter().map(|a| a["actor"].as_str().unwrap()).collect();
    assert_eq!(actors, ["target", "target", "drafter", "drafter", "trainer"]);

    // Killed between the last checkpoint and the export: the next start exports.
    std::fs::remove_file(run.dir().join("summary.json")).unwrap();
    std::fs::remove_dir_all(export).unwrap();
    let again = run.train(&["--json"]);
    assert_eq!(again.status.code(), Some(0), "{}", text(&again));
    assert_eq!(draftmill::hf::validate::check(export), []);
    let after = run.summary();
    assert_eq!((&after["steps"], &after["loss_last"]), (&summary["steps"], &summary["loss_last"]));
    let summary = after;

    // A second start has nothing to do and changes nothing.
    let again = run.train(&[]);
    assert_eq!(again.status.code(), Some(0), "{}", text(&again));
    assert_eq!((run.summary(), run.ledger()), (summary.clone(), (trained_jobs, 0)));

    // Issue 17, F2: its closing lines have the whole commands to serve the export.
    let config: Value = serde_json::from_slice(&std::fs::read(export.join("config.json")).unwrap()).unwrap();
    let tokens = format!(r#""num_speculative_tokens": {}}}'"#, config["block_size"].as_u64().unwrap() - 1);
    for part in
        ["vllm serve tests/golden/", r#"'{"method": "dflash", "model": "#, &tokens, "--speculative-algorithm DFLASH"]
    {
        assert!(text(&again).contains(part), "{part}: {}", text(&again));
    }
}

#[cfg(feature = "torch")]
#[test]
fn a_real_run_that_is_interrupted_goes_on_to_the_same_end() {
    let whole = Run::new(&["checkpoint.every_steps=5"]);
    assert!(whole.train(&[]).status.success());
    let run = Run::new(&["checkpoint.every_steps=5"]);
    let mut child = run.train_until(8);
    interrupt(&child);
    let code = child.wait().unwrap().code();
    // A fast machine may finish before the signal arrives.
    assert!(code == Some(130) || code == Some(0), "{code:?}");
    let end = run.train(&[]);
    assert_eq!(end.status.code(), Some(0), "{}", text(&end));
    assert_eq!(run.ledger(), whole.ledger());
    assert_eq!(run.steps(), whole.steps());
    assert_eq!(draftmill::hf::validate::check(&run.dir().join("export")), []);
}

#[test]
fn an_interrupt_ends_with_130_and_the_same_command_goes_on() {
    let run = Run::new(SLOW);
    let mut child = run.train_until(6);
    interrupt(&child);
    assert_eq!(child.wait().unwrap().code(), Some(130));
    let (trained, open) = run.ledger();
    assert!(trained >= 12 && open > 0, "{trained} trained, {open} open");
    assert_eq!(run.summary()["finished"], false);
    let end = run.train(&[]);
    assert_eq!(end.status.code(), Some(0), "{}", text(&end));
    let steps = run.steps();
    assert_eq!(steps, (1..=steps.len() as u64).collect::<Vec<_>>());
    assert_eq!(run.ledger(), (2 * steps.len() as u64, 0));
}

#[test]
fn a_killed_run_goes_on_from_its_last_checkpoint() {
    let run = Run::new(SLOW);
    let mut child = run.train_until(6);
    child.kill().unwrap();
    child.wait().unwrap();
    let end = run.train(&[]);
    assert_eq!(end.status.code(), Some(0), "{}", text(&end));
    assert!(text(&end).contains("step-4"), "it says where it goes on: {}", text(&end));
    let steps = run.steps();
    assert_eq!(steps, (1..=steps.len() as u64).collect::<Vec<_>>(), "every step is in the log once");
    assert_eq!(run.ledger(), (2 * steps.len() as u64, 0));
}

/// Draw policy `replay`: the jobs of each step do not depend on timing, on the number of targets, or on a kill.
#[test]
fn a_replayed_run_that_was_killed_trains_the_same_steps_as_one_that_was_not() {
    let sets = [SLOW, &["pool.draw_policy=replay"]].concat();
    let whole = Run::new(&[&sets[..], &["target.devices=[\"cpu\"]"]].concat());
    assert_eq!(whole.train(&[]).status.code(), Some(0));
    let mut run = Run::new(&sets);
    let mut child = run.train_until(6);
    child.kill().unwrap();
    child.wait().unwrap();
    // Another window would be another order.
    run.sets.push("pool.replay_window=2".into());
    let refused = run.train(&[]);
    assert!(text(&refused).contains("pool.replay_window: the run has 4, now it is 2"), "{}", text(&refused));
    run.sets.pop();
    let end = run.train(&[]);
    assert_eq!(end.status.code(), Some(0), "{}", text(&end));
    assert_eq!(run.step_of_each_job(), whole.step_of_each_job());
    assert!(run.step_of_each_job().iter().all(|(_, outcome)| outcome.is_some()));
}

#[test]
fn automodel_2478_a_run_goes_on_only_with_what_it_began_with() {
    let mut run = Run::new(SLOW);
    let mut child = run.train_until(5);
    child.kill().unwrap();
    child.wait().unwrap();
    for (set, name) in
        [("run.seed=7", "run.seed"), ("plan.job_tokens=200", "plan.job_tokens"), ("plan.order=shuffle", "plan.order")]
    {
        run.sets.push(set.into());
        let refused = run.train(&[]);
        run.sets.pop();
        assert_eq!(refused.status.code(), Some(3), "{}", text(&refused));
        assert!(text(&refused).contains(name), "{name} is not named: {}", text(&refused));
    }
    let refused = run.train(&["--fresh"]);
    assert!(refused.status.code() == Some(3) && text(&refused).contains("--force"), "{}", text(&refused));
    run.sets.push("run.seed=7".into());
    let fresh = run.train(&["--fresh", "--force"]);
    assert_eq!(fresh.status.code(), Some(0), "{}", text(&fresh));
    assert_eq!(run.ledger().1, 0);
}

#[test]
fn a_second_process_on_the_same_run_is_refused() {
    let run = Run::new(SLOW);
    let mut child = run.train_until(1);
    let second = run.train(&[]);
    assert!(!second.status.success() && text(&second).contains(&child.id().to_string()), "{}", text(&second));
    child.kill().unwrap();
    child.wait().unwrap();
}

/// A run that starts from it has the same layers; another one is refused with the keys to set.
#[cfg(feature = "torch")]
#[test]
fn a_drafter_that_slides_is_imported_and_trained_on() {
    let run = Run::new(&["run.max_steps=1"]);
    assert!(run.train(&[]).status.success());
    let (export, out) = (run.dir().join("export"), run.dir().join("imported"));
    let import = |out: &Path| {
        let words = ["import", "--draft", export.to_str().unwrap(), "--out", out.to_str().unwrap()];
        let imported = run.plain(&words);
        assert_eq!(imported.status.code(), Some(0), "{}", text(&imported));
        String::from_utf8(imported.stdout).unwrap()
    };
    let next = format!("Next: draftmill train --set drafter.init_from={}", out.display());
    assert!(import(&out).contains(&next));
    let file = export.join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    config["layer_types"] = ["sliding_attention", "full_attention"].into_iter().collect();
    (config["use_sliding_window"], config["sliding_window"]) = (true.into(), 8.into());
    std::fs::write(&file, config.to_string()).unwrap();
    let out = run.dir().join("sliding");
    assert!(import(&out).contains("Next: draftmill train"));
    let init = format!("drafter.init_from={}", out.display());
    let refused = Run::new(&[&init]).train(&[]);
    assert_eq!(refused.status.code(), Some(5), "{}", text(&refused));
    let remedy = "drafter.layer_types = [\"sliding\", \"full\"], drafter.sliding_window = 8";
    assert!(text(&refused).contains(remedy), "{}", text(&refused));
    let kinds = "drafter.layer_types=[\"sliding\", \"full\"]";
    let trained = Run::new(&[&init, kinds, "drafter.sliding_window=8", "run.max_steps=2"]).train(&[]);
    assert_eq!(trained.status.code(), Some(0), "{}", text(&trained));
}

/// A run starts from the weights of another run's export, in either layout, and only if they match.
#[cfg(feature = "torch")]
#[test]
fn a_run_starts_from_the_weights_of_another_ones_export() {
    let first = Run::new(&["run.epochs=2", "checkpoint.export_dtype=f32"]);
    assert!(first.train(&[]).status.success());
    let export = first.dir().join("export");
    let speculators = first.dir().join("speculators");
    let run = first.dir();
    let (run, out) = (run.to_str().unwrap(), speculators.to_str().unwrap());
    let exported = first.plain(&["export", "--run", run, "--out", out, "--format", "speculators", "--json"]);
    assert!(exported.status.success(), "{}", text(&exported));
    let report: Value = serde_json::from_slice(&exported.stdout).unwrap();
    assert_eq!(report["self_check"]["largest_difference"], 0.0, "{report}");
    let last = first.summary()["loss_last"].as_f64().unwrap();
    for init in [export, speculators] {
        let init = format!("drafter.init_from={}", init.display());
        // A tiny learning rate, so that the losses are those of the initial weights.
        let second = Run::new(&[&init, "run.epochs=1", "optimizer.learning_rate=1e-9"]);
        assert!(second.train(&[]).status.success());
        let summary = second.summary();
        assert!(summary["loss_first"].as_f64().unwrap() < 1.1 * last, "{last}: {summary}");
        assert!(summary["loss_last"].as_f64().unwrap() < 1.1 * last, "{last}: {summary}");
        let other = Run::new(&[&init, "drafter.layers=1", "drafter.head_dim=8"]).train(&[]);
        assert_eq!(other.status.code(), Some(5), "{}", text(&other));
        for part in ["drafter.init_from", "drafter.layers = 2, drafter.head_dim = 16"] {
            assert!(text(&other).contains(part), "{part}: {}", text(&other));
        }
    }
}
