//! Rates, time shares and sentences from metrics of real meters, on a simulated clock.

use super::*;
use crate::admin::{recorder, run_info::Acceptance};
use draftmill_actors::runtime::{causes::Cause, meter::Meter};
use metrics::{counter, gauge, with_local_recorder};
use metrics_exporter_prometheus::PrometheusRecorder;
use tokio::time::{Instant, sleep};

struct World {
    recorder: PrometheusRecorder,
    builder: StatusBuilder,
    info: RunInfo,
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
        let info = RunInfo { planned_steps: 100, ..RunInfo::default() };
        World { recorder, builder: StatusBuilder::default(), info, born: Instant::now() }
    }

    fn meter(&self, actor: &'static str, index: usize) -> Meter {
        with_local_recorder(&self.recorder, || Meter::new(actor, index))
    }

    /// Runs `update`, then samples.
    fn sample(&mut self, update: impl FnOnce()) -> Status {
        with_local_recorder(&self.recorder, update);
        let samples = Samples::parse(&self.recorder.handle().render());
        let now = self.born.elapsed();
        self.builder.on_sample(&samples, &self.info, &Faults::default(), now, now.as_secs_f64())
    }

    /// Samples once a second; returns the last status.
    async fn samples(&mut self, seconds: u64) -> Status {
        for _ in 1..seconds {
            sleep(Duration::from_secs(1)).await;
            self.sample(|| ());
        }
        sleep(Duration::from_secs(1)).await;
        self.sample(|| ())
    }
}

/// First actor with this name.
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
    let first = world.sample(both_up);
    assert_eq!((first.progress.eta, first.training.tokens_per_second), (None, 0.0));
    for second in 1..=100 {
        sleep(Duration::from_secs(1)).await;
        world.sample(|| {
            // A step every 2 s, and half the token rate from second 50 on.
            gauge!(m::STEP).set(f64::from(second / 2));
            counter!(m::DRAFTER_TOKENS, "index" => "0").increment(if second <= 50 { 1000 } else { 500 });
        });
    }
    let status = world.samples(1).await;
    assert_eq!(status.progress.step, 50);
    assert!((status.progress.steps_per_second - 0.5).abs() < 0.02, "{:?}", status.progress);
    assert!((status.progress.eta.unwrap() - 100.0).abs() < 5.0, "{:?}", status.progress);
    assert!((450.0..=500.0).contains(&status.training.tokens_per_second), "{:?}", status.training);
    assert!(world.builder.snapshots.len() <= 62, "one minute is stored: {}", world.builder.snapshots.len());
    world.info.paused = true;
    assert_eq!(world.samples(1).await.progress.eta, None, "a paused run has no remaining time");
}

#[tokio::test(start_paused = true)]
async fn a_wait_in_progress_counts_once() {
    let mut world = World::new();
    let mut meter = world.meter("target", 0);
    world.sample(both_up);
    let waiting = tokio::spawn(async move {
        meter.busy(sleep(Duration::from_secs(10))).await;
        meter.wait(Cause::PoolFull, sleep(Duration::from_secs(30))).await;
        meter
    });
    let status = world.samples(5).await;
    let target = named(&status, "target");
    assert_eq!((target.state.as_str(), target.busy), ("busy", 1.0), "{status:?}");
    let status = world.samples(15).await;
    let target = named(&status, "target");
    assert_eq!(target.state, "pool_full");
    assert!(target.waits["pool_full"] > 0.85 && target.busy < 0.15, "{target:?}");
    assert_eq!(target.up, Some(true));
    // The end of the wait records 30 s at once; the share stays at most 1.
    let status = world.samples(21).await;
    let target = named(&status, "target");
    assert!((0.7..=1.0).contains(&target.waits["pool_full"]) && target.busy < 0.05, "{target:?}");
    drop(waiting.await.unwrap());
    let status = world.samples(12).await;
    let target = named(&status, "target");
    assert_eq!((target.state.as_str(), target.busy, target.waits["pool_full"]), ("idle", 0.0, 0.0));
}

/// As in a `select!`.
#[tokio::test(start_paused = true)]
async fn a_cancelled_wait_leaves_no_state() {
    let mut world = World::new();
    let mut meter = world.meter("drafter", 0);
    let wait = meter.wait(Cause::Batch, sleep(Duration::from_secs(100)));
    let cancelled = tokio::time::timeout(Duration::from_secs(1), wait).await;
    assert!(cancelled.is_err());
    assert_eq!(named(&world.sample(|| ()), "drafter").state, "idle");
}

#[tokio::test(start_paused = true)]
async fn the_sentence_names_the_bottleneck() {
    for (actor, cause, expected) in [
        ("drafter", Cause::Batch, "Bottleneck: the targets."),
        ("target", Cause::PoolFull, "Bottleneck: the drafters."),
        ("target", Cause::Job, "Bottleneck: the job queue."),
        ("trainer", Cause::MicroBatches, "Balanced"),
    ] {
        let mut world = World::new();
        let mut meter = world.meter(actor, 0);
        world.sample(|| {
            both_up();
            gauge!(m::LOSS).set(2.0);
        });
        let waiting = async { meter.wait(cause, sleep(Duration::from_secs(8))).await };
        let (status, ()) = tokio::join!(world.samples(5), waiting);
        assert!(status.sentence.starts_with(expected), "{cause:?}: {}", status.sentence);
    }
}

#[tokio::test(start_paused = true)]
async fn states_follow_the_metrics_and_three_are_not_ready() {
    let mut world = World::new();
    assert_eq!(world.sample(|| ()).state, State::Starting);
    let mut target = world.meter("target", 0);
    let working = tokio::spawn(async move { target.busy(sleep(Duration::from_secs(5))).await });
    tokio::task::yield_now().await;
    let status = world.sample(|| ());
    assert_eq!(status.state, State::NoTarget);
    assert!(status.not_ready().unwrap().contains("no target"), "{status:?}");
    assert_eq!(world.sample(both_up).state, State::Filling);
    assert_eq!(world.sample(|| gauge!(m::LOSS).set(2.0)).state, State::Training);
    working.await.unwrap();
    world.info.paused = true;
    let status = world.sample(|| ());
    assert_eq!((status.state, status.not_ready()), (State::Paused, None));
    let status = world.sample(|| gauge!(m::POOL_DRAINING).set(1.0));
    assert_eq!((status.state, status.not_ready()), (State::Draining, None));
    world.info.stopping = true;
    let status = world.sample(|| ());
    assert_eq!((status.state, status.not_ready()), (State::Stopping, Some("the run is ending")));
    assert_eq!(Status::default().not_ready(), Some("the run is starting: no measurements yet"));
}

#[tokio::test(start_paused = true)]
async fn pool_training_and_checkpoint_equal_the_metrics() {
    let mut world = World::new();
    let before = world.sample(both_up);
    assert_eq!((before.training.loss, before.checkpoint.at), (None, None));
    world.info.acceptance = Some(Acceptance { curve: vec![(0, 1.5), (60, 2.75)], ..Acceptance::default() });
    let status = world.sample(|| {
        gauge!(m::LOSS).set(2.5);
        gauge!(m::ACCURACY).set(0.25);
        gauge!(m::LEADING_RUN).set(1.5);
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
    assert_eq!(
        (status.training.loss, status.training.accuracy, status.training.leading_run),
        (Some(2.5), Some(0.25), Some(1.5))
    );
    assert_eq!((before.training.acceptance, status.training.acceptance), (None, Some(2.75)));
    assert!(before.training.acceptance_curve.is_empty());
    assert_eq!(status.training.acceptance_curve, [(0, 1.5), (60, 2.75)]);
    assert_eq!(status.training.grad_norm, None, "a value that is not finite is absent");
    let bucket = |bucket, longest, batches, drawn| Bucket { bucket, longest, batches, drawn };
    assert_eq!(status.pool.buckets, [bucket(0, 64, 0, 0), bucket(1, 128, 3, 9)]);
    assert_eq!((status.pool.max_bytes, status.pool.min_ready, status.pool.max_batches), (4096, 2, 4));
    assert_eq!(status.checkpoint, Checkpoint { step: 20, at: Some(7.0), written: 1, failed: 0 });
    assert_eq!(status.jobs.skipped, 2);
    sleep(Duration::from_secs(1)).await;
    let later = world.sample(|| ());
    assert!(!later.differs(&Status { at: 0.0, ..later.clone() }) && later.differs(&before));
}

#[tokio::test(start_paused = true)]
async fn gpus_appear_with_their_first_report() {
    let mut world = World::new();
    assert!(world.sample(|| ()).gpus.is_empty());
    let memory = crate::common::gpu_memory::Memory { allocated: 1, peak: 2, reserved: 3, free: 4, total: 9 };
    let status = world.sample(|| {
        memory.publish("cuda:1");
        crate::common::gpu_memory::Memory::default().publish("cuda:0");
    });
    assert_eq!(status.gpus, [Gpu { device: "cuda:1".into(), memory }]);
    let json = serde_json::to_value(&status.gpus).unwrap();
    let want =
        serde_json::json!([{ "device": "cuda:1", "allocated": 1, "peak": 2, "reserved": 3, "free": 4, "total": 9 }]);
    assert_eq!(json, want);
}
