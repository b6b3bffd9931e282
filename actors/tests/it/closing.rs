//! Shutdown that trains the pool (`Shutdown::drain`): nothing new begins, extracted batches are trained as far as they
//! form whole steps, the ledger is exact, and another start trains the rest.

use crate::{
    pipeline::assert_all_trained,
    world::{Breakage, Outcomes, World, Wrong},
};
use draftmill_actors::{
    messages::types::Outcome,
    pool::state::{DrawPolicy, Settings},
};
use proptest::prelude::*;
use std::{
    sync::{Arc, atomic::AtomicU64, atomic::Ordering::Relaxed},
    time::Duration,
};

const SECOND: Duration = Duration::from_secs(1);

/// Runs a world, and also returns the number of extracted jobs.
fn counted(world: World) -> (Outcomes, u64) {
    let counts: Vec<_> = world.targets.iter().map(|_| Arc::new(AtomicU64::new(0))).collect();
    let ended = World { counts: counts.clone(), ..world }.run();
    (ended, counts.iter().map(|count| count.load(Relaxed)).sum())
}

fn trained(ended: &Outcomes) -> u64 {
    ended.outcomes().values().filter(|outcome| matches!(outcome, Outcome::Trained { .. })).count() as u64
}

/// Returns a node whose drafters are so slow that the pool is full.
fn full_pool() -> World {
    let slow = Breakage { slowness: Some(4.0), ..Breakage::default() };
    World { drafters: vec![slow; 2], epochs: 2, ..World::default() }
}

#[test]
fn a_close_trains_the_full_pool_and_a_stop_reopens_it() {
    let at = Some(20 * SECOND);
    let (closed, extracted) = counted(World { close_at: at, ..full_pool() });
    let (stopped, before) = counted(World { stop_at: at, ..full_pool() });
    // Sixteen batches wait, two drafters hold two each; a step takes four.
    assert!(extracted - trained(&closed) < 4, "{} of {extracted} trained", trained(&closed));
    assert!(before - trained(&stopped) >= 16, "{} of {before} trained", trained(&stopped));
    // Targets that wait for bytes begin no forward after the close.
    assert_eq!(extracted, before);
    for ended in [&closed, &stopped] {
        let report = ended.report();
        assert!(ended.records.iter().all(|record| record.micro_batches == 4), "T1: whole steps");
        assert!(!report.jobs.plan_ended && report.jobs.skipped == 0);
        assert_eq!(report.jobs.planned, report.jobs.trained + report.jobs.unfinished, "a job was lost");
        assert_eq!(ended.ledger().checkpoints.last().map(|(step, _)| *step), Some(ended.records.len() as u64));
    }
}

#[test]
fn a_forward_in_hand_is_finished_and_trained() {
    // Forwards of ten seconds and quick drafters: the pool is empty, and the forwards are all that there is.
    let target = Breakage { slowness: Some(1000.0), ..Breakage::default() };
    let pool = Settings { min_ready: 3, ..World::default().pool };
    let world = World { targets: vec![target; 4], pool, ..World::default() };
    let one = world.clone().run().records[0].seconds / 10.0;
    let (ended, extracted) = counted(World { close_at: Some(Duration::from_secs_f64(one)), ..world });
    assert_eq!((extracted, trained(&ended)), (4, 4), "the first forward of each target, and no other");
}

#[test]
fn a_forward_that_hangs_holds_a_close_until_it_becomes_a_stop() {
    let hangs = Breakage { every: Some((9, Wrong::Hang)), ..Breakage::default() };
    let (close_at, stop_at) = (Some(20 * SECOND), Some(50 * SECOND));
    let targets = vec![hangs, Breakage::default()];
    let world = World { targets, offer_stragglers: false, ..full_pool() };
    let (ended, extracted) = counted(World { close_at, stop_at, ..world });
    assert!((50 * SECOND..62 * SECOND).contains(&ended.took), "{:?}", ended.took);
    let steps = ended.records.len() as u64;
    assert_eq!(ended.ledger().checkpoints.last().map(|(step, _)| *step), Some(steps), "it is orderly");
    // Until min_ready are left, drafters continued.
    assert!(extracted - trained(&ended) < 4 + 4 + 4, "{} of {extracted}", trained(&ended));
}

#[test]
fn a_close_does_not_wait_for_a_restart_and_uses_up_no_try_of_a_job() {
    let lost = Breakage { every: Some((2, Wrong::Lose)), bad_restarts: 1000, ..Breakage::default() };
    let world = World { max_restarts: 1000, max_attempts: 2, close_at: Some(10 * SECOND), ..full_pool() };
    let ended = World { targets: vec![lost, Breakage::default()], ..world }.run();
    // The batches in the pool take two drafters of two seconds a batch about twenty seconds.
    assert!(ended.took < 40 * SECOND, "{:?}", ended.took);
    assert_eq!(ended.report().jobs.skipped, 0);
}

/// With a fixed order the next batch may be one that no target had: the jobs after it are open again.
#[test]
fn a_close_in_a_fixed_order_trains_up_to_the_first_gap() {
    let pool = Settings { draw_policy: DrawPolicy::Replay, replay_window: 12, ..World::default().pool };
    let world = World { pool, ..full_pool() };
    let whole = world.clone().run();
    let closed = World { close_at: Some(20 * SECOND), ..world.clone() }.run();
    let stopped = World { stop_at: Some(20 * SECOND), ..world }.run();
    assert!(trained(&closed) >= trained(&stopped));
    for (job, outcome) in closed.outcomes() {
        assert_eq!(whole.outcomes().get(job), Some(outcome), "{job} is part of another step");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// Closes a healthy or broken node at any moment, sometimes followed by a stop.
    #[test]
    fn a_close_at_any_moment_loses_nothing(
        drafters in 1_usize..5, accumulation in 1_usize..5, queue_jobs in 1_usize..4, epoch_barrier: bool, faults: bool,
        prefetch in 0_usize..4, checkpoint_every in 0_u64..3, part in 0_u32..1000, ordered: bool, slow: bool,
        stop_after in prop::option::of(0_u32..20),
    ) {
        let every = |n, wrong| Breakage { every: Some((n, wrong)), ..Breakage::default() };
        let mut world = World {
            accumulation, epoch_barrier, queue_jobs, prefetch, checkpoint_every, epochs: 2, max_attempts: 30, max_restarts: 99,
            ..World::default()
        };
        if faults {
            world.targets = vec![every(3, Wrong::Fail), every(5, Wrong::Panic), every(7, Wrong::Nan)];
        }
        let drafter = if faults { every(5, Wrong::Fail) } else { Breakage::default() };
        world.drafters = vec![Breakage { slowness: slow.then_some(4.0), ..drafter }; drafters];
        if ordered {
            world.pool = Settings { draw_policy: DrawPolicy::Replay, replay_window: 8, ..world.pool };
        }
        let close_at = world.clone().run().took * part / 1000;
        let stop_at = stop_after.map(|after| close_at + SECOND * after);
        let (first, extracted) = counted(World { close_at: Some(close_at), stop_at, ..world.clone() });
        let steps = first.records.len() as u64;
        let size = (drafters * accumulation) as u64;
        if !first.report().jobs.plan_ended {
            prop_assert!(first.records.iter().all(|record| record.micro_batches == size), "T1");
            if !faults && !ordered && stop_at.is_none() {
                prop_assert!(extracted - trained(&first) < size, "{} of {} trained", trained(&first), extracted);
            }
        }
        let jobs = &first.report().jobs;
        prop_assert_eq!(jobs.planned, jobs.trained + jobs.unfinished);
        prop_assert_eq!(first.ledger().checkpoints.last().map_or(0, |(step, _)| *step), steps);
        let second = world.clone().run_with(first.result.unwrap().ledger.unwrap(), steps);
        assert_all_trained(&world, &second, 2);
    }
}
