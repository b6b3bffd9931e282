//! Stragglers in the dispatcher's `State`: their detection, the offers of their jobs, and late results.

use crate::{
    counted::Counted,
    dispatcher::{Event, Outside, settings},
};
use draftmill_actors::{dispatcher::Settings, runtime::metrics as m};
use std::time::Duration;

/// Runs three forwards of a second each, so that the forward-time estimate is known.
fn warmed_up(settings: Settings) -> Outside {
    let mut outside = Outside::new(settings);
    for _ in 0..3 {
        for e in [Event::Job, Event::Padded(0, true), Event::Pull(0), Event::Start(0), Event::Pass(1), Event::Finish(0)]
        {
            outside.step(e);
        }
    }
    assert_eq!(outside.done.len(), 3);
    outside
}

#[test]
fn a_stragglers_job_is_offered_to_another_target_and_the_first_result_wins() {
    for straggler_wins in [false, true] {
        let mut outside = warmed_up(settings());
        for e in [Event::Job, Event::Padded(0, true), Event::Pull(0), Event::Start(0), Event::Pull(1), Event::Pass(3)] {
            outside.step(e);
        }
        assert_eq!(outside.held.len(), 1, "three seconds are no straggler at four times one second");
        outside.step(Event::Pass(1));
        assert_eq!(outside.held.iter().map(|h| h.target).collect::<Vec<_>>(), [0, 1]);
        outside.step(Event::Pass(100));
        assert_eq!(outside.offered, 1, "once, and its target is not a straggler before it started");
        outside.step(Event::Finish(usize::from(!straggler_wins)));
        assert_eq!((outside.done.len(), outside.late), (4, 0));
        outside.finish();
        assert_eq!(outside.drained, [1], "the end waits for the job, not for the forward");
        outside.step(Event::Finish(0));
        assert_eq!((outside.done.len(), outside.late), (4, 1), "the other one is dropped");
    }
}

#[test]
fn nothing_is_left_to_a_straggler_alone() {
    let mut outside = warmed_up(Settings { max_attempts: 3, ..settings() });
    for e in [Event::Job, Event::Padded(0, true), Event::Pull(0), Event::Start(0), Event::Pull(1), Event::Pass(9)] {
        outside.step(e);
    }
    // Target 0 hangs. Each target that gets its job fails at it, until the job is skipped.
    for attempt in 1..=3 {
        assert_eq!(outside.held.len(), 2, "attempt {attempt}");
        outside.step(Event::Fail(1));
        outside.step(Event::Pull(1 + attempt % 2));
    }
    assert_eq!(outside.held.len(), 1);
    let actions = outside.state.on_end();
    outside.apply(actions);
    assert_eq!(outside.drained, [1], "the run ends without it");
}

#[test]
fn a_straggler_is_only_reported_where_its_job_is_not_to_be_offered() {
    let mut outside = warmed_up(Settings { offer_stragglers: false, ..settings() });
    for e in [Event::Job, Event::Padded(0, true), Event::Pull(0), Event::Start(0), Event::Pull(1), Event::Pass(3)] {
        outside.step(e);
    }
    let due = outside.state.next_due().unwrap();
    assert_eq!(due, outside.now + Duration::from_secs(1));
    outside.step(Event::Pass(1));
    assert_eq!((outside.held.len(), outside.state.next_due()), (1, None));
}

#[test]
fn a_stragglers_job_prefers_a_target_that_has_not_failed_at_it() {
    let straggles = |more: &[Event]| {
        let mut outside = warmed_up(Settings { max_attempts: 9, ..settings() });
        for e in [Event::Job, Event::Padded(0, true), Event::Pull(0), Event::Start(0), Event::Pull(1), Event::Pass(9)] {
            outside.step(e);
        }
        for e in more {
            outside.step(e.clone());
        }
        // Target 1 got the job that target 0 does not finish, and fails at it.
        outside.step(Event::Fail(1));
        outside
    };
    // Target 1 takes the next job in its place, and target 2 the straggler's.
    let mut outside = straggles(&[Event::Job, Event::Padded(0, true)]);
    outside.step(Event::Pull(1));
    outside.step(Event::Pull(2));
    let held = |outside: &Outside| outside.held.iter().map(|h| (h.target, h.job.index)).collect::<Vec<_>>();
    assert_eq!(held(&outside), [(0, 4), (1, 5), (2, 4)]);
    // With nothing else to do it tries again: it must not wait while there is work.
    let mut outside = straggles(&[]);
    outside.step(Event::Pull(1));
    assert_eq!(held(&outside), [(0, 4), (1, 4)]);
}

#[test]
fn a_hanging_first_forward_becomes_a_straggler_with_an_estimate() {
    let mut outside = Outside::new(settings());
    for e in [Event::Job, Event::Padded(0, true), Event::Pull(0), Event::Start(0)] {
        outside.step(e);
    }
    for _ in 0..3 {
        assert_eq!(outside.state.next_due(), None);
        for e in [Event::Job, Event::Padded(0, true), Event::Pull(1), Event::Start(1), Event::Pass(1), Event::Finish(1)]
        {
            outside.step(e);
        }
    }
    outside.step(Event::Pull(1));
    outside.step(Event::Pass(1));
    assert_eq!(outside.held.iter().map(|h| (h.target, h.job.index)).collect::<Vec<_>>(), [(0, 1), (1, 1)]);
}

#[test]
fn stragglers_and_late_results_are_counted_once_each_and_none_at_a_stop() {
    for stop in [false, true] {
        let (counted, ()) = Counted::during(|| {
            let mut outside = warmed_up(settings());
            for e in [Event::Job, Event::Padded(0, true), Event::Pull(0), Event::Start(0), Event::Pull(1)] {
                outside.step(e);
            }
            outside.step(Event::Pass(4));
            outside.step(Event::Pass(100));
            outside.step(Event::Finish(1));
            if stop {
                let actions = outside.state.on_stop();
                outside.apply(actions);
            }
            outside.step(Event::Finish(0));
        });
        // A result after a stop is not late: no other target was faster.
        let late = if stop { 0.0 } else { 1.0 };
        assert_eq!((counted.last(m::STRAGGLERS, ""), counted.last(m::LATE_RESULTS, "")), (1.0, late));
    }
}

#[test]
fn an_offer_that_finds_nobody_is_made_again() {
    let mut outside = warmed_up(settings());
    for e in [Event::Job, Event::Padded(0, true), Event::Pull(0), Event::Start(0), Event::Pass(9)] {
        outside.step(e);
    }
    outside.step(Event::LostPull(1));
    assert_eq!(outside.held.len(), 1);
    outside.step(Event::Pull(2));
    assert_eq!(outside.held.iter().map(|h| (h.target, h.job.index)).collect::<Vec<_>>(), [(0, 4), (2, 4)]);
}
