//! Comparisons of the drafters' weights with the published ones: their schedule, and their results.

use crate::{
    counted::Counted,
    world::{Breakage, Outcomes, World},
};
use draftmill_actors::runtime::metrics as m;

/// Returns the comparisons without and with a difference.
fn compared(world: World) -> (Outcomes, f64, f64) {
    let (counted, ended) = Counted::during(|| world.run());
    ended.report();
    let last = |result| counted.values(m::REPLICA_CHECKS, result).last().copied().unwrap_or(0.0);
    (ended, last(" result=same"), last(" result=different"))
}

#[test]
fn every_replica_is_compared_every_so_many_steps_where_there_are_several() {
    let drafters = |count| vec![Breakage::default(); count];
    for (count, every, checks) in [(2, 3, 6), (3, 5, 6), (2, 0, 0), (1, 1, 0), (2, 1000, 0)] {
        let world = World { drafters: drafters(count), replica_check_every: every, max_steps: 10, ..World::default() };
        let (ended, same, different) = compared(world);
        assert_eq!(ended.report().trainer.step, 10);
        assert_eq!((same, different), (f64::from(checks), 0.0), "{count} drafters, every {every}");
    }
}

/// A copy that writes zeros without an error (pytorch#84803) is found at the step that was trained with it, and the
/// next copy repairs it.
#[test]
fn a_corrupt_replica_is_counted_and_gets_the_weights_again() {
    let garbled = Breakage { garbles: Some(4), ..Breakage::default() };
    let world = World {
        drafters: vec![Breakage::default(), garbled],
        replica_check_every: 1,
        max_steps: 10,
        ..World::default()
    };
    let (_, same, different) = compared(world);
    // Copies 4 and 8 of ten are corrupt, and steps 5 and 9 are trained with them.
    assert_eq!((same, different), (18.0, 2.0));
}
