//! Rates, shares and sentences from metrics that real meters wrote, on a clock that the test owns.

use super::*;
use crate::admin::{recorder, run_info::Acceptance};
use draftmill_actors::runtime::{causes::Cause, meter::Meter};
use metrics::{counter, gauge, with_local_recorder};
use metrics_exporter_prometheus::PrometheusRecorder;
use tokio::time::{Instant, sleep};

struct World {
    recorder: PrometheusRecorder,
    derivation: Derivation,
    facts: Facts,
    born: Instant,
}

impl World {
    fn new() -> World {
        let histograms = m::TABLE.iter().filter(|spec| !spec.buckets.is_empty());
        let buckets: Vec<_> = histograms.map(|spec| (spec.name, spec.buckets)).collect();
        let recorder = recorder(&buckets).unwrap();
        with_local_recorder(&recorder, || {
            let buckets = vec![64, 128];
            m::register(&m::Known { targets: 2, drafters: 1, buckets, version: "t", ..m::Known::default() });
        });
        let facts = Facts { planned_steps: 100, ..Facts::default() };
        World { recorder, derivation: Derivation::default(), facts, born: Instant::now() }
    }

    fn meter(&self, actor: &'static str, index: usize) -> Meter {
        with_local_recorder(&self.recorder, || Meter::new(actor, index))
    }

    fn look(&mut self, happens: impl FnOnce()) -> Status {
        with_local_recorder(&self.recorder, happens);
        let samples = Samples::parse(&self.recorder.handle().render());
        let now = self.born.elapsed();
        self.derivation.on_sample(&samples, &self.facts, &Faults::default(), now, now.as_secs_f64())
    }

    /// A look each second, the last of which is told.
    async fn looks(&mut self, seconds: u64) -> Status {
        for _ in 1..seconds {
            sleep(Duration::from_secs(1)).await;
            self.look(|| ());
        }
        sleep(Duration::from_secs(1)).await;
        self.look(|| ())
    }
}

/// The first actor of this name.
fn named<'a>(status: &'a Status, name: &str) -> &'a Actor {
    status.actors.iter().find(|actor| actor.actor == name).unwrap()
}

fn both_up() {
    for index in ["0", "1"] {
        gauge!(m::TARGET_UP, "index" => index).set(1.0);
    }
}

#[tokio::test(start_paused = true)]
async fn steps_and_tokens_are_rates_over_their_windows() {
    let mut world = World::new();
    let first = world.look(both_up);
    assert_eq!((first.progress.eta, first.training.tokens_per_second), (None, 0.0));
    for second in 1..=100 {
        sleep(Duration::from_secs(1)).await;
        world.look(|| {
            // A step every two seconds, and tokens that come at half the rate from second 50 on.
            gauge!(m::STEP).set(f64::from(second / 2));
            counter!(m::DRAFTER_TOKENS, "index" => "0").increment(if second <= 50 { 1000 } else { 500 });
        });
    }
    let status = world.looks(1).await;
    assert_eq!(status.progress.step, 50);
    assert!((status.progress.steps_per_second - 0.5).abs() < 0.02, "{:?}", status.progress);
    assert!((status.progress.eta.unwrap() - 100.0).abs() < 5.0, "{:?}", status.progress);
    assert!((450.0..=500.0).contains(&status.training.tokens_per_second), "{:?}", status.training);
    assert!(world.derivation.moments.len() <= 62, "a minute is remembered: {}", world.derivation.moments.len());
    world.facts.paused = true;
    assert_eq!(world.looks(1).await.progress.eta, None, "a paused run has no end");
}

#[tokio::test(start_paused = true)]
async fn a_long_wait_counts_before_it_is_over_and_only_once_after() {
    let mut world = World::new();
    let mut meter = world.meter("target", 0);
    world.look(both_up);
    let waiting = tokio::spawn(async move {
        meter.busy(sleep(Duration::from_secs(10))).await;
        meter.wait(Cause::PoolFull, sleep(Duration::from_secs(30))).await;
        meter
    });
    let status = world.looks(5).await;
    let target = named(&status, "target");
    assert_eq!((target.state.as_str(), target.busy), ("busy", 1.0), "{status:?}");
    let status = world.looks(15).await;
    let target = named(&status, "target");
    assert_eq!(target.state, "pool_full");
    assert!(target.waits["pool_full"] > 0.85 && target.busy < 0.15, "{target:?}");
    assert_eq!(target.up, Some(true));
    // The end of the wait records 30 s at once: the share stays a share.
    let status = world.looks(21).await;
    let target = named(&status, "target");
    assert!((0.7..=1.0).contains(&target.waits["pool_full"]) && target.busy < 0.05, "{target:?}");
    drop(waiting.await.unwrap());
    let status = world.looks(12).await;
    let target = named(&status, "target");
    assert_eq!((target.state.as_str(), target.busy, target.waits["pool_full"]), ("idle", 0.0, 0.0));
}

/// A future that is dropped in the middle, as in a `select!`, leaves no state behind.
#[tokio::test(start_paused = true)]
async fn a_wait_that_is_given_up_is_no_state_any_more() {
    let mut world = World::new();
    let mut meter = world.meter("drafter", 0);
    let wait = meter.wait(Cause::Batch, sleep(Duration::from_secs(100)));
    let given_up = tokio::time::timeout(Duration::from_secs(1), wait).await;
    assert!(given_up.is_err());
    assert_eq!(named(&world.look(|| ()), "drafter").state, "idle");
}

#[tokio::test(start_paused = true)]
async fn the_sentence_names_who_holds_the_run_back() {
    for (actor, cause, expected) in [
        ("drafter", Cause::Batch, "The targets hold this run back"),
        ("target", Cause::PoolFull, "The drafters hold this run back"),
        ("target", Cause::Job, "The queue holds this run back"),
        ("trainer", Cause::MicroBatches, "Balanced"),
    ] {
        let mut world = World::new();
        let mut meter = world.meter(actor, 0);
        world.look(|| {
            both_up();
            gauge!(m::LOSS).set(2.0);
        });
        let waiting = async { meter.wait(cause, sleep(Duration::from_secs(8))).await };
        let (status, ()) = tokio::join!(world.looks(5), waiting);
        assert!(status.sentence.starts_with(expected), "{cause:?}: {}", status.sentence);
    }
}

#[tokio::test(start_paused = true)]
async fn each_state_has_its_sign_and_only_three_are_not_ready() {
    let mut world = World::new();
    assert_eq!(world.look(|| ()).state, State::Starting);
    let mut target = world.meter("target", 0);
    let working = tokio::spawn(async move { target.busy(sleep(Duration::from_secs(5))).await });
    tokio::task::yield_now().await;
    let status = world.look(|| ());
    assert_eq!(status.state, State::NoTarget);
    assert!(status.not_ready().unwrap().contains("no target"), "{status:?}");
    assert_eq!(world.look(both_up).state, State::Filling);
    assert_eq!(world.look(|| gauge!(m::LOSS).set(2.0)).state, State::Training);
    working.await.unwrap();
    world.facts.paused = true;
    let status = world.look(|| ());
    assert_eq!((status.state, status.not_ready()), (State::Paused, None));
    let status = world.look(|| gauge!(m::POOL_DRAINING).set(1.0));
    assert_eq!((status.state, status.not_ready()), (State::Draining, None));
    world.facts.stopping = true;
    let status = world.look(|| ());
    assert_eq!((status.state, status.not_ready()), (State::Stopping, Some("the run is ending")));
    assert_eq!(Status::default().not_ready(), Some("the run is starting: nothing was measured yet"));
}

#[tokio::test(start_paused = true)]
async fn pool_loss_and_checkpoint_are_those_of_the_metrics() {
    let mut world = World::new();
    let before = world.look(both_up);
    assert_eq!((before.training.loss, before.checkpoint.at), (None, None));
    world.facts.acceptance = Some(Acceptance { curve: vec![(0, 1.5), (60, 2.75)], ..Acceptance::default() });
    let status = world.look(|| {
        gauge!(m::LOSS).set(2.5);
        gauge!(m::ACCURACY).set(0.25);
        gauge!(m::EVAL_ACCEPTANCE).set(2.75);
        gauge!(m::GRAD_NORM).set(f64::NAN);
        gauge!(m::POOL_BUCKET_BATCHES, "bucket" => "1").set(3.0);
        counter!(m::POOL_DRAWS, "bucket" => "1").increment(9);
        gauge!(m::POOL_MAX_BYTES).set(4096.0);
        gauge!(m::POOL_MIN_READY).set(2.0);
        gauge!(m::POOL_MAX_BATCHES).set(4.0);
        gauge!(m::CHECKPOINT_STEP).set(20.0);
        gauge!(m::CHECKPOINT_TIME).set(7.0);
        counter!(m::CHECKPOINTS, "result" => "written").increment(1);
        counter!(m::JOBS, "outcome" => "skipped").increment(2);
    });
    assert_eq!((status.training.loss, status.training.accuracy), (Some(2.5), Some(0.25)));
    assert_eq!((before.training.acceptance, status.training.acceptance), (None, Some(2.75)));
    assert!(before.training.acceptance_curve.is_empty());
    assert_eq!(status.training.acceptance_curve, [(0, 1.5), (60, 2.75)]);
    assert_eq!(status.training.grad_norm, None, "what is not finite is not told as a number");
    let bucket = |bucket, longest, batches, drawn| Bucket { bucket, longest, batches, drawn };
    assert_eq!(status.pool.buckets, [bucket(0, 64, 0, 0), bucket(1, 128, 3, 9)]);
    assert_eq!((status.pool.max_bytes, status.pool.min_ready, status.pool.max_batches), (4096, 2, 4));
    assert_eq!(status.checkpoint, Checkpoint { step: 20, at: Some(7.0), written: 1, failed: 0 });
    assert_eq!(status.jobs.skipped, 2);
    sleep(Duration::from_secs(1)).await;
    let later = world.look(|| ());
    assert!(!later.differs(&Status { at: 0.0, ..later.clone() }) && later.differs(&before));
}

#[tokio::test(start_paused = true)]
async fn gpus_are_told_once_they_told_of_themselves() {
    let mut world = World::new();
    assert!(world.look(|| ()).gpus.is_empty());
    let memory = crate::common::gpu_memory::Memory { allocated: 1, peak: 2, reserved: 3, free: 4, total: 9 };
    let status = world.look(|| {
        memory.publish("cuda:1");
        crate::common::gpu_memory::Memory::default().publish("cuda:0");
    });
    assert_eq!(status.gpus, [Gpu { device: "cuda:1".into(), memory }]);
    let told = serde_json::to_value(&status.gpus).unwrap();
    let want =
        serde_json::json!([{ "device": "cuda:1", "allocated": 1, "peak": 2, "reserved": 3, "free": 4, "total": 9 }]);
    assert_eq!(told, want);
}
