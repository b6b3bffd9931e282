//! Metrics against the events that they count: returns by cause, stragglers, late results, restarts of targets,
//! checkpoints.

use crate::{
    faults::{broken, long_forwards, with_drafter, with_target},
    world::{Breakage, World, Wrong},
};
use draftmill_actors::runtime::metrics as m;
use metrics::{
    Counter, CounterFn, Gauge, GaugeFn, Histogram, HistogramFn, Key, KeyName, Metadata, Recorder, SharedString, Unit,
    with_local_recorder,
};
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::Duration,
};

/// Every value that a series had.
type Series = Arc<Mutex<BTreeMap<String, Vec<f64>>>>;

struct One {
    all: Series,
    name: String,
}

impl One {
    fn push(&self, next: impl Fn(f64) -> f64) {
        let mut all = self.all.lock().unwrap();
        let values = all.entry(self.name.clone()).or_default();
        values.push(next(values.last().copied().unwrap_or(0.0)));
    }
}

impl CounterFn for One {
    fn increment(&self, value: u64) {
        self.push(|old| old + value as f64);
    }

    fn absolute(&self, value: u64) {
        self.push(|_| value as f64);
    }
}

impl GaugeFn for One {
    fn increment(&self, value: f64) {
        self.push(|old| old + value);
    }

    fn decrement(&self, value: f64) {
        self.push(|old| old - value);
    }

    fn set(&self, value: f64) {
        self.push(|_| value);
    }
}

/// Counts the `_sum` of a histogram.
impl HistogramFn for One {
    fn record(&self, value: f64) {
        self.push(|old| old + value);
    }
}

#[derive(Default)]
struct Book(Series);

impl Book {
    fn one(&self, key: &Key) -> Arc<One> {
        let labels: String = key.labels().map(|label| format!(" {}={}", label.key(), label.value())).collect();
        Arc::new(One { all: self.0.clone(), name: format!("{}{labels}", key.name()) })
    }
}

impl Recorder for Book {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(self.one(key))
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(self.one(key))
    }

    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::from_arc(self.one(key))
    }
}

/// Values that were recorded during some work.
pub struct Counted(BTreeMap<String, Vec<f64>>);

impl Counted {
    pub fn during<T>(work: impl FnOnce() -> T) -> (Counted, T) {
        let book = Book::default();
        let out = with_local_recorder(&book, work);
        let all = book.0.lock().unwrap().clone();
        (Counted(all), out)
    }

    /// Returns the sum over the last values of every series of a metric.
    pub fn sum(&self, name: &str) -> f64 {
        let of_it = self.0.iter().filter(|(series, _)| series.split(' ').next() == Some(name));
        of_it.filter_map(|(_, values)| values.last()).sum()
    }

    /// Returns the same sum for the series of one actor.
    pub fn of_actor(&self, name: &str, actor: &str) -> f64 {
        let begin = format!("{name} actor={actor} ");
        self.0.iter().filter(|(series, _)| series.starts_with(&begin)).filter_map(|(_, values)| values.last()).sum()
    }

    /// Returns all values of a series, oldest first. `labels` as in " cause=failed".
    pub fn values(&self, name: &str, labels: &str) -> Vec<f64> {
        self.0.get(&format!("{name}{labels}")).cloned().unwrap_or_default()
    }

    pub fn last(&self, name: &str, labels: &str) -> f64 {
        self.values(name, labels).last().copied().unwrap_or(0.0)
    }
}

#[test]
fn a_job_that_comes_back_is_counted_by_its_cause() {
    for (wrong, cause) in [
        (Wrong::Fail, "failed"),
        (Wrong::Nan, "non_finite"),
        (Wrong::Short, "wrong_shape"),
        (Wrong::Panic, "failed"),
        (Wrong::Lose, "failed"),
    ] {
        // Forwards five and ten of the target fail, and none after them.
        let world = with_target(Breakage { until: Some(10), ..broken(5, wrong) });
        let (counted, ended) = Counted::during(|| world.run());
        ended.report();
        for other in ["failed", "non_finite", "wrong_shape", "gone", "drafter_failed"] {
            let expected = if other == cause { 2.0 } else { 0.0 };
            assert_eq!(counted.last(m::JOBS_RETURNED, &format!(" cause={other}")), expected, "{cause}: {other}");
        }
    }
    let world = with_drafter(Breakage { until: Some(10), ..broken(5, Wrong::Fail) });
    let (counted, ended) = Counted::during(|| world.run());
    assert_eq!(counted.last(m::JOBS_RETURNED, " cause=drafter_failed"), 2.0);
    assert_eq!(counted.last(m::JOBS, " outcome=trained"), ended.report().jobs.trained as f64);
}

#[test]
fn a_target_that_waits_for_bytes_at_a_stop_returns_its_job() {
    let slow = Breakage { slowness: Some(1e4), ..Breakage::default() };
    let world =
        World { drafters: vec![slow.clone(), slow], stop_at: Some(Duration::from_secs(3600)), ..World::default() };
    let (counted, ended) = Counted::during(|| world.run());
    assert!(counted.values(m::JOBS_RETURNED, " cause=gone").is_empty(), "they had not begun");
    assert!(ended.report().jobs.unfinished > 3);
}

#[test]
fn a_target_is_up_while_it_serves_and_its_restarts_are_counted() {
    let world = with_target(Breakage { until: Some(4), bad_restarts: 1, ..broken(2, Wrong::Lose) });
    let (counted, ended) = Counted::during(|| world.run());
    ended.report();
    assert_eq!(counted.values(m::TARGET_UP, " index=0"), [1.0, 0.0, 1.0, 0.0, 1.0, 0.0]);
    assert_eq!(counted.values(m::TARGET_UP, " index=1"), [1.0, 0.0]);
    // The failed restart does not count.
    assert_eq!(counted.values(m::TARGET_RESTARTS, " index=0"), [1.0, 2.0]);
    assert!(counted.values(m::TARGET_RESTARTS, " index=1").is_empty());
}

#[test]
fn a_forward_that_hangs_is_one_straggler_however_long_it_hangs() {
    let hang = Breakage { until: Some(10), ..broken(10, Wrong::Hang) };
    let world = World { targets: vec![hang, Breakage::default(), Breakage::default()], ..long_forwards() };
    let (counted, ended) = Counted::during(|| world.run());
    ended.report();
    assert_eq!((counted.last(m::STRAGGLERS, ""), counted.last(m::LATE_RESULTS, "")), (1.0, 0.0));
}

#[test]
fn a_late_result_is_dropped_and_counted_and_is_nobodys_work() {
    // So slow that each of its forwards is a straggler, and another target finishes before it.
    let slow = Breakage { slowness: Some(20.0), ..Breakage::default() };
    let lengths = (0..2000).map(|i| 10 + (i * 37) % 300).collect();
    let world = World { targets: vec![slow, Breakage::default(), Breakage::default()], lengths, ..long_forwards() };
    let (counted, ended) = Counted::during(|| world.run());
    let (report, late) = (ended.report(), counted.last(m::LATE_RESULTS, ""));
    assert!(late >= 2.0 && counted.last(m::STRAGGLERS, "") >= late, "{late}");
    assert_eq!(report.targets.iter().map(|target| target.jobs).sum::<u64>(), report.jobs.trained);
    let tokens: f64 = (0..3).map(|i| counted.last(m::TARGET_TOKENS, &format!(" index={i}"))).sum();
    assert_eq!(tokens, report.jobs.real_tokens as f64, "tokens of dropped results are not counted");
}

#[test]
fn checkpoints_are_counted_by_result() {
    let world = World { checkpoint_every: 3, bad_checkpoints: vec![3, 9], ..World::default() };
    let (counted, ended) = Counted::during(|| world.run());
    assert_eq!(counted.last(m::CHECKPOINTS, " result=failed"), 2.0);
    assert_eq!(counted.last(m::CHECKPOINTS, " result=written"), ended.ledger().checkpoints.len() as f64);
    assert_eq!(counted.last(m::CHECKPOINT_STEP, ""), ended.records.len() as f64);
}

#[test]
fn a_job_that_is_given_up_is_counted_by_its_cause() {
    let losing = Breakage { until: Some(5), ..broken(5, Wrong::LoseFeatures) };
    for (world, cause) in [
        (with_target(Breakage { until: Some(5), ..broken(5, Wrong::Fail) }), "failed"),
        (with_target(Breakage { until: Some(5), ..broken(5, Wrong::Nan) }), "non_finite"),
        (with_target(Breakage { until: Some(5), ..broken(5, Wrong::Short) }), "wrong_shape"),
        (with_drafter(Breakage { until: Some(5), ..broken(5, Wrong::Fail) }), "drafter_failed"),
        (with_drafter(losing), "features_lost"),
    ] {
        let world = World { max_attempts: 1, max_skip_fraction: 1.0, ..world };
        let (counted, ended) = Counted::during(|| world.run());
        assert_eq!(ended.report().jobs.skipped, 1, "{cause}");
        assert_eq!(counted.last(m::JOBS_SKIPPED, &format!(" cause={cause}")), 1.0, "{cause}");
        assert_eq!((counted.sum(m::JOBS_SKIPPED), counted.last(m::JOBS, " outcome=skipped")), (1.0, 1.0), "{cause}");
    }
}

#[test]
fn forwards_and_failures_of_a_target_are_all_that_it_did() {
    let world = with_target(Breakage { until: Some(10), ..broken(5, Wrong::Fail) });
    let (counted, ended) = Counted::during(|| world.run());
    for (i, target) in ended.report().targets.iter().enumerate() {
        assert_eq!(counted.last(m::TARGET_JOBS, &format!(" index={i}")), target.jobs as f64);
    }
    assert_eq!((counted.last(m::TARGET_FAILURES, " index=0"), counted.sum(m::TARGET_FAILURES)), (2.0, 2.0));
}

#[test]
fn a_final_fault_and_a_nan_loss_are_counted_once() {
    let (counted, ended) = Counted::during(|| with_drafter(broken(4, Wrong::Nan)).run());
    assert!(ended.fault().message.contains("is NaN"), "{}", ended.fault());
    assert_eq!(counted.last(m::NON_FINITE_LOSSES, ""), 1.0);
    assert_eq!((counted.last(m::FAULTS, " actor=drafter"), counted.sum(m::FAULTS)), (1.0, 1.0));
    let world = World { targets: vec![broken(1, Wrong::Nan)], max_attempts: 100, ..World::default() };
    let (counted, ended) = Counted::during(|| world.run());
    assert_eq!(ended.fault().actor, "target 0");
    assert_eq!((counted.last(m::FAULTS, " actor=target"), counted.sum(m::FAULTS)), (1.0, 1.0));
}

#[test]
fn steps_limits_and_settings_are_told_while_the_run_goes_on() {
    let world = World { checkpoint_every: 3, ..World::default() };
    let limits = world.pool;
    let (counted, ended) = Counted::during(|| world.run());
    assert_eq!(
        (counted.last(m::STEPS, ""), counted.last(m::STEP, "")),
        (ended.records.len() as f64, ended.records.len() as f64)
    );
    assert_eq!(counted.last(m::CHECKPOINT_EVERY, ""), 3.0);
    assert_eq!(counted.last(m::STEP_BUCKETS, ""), ended.records.last().unwrap().buckets as f64);
    assert_eq!(counted.last(m::POOL_MIN_READY, ""), limits.min_ready as f64);
    assert_eq!(counted.last(m::POOL_MAX_BATCHES, ""), limits.max_batches as f64);
    assert_eq!(counted.last(m::POOL_MAX_BYTES, ""), limits.max_bytes as f64);
    // All are 0 at the end, and each of these changed meanwhile.
    for name in [m::POOL_RESERVED_BATCHES, m::POOL_CHECKED_OUT_BATCHES] {
        assert_eq!(counted.last(name, ""), 0.0, "{name}");
        assert!(counted.values(name, "").iter().any(|&held| held > 0.0), "{name}");
    }
}

#[test]
fn the_pool_and_the_dispatcher_tell_who_holds_the_others_back() {
    let slow = Breakage { slowness: Some(20.0), ..Breakage::default() };
    let waited = |counted: &Counted, actor: &str, cause: &str| {
        counted.last(m::WAIT_SECONDS, &format!(" actor={actor} index=0 cause={cause}"))
    };
    let world = World { drafters: vec![slow.clone(); 2], epochs: 4, ..World::default() };
    let (counted, ended) = Counted::during(|| world.run());
    let most = 0.8 * ended.took.as_secs_f64();
    assert!(waited(&counted, "pool", "drafter") > most && waited(&counted, "dispatcher", "target") > most);
    assert!(waited(&counted, "planner", "queue") > 0.5 * most);

    let slow = Breakage { slowness: Some(400.0), ..Breakage::default() };
    let world = World { targets: vec![slow; 3], epochs: 4, ..World::default() };
    let (counted, ended) = Counted::during(|| world.run());
    let most = 0.8 * ended.took.as_secs_f64();
    assert!(waited(&counted, "pool", "target") > most && waited(&counted, "dispatcher", "target") > most);
    assert_eq!(counted.sum(m::ACTOR_STATE), 0.0, "who has ended does nothing");
    let [busy, waits] = [m::BUSY_SECONDS, m::WAIT_SECONDS].map(|name| counted.of_actor(name, "planner"));
    assert!((busy + waits - ended.took.as_secs_f64()).abs() < 1.0, "no time is left over: {busy} + {waits}");
}
