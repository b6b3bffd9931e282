//! SIGKILL at random moments: the final weights contain every job of every epoch exactly once.
//!
//! A kill happens some milliseconds or some steps after the start; the seed decides. `DRAFTMILL_TORTURE_SEED` repeats a
//! schedule; the exact moments depend on the machine.

use crate::train::{Run, text};
use draftmill::{engines::simulated::trained_jobs, run_dir::db::StateReader};
use draftmill_actors::messages::types::{JobId, Outcome};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::{
    collections::BTreeSet,
    path::Path,
    process::{Child, Stdio},
    thread::sleep,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

const SIMULATED: &[&str] = &[
    "run.engine=simulated",
    "run.epochs=3",
    "plan.job_tokens=64",
    "simulate.target_per_token=2us",
    "simulate.micro_batch=6ms",
    "simulate.step=1ms",
    "simulate.feature_bytes_per_token=1 KiB",
    "checkpoint.every_steps=3",
    "checkpoint.keep_last=2",
];

fn seed() -> u64 {
    let random = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
    let seed = std::env::var("DRAFTMILL_TORTURE_SEED").map_or_else(|_| random(), |text| text.parse().unwrap());
    println!("DRAFTMILL_TORTURE_SEED={seed}");
    seed
}

/// Lines of the step log; 0 while there is none.
fn logged(run: &Run) -> usize {
    std::fs::read_to_string(run.dir().join("steps.jsonl")).map_or(0, |log| log.lines().count())
}

/// Starts training and kills it at a random moment of `rng`. Returns false if the run ended before.
fn start_and_kill(run: &Run, rng: &mut ChaCha8Rng, most_steps: u64) -> bool {
    let (steps, pause) = (rng.random_range(0..=most_steps), Duration::from_micros(rng.random_range(0..25_000)));
    let mut child: Child = run.draftmill("train", &[]).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    // A start first cuts the log to its checkpoint, so growth counts from the shortest observed length.
    let mut shortest = logged(run);
    let ended = loop {
        let now = logged(run);
        shortest = shortest.min(now);
        if now as u64 >= shortest as u64 + steps {
            sleep(pause);
            break child.try_wait().unwrap();
        }
        if let Some(status) = child.try_wait().unwrap() {
            break Some(status);
        }
        sleep(Duration::from_micros(500));
    };
    if let Some(status) = ended {
        assert_eq!(status.code(), Some(0), "a start failed: {}", text(&run.train(&[])));
        return false;
    }
    child.kill().unwrap();
    child.wait().unwrap();
    true
}

/// Checks the disk after a kill: a valid ledger, whose outcomes agree with the content of the newest checkpoint.
pub fn assert_sound(run: &Path) {
    // A kill may come before the file has its tables.
    let Ok(state) = StateReader::open(run) else { return };
    assert_eq!(state.verify().unwrap(), []);
    if let Some(checkpoint) = state.latest_checkpoint().unwrap() {
        let held = trained_jobs(&run.join("checkpoints").join(&checkpoint.name)).unwrap();
        assert_eq!(set(&held), ledger_until(&state, checkpoint.step), "{checkpoint:?}");
    }
}

/// Returns the jobs as a set; fails if one is repeated.
fn set(jobs: &[JobId]) -> BTreeSet<JobId> {
    let set: BTreeSet<JobId> = jobs.iter().copied().collect();
    assert_eq!(set.len(), jobs.len(), "a job is in the weights twice");
    set
}

/// Returns every job that was trained by `step`, from the ledger.
fn ledger_until(state: &StateReader, step: u64) -> BTreeSet<JobId> {
    let epochs = state.planned_epochs().unwrap();
    let jobs = epochs.into_iter().flat_map(|epoch| state.plan(epoch).unwrap().unwrap().jobs).map(|job| job.id);
    jobs.filter(|&job| matches!(state.outcome(job).unwrap(), Some(Outcome::Trained { step: at }) if at <= step))
        .collect()
}

/// Checks the end of a simulated run: the weights contain every job of its epochs exactly once.
pub fn assert_every_job_once(run: &Path, epochs: u32) {
    let state = StateReader::open(run).unwrap();
    let newest = state.latest_checkpoint().unwrap().unwrap();
    let held = set(&trained_jobs(&run.join("checkpoints").join(&newest.name)).unwrap());
    let planned: BTreeSet<JobId> =
        (0..epochs).flat_map(|epoch| state.plan(epoch).unwrap().unwrap().jobs).map(|job| job.id).collect();
    assert_eq!(held, planned, "every job of every epoch is in the weights once");
}

pub fn assert_verified(run: &Run) {
    let dir = run.dir();
    let verified = run.plain(&["ledger", dir.to_str().unwrap(), "--verify"]);
    assert_eq!(verified.status.code(), Some(0), "{}", text(&verified));
}

#[test]
fn r1_forty_kills_lose_nothing_and_repeat_nothing() {
    let mut rng = ChaCha8Rng::seed_from_u64(seed());
    let mut kills = 0;
    while kills < 40 {
        let run = Run::new(SIMULATED);
        let before = kills;
        while start_and_kill(&run, &mut rng, 5) {
            kills += 1;
            assert!(kills - before < 400, "the run does not get on");
            if rng.random_bool(0.5) {
                assert_sound(&run.dir());
            }
        }
        assert_verified(&run);
        assert_sound(&run.dir());
        assert_every_job_once(&run.dir(), 3);
        let starts = StateReader::open(&run.dir()).unwrap().runs().unwrap();
        assert_eq!(starts.last().unwrap().outcome.as_deref(), Some("finished"));
        let reopened: u64 = starts.iter().map(|start| start.reopened).sum();
        println!("{} kills, {} noted starts, {} jobs reopened", kills - before, starts.len(), reopened);
        assert_eq!(run.steps(), (1..=run.steps().len() as u64).collect::<Vec<_>>(), "every step is in the log once");
    }
}

#[cfg(feature = "torch")]
#[test]
fn r1_kills_of_a_real_training_lose_nothing() {
    let mut rng = ChaCha8Rng::seed_from_u64(seed());
    let mut kills = 0;
    while kills < 5 {
        let run = Run::new(&["run.epochs=3", "checkpoint.every_steps=3", "checkpoint.keep_last=2"]);
        while start_and_kill(&run, &mut rng, 4) {
            kills += 1;
            assert_eq!(StateReader::open(&run.dir()).map_or(Vec::new(), |state| state.verify().unwrap()), []);
        }
        assert_verified(&run);
        assert_eq!(run.ledger().1, 0);
        assert_eq!(run.steps(), (1..=run.steps().len() as u64).collect::<Vec<_>>());
        assert_eq!(draftmill::hf::validate::check(&run.dir().join("export")), []);
    }
    println!("{kills} kills");
}
