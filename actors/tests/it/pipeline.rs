//! Whole runs on paused time: every job ends exactly once, waits have the right cause, stops and resumes lose nothing.

use crate::world::{Breakage, World, Wrong};
use draftmill_actors::{
    messages::types::Outcome,
    pool::state::{DrawPolicy, Settings},
    runtime::{causes::Cause, meter::Totals},
};
use proptest::prelude::*;
use std::time::Duration;

fn waited(totals: &Totals, cause: Cause) -> Duration {
    totals.waits.iter().find(|(c, _)| *c == cause).map(|(_, d)| *d).unwrap()
}

/// Checks that every job of every planned epoch was trained, and each sample of an epoch exactly once.
pub fn assert_all_trained(world: &World, ended: &crate::world::Outcomes, epochs: u32) {
    let ledger = ended.ledger();
    assert_eq!(ledger.plans.len(), epochs as usize);
    for plan in &ledger.plans {
        let mut samples: Vec<u32> = plan.jobs.iter().flat_map(|j| j.samples.iter().copied()).collect();
        samples.sort_unstable();
        assert_eq!(samples, (0..world.lengths.len() as u32).collect::<Vec<_>>(), "epoch {}", plan.epoch);
        for job in &plan.jobs {
            assert!(matches!(ledger.outcomes.get(&job.id), Some(Outcome::Trained { .. })), "job {}", job.id);
        }
    }
}

#[test]
fn an_epoch_is_trained_exactly_once_and_steps_are_full() {
    let world = World::default();
    let ended = world.clone().run();
    assert_all_trained(&world, &ended, 1);
    let jobs = ended.outcomes().len() as u64;
    let size = 4;
    assert_eq!(ended.records.len() as u64, jobs.div_ceil(size));
    for (i, r) in ended.records.iter().enumerate() {
        assert_eq!(r.step, i as u64 + 1);
        let last = i + 1 == ended.records.len();
        assert!(r.micro_batches == size || last, "step {} has {} micro-batches (T1)", r.step, r.micro_batches);
        assert!((0.0..=1.0).contains(&r.accuracy), "speculators#759: accuracy {}", r.accuracy);
    }
    let report = ended.report();
    assert_eq!((report.jobs.trained, report.jobs.skipped, report.jobs.unfinished), (jobs, 0, 0));
    let tokens: u64 = world.lengths.iter().map(|&l| u64::from(l)).sum();
    assert_eq!(report.targets.iter().map(|t| t.tokens).sum::<u64>(), tokens);
    assert_eq!(report.drafters.iter().map(|d| d.tokens).sum::<u64>(), tokens);
}

#[test]
fn a_run_is_a_function_of_its_settings() {
    let (a, b) = (World::default().run(), World::default().run());
    assert_eq!(a.outcomes(), b.outcomes());
    assert_eq!(a.records, b.records);
    assert_eq!(a.took, b.took);
}

#[test]
fn continuous_epochs_never_drain_the_pool_between_them() {
    let mut costs = World::default().costs;
    costs.seconds_per_token = 2e-3;
    let world = World { epochs: 3, costs, ..World::default() };
    let continuous = world.clone().run();
    assert_all_trained(&world, &continuous, 3);
    let barrier = World { epoch_barrier: true, ..world.clone() }.run();
    assert_all_trained(&world, &barrier, 3);
    assert!(continuous.took < barrier.took, "{:?} against {:?}", continuous.took, barrier.took);
}

#[test]
fn specforge_678_leftovers_of_a_window_are_trained_and_the_run_ends() {
    // Every count of jobs modulo the step size, with the barrier: the end of an epoch never waits for a full step.
    for samples in [1, 2, 3, 7, 50, 51, 52, 53] {
        for epoch_barrier in [false, true] {
            let lengths = vec![900; samples];
            let pool = Settings { min_ready: 3, ..World::default().pool };
            let world = World { lengths, epochs: 2, epoch_barrier, pool, ..World::default() };
            let ended = world.clone().run();
            assert_all_trained(&world, &ended, 2);
        }
    }
}

#[test]
fn specforge_656_nothing_stays_behind_in_the_pool() {
    let world = World { epochs: 4, ..World::default() };
    let limit = world.pool;
    let ended = world.run();
    let report = ended.report();
    assert!(report.pool.peak_bytes <= limit.max_bytes, "L1: {} bytes", report.pool.peak_bytes);
    assert!(report.pool.peak_batches <= limit.max_batches, "L1: {} batches", report.pool.peak_batches);
    assert_eq!(report.jobs.unfinished, 0);
}

#[test]
fn the_slower_stage_holds_the_other_back() {
    let slow = Breakage { slowness: Some(20.0), ..Breakage::default() };
    let drafters_slow = World { drafters: vec![slow.clone(); 2], ..World::default() }.run();
    let report = drafters_slow.report();
    for t in &report.targets {
        assert!(waited(&t.totals, Cause::PoolFull) > waited(&t.totals, Cause::Job) * 10, "{:?}", t.totals);
    }
    let mut costs = World::default().costs;
    costs.seconds_per_token = 0.1;
    let targets_slow = World { costs, ..World::default() }.run();
    for d in &targets_slow.report().drafters {
        assert!(waited(&d.totals, Cause::Batch) > waited(&d.totals, Cause::Step) * 10, "{:?}", d.totals);
        assert!(waited(&d.totals, Cause::Batch) > d.totals.busy);
    }
}

#[test]
fn torchspec_42_everything_at_once_stays_within_the_pool() {
    // A hundred fast targets against slow drafters: in the report, a wave of two windows overflowed the store.
    let slow = Breakage { slowness: Some(50.0), ..Breakage::default() };
    let mut world = World { targets: vec![Breakage::default(); 100], drafters: vec![slow; 2], ..World::default() };
    (world.queue_jobs, world.pad_ahead) = (200, 100);
    (world.pool.max_bytes, world.pool.max_batches) = (200_000, 1000);
    let ended = world.clone().run();
    assert_all_trained(&world, &ended, 1);
    let peak = ended.report().pool.peak_bytes;
    assert!((160_000..=200_000).contains(&peak), "the promise is used and kept: {peak}");
}

#[test]
fn backpressure_is_arithmetic() {
    // Drafters that never finish: targets fill exactly max_batches positions, less the batches that the drafters took.
    let never = Breakage { every: Some((1, crate::world::Wrong::Hang)), ..Breakage::default() };
    let world = World { drafters: vec![never; 2], stop_at: Some(Duration::from_secs(3600)), ..World::default() };
    let (max_batches, prefetch, drafters) = (world.pool.max_batches, 1, world.drafters.len());
    let ended = World { stop_at: None, ..world }.run_for(Duration::from_secs(3600));
    // Batches in work and prefetched ones left the pool; one more draw of each waits for min_ready only.
    let extracted: u64 = ended.iter().sum();
    assert_eq!(extracted as usize, max_batches + drafters * (1 + prefetch));
}

#[test]
fn ray_42601_a_twice_as_fast_drafter_does_twice_the_work() {
    let fast = Breakage { slowness: Some(0.5), ..Breakage::default() };
    let world = World { drafters: vec![Breakage::default(), fast], accumulation: 6, epochs: 3, ..World::default() };
    let ended = world.run();
    let (slow, fast) = (ended.report().drafters[0].micro_batches, ended.report().drafters[1].micro_batches);
    let ratio = fast as f64 / slow as f64;
    assert!((1.8..=2.2).contains(&ratio), "{fast} against {slow}");
}

#[test]
fn speculators_867_targets_share_the_work_by_speed_alone() {
    // Slow targets, so that every target has work at every moment.
    let mut costs = World::default().costs;
    costs.seconds_per_token = 0.01;
    let world = World { targets: vec![Breakage::default(); 4], costs, epochs: 4, ..World::default() };
    let ended = world.run();
    let tokens: Vec<f64> = ended.report().targets.iter().map(|t| t.tokens as f64).collect();
    let (least, most) = tokens.iter().fold((f64::MAX, 0.0_f64), |(l, m), &t| (l.min(t), m.max(t)));
    assert!(most / least <= 1.1, "{tokens:?}");
}

#[test]
fn max_steps_ends_the_run_and_leaves_the_rest_open() {
    let ended = World { max_steps: 3, ..World::default() }.run();
    assert_eq!(ended.records.len(), 3);
    assert_eq!(ended.outcomes().len(), 12);
    assert!(ended.outcomes().values().all(|o| matches!(o, Outcome::Trained { step: 1..=3 })));
    assert_eq!(ended.ledger().checkpoints, [(3, "step-3".to_owned())]);
}

#[test]
fn checkpoints_come_at_their_interval_and_at_the_end() {
    let ended = World { checkpoint_every: 4, max_steps: 10, ..World::default() }.run();
    let steps: Vec<u64> = ended.ledger().checkpoints.iter().map(|(s, _)| *s).collect();
    assert_eq!(steps, [4, 8, 10]);
}

#[test]
fn a_stop_at_any_time_and_a_resume_train_every_job_once() {
    let world = World { epochs: 2, epoch_barrier: false, ..World::default() };
    let whole = world.clone().run();
    for tenth in 0..=10 {
        let stop_at = Some(whole.took * tenth / 10);
        let first = World { stop_at, ..world.clone() }.run();
        let steps = first.records.len() as u64;
        assert_eq!(
            first.outcomes().len() as u64,
            steps.min(whole.records.len() as u64 - 1) * 4 + last_jobs(&whole, steps)
        );
        if steps > 0 {
            assert_eq!(first.ledger().checkpoints.last().map(|(s, _)| *s), Some(steps), "a stop writes a checkpoint");
        }
        let mut ledger = first.result.unwrap().ledger.unwrap();
        ledger.checkpoints.clear();
        let second = world.clone().run_with(ledger, steps);
        assert_all_trained(&world, &second, 2);
    }
}

fn last_jobs(whole: &crate::world::Outcomes, steps: u64) -> u64 {
    if steps == whole.records.len() as u64 { whole.records.last().unwrap().micro_batches } else { 0 }
}

#[test]
fn a_resume_after_the_end_is_a_no_op() {
    let world = World::default();
    let first = world.clone().run();
    let before = first.outcomes().clone();
    let steps = first.records.len() as u64;
    let again = world.run_with(first.result.unwrap().ledger.unwrap(), steps);
    assert!(again.records.is_empty());
    assert_eq!(*again.outcomes(), before);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// Settings are either refused at load or the run ends; none hangs.
    #[test]
    fn specforge_735_no_settings_wait_for_ever(
        max_bytes in 1_u64..400_000, max_batches in 1_usize..10, min_ready in 0_usize..10,
        targets in 1_usize..5, drafters in 1_usize..4, accumulation in 1_usize..5, epoch_barrier: bool,
    ) {
        let mut world = World { accumulation, epoch_barrier, epochs: 2, ..World::default() };
        world.targets.resize(targets, Breakage::default());
        world.drafters.resize(drafters, Breakage::default());
        world.pool = Settings { max_bytes, max_batches, min_ready, ..world.pool };
        // A job has at most 1000 tokens.
        prop_assume!(world.pool.deadlock(world.costs.bytes(1000)).is_none());
        assert_all_trained(&world, &world.clone().run(), 2);
    }
}

/// transformers#40691, ms-swift#10050: a resume in a later epoch must not replay the order of the first one.
/// SimpleTuner#2986: the numbers of targets and drafters may change between runs; the set of ids stays exact.
#[test]
fn a_resume_in_a_later_epoch_with_other_workers_is_exact() {
    let world = World { epochs: 3, ..World::default() };
    let whole = world.clone().run();
    let first = World { stop_at: Some(whole.took * 3 / 4), ..world.clone() }.run();
    let ledger = first.result.unwrap().ledger.unwrap();
    assert!(ledger.plans.len() >= 2, "it was stopped in a later epoch");
    let open = |epoch: u32| ledger.outcomes.keys().filter(|id| id.epoch == epoch).count();
    assert!(open(1) > 0, "jobs of a later epoch were trained before the stop");
    let steps = first.records.len() as u64;
    let before = ledger.outcomes.clone();
    let mut resumed = world.clone();
    resumed.targets.truncate(1);
    resumed.drafters.push(Breakage::default());
    let second = resumed.run_with(ledger, steps);
    assert_all_trained(&world, &second, 3);
    assert_eq!(second.ledger().plans, whole.ledger().plans, "the plans are those of an uninterrupted run");
    for (id, outcome) in &before {
        assert_eq!(second.outcomes().get(id), Some(outcome), "job {id} was trained again");
    }
}

/// verl#7401: a resume exactly at the boundary of an epoch continues with the next one.
#[test]
fn verl_7401_a_resume_at_the_border_of_an_epoch_trains_the_next_one() {
    let one = World::default().run();
    let (steps, jobs) = (one.records.len() as u64, one.outcomes().len());
    let world = World { epochs: 2, ..World::default() };
    let two = world.clone().run_with(one.result.unwrap().ledger.unwrap(), steps);
    assert_all_trained(&world, &two, 2);
    assert_eq!(two.outcomes().len() - jobs, two.ledger().plans[1].jobs.len());
    assert_eq!(two.records.first().map(|r| r.step), Some(steps + 1));
}

/// lhotse#785: inspecting a plan before the run must not advance it.
#[test]
fn lhotse_785_planning_for_a_look_changes_nothing() {
    let world = World { epochs: 2, ..World::default() };
    let settings = draftmill_actors::planner::plan::PlanSettings {
        seed: 1,
        job_tokens: 1000,
        order: draftmill_actors::planner::plan::JobOrder::Spread,
        bounds: draftmill_actors::planner::buckets::optimal_bounds(&world.lengths, 4),
    };
    let looked: Vec<_> =
        (0..2).map(|e| draftmill_actors::planner::plan::plan_epoch(&world.lengths, &settings, e).unwrap()).collect();
    assert_eq!(world.run().ledger().plans, looked);
}

/// TorchSpec#126, Automodel#2468: batches without a valid anchor count as micro-batches of weight zero; no actor waits
/// for another's decision, and every step stays full. The world's drafters find no anchor in every seventeenth job.
#[test]
fn a_batch_without_an_anchor_has_weight_zero() {
    let world = World { epochs: 2, ..World::default() };
    let ended = world.clone().run();
    assert_all_trained(&world, &ended, 2);
    let supervised: u64 = ended.records.iter().map(|r| r.supervised).sum();
    let without: u64 = ended
        .ledger()
        .plans
        .iter()
        .flat_map(|p| &p.jobs)
        .filter(|j| j.id.index % 17 == 0)
        .map(|j| u64::from(j.tokens))
        .sum();
    let tokens: u64 = ended.records.iter().map(|r| r.tokens).sum();
    assert!(without > 0);
    assert_eq!(supervised, tokens - without);
}

pub fn failing(every: u64, wrong: Wrong) -> Breakage {
    Breakage { every: Some((every, wrong)), ..Breakage::default() }
}

#[test]
fn a_failed_micro_batch_gives_its_ticket_and_its_batch_back_and_is_trained() {
    for drafters in [vec![failing(4, Wrong::Fail)], vec![failing(3, Wrong::Fail), Breakage::default()]] {
        let world = World { drafters, epochs: 2, max_attempts: 20, ..World::default() };
        let ended = world.clone().run();
        assert_all_trained(&world, &ended, 2);
        let (_, full) = ended.records.split_last().unwrap();
        let size = world.accumulation * world.drafters.len();
        assert!(full.iter().all(|r| r.micro_batches as usize == size), "T1");
        assert!(ended.report().pool.peak_bytes <= world.pool.max_bytes, "L1");
    }
}

#[test]
fn an_untrainable_batch_is_skipped_with_its_reason() {
    let poison = Breakage { poison: Some(7), ..Breakage::default() };
    for (draw_policy, drafters) in
        [(DrawPolicy::Proportional, 1), (DrawPolicy::Replay, 1), (DrawPolicy::Uniform, 3), (DrawPolicy::Replay, 3)]
    {
        // The batches are broken, not the drafters: random draws may hit several of them in a row.
        let drafters = vec![poison.clone(); drafters];
        let mut world = World { drafters, max_skip_fraction: 1.0, max_failures_in_a_row: 100, ..World::default() };
        world.pool.draw_policy = draw_policy;
        let ended = world.run();
        let all: usize = ended.ledger().plans.iter().map(|p| p.jobs.len()).sum();
        assert_eq!(ended.outcomes().len(), all);
        for (job, outcome) in ended.outcomes() {
            match outcome {
                Outcome::Skipped { reason, attempts } => {
                    assert!(reason.contains("the drafter failed to train the job: poison"), "{reason}");
                    assert_eq!((job.index % 7, *attempts), (3, 3));
                }
                Outcome::Trained { .. } => assert_ne!(job.index % 7, 3),
            }
        }
    }
}

#[test]
fn a_drafter_that_only_fails_stops_the_run_with_the_cause() {
    let ended = World { drafters: vec![failing(1, Wrong::Fail)], max_skip_fraction: 1.0, ..World::default() }.run();
    assert_eq!(ended.fault().actor, "drafter 0");
    assert!(ended.fault().message.contains("5 batches failed in a row"), "{}", ended.fault());
}

/// If the engine lost the features there is nothing to return.
#[test]
fn a_job_whose_features_are_lost_is_skipped_at_once() {
    let drafters = vec![failing(9, Wrong::LoseFeatures), Breakage::default()];
    let ended = World { drafters, max_skip_fraction: 1.0, ..World::default() }.run();
    let lost: Vec<_> = ended.outcomes().values().filter(|o| !matches!(o, Outcome::Trained { .. })).collect();
    assert!(!lost.is_empty());
    for outcome in lost {
        let Outcome::Skipped { reason, attempts: 1 } = outcome else { panic!("{outcome:?}") };
        assert!(reason.contains("lost its hidden states"), "{reason}");
    }
}
