//! Derivation of [`Status`] from metrics samples: rates, shares of time, state and sentence. The caller passes the time.

use super::run_info::RunInfo;
use super::{
    recent_warnings::Faults,
    samples::Samples,
    status::{Actor, Bucket, Checkpoint, Config, Gpu, Jobs, Pool, Progress, Queue, Run, State, Status, Training},
};
use crate::common::gpu_memory::Memory;
use draftmill_actors::runtime::{
    causes::{ACTORS, BUSY},
    metrics as m,
};
use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::Duration,
};

/// Averaging window of time shares and tokens per second.
const WINDOW: Duration = Duration::from_secs(10);
/// Averaging window of steps per second and of the remaining time.
const LONG_WINDOW: Duration = Duration::from_secs(60);
/// Minimum share of time for a wait to be named as the bottleneck.
const MIN_REPORTED_WAIT: f64 = 0.05;
/// State of an actor between two units of work, and after its end.
const IDLE: &str = "idle";

/// Computes [`Status`] and stores the snapshots of the last minute.
#[derive(Debug, Default)]
pub struct StatusBuilder {
    snapshots: VecDeque<Snapshot>,
    last_records: BTreeMap<Key, LastRecord>,
}

/// Actor: position on the page, name, index.
type Key = (usize, String, u64);

/// Seconds that an actor spent in each state.
type Spent = BTreeMap<String, f64>;

/// Counters at one time.
#[derive(Debug, Default)]
struct Snapshot {
    at: Duration,
    step: f64,
    /// Tokens by drafter index.
    trained: BTreeMap<u64, f64>,
    /// Tokens by target index.
    extracted: BTreeMap<u64, f64>,
    actors: BTreeMap<Key, Spent>,
}

/// Total recorded time of an actor, and the time of its last change.
#[derive(Debug, Default)]
struct LastRecord {
    recorded: f64,
    since: Duration,
}

impl StatusBuilder {
    /// Status at `now` (sampler's clock) and `at` (seconds since 1970).
    pub fn on_sample(&mut self, samples: &Samples, info: &RunInfo, faults: &Faults, now: Duration, at: f64) -> Status {
        let snapshot = self.snapshot(samples, now);
        let short = self.before(now, WINDOW).unwrap_or(&snapshot);
        let long = self.before(now, LONG_WINDOW).unwrap_or(&snapshot);
        let count = |name| samples.sum(name).max(0.0) as u64;
        let trained = samples.sum(m::LOSS) != 0.0;
        let last = |name| samples.get(name).filter(|value| trained && value.is_finite());

        let steps_per_second = rate(&snapshot, long, |snapshot| snapshot.step);
        let (step, left) = (count(m::STEP), info.planned_steps.saturating_sub(count(m::STEP)));
        let mut status = Status {
            at,
            version: env!("CARGO_PKG_VERSION"),
            run: Run {
                dir: info.dir.clone(),
                number: info.run,
                engine: info.engine.clone(),
                started: info.started,
                paused: info.paused,
            },
            progress: Progress {
                step,
                planned_steps: info.planned_steps,
                steps_per_second: rounded(steps_per_second, 4),
                eta: (steps_per_second > 0.0 && !info.paused).then(|| (left as f64 / steps_per_second).round()),
                epoch: count(m::EPOCH),
                epochs: info.epochs,
            },
            training: Training {
                loss: last(m::LOSS),
                accuracy: last(m::ACCURACY),
                leading_run: last(m::LEADING_RUN),
                acceptance: samples.get(m::EVAL_ACCEPTANCE).filter(|tokens| *tokens > 0.0),
                acceptance_curve: info.acceptance.as_ref().map_or_else(Vec::new, |acceptance| acceptance.curve.clone()),
                learning_rate: last(m::LEARNING_RATE),
                grad_norm: last(m::GRAD_NORM),
                tokens_per_second: rate(&snapshot, short, |snapshot| snapshot.trained.values().sum()).round(),
                extracted_tokens_per_second: rate(&snapshot, short, |snapshot| snapshot.extracted.values().sum())
                    .round(),
            },
            jobs: Jobs {
                trained: samples.with(m::JOBS, &[("outcome", "trained")]) as u64,
                skipped: samples.with(m::JOBS, &[("outcome", "skipped")]) as u64,
                returned: count(m::JOBS_RETURNED),
            },
            queue: Queue {
                jobs: count(m::QUEUE_JOBS),
                padded: count(m::QUEUE_PADDED_JOBS),
                stragglers: count(m::STRAGGLERS),
            },
            actors: actors(samples, &snapshot, short),
            pool: pool(samples),
            gpus: gpus(samples),
            checkpoint: checkpoint(samples),
            config: Config { hash: info.config_hash.clone(), since: info.config_since, reloads: info.reloads.clone() },
            faults: faults.clone(),
            ..Status::default()
        };
        let in_service = samples.by(m::TARGET_UP, "index").any(|(_, up)| up > 0.0);
        status.state = state(&status, info, in_service);
        status.sentence = sentence(&status);
        self.snapshots.push_back(snapshot);
        while self.snapshots.len() > 1 && self.snapshots[1].at + LONG_WINDOW <= now {
            self.snapshots.pop_front();
        }
        status
    }

    /// Newest snapshot that is at least `window` old, else the oldest.
    fn before(&self, now: Duration, window: Duration) -> Option<&Snapshot> {
        self.snapshots.iter().rev().find(|snapshot| snapshot.at + window <= now).or(self.snapshots.front())
    }

    /// Counters of this sample. Recorded times cover finished work; the time in the current state is added.
    fn snapshot(&mut self, samples: &Samples, now: Duration) -> Snapshot {
        let states = || samples.by_three(m::ACTOR_STATE, ["actor", "index", "state"]);
        let (busy, waits) = (format!("{}_sum", m::BUSY_SECONDS), format!("{}_sum", m::WAIT_SECONDS));
        let mut actors = BTreeMap::<Key, Spent>::new();
        for (actor, index, state, _) in states() {
            let labels = [("actor", actor), ("index", index), ("cause", state)];
            let seconds = match state {
                BUSY => samples.with(&busy, &labels[..2]),
                _ => samples.with(&waits, &labels),
            };
            actors.entry(key(actor, index)).or_default().insert(state.to_owned(), seconds);
        }
        for (key, spent) in &actors {
            let recorded = spent.values().sum();
            let last = self.last_records.entry(key.clone()).or_insert(LastRecord { recorded, since: now });
            if recorded > last.recorded {
                *last = LastRecord { recorded, since: now };
            }
        }
        for (actor, index, state, _) in states().filter(|(.., on)| *on > 0.0) {
            let key = key(actor, index);
            let current = self.last_records.get(&key).map_or(0.0, |last| (now - last.since).as_secs_f64());
            if let Some(seconds) = actors.get_mut(&key).and_then(|spent| spent.get_mut(state)) {
                *seconds += current;
            }
        }
        let tokens =
            |name| samples.by(name, "index").map(|(index, tokens)| (index.parse().unwrap_or(0), tokens)).collect();
        Snapshot {
            at: now,
            step: samples.sum(m::STEP),
            trained: tokens(m::DRAFTER_TOKENS),
            extracted: tokens(m::TARGET_TOKENS),
            actors,
        }
    }
}

fn key(actor: &str, index: &str) -> Key {
    let position = ACTORS.iter().position(|(name, _)| *name == actor).unwrap_or(ACTORS.len());
    (position, actor.to_owned(), index.parse().unwrap_or(0))
}

/// Growth per second of a counter between two snapshots.
fn rate(new: &Snapshot, old: &Snapshot, counter: impl Fn(&Snapshot) -> f64) -> f64 {
    let seconds = new.at.saturating_sub(old.at).as_secs_f64();
    if seconds > 0.0 { (counter(new) - counter(old)).max(0.0) / seconds } else { 0.0 }
}

fn rounded(value: f64, digits: i32) -> f64 {
    let scale = 10f64.powi(digits);
    (value * scale).round() / scale
}

fn actors(samples: &Samples, new: &Snapshot, old: &Snapshot) -> Vec<Actor> {
    let now: Vec<_> =
        samples.by_three(m::ACTOR_STATE, ["actor", "index", "state"]).filter(|(.., on)| *on > 0.0).collect();
    let actor = |(key, spent): (&Key, &Spent)| {
        let (_, name, index) = key;
        let before = old.actors.get(key);
        let grown = |state: &str| {
            let since = before.and_then(|spent| spent.get(state)).copied().unwrap_or(0.0);
            (spent.get(state).copied().unwrap_or(0.0) - since).max(0.0)
        };
        // Work may be counted a tick longer in progress than recorded at its end, so shares are limited to the whole.
        let total = new.at.saturating_sub(old.at).as_secs_f64().max(spent.keys().map(|state| grown(state)).sum());
        let share = |state: &str| if total > 0.0 { rounded(grown(state) / total, 3) } else { 0.0 };
        let is = |(a, i, ..): &&(&str, &str, &str, f64)| a == name && i.parse() == Ok(*index);
        let label = index.to_string();
        let of_target = |metric| (name == "target").then(|| samples.with(metric, &[("index", &label)]));
        let tokens = |by: fn(&Snapshot) -> &BTreeMap<u64, f64>| {
            rate(new, old, |snapshot| by(snapshot).get(index).copied().unwrap_or(0.0)).round()
        };
        Actor {
            actor: name.clone(),
            index: *index,
            state: now.iter().find(is).map_or(IDLE, |(_, _, state, _)| state).to_owned(),
            busy: share(BUSY),
            waits: spent.keys().filter(|state| *state != BUSY).map(|state| (state.clone(), share(state))).collect(),
            tokens_per_second: match name.as_str() {
                "target" => Some(tokens(|snapshot| &snapshot.extracted)),
                "drafter" => Some(tokens(|snapshot| &snapshot.trained)),
                _ => None,
            },
            up: of_target(m::TARGET_UP).map(|up| up > 0.0),
            restarts: of_target(m::TARGET_RESTARTS).map(|restarts| restarts as u64),
        }
    };
    new.actors.iter().map(actor).collect()
}

fn pool(samples: &Samples) -> Pool {
    let value = |name| samples.sum(name).max(0.0) as u64;
    let buckets = samples.by(m::POOL_BUCKET_BATCHES, "bucket").map(|(bucket, batches)| Bucket {
        bucket: bucket.parse().unwrap_or(0),
        longest: samples.with(m::BUCKET_MAX_TOKENS, &[("bucket", bucket)]) as u32,
        batches: batches as u64,
        drawn: samples.with(m::POOL_DRAWS, &[("bucket", bucket)]) as u64,
    });
    let mut buckets: Vec<_> = buckets.collect();
    buckets.sort_by_key(|bucket| bucket.bucket);
    Pool {
        batches: value(m::POOL_BATCHES),
        min_ready: value(m::POOL_MIN_READY),
        max_batches: value(m::POOL_MAX_BATCHES),
        bytes: value(m::POOL_BYTES),
        reserved_bytes: value(m::POOL_RESERVED_BYTES),
        checked_out_bytes: value(m::POOL_CHECKED_OUT_BYTES),
        max_bytes: value(m::POOL_MAX_BYTES),
        draining: value(m::POOL_DRAINING) > 0,
        buckets,
    }
}

/// GPUs with a memory report.
fn gpus(samples: &Samples) -> Vec<Gpu> {
    let devices: BTreeSet<&str> = samples.by(m::DEVICE_MEMORY, "device").map(|(device, _)| device).collect();
    let gpu = |device: &str| {
        let bytes = |kind| samples.with(m::DEVICE_MEMORY, &[("device", device), ("kind", kind)]).max(0.0) as u64;
        Gpu { device: device.to_owned(), memory: Memory::of_series(bytes) }
    };
    devices.into_iter().map(gpu).filter(|gpu| gpu.memory.total > 0).collect()
}

/// State of the run. `in_service` is true if any target serves.
fn state(status: &Status, info: &RunInfo, in_service: bool) -> State {
    // The series exist before their actors start.
    let untouched = status.training.loss.is_none() && status.actors.iter().all(|actor| actor.state == IDLE);
    match () {
        () if info.stopping => State::Stopping,
        () if untouched => State::Starting,
        () if status.pool.draining => State::Draining,
        () if !in_service => State::NoTarget,
        () if info.paused => State::Paused,
        () if status.training.loss.is_none() => State::Filling,
        () => State::Training,
    }
}

fn checkpoint(samples: &Samples) -> Checkpoint {
    let by_result = |result| samples.with(m::CHECKPOINTS, &[("result", result)]) as u64;
    Checkpoint {
        step: samples.sum(m::CHECKPOINT_STEP) as u64,
        at: samples.get(m::CHECKPOINT_TIME).filter(|at| *at > 0.0),
        written: by_result("written"),
        failed: by_result("failed"),
    }
}

/// Sentence about the state; during training, about the bottleneck.
fn sentence(status: &Status) -> String {
    let percent = |share: f64| format!("{:.0} % of the time", share * 100.0);
    match status.state {
        State::Starting => "Starting: no measurements yet.".into(),
        State::Filling => "Filling the pool: no step of this start is complete yet.".into(),
        State::Paused => "Paused: targets get no new jobs; jobs in progress are finished.".into(),
        State::Draining => "Draining: the plan has ended; drafters train the last batches of the pool.".into(),
        State::NoTarget => "No target is in service.".into(),
        State::Stopping => "Stopping: work in progress is finished and a checkpoint is written.".into(),
        State::Training => {
            let batch = status.mean_wait("drafter", "batch");
            let pool_full = status.mean_wait("target", "pool_full");
            let job = status.mean_wait("target", "job");
            match () {
                () if batch.max(pool_full).max(job) < MIN_REPORTED_WAIT => {
                    "Balanced: targets and drafters hardly wait.".into()
                }
                () if job >= pool_full && job >= MIN_REPORTED_WAIT => {
                    format!("Bottleneck: the job queue. Targets wait for jobs {}.", percent(job))
                }
                () if batch >= pool_full => {
                    format!("Bottleneck: the targets. Drafters wait for batches {}.", percent(batch))
                }
                () => format!("Bottleneck: the drafters. The pool is full for the targets {}.", percent(pool_full)),
            }
        }
    }
}

#[cfg(test)]
mod tests;
