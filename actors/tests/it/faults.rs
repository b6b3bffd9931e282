//! Faults on paused time: the first one is reported, nothing hangs (S1), and nothing is lost silently.

use crate::{
    pipeline::assert_all_trained,
    world::{Breakage, Outcomes, World, Wrong},
};
use draftmill_actors::{
    messages::types::Outcome,
    runtime::{causes::Cause, fault::FailAtPoll},
    simulated::CostModel,
};
use std::time::Duration;

pub fn broken(every: u64, wrong: Wrong) -> Breakage {
    Breakage { every: Some((every, wrong)), ..Breakage::default() }
}

/// Returns a healthy node with one broken target (of three) or one broken drafter (of two).
pub fn with_target(b: Breakage) -> World {
    World { targets: vec![b, Breakage::default(), Breakage::default()], ..World::default() }
}

pub fn with_drafter(b: Breakage) -> World {
    World { drafters: vec![b, Breakage::default()], ..World::default() }
}

fn skipped(ended: &Outcomes) -> Vec<(String, u32)> {
    let skipped = ended.outcomes().values().filter_map(|o| match o {
        Outcome::Skipped { reason, attempts } => Some((reason.clone(), *attempts)),
        Outcome::Trained { .. } => None,
    });
    skipped.collect()
}

#[test]
fn a_failed_job_is_tried_again_and_trained() {
    // speculators#994: NaN in one extraction of fifty; SpecForge#656 (c7fc438e): a capture shorter than the prompt.
    for wrong in [Wrong::Fail, Wrong::Nan, Wrong::Short] {
        let ended = with_target(broken(5, wrong)).run();
        let all: usize = ended.ledger().plans.iter().map(|p| p.jobs.len()).sum();
        assert_eq!(ended.outcomes().len(), all);
        assert_eq!(skipped(&ended), [], "every job found a target that did it");
    }
}

#[test]
fn speculators_994_a_job_that_never_works_is_skipped_with_its_reason() {
    let every_target = vec![broken(3, Wrong::Nan); 2];
    let ended = World { targets: every_target, max_attempts: 1, max_skip_fraction: 1.0, ..World::default() }.run();
    let skipped = skipped(&ended);
    assert!(!skipped.is_empty());
    for (reason, attempts) in &skipped {
        assert!(reason.contains("NaN or infinite"), "{reason}");
        assert_eq!(*attempts, 1);
    }
    assert_eq!(ended.report().jobs.skipped as usize, skipped.len());
}

#[test]
fn speculators_967_a_target_that_only_fails_stops_the_run() {
    let ended = World { targets: vec![broken(1, Wrong::Nan)], max_attempts: 100, ..World::default() }.run();
    assert_eq!(ended.fault().actor, "target 0");
    assert!(ended.fault().message.contains("5 jobs failed in a row"), "{}", ended.fault());
}

#[test]
fn too_many_skips_stop_the_run_and_name_the_setting() {
    let targets = vec![broken(3, Wrong::Fail); 2];
    let ended = World { targets, max_attempts: 1, max_skip_fraction: 0.05, ..World::default() }.run();
    assert_eq!(ended.fault().actor, "planner");
    assert!(ended.fault().message.contains("dispatch.max_skip_fraction = 0.05"), "{}", ended.fault());
    assert!(ended.fault().message.contains("out of luck"), "{}", ended.fault());
}

#[test]
fn trl_7176_a_target_that_panics_or_is_lost_is_restarted_and_serves_again() {
    for wrong in [Wrong::Panic, Wrong::Lose] {
        for n in [1, 2, 7] {
            let world = with_target(Breakage { until: Some(2 * n), bad_restarts: 1, ..broken(n, wrong) });
            let ended = world.clone().run();
            assert_all_trained(&world, &ended, 1);
            let target = &ended.report().targets[0];
            assert_eq!(target.restarts, 2, "it fell twice");
            assert!(target.jobs > 0 && target.gone.is_none(), "it was re-admitted");
            let out = target.totals.waits.iter().find(|(cause, _)| *cause == Cause::Down).unwrap().1;
            // One second for the failed restart, two for the next, and one for the second failure.
            let doubled = if n == 1 { 1 + 2 + 4 } else { 1 + 2 + 1 };
            assert_eq!(out, Duration::from_secs(doubled), "pauses grow until a job went well ({n})");
        }
    }
}

#[test]
fn a_target_on_probation_is_taken_out_by_its_first_failure() {
    // The probe succeeds, and yet every job fails: five, and then one after each restart.
    let world = with_target(broken(1, Wrong::Nan));
    let ended = World { max_attempts: 100, ..world.clone() }.run();
    assert_all_trained(&world, &ended, 1);
    let target = &ended.report().targets[0];
    assert_eq!((target.restarts, target.jobs), (u64::from(world.max_restarts), 0));
    assert!(target.gone.as_ref().unwrap().contains("5 jobs failed in a row"), "{:?}", target.gone);
}

#[test]
fn the_run_goes_on_without_a_target_that_is_gone_for_good() {
    let ended = with_target(Breakage { bad_restarts: 99, ..broken(3, Wrong::Lose) }).run();
    assert_all_trained(&World::default(), &ended, 1);
    let target = &ended.report().targets[0];
    assert_eq!(target.jobs, 2);
    assert!(target.gone.as_ref().unwrap().contains("fell off the bus"), "the first cause: {:?}", target.gone);
}

#[test]
fn speculators_969_all_targets_gone_stop_the_run_with_the_first_cause() {
    let bad = |n, wrong| Breakage { bad_restarts: 99, ..broken(n, wrong) };
    let world =
        World { targets: vec![bad(5, Wrong::Panic), bad(2, Wrong::Lose), bad(4, Wrong::Panic)], ..World::default() };
    let ended = world.run();
    assert_eq!(ended.fault().actor, "target 1");
    assert!(ended.fault().message.contains("fell off the bus"), "{}", ended.fault());
    assert!(ended.fault().message.contains("3 restarts failed"), "{}", ended.fault());
    assert!(ended.took < Duration::from_secs(60));
}

#[test]
fn specforge_656_a_panic_of_a_drafter_ends_everybody_with_that_panic() {
    for n in [1, 2, 7] {
        let drafter = with_drafter(broken(n, Wrong::Panic)).run();
        assert_eq!(drafter.fault().actor, "drafter 0");
        assert!(drafter.fault().message.contains("on purpose"), "{}", drafter.fault());
        assert!(drafter.fault().root);
    }
}

#[test]
fn ray_41973_a_lost_drafter_ends_the_run_within_the_grace_period() {
    let healthy = World::default().run().took;
    let ended = with_drafter(broken(2, Wrong::Lose)).run();
    assert!(ended.fault().message.contains("fell off the bus"), "{}", ended.fault());
    assert!(ended.took < healthy + Duration::from_secs(10));
}

/// Returns a node whose forwards take seconds, so that stragglers can be detected.
pub fn long_forwards() -> World {
    let costs = CostModel { seconds_per_token: 0.003, seconds_per_micro_batch: 0.1, ..World::default().costs };
    World { costs, ..World::default() }
}

#[test]
fn a_target_that_hangs_keeps_nobody_from_finishing() {
    for at in [10, 25] {
        let hang = Breakage { until: Some(at), ..broken(at, Wrong::Hang) };
        let world = World { targets: vec![hang, Breakage::default(), Breakage::default()], ..long_forwards() };
        let ended = world.clone().run();
        assert_all_trained(&world, &ended, 1);
        assert_eq!(ended.report().targets[0].jobs, 0, "it never reported");
        let healthy = long_forwards().run().took;
        assert!(ended.took > healthy && ended.took < 2 * healthy + Duration::from_secs(20), "{:?}", ended.took);
    }
}

#[test]
fn a_hanging_target_without_offers_holds_the_run_until_it_is_stopped() {
    let hang = Breakage { until: Some(10), ..broken(10, Wrong::Hang) };
    let hour = Duration::from_secs(3600);
    let world = World {
        targets: vec![hang, Breakage::default(), Breakage::default()],
        offer_stragglers: false,
        stop_at: Some(hour),
        ..long_forwards()
    };
    let ended = world.run();
    let report = ended.report();
    assert!(ended.took >= hour && ended.took <= hour + Duration::from_secs(10), "{:?}", ended.took);
    assert!(!ended.ledger().checkpoints.is_empty(), "a stop is orderly all the same");
    assert!(report.jobs.unfinished > 0, "its job stays open");
    assert_eq!(report.jobs.trained + report.jobs.unfinished, report.jobs.planned);
}

/// S1, the fault matrix: any actor fails at any poll, and the run ends at once with that actor's name.
#[test]
fn nobody_hangs_when_an_actor_dies_at_any_wait() {
    let world =
        World { lengths: World::default().lengths[..120].to_vec(), checkpoint_every: 2, epochs: 2, ..World::default() };
    let world = World { epoch_barrier: true, ..world };
    let healthy = world.clone().run().took;
    for actor in ["planner", "dispatcher", "pool", "trainer", "target 0", "target 2", "drafter 0", "drafter 1"] {
        let mut failed = 0;
        // Every pending poll of its life, the rarer ones at its end included.
        for nth in (1..60).chain((60..).step_by(7)) {
            let fail_at_poll = Some(FailAtPoll { actor: actor.into(), nth });
            let ended = World { fail_at_poll, ..world.clone() }.run();
            assert!(ended.took <= healthy + Duration::from_secs(10), "{actor} at wait {nth}: {:?}", ended.took);
            if ended.result.is_ok() {
                assert_all_trained(&world, &ended, 2);
                break;
            }
            assert_eq!(ended.fault().actor, actor, "at wait {nth}: {}", ended.fault());
            assert!(ended.fault().root && ended.fault().message.contains("failed at poll"), "{}", ended.fault());
            failed += 1;
        }
        assert!(failed > 20, "{actor} was polled {failed} times");
    }
}

#[test]
fn a_job_larger_than_the_pool_is_skipped_with_the_numbers() {
    let mut world = World { max_skip_fraction: 1.0, max_failures_in_a_row: 1000, ..World::default() };
    world.pool.max_bytes = 20_000;
    world.pool.min_ready = 1;
    let ended = world.run();
    let reasons = skipped(&ended);
    assert!(reasons.iter().any(|(r, _)| r.contains("pool.max_bytes = 20000")), "{reasons:?}");
    assert!(ended.report().pool.peak_bytes <= 20_000);
}

#[test]
fn an_abort_ends_everybody_even_when_an_engine_hangs() {
    let world = World { abort_at: Some(Duration::from_secs(5)), ..with_drafter(broken(1, Wrong::Hang)) };
    let ended = world.run();
    assert!(!ended.fault().root);
    assert!(ended.took <= Duration::from_secs(5 + 10));
}
