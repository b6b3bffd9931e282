//! What the metrics promise is really counted: returns by cause, stragglers, late results, targets that come and go, checkpoints.

use crate::{
    faults::{broken, long_forwards, with_drafter, with_target},
    world::{Breakage, World, Wrong},
};
use draftmill_actors::metrics as m;
use metrics::{
    Counter, CounterFn, Gauge, GaugeFn, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit,
    with_local_recorder,
};
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::Duration,
};

/// Every value that a series ever had.
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

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}

/// What was counted while `work` ran.
pub struct Counted(BTreeMap<String, Vec<f64>>);

impl Counted {
    pub fn during<T>(work: impl FnOnce() -> T) -> (Counted, T) {
        let book = Book::default();
        let out = with_local_recorder(&book, work);
        let all = book.0.lock().unwrap().clone();
        (Counted(all), out)
    }

    /// All values that a series had, oldest first. `labels` as in " cause=failed".
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
        // Five and ten of the target's forwards go wrong, and none after them.
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
fn a_target_that_waits_for_room_at_a_stop_gives_its_job_back() {
    let slow = Breakage { slowness: Some(1e4), ..Breakage::default() };
    let world =
        World { drafters: vec![slow.clone(), slow], stop_at: Some(Duration::from_secs(3600)), ..World::default() };
    let (counted, ended) = Counted::during(|| world.run());
    assert_eq!(counted.last(m::JOBS_RETURNED, " cause=gone"), 3.0, "one of each target");
    assert!(ended.report().jobs.unfinished > 3);
}

#[test]
fn a_target_is_up_while_it_serves_and_its_restarts_are_counted() {
    let world = with_target(Breakage { until: Some(4), bad_restarts: 1, ..broken(2, Wrong::Lose) });
    let (counted, ended) = Counted::during(|| world.run());
    ended.report();
    assert_eq!(counted.values(m::TARGET_UP, " index=0"), [1.0, 0.0, 1.0, 0.0, 1.0, 0.0]);
    assert_eq!(counted.values(m::TARGET_UP, " index=1"), [1.0, 0.0]);
    // The one in vain is none.
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
    // So slow that each of its forwards is a straggler, and another target is done before it.
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
    let world = World { checkpoint_every: 3, bad_saves: vec![3, 9], ..World::default() };
    let (counted, ended) = Counted::during(|| world.run());
    assert_eq!(counted.last(m::CHECKPOINTS, " result=failed"), 2.0);
    assert_eq!(counted.last(m::CHECKPOINTS, " result=written"), ended.ledger().checkpoints.len() as f64);
    assert_eq!(counted.last(m::CHECKPOINT_STEP, ""), ended.records.len() as f64);
}
