//! Draw policy `replay` in whole runs: the steps are those of the plan, on any node and with any interruption.

use crate::{
    pipeline::failing,
    world::{Breakage, Outcomes, World, Wrong},
};
use draftmill_actors::{
    messages::types::{JobId, Outcome},
    planner::ledger::MemoryLedger,
    pool::DrawPolicy,
};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

/// Returns the jobs of each step.
fn steps(outcomes: &Outcomes) -> BTreeMap<u64, BTreeSet<JobId>> {
    let mut steps = BTreeMap::<u64, BTreeSet<JobId>>::new();
    for (job, outcome) in outcomes.outcomes() {
        if let Outcome::Trained { step } = outcome {
            steps.entry(*step).or_default().insert(*job);
        }
    }
    steps
}

/// Returns a node with draw policy `replay` and 4 micro-batches per step.
fn replaying(targets: Vec<Breakage>, drafters: Vec<Breakage>) -> World {
    let accumulation = 4 / drafters.len();
    let mut world = World {
        targets,
        drafters,
        accumulation,
        epochs: 3,
        max_skip_fraction: 1.0,
        max_attempts: 1000,
        ..World::default()
    };
    // No engine is to blame for a job: after a kill all skipped jobs are open again, one directly after the other.
    world.max_failures_in_a_row = u32::MAX;
    world.pool.draw_policy = DrawPolicy::Replay;
    world
}

#[test]
fn replay_trains_the_same_steps_whatever_the_node() {
    let one = replaying(vec![Breakage::default()], vec![Breakage::default()]).run();
    let slow = Breakage { slowness: Some(7.0), ..Breakage::default() };
    let many =
        replaying(vec![slow.clone(), Breakage::default(), failing(4, Wrong::Nan)], vec![slow, failing(3, Wrong::Fail)]);
    let many = many.run();
    assert_eq!(steps(&one), steps(&many));
    // The order differs from the plan's: the jobs of a step are shuffled, and epochs follow each other without a gap.
    let plan_order: Vec<JobId> = one.ledger().plans.iter().flat_map(|p| p.jobs.iter().map(|j| j.id)).collect();
    let by_plan = plan_order.chunks(4).map(|jobs| jobs.iter().copied().collect::<BTreeSet<_>>());
    let same = steps(&one).into_values().zip(by_plan).filter(|(a, b)| a == b).count();
    assert!(same < 5, "{same} steps are those of the plan's order");
    assert!(one.records.iter().rev().skip(1).all(|r| r.micro_batches == 4), "T1, over the boundaries of epochs too");
}

/// Node, and the interruptions of its run.
#[derive(Clone, Debug)]
struct Case {
    /// Slowness and failure interval of each.
    targets: Vec<(f64, u64)>,
    drafters: Vec<(f64, u64)>,
    window: usize,
    poison: Option<u32>,
    indigestible: Option<u64>,
    barrier: bool,
    prefetch: usize,
    queue_jobs: usize,
    /// Moments of the stops, in thousandths of the run's duration.
    stops: Vec<u32>,
    killed: bool,
    close: bool,
}

/// Checks that the steps are those of a plain run.
fn replays(case: Case) -> Result<(), TestCaseError> {
    let Case { targets, drafters, window, poison, indigestible, barrier, prefetch, queue_jobs, stops, killed, close } =
        case;
    let broken = |&(slowness, every): &(f64, u64)| Breakage {
        slowness: Some(slowness),
        every: Some((every, Wrong::Fail)),
        mercy: Some(3),
        poison,
        indigestible,
        ..Breakage::default()
    };
    let healthy = Breakage { poison, indigestible, ..Breakage::default() };
    let mut plain = replaying(vec![healthy.clone()], vec![healthy]);
    // More than all engines together take from a job that can be trained.
    plain.max_attempts = 30;
    plain.epoch_barrier = barrier;
    plain.pool.replay_window = window;
    let mut node = World {
        targets: targets.iter().map(broken).collect(),
        drafters: drafters.iter().map(broken).collect(),
        accumulation: 4 / drafters.len(),
        prefetch,
        queue_jobs,
        checkpoint_every: 3,
        ..plain.clone()
    };
    // The smallest pool that the settings allow.
    node.pool.max_batches = window;
    node.pool.max_bytes = window as u64 * node.costs.bytes(1000);
    prop_assert_eq!(node.pool.deadlock(node.costs.bytes(1000)), None);
    let expected = plain.run();
    let took = node.clone().run().took;

    let (mut ledger, mut start) = (MemoryLedger::default(), 0);
    for part in stops {
        let at = Some(took * part / 1000);
        let (close_at, stop_at) = if close { (at, None) } else { (None, at) };
        let ended = World { close_at, stop_at, ..node.clone() }.run_with(ledger, start);
        ledger = ended.result.unwrap().ledger.unwrap();
        start = ledger.checkpoints.last().map_or(0, |(step, _)| *step);
        if killed {
            // Same as after a kill: back to an earlier checkpoint; jobs trained or skipped since are open again.
            ledger.checkpoints.pop();
            start = ledger.checkpoints.last().map_or(0, |(step, _)| *step);
            ledger.outcomes.retain(|_, o| matches!(o, Outcome::Trained { step } if *step <= start));
        }
    }
    let ended = node.run_with(ledger, start);
    let (seen, wanted) = (steps(&ended), steps(&expected));
    let other = wanted.iter().find(|(step, jobs)| seen.get(step) != Some(jobs));
    prop_assert!(seen.len() == wanted.len() && other.is_none(), "{} steps, {:?}", seen.len(), other);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    /// Random speeds, failures, numbers of workers, windows and stops: the sequence of steps is always that of a plain run.
    #[test]
    fn replay_is_a_function_of_the_plan(
        targets in prop::collection::vec((0.1_f64..20.0, 2_u64..9), 1..5),
        drafters in prop::sample::select(vec![1_usize, 2, 4]),
        speeds in prop::collection::vec((0.1_f64..20.0, 2_u64..9), 4),
        window in 1_usize..16, poison in prop::option::of(5_u32..40),
        indigestible in prop::option::of(5_u64..40), barrier: bool, prefetch in 0_usize..4, queue_jobs in 1_usize..9,
        stops in prop::collection::vec(0_u32..1000, 0..3), killed: bool, close: bool,
    ) {
        let drafters = speeds[..drafters].to_vec();
        replays(Case {
            targets, drafters, window, poison, indigestible, barrier, prefetch, queue_jobs, stops, killed, close,
        })?;
    }
}

/// A kill reopens every skipped job: more in a row than a target may fail elsewhere.
#[test]
fn replay_goes_on_where_all_that_comes_first_was_given_up_before() {
    let case = Case {
        targets: vec![(0.1, 2)],
        drafters: vec![(0.1, 2)],
        window: 1,
        poison: None,
        indigestible: Some(5),
        barrier: false,
        prefetch: 0,
        queue_jobs: 1,
        stops: vec![765],
        killed: true,
        close: true,
    };
    replays(case).unwrap();
}
