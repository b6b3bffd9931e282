//! Faults on paused time: the first one is reported, nobody hangs (S1), and nothing is lost silently.

use crate::world::{Breakage, Outcomes, World, Wrong};
use draftmill_actors::types::Outcome;
use std::time::Duration;

fn broken(every: u64, wrong: Wrong) -> Breakage {
    Breakage { every: Some((every, wrong)), ..Breakage::default() }
}

/// A healthy node with one broken target (of three) or one broken drafter (of two).
fn with_target(b: Breakage) -> World {
    World { targets: vec![b, Breakage::default(), Breakage::default()], ..World::default() }
}

fn with_drafter(b: Breakage) -> World {
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
fn specforge_656_a_panic_anywhere_ends_everybody_with_that_panic() {
    for n in [1, 2, 7] {
        let target = with_target(broken(n, Wrong::Panic)).run();
        assert_eq!(target.fault().actor, "target 0");
        assert!(target.fault().message.contains("on purpose"), "{}", target.fault());
        let drafter = with_drafter(broken(n, Wrong::Panic)).run();
        assert_eq!(drafter.fault().actor, "drafter 0");
        assert!(drafter.fault().root);
    }
}

#[test]
fn ray_41973_a_lost_engine_ends_the_run_within_the_grace_period() {
    let healthy = World::default().run().took;
    for ended in [with_target(broken(2, Wrong::Lose)).run(), with_drafter(broken(2, Wrong::Lose)).run()] {
        assert!(ended.fault().message.contains("fell off the bus"), "{}", ended.fault());
        assert!(ended.took < healthy + Duration::from_secs(10));
    }
}

#[test]
fn a_job_larger_than_the_pool_is_skipped_with_the_arithmetic_and_nobody_waits() {
    let mut world = World { max_skip_fraction: 1.0, max_failures_in_a_row: 1000, ..World::default() };
    world.pool.max_bytes = 20_000;
    world.pool.min_ready = 1;
    let ended = world.run();
    let reasons = skipped(&ended);
    assert!(reasons.iter().any(|(r, _)| r.contains("pool.max_bytes = 20000")), "{reasons:?}");
    assert!(ended.report().pool.bytes <= 20_000);
}

#[test]
fn an_abort_ends_everybody_even_when_an_engine_hangs() {
    let world = World { abort_at: Some(Duration::from_secs(5)), ..with_drafter(broken(1, Wrong::Hang)) };
    let ended = world.run();
    assert!(!ended.fault().root);
    assert!(ended.took <= Duration::from_secs(5 + 10));
}
