//! Properties of the dispatcher's `State`: D1, D2, L3, order, attempts, and the drain.

use crate::counted::Counted;
use draftmill_actors::{
    dispatcher::{
        Failure, LeaseId, Return, Settings,
        state::{Action, State},
    },
    messages::{
        job::{Job, Receipt},
        types::{JobId, JobSpec, PaddedBatch},
    },
    runtime::metrics as m,
};
use proptest::prelude::*;
use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};
use tokio::time::Instant;

fn job(index: u32) -> Job {
    let id = JobId { epoch: 0, index };
    Job {
        spec: JobSpec { id, bucket: 0, samples: vec![index], tokens: 1, width: 1 },
        attempts: 0,
        receipt: Receipt::detached(id),
    }
}

const TARGETS: usize = 3;

pub fn settings() -> Settings {
    Settings {
        queue_jobs: 4,
        pad_ahead: 2,
        max_attempts: 2,
        straggler_factor: 4.0,
        offer_stragglers: true,
        paused: false,
        paused_targets: Vec::new(),
    }
}

#[derive(Clone, Debug)]
pub enum Event {
    Job,
    Pull(usize),
    /// A pull whose target is gone when it is answered.
    LostPull(usize),
    Padded(usize, bool),
    Start(usize),
    Finish(usize),
    Fail(usize),
    Pass(u64),
    Reconfigure(Settings),
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        3 => Just(Event::Job),
        4 => (0..TARGETS).prop_map(Event::Pull),
        1 => (0..TARGETS).prop_map(Event::LostPull),
        4 => (any::<usize>(), prop::bool::weighted(0.9)).prop_map(|(i, ok)| Event::Padded(i, ok)),
        3 => any::<usize>().prop_map(Event::Start),
        3 => any::<usize>().prop_map(Event::Finish),
        1 => any::<usize>().prop_map(Event::Fail),
        2 => (0_u64..20).prop_map(Event::Pass),
        1 => changed().prop_map(Event::Reconfigure),
    ]
}

/// Longest queue of any settings.
const LONGEST: usize = 6;

fn changed() -> impl Strategy<Value = Settings> {
    let numbers = (1_usize..=LONGEST, 1_usize..5, 1_u32..4, prop::sample::select(vec![0.0, 1.0, 4.0]));
    let paused = (any::<bool>(), prop::bool::weighted(0.2), prop::collection::vec(0..TARGETS, 0..TARGETS));
    (numbers, paused).prop_map(|((queue_jobs, pad_ahead, max_attempts, straggler_factor), (offer, paused, targets))| {
        let changed = Settings { queue_jobs, pad_ahead, max_attempts, straggler_factor, ..settings() };
        Settings { offer_stragglers: offer, paused, paused_targets: targets, ..changed }
    })
}

pub struct Held {
    pub lease: LeaseId,
    pub job: JobId,
    pub target: usize,
    pub started: bool,
}

/// Model of the surroundings: the targets, and the fate of every job.
pub struct Outside {
    pub state: State,
    settings: Settings,
    /// Smallest limit that was ever in force.
    pub max_attempts: u32,
    pub now: Instant,
    pub next: u32,
    pub pulls: u64,
    /// Waiting pulls: the target, and true if it is gone when answered.
    pub waiting: BTreeMap<u64, (usize, bool)>,
    pub padding: Vec<JobId>,
    pub held: Vec<Held>,
    pub done: BTreeSet<JobId>,
    pub failures: BTreeMap<JobId, u32>,
    pub offered: usize,
    pub late: usize,
    pub drained: Vec<usize>,
    pub refused: usize,
}

impl Outside {
    pub fn new(settings: Settings) -> Self {
        Self {
            max_attempts: settings.max_attempts,
            state: State::new(settings.clone()),
            settings,
            now: Instant::now(),
            next: 0,
            pulls: 0,
            waiting: BTreeMap::new(),
            padding: Vec::new(),
            held: Vec::new(),
            done: BTreeSet::new(),
            failures: BTreeMap::new(),
            offered: 0,
            late: 0,
            drained: Vec::new(),
            refused: 0,
        }
    }

    pub fn apply(&mut self, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Pad(spec) => {
                    assert!(!self.padding.contains(&spec.id), "padded twice at once");
                    self.padding.push(spec.id);
                }
                Action::Lease { pull, lease, job, .. } => {
                    let (target, lost) = self.waiting.remove(&pull).unwrap();
                    assert!(self.serves(target), "a paused target got a job");
                    if lost {
                        let actions = self.state.on_return(Return::Unused { lease });
                        self.apply(actions);
                        continue;
                    }
                    assert!(!self.done.contains(&job), "D1: {job} leased after it was done");
                    let others = self.held.iter().filter(|h| h.job == job).count();
                    assert!(self.held.iter().all(|h| h.job != job || h.target != target), "both leases at one target");
                    self.offered += others;
                    self.held.push(Held { lease, job, target, started: false });
                }
                Action::NoMore { pull } => {
                    self.waiting.remove(&pull).unwrap();
                    self.refused += 1;
                }
                Action::Drain { late, .. } => {
                    let given_up = |job| self.failures.get(job).is_some_and(|n| *n >= self.max_attempts);
                    let wanted = self.held.iter().filter(|h| !self.done.contains(&h.job) && !given_up(&h.job)).count();
                    assert_eq!((wanted, self.padding.len()), (0, 0), "L3: told to drain too early");
                    assert_eq!(late, self.held.len());
                    self.drained.push(late);
                }
            }
        }
    }

    fn serves(&self, target: usize) -> bool {
        !self.settings.paused && !self.settings.paused_targets.contains(&target)
    }

    pub fn pull(&mut self, target: usize, lost: bool) {
        // A target waits for one job at a time, and not while it has one.
        let busy = self.held.iter().map(|h| h.target).chain(self.waiting.values().map(|(t, _)| *t));
        if busy.into_iter().any(|t| t == target) {
            return;
        }
        self.pulls += 1;
        self.waiting.insert(self.pulls, (target, lost));
        let actions = self.state.on_pull(self.pulls, target);
        self.apply(actions);
    }

    pub fn step(&mut self, event: Event) {
        match event {
            Event::Job if self.state.has_room() => {
                self.next += 1;
                let actions = self.state.on_job(job(self.next));
                self.apply(actions);
            }
            Event::Pull(target) => self.pull(target, false),
            Event::LostPull(target) => self.pull(target, true),
            Event::Padded(i, ok) if !self.padding.is_empty() => {
                let id = self.padding.swap_remove(i % self.padding.len());
                *self.failures.entry(id).or_default() += u32::from(!ok);
                let result = if ok { Ok(PaddedBatch::default()) } else { Err("no such sample".into()) };
                let actions = self.state.on_padded(id, result);
                self.apply(actions);
            }
            Event::Start(i) if !self.held.is_empty() => {
                let i = i % self.held.len();
                if !std::mem::replace(&mut self.held[i].started, true) {
                    self.state.on_started(self.held[i].lease, self.now);
                }
            }
            Event::Finish(i) if !self.held.is_empty() => {
                let Held { lease, job, .. } = self.held.swap_remove(i % self.held.len());
                let back = match self.state.on_claim(lease, self.now) {
                    Some(claimed) => {
                        assert_eq!(claimed.id(), job);
                        assert!(self.done.insert(job), "D1: {job} was claimed twice");
                        Return::Done { lease }
                    }
                    None => {
                        let given_up = self.failures.get(&job).is_some_and(|n| *n >= self.max_attempts);
                        assert!(self.done.contains(&job) || given_up, "a result was refused, and there is no other");
                        self.late += 1;
                        Return::Late { lease }
                    }
                };
                let actions = self.state.on_return(back);
                self.apply(actions);
            }
            Event::Fail(i) if !self.held.is_empty() => {
                let Held { lease, job, .. } = self.held.swap_remove(i % self.held.len());
                *self.failures.entry(job).or_default() += 1;
                let back = Return::Failed { lease, failure: Failure::Failed, message: "broken".into() };
                let actions = self.state.on_return(back);
                self.apply(actions);
            }
            Event::Pass(seconds) => {
                self.now += Duration::from_secs(seconds);
                if self.state.next_due().is_some_and(|due| due <= self.now) {
                    let actions = self.state.on_time(self.now);
                    self.apply(actions);
                    assert!(self.state.next_due().is_none_or(|due| due > self.now), "on_time would spin");
                }
            }
            Event::Reconfigure(settings) => {
                self.max_attempts = self.max_attempts.min(settings.max_attempts);
                self.settings = settings.clone();
                let actions = self.state.reconfigure(settings);
                self.apply(actions);
            }
            _ => {}
        }
        let (queued, padded) = self.state.depth();
        let waiting = self.waiting.values().filter(|(target, _)| self.serves(*target)).count();
        assert!(padded == 0 || waiting == 0, "D2: {waiting} pulls wait while {padded} padded jobs are ready");
        assert!(queued <= LONGEST.max(self.settings.queue_jobs) + TARGETS);
    }

    /// Lets the targets work until the pool drains.
    pub fn finish(&mut self) {
        let actions = self.state.on_end();
        self.apply(actions);
        for round in 0.. {
            assert!(round < 10_000, "the run hangs");
            if !self.drained.is_empty() {
                break;
            }
            self.pull(round % TARGETS, false);
            self.step(Event::Padded(0, true));
            self.step(Event::Finish(0));
        }
    }
}

proptest! {
    #[test]
    fn every_job_ends_and_the_pool_is_told_to_drain_once(events in prop::collection::vec(event(), 0..200)) {
        let mut outside = Outside::new(settings());
        for e in events {
            outside.step(e);
        }
        prop_assert!(outside.drained.is_empty());
        // A paused run waits until it is resumed.
        outside.step(Event::Reconfigure(settings()));
        outside.finish();
        prop_assert_eq!(outside.drained.len(), 1);
        prop_assert_eq!(outside.state.depth(), (0, 0));
        prop_assert_eq!(outside.waiting.len(), 0, "pulls are answered at the end");
        for index in 1..=outside.next {
            let id = JobId { epoch: 0, index };
            let failures = outside.failures.get(&id).copied().unwrap_or(0);
            prop_assert!(outside.done.contains(&id) || failures >= outside.max_attempts, "job {} is lost after {} failures", id, failures);
        }
        // Late results may still arrive.
        while !outside.held.is_empty() {
            outside.step(Event::Finish(0));
        }
        let refused = outside.refused;
        outside.step(Event::Pull(0));
        prop_assert_eq!(outside.refused, refused + 1, "a pull after the end is answered at once");
    }
}

#[test]
fn a_failed_job_comes_back_first_and_is_given_up_after_max_attempts() {
    let mut outside = Outside::new(settings());
    for e in [Event::Job, Event::Job, Event::Pull(0), Event::Padded(0, true)] {
        outside.step(e);
    }
    assert_eq!(outside.held[0].job.index, 1);
    outside.step(Event::Fail(0));
    outside.step(Event::Pull(0));
    assert_eq!(outside.held[0].job.index, 1, "the only one that is padded, so it must not wait (D2)");
    outside.step(Event::Fail(0));
    outside.step(Event::Pull(0));
    outside.step(Event::Padded(0, true));
    assert_eq!(outside.held[0].job.index, 2, "job 1 was skipped");
}

#[test]
fn a_failed_job_prefers_another_target() {
    let mut outside = Outside::new(settings());
    for e in [Event::Job, Event::Padded(0, true), Event::Job, Event::Padded(0, true), Event::Pull(0), Event::Fail(0)] {
        outside.step(e);
    }
    // Target 0 gets the next job, although job 1 is at the head; target 1 gets job 1.
    outside.step(Event::Pull(0));
    outside.step(Event::Pull(1));
    assert_eq!(outside.held.iter().map(|h| (h.target, h.job.index)).collect::<Vec<_>>(), [(0, 2), (1, 1)]);
    // The job is at the head again, before the jobs that were waiting.
    let mut outside = Outside::new(settings());
    for e in [Event::Job, Event::Job, Event::Padded(0, true), Event::Padded(0, true), Event::Pull(0), Event::Fail(0)] {
        outside.step(e);
    }
    outside.step(Event::Pull(1));
    assert_eq!((outside.held[0].target, outside.held[0].job.index), (1, 1));
    // Both wait, and the one that has not failed at the job gets it, although the other one pulled first.
    let mut outside = Outside::new(settings());
    for e in [Event::Job, Event::Padded(0, true), Event::Pull(0), Event::Pull(1)] {
        outside.step(e);
    }
    outside.step(Event::Fail(0));
    assert_eq!(outside.held[0].target, 1);
}

#[test]
fn a_job_that_cannot_be_padded_is_skipped_and_counted() {
    let (counted, ()) = Counted::during(|| {
        let mut outside = Outside::new(settings());
        for e in [Event::Job, Event::Padded(0, false)] {
            outside.step(e);
        }
        assert_eq!((outside.state.depth().0, outside.padding.len()), (1, 1), "it is padded once more");
        outside.step(Event::Padded(0, false));
        assert_eq!((outside.state.depth().0, outside.padding.len()), (0, 0), "two tries are enough");
    });
    assert_eq!(counted.last(m::JOBS_RETURNED, " cause=failed"), 2.0);
}

#[test]
fn the_end_does_not_wait_for_a_job_whose_target_went_away_with_it() {
    let mut outside = Outside::new(settings());
    for e in [Event::Job, Event::Padded(0, true), Event::Pull(0)] {
        outside.step(e);
    }
    let Held { lease, .. } = outside.held.remove(0);
    drop(outside.state.on_claim(lease, outside.now));
    let actions = outside.state.on_return(Return::Failed { lease, failure: Failure::Gone, message: "gone".into() });
    outside.apply(actions);
    let actions = outside.state.on_end();
    outside.apply(actions);
    assert_eq!(outside.drained, [0]);
}

#[test]
fn jobs_leave_in_plan_order_when_padding_keeps_up() {
    let mut outside = Outside::new(settings());
    let mut order = Vec::new();
    for _ in 0..20 {
        for e in [Event::Job, Event::Padded(0, true), Event::Pull(0)] {
            outside.step(e);
        }
        order.extend(outside.held.iter().map(|h| h.job.index));
        outside.step(Event::Finish(0));
    }
    assert_eq!(order, (1..=20).collect::<Vec<_>>());
}

/// A dispatcher that scans its queue at every message takes minutes for this.
#[test]
fn a_queue_of_100_000_jobs_costs_no_more_per_message_than_a_short_one() {
    const JOBS: u32 = 100_000;
    let mut outside = Outside::new(Settings { queue_jobs: JOBS as usize, ..settings() });
    for index in 0..JOBS {
        let actions = outside.state.on_job(job(index));
        outside.apply(actions);
    }
    assert!(!outside.state.has_room());
    let mut order = Vec::new();
    while outside.state.depth().0 > 0 {
        for id in std::mem::take(&mut outside.padding) {
            let actions = outside.state.on_padded(id, Ok(PaddedBatch::default()));
            outside.apply(actions);
        }
        outside.pull(0, false);
        order.extend(outside.held.iter().map(|held| held.job.index));
        outside.step(Event::Finish(0));
    }
    assert_eq!(order, (0..JOBS).collect::<Vec<_>>());
}

#[test]
fn molt_85_an_empty_plan_ends_at_once() {
    let mut outside = Outside::new(settings());
    outside.step(Event::Pull(0));
    let actions = outside.state.on_end();
    outside.apply(actions);
    assert_eq!((outside.drained.len(), outside.refused), (1, 1));
}
