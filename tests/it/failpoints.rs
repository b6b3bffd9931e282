//! Kills the program, or fails a write, at every fail point of a checkpoint and of state.db, one by one. The next start
//! resumes, and nothing is lost.
//!
//! The fail points are not listed here: a start that logs its fail points finds them, so new ones are included.

use crate::{
    recovery::copy,
    scrape::{get, without_run},
    torture::{assert_every_job_once, assert_sound},
    train::{Run, text},
};
use draftmill::run_dir::db::StateReader;
use serde_json::Value;
use std::{
    fs,
    io::{BufRead, BufReader},
    os::unix::process::ExitStatusExt,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

const EPOCHS: u32 = 2;
const SETS: &[&str] = &[
    "run.engine=simulated",
    "run.epochs=2",
    "simulate.target_per_token=1us",
    "simulate.micro_batch=3ms",
    "simulate.reduce=0s",
    "simulate.step=1ms",
    "simulate.feature_bytes_per_token=1 KiB",
    "checkpoint.every_steps=3",
    "checkpoint.keep_last=1",
];
/// Some of the fail points that every start passes, and of those that only a start after damage passes.
const SOME: &[&str] = &[
    "create:checkpoint",
    "write:weights.safetensors",
    "write:exp_avg.safetensors",
    "write:exp_avg_sq.safetensors",
    "write:state.json",
    "write:draft_config.json",
    "write:manifest.json",
    "sync:weights.safetensors",
    "sync:manifest.json",
    "sync:checkpoint",
    "rename:checkpoint",
    "sync:parent of checkpoint",
    "delete:checkpoint",
    "commit:schema",
    "committed:schema",
    "commit:write the identity to",
    "commit:note the start of a run in",
    "commit:write a plan to",
    "commit:record outcomes in",
    "commit:name a checkpoint in",
    "committed:name a checkpoint in",
    "commit:note the end of a run in",
    "rename:run.toml",
    "rename:summary.json",
];
const SOME_AFTER_DAMAGE: &[&str] =
    &["rename:damaged checkpoint", "commit:note an event in", "commit:note changed settings in"];

/// Prepared store, and a run on it whose newest checkpoint is damaged.
struct World {
    store: Run,
    damaged: PathBuf,
    /// Step of that checkpoint.
    newest: u64,
}

/// Start in an empty folder, or in a copy of the damaged one with another learning rate.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Begin {
    Empty,
    Damaged,
}

impl World {
    fn new() -> World {
        let world = World { store: Run::new(SETS), damaged: PathBuf::new(), newest: 0 };
        let damaged = world.folder("damaged");
        let killed = world.train(&damaged, "sync:parent of checkpoint=2*off->return(kill)", Begin::Empty, &[]);
        assert!(killed.status.signal().is_some(), "{}", text(&killed));
        let newest = StateReader::open(&damaged).unwrap().latest_checkpoint().unwrap().unwrap();
        fs::write(damaged.join("checkpoints").join(newest.name).join("state.json"), "{}").unwrap();
        World { damaged, newest: newest.step, ..world }
    }

    fn folder(&self, name: &str) -> PathBuf {
        self.store.dir().parent().unwrap().join(name.replace([':', ' '], "-"))
    }

    fn command(&self, run: &Path, points: &str, begin: Begin, sets: &[&str]) -> Command {
        let mut train = Command::new(env!("CARGO_BIN_EXE_draftmill"));
        train.current_dir(env!("CARGO_MANIFEST_DIR")).args(["train", "--config", "configs/smoke.toml"]);
        train.env("FAILPOINTS", points);
        let (run, store) = (run.display(), self.store.dir().join("data.safetensors"));
        let own = [format!("run.dir={run}"), format!("data.store={}", store.display())];
        let sets = SETS.iter().chain(sets).map(|set| (*set).to_owned()).chain(own);
        let changed = (begin == Begin::Damaged).then(|| "optimizer.learning_rate=0.5".to_owned());
        for set in sets.chain(changed) {
            train.args(["--set", &set]);
        }
        train
    }

    fn train(&self, run: &Path, points: &str, begin: Begin, sets: &[&str]) -> Output {
        self.command(run, points, begin, sets).output().unwrap()
    }

    /// Creates the folder of a case.
    fn begin(&self, begin: Begin, name: &str) -> PathBuf {
        let run = self.folder(name);
        if begin == Begin::Damaged {
            copy(&self.damaged, &run);
        }
        run
    }

    /// Returns every fail point that a start passes, and true if it passes more than twice.
    fn passed(&self, begin: Begin) -> Vec<(String, bool)> {
        let run = self.begin(begin, "look");
        let looked = self.train(&run, "", begin, &["log.level=error,failpoint=trace"]);
        assert!(looked.status.success(), "{}", text(&looked));
        fs::remove_dir_all(run).unwrap();
        let lines =
            text(&looked).lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()).collect::<Vec<_>>();
        let names = lines.iter().filter(|line| line["level"] == "TRACE").map(|line| line["message"].as_str().unwrap());
        let names: Vec<&str> = names.collect();
        // A slow disk makes fewer checkpoints, but always the first and the last one; it may delete only one.
        let often = |name: &&str| names.iter().filter(|n| n == &name).count() > 2 && *name != "delete:checkpoint";
        let mut points: Vec<_> = names.iter().map(|name| ((*name).to_owned(), often(name))).collect();
        points.sort_unstable();
        points.dedup();
        points
    }

    /// Returns every fail point with a start that passes it.
    fn points(&self) -> Vec<(Begin, String, bool)> {
        let (empty, damaged) = (self.passed(Begin::Empty), self.passed(Begin::Damaged));
        for name in SOME {
            assert!(empty.iter().any(|(point, _)| point == name), "no start passes {name}: {empty:?}");
        }
        let only = damaged.into_iter().filter(|(point, _)| empty.iter().all(|(other, _)| other != point));
        let only: Vec<_> = only.collect();
        for name in SOME_AFTER_DAMAGE {
            assert!(only.iter().any(|(point, _)| point == name), "no start passes {name}: {only:?}");
        }
        let empty = empty.iter().cloned().map(|(point, often)| (Begin::Empty, point, often));
        empty.chain(only.into_iter().map(|(point, often)| (Begin::Damaged, point, often))).collect()
    }

    /// Resumes without a fault, to the end.
    fn go_on(&self, run: &Path, begin: Begin, case: &str) {
        let end = self.train(run, "", begin, &[]);
        assert_eq!(end.status.code(), Some(0), "{case}: {}", text(&end));
        self.assert_complete(run, case);
        fs::remove_dir_all(run).unwrap();
    }

    /// Checks that the ledger agrees with its newest checkpoint, and that this one is complete.
    fn assert_sound(&self, run: &Path, begin: Begin) {
        let newest = StateReader::open(run).ok().and_then(|state| state.latest_checkpoint().unwrap());
        // No start has discarded the damaged one yet.
        let given_up = begin == Begin::Empty || newest.is_some_and(|newest| newest.step != self.newest);
        if given_up {
            assert_sound(run);
        }
    }

    fn assert_complete(&self, run: &Path, case: &str) {
        println!("{case}");
        let verified = self.store.plain(&["ledger", run.to_str().unwrap(), "--verify"]);
        assert_eq!(verified.status.code(), Some(0), "{case}: {}", text(&verified));
        assert_sound(run);
        assert_every_job_once(run, EPOCHS);
        let log = fs::read_to_string(run.join("steps.jsonl")).unwrap();
        let steps: Vec<u64> =
            log.lines().map(|l| serde_json::from_str::<Value>(l).unwrap()["step"].as_u64().unwrap()).collect();
        assert_eq!(steps, (1..=steps.len() as u64).collect::<Vec<_>>(), "{case}");
        let left = fs::read_dir(run.join("checkpoints")).unwrap().map(|entry| entry.unwrap().file_name());
        let left: Vec<_> = left.filter(|name| name.to_str().unwrap().contains("draftmill-partial")).collect();
        assert!(left.is_empty(), "{case}: {left:?}");
    }
}

/// Skips the first pass if there are others.
fn second(often: bool) -> &'static str {
    if often { "1*off->" } else { "" }
}

fn of_a_checkpoint(point: &str) -> bool {
    let other = ["run.toml", "summary.json", "steps.jsonl", "evals.jsonl", "run folder", "damaged", "later"];
    !point.starts_with("commit") && !other.iter().any(|part| point.contains(part))
}

#[test]
fn r1_death_at_any_point_loses_nothing_and_repeats_nothing() {
    let world = World::new();
    for (begin, point, often) in world.points() {
        let torn = if point.starts_with("write:") { &["kill", "torn"][..] } else { &["kill"] };
        for death in torn {
            let case = format!("{point} {death}");
            let run = world.begin(begin, &case);
            let died = world.train(&run, &format!("{point}={}return({death})", second(often)), begin, &[]);
            assert!(died.status.signal().is_some(), "{case}: it did not die: {}", text(&died));
            world.assert_sound(&run, begin);
            // The next start fails at once if it passes there.
            world.train(&run, &format!("{point}=return({death})"), begin, &[]);
            world.assert_sound(&run, begin);
            world.go_on(&run, begin, &case);
        }
    }
}

/// verl#7401 and others: a checkpoint that could not be written must neither end the run nor harm the one before it.
#[test]
fn a_failed_write_costs_one_checkpoint_or_ends_the_run() {
    let world = World::new();
    for (begin, point, often) in world.points() {
        if of_a_checkpoint(&point) {
            let (kind, reason) = match point.starts_with("write:") {
                true => ("short", "no storage space"),
                false => ("erofs", "Read-only file system"),
            };
            let case = format!("{point} {kind} once");
            let run = world.begin(begin, &case);
            // The first: on a slow disk the second may be the last one, whose failure ends the run.
            let ended = world.train(&run, &format!("{point}=1*return({kind})"), begin, &[]);
            assert_eq!(ended.status.code(), Some(0), "{case}: {}", text(&ended));
            let told = if point == "delete:checkpoint" { "old checkpoints not deleted" } else { "checkpoint failed" };
            assert!(text(&ended).contains(told) && text(&ended).contains(reason), "{case}: {}", text(&ended));
            world.assert_complete(&run, &case);
            fs::remove_dir_all(run).unwrap();
        }
        let (kind, reason) = match point.split(':').next() {
            Some("commit") => ("erofs", "is read-only"),
            Some("committed") => ("enospc", "the disk is full; free disk space"),
            _ if point == "sync:run folder" => ("enospc", "the disk is full; free disk space"),
            _ => ("enospc", "No space left on device"),
        };
        let case = format!("{point} {kind}");
        let run = world.begin(begin, &case);
        let ended = world.train(&run, &format!("{point}={}return({kind})", second(often)), begin, &[]);
        // A failed deletion only costs disk space.
        let code = if point == "delete:checkpoint" { 0 } else { 6 };
        assert_eq!(ended.status.code(), Some(code), "{case}: {}", text(&ended));
        assert!(text(&ended).contains(reason), "{case}: {}", text(&ended));
        world.assert_sound(&run, begin);
        world.go_on(&run, begin, &case);
    }
}

#[test]
fn a_checkpoint_that_failed_is_counted() {
    let world = World::new();
    let (run, points) = (world.folder("counted"), "rename:checkpoint=1*off->1*return(enospc)");
    let sets = ["admin.listen=127.0.0.1:0", "simulate.micro_batch=50ms"];
    let mut train = world.command(&run, points, Begin::Empty, &sets);
    let mut child = train.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    let (mut address, mut counted) = (String::new(), None);
    for line in lines {
        let line: Value = serde_json::from_str(&line).unwrap_or_default();
        if let Some(url) = line["metrics"].as_str() {
            address = url.trim_start_matches("http://").trim_end_matches("/metrics").to_owned();
        }
        if line["message"].as_str().is_some_and(|text| text.contains("checkpoint failed")) {
            counted = Some(without_run(&get(&address, "/metrics")));
        }
    }
    assert_eq!(child.wait().unwrap().code(), Some(0));
    let counted = counted.expect("a checkpoint failed");
    for result in ["failed", "written"] {
        let line = format!("draftmill_checkpoints_total{{result=\"{result}\"}} 1");
        assert!(counted.lines().any(|l| l == line), "{line}: {counted}");
    }
    world.assert_complete(&run, "counted");
}
