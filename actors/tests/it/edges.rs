//! Edge cases of settings and moments: the smallest queues, barriers alongside checkpoints, stops between jobs, uneven
//! numbers of workers.

use crate::{
    faults::{broken, long_forwards},
    pipeline::assert_all_trained,
    world::{Breakage, World, Wrong},
};
use draftmill_actors::pool::Settings;
use proptest::prelude::*;
use std::time::Duration;

/// Returns the smallest node, with a checkpoint after every step: the planner gets requests while it hands out jobs.
fn narrow() -> World {
    let pool = Settings { max_batches: 1, min_ready: 1, ..World::default().pool };
    World { pool, queue_jobs: 1, pad_ahead: 1, checkpoint_every: 1, epochs: 3, accumulation: 1, ..World::default() }
}

#[test]
fn a_barrier_never_keeps_the_planner_from_recording() {
    let world = World { epoch_barrier: true, ..narrow() };
    assert_all_trained(&world, &world.clone().run(), 3);
}

#[test]
fn a_stop_beside_a_barrier_is_an_orderly_end() {
    let world = World { epoch_barrier: true, ..narrow() };
    let took = world.clone().run().took;
    for part in 0..=60 {
        let stop_at = Some(took * part / 60);
        let ended = World { stop_at, ..world.clone() }.run();
        let steps = ended.records.len() as u64;
        assert_eq!(ended.ledger().checkpoints.last().map_or(0, |(step, _)| *step), steps, "{part}/60");
    }
}

#[test]
fn a_resume_with_barriers_passes_epochs_that_are_done() {
    for done in 1..=3 {
        let world = World { epoch_barrier: true, epochs: done, ..World::default() };
        let first = world.clone().run();
        let steps = first.records.len() as u64;
        let more = World { epochs: 4, ..world };
        let second = more.clone().run_with(first.result.unwrap().ledger.unwrap(), steps);
        assert_all_trained(&more, &second, 4);
    }
}

/// Returns a node whose first target hangs in its `at`-th forward.
fn hanging(at: u64, world: World) -> World {
    let hang = Breakage { until: Some(at), ..broken(at, Wrong::Hang) };
    World { targets: vec![hang, Breakage::default(), Breakage::default()], costs: long_forwards().costs, ..world }
}

#[test]
fn a_barrier_does_not_wait_for_a_forward_that_hangs() {
    let world = hanging(10, World { epochs: 3, epoch_barrier: true, ..World::default() });
    assert_all_trained(&world, &world.clone().run(), 3);
}

#[test]
fn a_target_that_hangs_in_its_first_forward_delays_no_end() {
    for at in 1..=4 {
        let world = hanging(at, World::default());
        assert_all_trained(&world, &world.clone().run(), 1);
    }
}

#[test]
fn a_hanging_forward_in_a_rare_bucket_delays_no_end() {
    // The only two jobs of the longest bucket: it never gets an estimate.
    let mut lengths = vec![100; 400];
    lengths[7] = 900;
    let bounds = vec![100, 900];
    for at in 1..=12 {
        let world = hanging(at, World { lengths: lengths.clone(), bounds: bounds.clone(), ..World::default() });
        assert_all_trained(&world, &world.clone().run(), 1);
    }
}

#[test]
fn targets_that_are_all_out_at_once_come_back() {
    for epoch_barrier in [false, true] {
        let out = Breakage { until: Some(4), bad_restarts: 2, ..broken(4, Wrong::Lose) };
        let world = World { targets: vec![out; 3], epoch_barrier, epochs: 2, ..World::default() };
        let ended = world.clone().run();
        assert_all_trained(&world, &ended, 2);
        assert!(ended.report().targets.iter().all(|target| target.restarts == 1));
    }
}

#[test]
fn a_stop_does_not_wait_for_a_restart() {
    let out = Breakage { bad_restarts: 99, ..broken(2, Wrong::Lose) };
    let stop_at = Duration::from_secs(100);
    let ended = World { targets: vec![out; 3], max_restarts: 99, stop_at: Some(stop_at), ..World::default() }.run();
    // The pause of 64 seconds that began at second 63 is cut short.
    assert!(ended.report().targets.iter().all(|target| target.restarts == 0));
    assert!(ended.took <= stop_at + Duration::from_secs(2), "{:?}", ended.took);
}

#[test]
fn a_target_that_is_out_holds_neither_room_nor_job() {
    // A pool of one batch, and a pause of a minute and more: the other targets continue meanwhile.
    let world = narrow();
    let out = Breakage { until: Some(2), bad_restarts: 7, ..broken(2, Wrong::Lose) };
    let targets = vec![out, Breakage::default()];
    let world = World { targets, max_restarts: 99, ..world };
    let ended = world.clone().run();
    assert_all_trained(&world, &ended, 3);
    let healthy = World { targets: vec![Breakage::default(); 2], ..world }.run().took;
    assert!(ended.took < healthy + Duration::from_secs(10), "{:?} {healthy:?}", ended.took);
}

#[test]
fn nothing_to_train_is_told() {
    let ended = World { lengths: vec![], ..World::default() }.run();
    assert!(ended.fault().message.contains("there is no sample to plan"), "{}", ended.fault());
}

#[test]
fn a_report_tells_a_plan_that_ended_from_one_that_was_stopped() {
    let world = World { epochs: 2, ..World::default() };
    let whole = world.clone().run();
    assert!(whole.report().jobs.plan_ended);
    // Before the first job: nothing is in flight, and yet nothing is finished.
    for stop_at in [Duration::ZERO, whole.took / 2] {
        let ended = World { stop_at: Some(stop_at), ..world.clone() }.run();
        assert!(!ended.report().jobs.plan_ended, "stopped at {stop_at:?}");
    }
    let limited = World { max_steps: 2, ..world }.run();
    assert!(!limited.report().jobs.plan_ended);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// Any numbers of workers with any queue: every job is trained once, and nothing waits forever.
    #[test]
    fn no_shape_of_a_node_hangs(
        samples in 1_usize..40, targets in 1_usize..5, drafters in 1_usize..7, accumulation in 1_usize..40,
        queue_jobs in 1_usize..4, pad_ahead in 0_usize..4, prefetch in 0_usize..20, max_batches in 1_usize..4,
        epoch_barrier: bool, checkpoint_every in 0_u64..3,
    ) {
        let mut world = World {
            accumulation, epoch_barrier, queue_jobs, pad_ahead, prefetch, checkpoint_every, epochs: 3, ..World::default()
        };
        world.lengths.truncate(samples);
        world.targets.resize(targets, Breakage::default());
        world.drafters.resize(drafters, Breakage::default());
        world.pool = Settings { max_batches, min_ready: 1 + max_batches / 2, ..world.pool };
        assert_all_trained(&world, &world.clone().run(), 3);
    }

    /// A stop at any moment is orderly, and a resumed run trains the rest, each job once.
    #[test]
    fn a_stop_at_any_moment_loses_nothing(
        drafters in 1_usize..5, accumulation in 1_usize..5, queue_jobs in 1_usize..4, epoch_barrier: bool,
        prefetch in 0_usize..4, checkpoint_every in 0_u64..3, part in 0_u32..1000,
    ) {
        let mut world = World { accumulation, epoch_barrier, queue_jobs, prefetch, checkpoint_every, epochs: 2, ..World::default() };
        world.drafters.resize(drafters, Breakage::default());
        let took = world.clone().run().took;
        let first = World { stop_at: Some(took * part / 1000), ..world.clone() }.run();
        let steps = first.records.len() as u64;
        prop_assert_eq!(first.ledger().checkpoints.last().map_or(0, |(step, _)| *step), steps);
        let second = world.clone().run_with(first.result.unwrap().ledger.unwrap(), steps);
        assert_all_trained(&world, &second, 2);
    }
}
