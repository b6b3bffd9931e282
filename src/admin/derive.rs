//! From two scrapes of the metrics to rates, shares and a sentence: every decision about [`Status`], without a clock of its own.

use super::run_info::Facts;
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

/// Shares and tokens per second are means over this time.
const WINDOW: Duration = Duration::from_secs(10);
/// The rate of steps, and with it the time that is left, over this.
const LONG_WINDOW: Duration = Duration::from_secs(60);
/// A wait below this share of the time is not worth a sentence.
const WORTH_TELLING: f64 = 0.05;
/// The state of an actor between two units of work, and of one that has ended.
const IDLE: &str = "idle";

/// Remembers the last minute of a run.
#[derive(Debug, Default)]
pub struct Derivation {
    moments: VecDeque<Moment>,
    tracks: BTreeMap<Key, Track>,
}

/// An actor by its place on the page, its name and its index.
type Key = (usize, String, u64);

/// Seconds of an actor by state.
type Spent = BTreeMap<String, f64>;

/// What grew up to one moment.
#[derive(Debug, Default)]
struct Moment {
    at: Duration,
    step: f64,
    /// Tokens by index of the drafter, and of the target.
    trained: BTreeMap<u64, f64>,
    extracted: BTreeMap<u64, f64>,
    actors: BTreeMap<Key, Spent>,
}

/// The time that an actor recorded, and since when it recorded nothing more.
#[derive(Debug, Default)]
struct Track {
    recorded: f64,
    since: Duration,
}

impl Derivation {
    /// What is so at `now` (on the sampler's clock) and `at` (in seconds since 1970).
    pub fn on_sample(&mut self, samples: &Samples, facts: &Facts, faults: &Faults, now: Duration, at: f64) -> Status {
        let moment = self.moment(samples, now);
        let short = self.before(now, WINDOW).unwrap_or(&moment);
        let long = self.before(now, LONG_WINDOW).unwrap_or(&moment);
        let count = |name| samples.sum(name).max(0.0) as u64;
        let trained = samples.sum(m::LOSS) != 0.0;
        let last = |name| samples.get(name).filter(|value| trained && value.is_finite());

        let steps_per_second = rate(&moment, long, |moment| moment.step);
        let (step, left) = (count(m::STEP), facts.planned_steps.saturating_sub(count(m::STEP)));
        let mut status = Status {
            at,
            version: env!("CARGO_PKG_VERSION"),
            run: Run {
                dir: facts.dir.clone(),
                number: facts.run,
                engine: facts.engine.clone(),
                started: facts.started,
                paused: facts.paused,
            },
            progress: Progress {
                step,
                planned_steps: facts.planned_steps,
                steps_per_second: rounded(steps_per_second, 4),
                eta: (steps_per_second > 0.0 && !facts.paused).then(|| (left as f64 / steps_per_second).round()),
                epoch: count(m::EPOCH),
                epochs: facts.epochs,
            },
            training: Training {
                loss: last(m::LOSS),
                accuracy: last(m::ACCURACY),
                acceptance: samples.get(m::EVAL_ACCEPTANCE).filter(|tokens| *tokens > 0.0),
                acceptance_curve: facts.acceptance.as_ref().map_or_else(Vec::new, |measured| measured.curve.clone()),
                learning_rate: last(m::LEARNING_RATE),
                grad_norm: last(m::GRAD_NORM),
                tokens_per_second: rate(&moment, short, |moment| moment.trained.values().sum()).round(),
                extracted_tokens_per_second: rate(&moment, short, |moment| moment.extracted.values().sum()).round(),
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
            actors: actors(samples, &moment, short),
            pool: pool(samples),
            gpus: gpus(samples),
            checkpoint: checkpoint(samples),
            config: Config {
                hash: facts.config_hash.clone(),
                since: facts.config_since,
                reloads: facts.reloads.clone(),
            },
            faults: faults.clone(),
            ..Status::default()
        };
        let answers = samples.by(m::TARGET_UP, "index").any(|(_, up)| up > 0.0);
        status.state = state(&status, facts, answers);
        status.sentence = sentence(&status);
        self.moments.push_back(moment);
        while self.moments.len() > 1 && self.moments[1].at + LONG_WINDOW <= now {
            self.moments.pop_front();
        }
        status
    }

    /// The newest moment that is at least this long ago, or else the oldest.
    fn before(&self, now: Duration, window: Duration) -> Option<&Moment> {
        self.moments.iter().rev().find(|moment| moment.at + window <= now).or(self.moments.front())
    }

    /// What actors recorded is of what is over. To it comes the time of what each does now.
    fn moment(&mut self, samples: &Samples, now: Duration) -> Moment {
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
            let track = self.tracks.entry(key.clone()).or_insert(Track { recorded, since: now });
            if recorded > track.recorded {
                *track = Track { recorded, since: now };
            }
        }
        for (actor, index, state, _) in states().filter(|(.., on)| *on > 0.0) {
            let key = key(actor, index);
            let open = self.tracks.get(&key).map_or(0.0, |track| (now - track.since).as_secs_f64());
            if let Some(seconds) = actors.get_mut(&key).and_then(|spent| spent.get_mut(state)) {
                *seconds += open;
            }
        }
        let tokens =
            |name| samples.by(name, "index").map(|(index, tokens)| (index.parse().unwrap_or(0), tokens)).collect();
        Moment {
            at: now,
            step: samples.sum(m::STEP),
            trained: tokens(m::DRAFTER_TOKENS),
            extracted: tokens(m::TARGET_TOKENS),
            actors,
        }
    }
}

fn key(actor: &str, index: &str) -> Key {
    let place = ACTORS.iter().position(|(name, _)| *name == actor).unwrap_or(ACTORS.len());
    (place, actor.to_owned(), index.parse().unwrap_or(0))
}

/// What grew in a second from one moment to the other.
fn rate(new: &Moment, old: &Moment, what: impl Fn(&Moment) -> f64) -> f64 {
    let seconds = new.at.saturating_sub(old.at).as_secs_f64();
    if seconds > 0.0 { (what(new) - what(old)).max(0.0) / seconds } else { 0.0 }
}

fn rounded(value: f64, digits: i32) -> f64 {
    let scale = 10f64.powi(digits);
    (value * scale).round() / scale
}

fn actors(samples: &Samples, new: &Moment, old: &Moment) -> Vec<Actor> {
    let now: Vec<_> =
        samples.by_three(m::ACTOR_STATE, ["actor", "index", "state"]).filter(|(.., on)| *on > 0.0).collect();
    let actor = |(key, spent): (&Key, &Spent)| {
        let (_, name, index) = key;
        let before = old.actors.get(key);
        let grown = |state: &str| {
            let since = before.and_then(|spent| spent.get(state)).copied().unwrap_or(0.0);
            (spent.get(state).copied().unwrap_or(0.0) - since).max(0.0)
        };
        // Work that was counted as under way and then as done may differ by a tick; shares never exceed the whole.
        let whole = new.at.saturating_sub(old.at).as_secs_f64().max(spent.keys().map(|state| grown(state)).sum());
        let share = |state: &str| if whole > 0.0 { rounded(grown(state) / whole, 3) } else { 0.0 };
        let is = |(a, i, ..): &&(&str, &str, &str, f64)| a == name && i.parse() == Ok(*index);
        let label = index.to_string();
        let of_target = |metric| (name == "target").then(|| samples.with(metric, &[("index", &label)]));
        let tokens = |by: fn(&Moment) -> &BTreeMap<u64, f64>| {
            rate(new, old, |moment| by(moment).get(index).copied().unwrap_or(0.0)).round()
        };
        Actor {
            actor: name.clone(),
            index: *index,
            state: now.iter().find(is).map_or(IDLE, |(_, _, state, _)| state).to_owned(),
            busy: share(BUSY),
            waits: spent.keys().filter(|state| *state != BUSY).map(|state| (state.clone(), share(state))).collect(),
            tokens_per_second: match name.as_str() {
                "target" => Some(tokens(|moment| &moment.extracted)),
                "drafter" => Some(tokens(|moment| &moment.trained)),
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
        loaned_bytes: value(m::POOL_CHECKED_OUT_BYTES),
        max_bytes: value(m::POOL_MAX_BYTES),
        draining: value(m::POOL_DRAINING) > 0,
        buckets,
    }
}

/// Those that have told of themselves.
fn gpus(samples: &Samples) -> Vec<Gpu> {
    let devices: BTreeSet<&str> = samples.by(m::DEVICE_MEMORY, "device").map(|(device, _)| device).collect();
    let gpu = |device: &str| {
        let bytes = |kind| samples.with(m::DEVICE_MEMORY, &[("device", device), ("kind", kind)]).max(0.0) as u64;
        Gpu { device: device.to_owned(), memory: Memory::of_series(bytes) }
    };
    devices.into_iter().map(gpu).filter(|gpu| gpu.memory.total > 0).collect()
}

/// `answers`: whether any target serves.
fn state(status: &Status, facts: &Facts, answers: bool) -> State {
    // Series are there before their actors are.
    let untouched = status.training.loss.is_none() && status.actors.iter().all(|actor| actor.state == IDLE);
    match () {
        () if facts.stopping => State::Stopping,
        () if untouched => State::Starting,
        () if status.pool.draining => State::Draining,
        () if !answers => State::NoTarget,
        () if facts.paused => State::Paused,
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

/// The state, and while it trains who holds whom back.
fn sentence(status: &Status) -> String {
    let percent = |share: f64| format!("{:.0} % of the time", share * 100.0);
    match status.state {
        State::Starting => "Starting: nothing was measured yet.".into(),
        State::Filling => "The pool is filling: no step of this start is complete yet.".into(),
        State::Paused => "Paused: no new jobs are handed out, and what was under way is finished.".into(),
        State::Draining => "Draining: the plan has ended, and the pool gives out its last batches.".into(),
        State::NoTarget => "No target answers: all are taken out or gone.".into(),
        State::Stopping => "Stopping: what is under way is finished, and a checkpoint is written.".into(),
        State::Training => {
            let batch = status.mean_wait("drafter", "batch");
            let room = status.mean_wait("target", "pool_full");
            let job = status.mean_wait("target", "job");
            match () {
                () if batch.max(room).max(job) < WORTH_TELLING => {
                    "Balanced: neither targets nor drafters wait for long.".into()
                }
                () if job >= room && job >= WORTH_TELLING => {
                    format!("The queue holds this run back: targets wait for jobs {}.", percent(job))
                }
                () if batch >= room => {
                    format!("The targets hold this run back: drafters wait for batches {}.", percent(batch))
                }
                () => format!("The drafters hold this run back: targets wait for room {}.", percent(room)),
            }
        }
    }
}

#[cfg(test)]
mod tests;
