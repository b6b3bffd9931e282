//! Round-robin compared with pulling: with one target of half speed, the others wait for it.

use draftmill_actors::{
    pipeline::{self, ControlHandle, Parts, Report, Settings},
    planner::ledger::MemoryLedger,
    pool,
    runtime::{causes::Cause, fault::Shutdown},
    simulated::{self as sim, CostModel, SimOptimizer, SimSource},
};
use std::{sync::Arc, time::Duration};
use tokio::{sync::mpsc, time::Instant};

/// Runs five targets, the second one of half speed, against drafters that keep up. `depth` selects round-robin.
fn run(depth: Option<usize>, costs: CostModel) -> (Duration, Report<MemoryLedger>) {
    let lengths: Arc<[u32]> = (0..3000).map(|i| 10 + (i * 37) % 300).collect();
    let mut settings = Settings::for_test(lengths.clone());
    (settings.planner.epochs, settings.dispatcher.max_attempts) = (2, 30);
    settings.pool = pool::Settings { max_bytes: 1 << 30, ..settings.pool };
    let (records, mut recorded) = mpsc::channel(16);
    let targets = sim::targets(costs, &[1.0, 0.5, 1.0, 1.0, 1.0]);
    let (control, inbox) = ControlHandle::new(&settings);
    let (optimizer, source) = (SimOptimizer::new(costs, 0.0), Arc::new(SimSource { lengths }));
    let (drafters, ledger) = (sim::drafters(costs, &[1.0; 2]), MemoryLedger::default());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    runtime.block_on(async {
        tokio::spawn(async move { while recorded.recv().await.is_some() {} });
        let born = Instant::now();
        let report = match depth {
            None => {
                let parts = Parts { targets, drafters, optimizer, source, ledger, records };
                pipeline::run_with_control(settings, parts, inbox, Shutdown::default()).await
            }
            Some(depth) => {
                let targets = sim::round_robin(targets, depth, control, settings.clone()).unwrap();
                let parts = Parts { targets, drafters, optimizer, source, ledger, records };
                pipeline::run_with_control(settings, parts, inbox, Shutdown::default()).await
            }
        };
        (born.elapsed(), report.unwrap())
    })
}

#[test]
fn a_rotation_runs_at_the_speed_of_its_slowest_target() {
    let costs = CostModel { seconds_per_token: 1e-3, seconds_per_micro_batch: 0.1, ..CostModel::default() };
    let (pull, pulled) = run(None, costs);
    for depth in [1, 4, 20] {
        let (rotation, report) = run(Some(depth), costs);
        assert_eq!(report.jobs.trained, pulled.jobs.trained);
        // Pull: 4.5 targets' worth of work; round-robin: five targets at half speed.
        let efficiency = pull.as_secs_f64() / rotation.as_secs_f64();
        assert!((efficiency - 2.5 / 4.5).abs() < 0.02, "depth {depth}: {efficiency}");
        let jobs: Vec<u64> = report.targets.iter().map(|target| target.jobs).collect();
        assert!(jobs.iter().all(|n| n.abs_diff(jobs[0]) <= 1), "{jobs:?}");
        let waits = &report.targets[0].totals.waits;
        let waited = waits.iter().find(|(cause, _)| *cause == Cause::Job).unwrap().1;
        assert!(waited > rotation * 2 / 5, "the others wait for the slow one: {waits:?}");
    }
}

#[test]
fn a_rotation_with_retries_and_stragglers_trains_every_job() {
    let costs = CostModel { seconds_per_token: 1e-3, jitter: 0.3, job_failures: 0.05, ..CostModel::default() };
    let (_, pulled) = run(None, costs);
    for depth in [1, 4, 20] {
        let (_, report) = run(Some(depth), costs);
        assert_eq!(report.jobs, pulled.jobs);
    }
}
