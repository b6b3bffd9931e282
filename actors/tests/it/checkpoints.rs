//! Checkpoints on paused time: training continues while one is written, one at a time; a failure costs that one alone.

use crate::{
    pipeline::assert_all_trained,
    world::{Outcomes, World},
};
use std::time::Duration;

fn steps(ended: &Outcomes) -> Vec<u64> {
    ended.ledger().checkpoints.iter().map(|(step, _)| *step).collect()
}

#[test]
fn training_does_not_wait_for_the_disk() {
    let world = World { epochs: 2, ..World::default() };
    let plain = world.clone().run();
    let last = plain.records.len() as u64;
    // Each is written in a third of the run: only the end waits.
    let third = plain.took / 3;
    let ended = World { checkpoint_every: 1, checkpoint_takes: third, ..world.clone() }.run();
    assert_all_trained(&world, &ended, 2);
    let trained = |o: &Outcomes| o.records.last().unwrap().seconds;
    assert_eq!(trained(&ended), trained(&plain), "no step was later than without checkpoints");
    assert!(ended.took <= plain.took + 2 * third, "the end waits for the one on its way and for the last one");
    let written = steps(&ended);
    assert!(written.len() <= 5, "one at a time: {written:?}");
    assert_eq!((written[0], written.last()), (1, Some(&last)));
    assert!(written.windows(2).all(|w| w[0] < w[1]));
}

#[test]
fn what_is_due_while_another_is_written_comes_right_after_it() {
    let ended =
        World { checkpoint_every: 4, checkpoint_takes: Duration::from_secs(7), epochs: 3, ..World::default() }.run();
    let written = steps(&ended);
    assert!(written.len() > 4, "{written:?}");
    // All but the last, which the end writes.
    for pair in written[..written.len() - 1].windows(2) {
        let done_at = ended.records[pair[0] as usize - 1].seconds + 7.0;
        let by_then = ended.records.iter().filter(|r| r.seconds < done_at).count() as u64;
        let due = (pair[0] / 4 + 1) * 4;
        // One more if that moment falls into an update.
        let next = due.max(by_then);
        assert!(pair[1] == next || pair[1] == by_then + 1, "{} after {}, not {next}", pair[1], pair[0]);
    }
}

#[test]
fn a_stop_right_after_a_save_began_still_finishes_it() {
    let world = World { checkpoint_every: 3, checkpoint_takes: Duration::from_secs(100), ..World::default() };
    let third = world.clone().run().records[2].seconds;
    let stop_at = Some(Duration::from_secs_f64(third) + Duration::from_millis(1));
    let ended = World { stop_at, ..world.clone() }.run();
    assert_eq!(steps(&ended), [3]);
    // Nothing before the checkpoint is lost either.
    let steps = ended.records.len() as u64;
    let second = world.clone().run_with(ended.result.unwrap().ledger.unwrap(), steps);
    assert_all_trained(&world, &second, 1);
}

#[test]
fn a_full_disk_costs_a_checkpoint_and_not_the_run() {
    let world = World { checkpoint_every: 3, bad_checkpoints: vec![3, 9], ..World::default() };
    let ended = world.clone().run();
    assert_all_trained(&world, &ended, 1);
    let last = ended.records.len() as u64;
    let wanted: Vec<u64> = (1..=last).filter(|s| s % 3 == 0 && ![3, 9].contains(s) || *s == last).collect();
    assert_eq!(steps(&ended), wanted);
}

#[test]
fn a_last_checkpoint_that_cannot_be_written_is_a_fault_with_its_reason() {
    let last = World::default().run().records.len() as u64;
    let ended = World { bad_checkpoints: vec![last], ..World::default() }.run();
    assert_eq!(ended.fault().actor, "trainer");
    let want = format!("the checkpoint of step {last} could not be written: no space left on device");
    assert!(ended.fault().message.contains(&want), "{}", ended.fault());
    // The checkpoint due at the last step failed; the end retries it.
    let again = World { bad_checkpoints: vec![last], checkpoint_every: last, ..World::default() }.run();
    assert_eq!(steps(&again), [last]);
}
