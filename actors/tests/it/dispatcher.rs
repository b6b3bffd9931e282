//! Properties of the dispatcher's `State`: D1, D2, order, attempts, and the order to drain.

use draftmill_actors::{
    dispatcher::{Action, Failure, Policy, Return, Settings, State},
    job::{Job, Receipt},
    types::{JobId, JobSpec, PaddedBatch},
};
use proptest::prelude::*;
use std::sync::Arc;

fn job(index: u32) -> Job {
    let id = JobId { epoch: 0, index };
    Job {
        spec: JobSpec { id, bucket: 0, samples: vec![index], tokens: 1, width: 1 },
        attempts: 0,
        receipt: Receipt::detached(id),
    }
}

fn settings() -> Settings {
    Settings { queue_jobs: 4, pad_ahead: 2, max_attempts: 2, policy: Policy::Pull }
}

#[derive(Clone, Debug)]
enum Event {
    Job,
    Pull,
    Padded(usize, bool),
    Done(usize),
    Fail(usize),
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        3 => Just(Event::Job),
        3 => Just(Event::Pull),
        4 => (any::<usize>(), prop::bool::weighted(0.9)).prop_map(|(i, ok)| Event::Padded(i, ok)),
        2 => any::<usize>().prop_map(Event::Done),
        1 => any::<usize>().prop_map(Event::Fail),
    ]
}

#[derive(Default)]
struct Outside {
    next: u32,
    pulls: u64,
    waiting: usize,
    padding: Vec<JobId>,
    leased: Vec<(Job, Arc<PaddedBatch>)>,
    done: Vec<JobId>,
    drained: usize,
    refused: usize,
}

impl Outside {
    fn apply(&mut self, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Pad(spec) => {
                    assert!(!self.padding.contains(&spec.id), "padded twice at once");
                    self.padding.push(spec.id);
                }
                Action::Lease { job, batch, .. } => {
                    assert!(self.leased.iter().all(|(j, _)| j.id() != job.id()), "D1: {} leased twice", job.id());
                    assert!(!self.done.contains(&job.id()), "D1: {} leased after it was done", job.id());
                    self.waiting -= 1;
                    self.leased.push((job, batch));
                }
                Action::NoMore { .. } => {
                    self.waiting -= 1;
                    self.refused += 1;
                }
                Action::Drain { .. } => {
                    assert!(self.leased.is_empty() && self.padding.is_empty(), "L3: told to drain too early");
                    self.drained += 1;
                }
            }
        }
    }

    fn step(&mut self, state: &mut State, event: Event) {
        let actions = match event {
            Event::Job if state.has_room() => {
                self.next += 1;
                state.on_job(job(self.next))
            }
            Event::Pull => {
                self.pulls += 1;
                self.waiting += 1;
                state.on_pull(self.pulls, 0)
            }
            Event::Padded(i, ok) if !self.padding.is_empty() => {
                let id = self.padding.swap_remove(i % self.padding.len());
                state.on_padded(id, if ok { Ok(PaddedBatch::default()) } else { Err("no such sample".into()) })
            }
            Event::Done(i) if !self.leased.is_empty() => {
                let (job, _) = self.leased.swap_remove(i % self.leased.len());
                self.done.push(job.id());
                state.on_return(Return::Done { job: job.id() })
            }
            Event::Fail(i) if !self.leased.is_empty() => {
                let (job, batch) = self.leased.swap_remove(i % self.leased.len());
                state.on_return(Return::Failed { job, batch, failure: Failure::Failed, message: "broken".into() })
            }
            _ => return,
        };
        self.apply(actions);
        let (queued, padded) = state.depth();
        assert!(
            padded == 0 || self.waiting == 0,
            "D2: {} pulls wait while {padded} padded jobs are ready",
            self.waiting
        );
        assert!(queued <= settings().queue_jobs + self.leased.len() + self.done.len() + 64);
    }
}

proptest! {
    #[test]
    fn every_job_ends_and_the_pool_is_told_to_drain_once(events in prop::collection::vec(event(), 0..200)) {
        let mut state = State::new(settings());
        let mut outside = Outside::default();
        for e in events {
            outside.step(&mut state, e);
        }
        prop_assert_eq!(outside.drained, 0);
        let actions = state.on_end();
        outside.apply(actions);
        for _ in 0..10_000 {
            if outside.drained > 0 {
                break;
            }
            if outside.waiting == 0 && outside.leased.is_empty() {
                outside.step(&mut state, Event::Pull);
            }
            outside.step(&mut state, Event::Padded(0, true));
            outside.step(&mut state, Event::Done(0));
        }
        prop_assert_eq!(outside.drained, 1);
        prop_assert_eq!(state.depth(), (0, 0));
        prop_assert_eq!(outside.waiting, 0, "pulls are answered at the end");
        let refused = outside.refused;
        outside.step(&mut state, Event::Pull);
        prop_assert_eq!(outside.refused, refused + 1, "a pull after the end is answered at once");
    }
}

#[test]
fn a_failed_job_comes_back_first_and_is_given_up_after_max_attempts() {
    let mut state = State::new(settings());
    let mut outside = Outside::default();
    for e in [Event::Job, Event::Job, Event::Pull, Event::Padded(0, true)] {
        outside.step(&mut state, e);
    }
    assert_eq!(outside.leased[0].0.id().index, 1);
    outside.step(&mut state, Event::Fail(0));
    outside.step(&mut state, Event::Pull);
    assert_eq!((outside.leased[0].0.id().index, outside.leased[0].0.attempts), (1, 1));
    outside.step(&mut state, Event::Fail(0));
    outside.step(&mut state, Event::Pull);
    outside.step(&mut state, Event::Padded(0, true));
    assert_eq!(outside.leased[0].0.id().index, 2, "job 1 was given up");
}

#[test]
fn jobs_leave_in_plan_order_when_padding_keeps_up() {
    let mut state = State::new(settings());
    let mut outside = Outside::default();
    let mut order = Vec::new();
    for _ in 0..20 {
        outside.step(&mut state, Event::Job);
        outside.step(&mut state, Event::Padded(0, true));
        outside.step(&mut state, Event::Pull);
        order.extend(outside.leased.iter().map(|(j, _)| j.id().index));
        outside.step(&mut state, Event::Done(0));
    }
    assert_eq!(order, (1..=20).collect::<Vec<_>>());
}

#[test]
fn molt_85_an_empty_plan_ends_at_once() {
    let mut state = State::new(settings());
    let mut outside = Outside::default();
    outside.step(&mut state, Event::Pull);
    outside.apply(state.on_end());
    assert_eq!((outside.drained, outside.refused), (1, 1));
}
