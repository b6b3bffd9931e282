//! Trace conformance: the lifecycle trace of whole runs, replayed against a small model that shares the predicates of
//! the actors.

use crate::world::{Breakage, Outcomes, World, Wrong};
use draftmill_actors::{
    pool::DrawPolicy,
    runtime::{
        invariants::{d2, l1, l2, l3, t1},
        trace::LIFECYCLE,
    },
    simulated::CostModel,
};
use proptest::prelude::*;
use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::{
        Once,
        mpsc::{Sender, channel},
    },
    time::Duration,
};
use tracing::{
    Event, Metadata, Subscriber,
    field::{Field, Visit},
    span,
};

thread_local! {
    /// Receiver of this thread's trace: a world runs on one thread.
    static TELL: RefCell<Option<Sender<Fields>>> = const { RefCell::new(None) };
}

/// Subscriber that forwards every event of the trace.
struct Recorder;

/// Returns the trace of a world's run. One recorder serves all tests: a subscriber for each would race with those of
/// other threads for the enabled events.
fn recorded(world: &World) -> (Outcomes, Vec<Fields>) {
    static RECORDER: Once = Once::new();
    RECORDER.call_once(|| tracing::subscriber::set_global_default(Recorder).unwrap());
    let (tell, told) = channel();
    TELL.set(Some(tell));
    let ended = world.clone().run();
    TELL.set(None);
    (ended, told.into_iter().collect())
}

#[derive(Clone, Default, Debug)]
struct Fields(BTreeMap<&'static str, String>);

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0.insert(field.name(), format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name(), value.to_owned());
    }
}

impl Subscriber for Recorder {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == LIFECYCLE
    }

    fn event(&self, event: &Event<'_>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        TELL.with_borrow(|tell| tell.as_ref().map(|tell| tell.send(fields).unwrap()));
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

impl Fields {
    fn text(&self, name: &str) -> String {
        self.0.get(name).unwrap_or_else(|| panic!("{self:?} lacks {name}")).clone()
    }

    fn number(&self, name: &str) -> u64 {
        self.text(name).parse().unwrap()
    }
}

/// Owner of a job (D1). There is no other.
#[derive(Clone, Debug, PartialEq)]
enum Place {
    HandedOut,
    Queued,
    Padded,
    /// Leased by these targets; the first result claims it.
    Leased(BTreeSet<u64>),
    Claimed,
    Pool,
    Drafter,
    Reported(u64),
    Trained,
    SkipDecided,
    Skipped,
}

struct Model<'a> {
    world: &'a World,
    places: BTreeMap<String, Place>,
    pulls: BTreeSet<u64>,
    requested: usize,
    reserved: Vec<u64>,
    /// Bytes of ready batches; true if a drafter returned the batch.
    ready: BTreeMap<String, (u64, bool)>,
    checked_out: Vec<u64>,
    draining: bool,
    last: bool,
    step: u64,
    short_steps: usize,
}

impl<'a> Model<'a> {
    fn new(world: &'a World) -> Self {
        Self {
            world,
            places: BTreeMap::new(),
            pulls: BTreeSet::new(),
            requested: 0,
            reserved: Vec::new(),
            ready: BTreeMap::new(),
            checked_out: Vec::new(),
            draining: false,
            last: false,
            step: 0,
            short_steps: 0,
        }
    }

    fn go(&mut self, job: &str, from: impl Fn(&Place) -> bool, to: Place) {
        let place = self.places.get_mut(job).unwrap_or_else(|| panic!("D1: {job} was never handed out"));
        assert!(from(place), "D1: {job} goes from {place:?} to {to:?}");
        *place = to;
    }

    fn count(&self, is: impl Fn(&Place) -> bool) -> usize {
        self.places.values().filter(|place| is(place)).count()
    }

    fn apply(&mut self, event: &Fields) {
        let (what, job) = (event.text("event"), event.0.get("job").cloned().unwrap_or_default());
        let target = || event.number("target_index");
        if what != "leased" {
            let padded = self.count(|p| *p == Place::Padded);
            assert!(d2(self.pulls.len(), padded), "D2: {} pulls wait before {event:?}", self.pulls.len());
        }
        match what.as_str() {
            "handed_out" => assert_eq!(self.places.insert(job, Place::HandedOut), None, "D1: handed out twice"),
            "queued" => self.go(&job, |p| *p == Place::HandedOut, Place::Queued),
            "padded" => self.go(&job, |p| *p == Place::Queued, Place::Padded),
            "pulls" => assert!(self.pulls.insert(target())),
            "leased" => {
                assert!(self.pulls.remove(&target()));
                let place = self.places.get_mut(&job).unwrap();
                match place {
                    Place::Padded => *place = Place::Leased([target()].into()),
                    Place::Leased(targets) => assert!(targets.insert(target())),
                    other => panic!("D1: {job} is leased from {other:?}"),
                }
            }
            "claimed" => self.go(&job, |p| matches!(p, Place::Leased(t) if t.contains(&target())), Place::Claimed),
            "returned" => {
                // The first result took the job; a failure, or a late result, leaves it to the other lease.
                if let Some(Place::Leased(targets)) = self.places.get_mut(&job) {
                    assert!(targets.remove(&target()));
                }
            }
            "requeued" => self.go(&job, |p| matches!(p, Place::Leased(t) if t.is_empty()), Place::Padded),
            "reservation_requested" => {
                self.requested += 1;
                self.draining = self.last;
            }
            "granted" => {
                self.requested -= 1;
                self.reserved.push(event.number("bytes"));
            }
            "cancelled" => self.unreserve(event),
            "filled" => {
                self.unreserve(event);
                self.go(&job, |p| *p == Place::Claimed, Place::Pool);
                self.ready.insert(job, (event.number("bytes"), false));
            }
            "drawn" => {
                let ordered = self.world.pool.draw_policy == DrawPolicy::Replay;
                assert!(l2(self.ready.len(), self.world.pool.min_ready, self.draining, ordered), "L2 at {event:?}");
                self.go(&job, |p| *p == Place::Pool, Place::Drafter);
                let (bytes, _) = self.ready.remove(&job).unwrap();
                assert_eq!(bytes, event.number("bytes"));
                self.checked_out.push(bytes);
            }
            "batch_returned" => {
                self.check_in(event);
                self.go(&job, |p| *p == Place::Drafter, Place::Pool);
                self.ready.insert(job, (event.number("bytes"), true));
            }
            "done" => self.check_in(event),
            "reported" => self.go(&job, |p| *p == Place::Drafter, Place::Reported(event.number("step"))),
            "reduced" => {
                self.step += 1;
                assert_eq!(event.number("step"), self.step);
                let reported = self.count(|p| *p == Place::Reported(self.step)) as u64;
                assert_eq!(reported, event.number("micro_batches"));
                let per_step = (self.world.accumulation * self.world.drafters.len()) as u64;
                assert!(self.short_steps == 0 && t1(reported, per_step, true), "T1 at {event:?}");
                self.short_steps += usize::from(!t1(reported, per_step, false));
            }
            "trained" => {
                let step = event.number("step");
                self.go(&job, |p| *p == Place::Reported(step), Place::Trained);
            }
            "skip_decided" => {
                self.go(&job, |p| matches!(p, Place::Leased(_) | Place::Queued | Place::Drafter), Place::SkipDecided);
            }
            "skipped" => self.go(&job, |p| *p == Place::SkipDecided, Place::Skipped),
            "drains" => {
                let late = event.number("late") as usize;
                assert!(l3(self.reserved.len() + self.requested, late), "L3 at {event:?}");
                let before = |p: &Place| {
                    matches!(p, Place::HandedOut | Place::Queued | Place::Padded | Place::Leased(_) | Place::Claimed)
                };
                let elsewhere = self.places.iter().filter(|(_, p)| before(p)).collect::<Vec<_>>();
                assert!(elsewhere.is_empty(), "L3: told to drain while {elsewhere:?}");
                (self.draining, self.last) = (true, event.text("last") == "true");
            }
            other => panic!("the model does not know {other}"),
        }
        let bytes =
            self.reserved.iter().chain(&self.checked_out).sum::<u64>() + self.ready.values().map(|r| r.0).sum::<u64>();
        let batches = self.reserved.len() + self.ready.values().filter(|r| !r.1).count();
        assert!(l1(bytes, self.world.pool.max_bytes, batches, self.world.pool.max_batches), "L1 after {event:?}");
    }

    fn end(&self) {
        let ended = self.count(|p| matches!(p, Place::Trained | Place::Skipped));
        assert_eq!(ended, self.places.len(), "every job has its end");
        assert_eq!((self.ready.len(), self.checked_out.len()), (0, 0), "nothing stays behind");
    }

    fn unreserve(&mut self, event: &Fields) {
        let at = self.reserved.iter().position(|&bytes| bytes == event.number("bytes"));
        self.reserved.swap_remove(at.expect("L1: unknown reservation"));
    }

    fn check_in(&mut self, event: &Fields) {
        let at = self.checked_out.iter().position(|&bytes| bytes == event.number("bytes"));
        self.checked_out.swap_remove(at.expect("L1: unknown checked-out bytes"));
    }
}

/// Runs a world that ends by itself and checks its trace against the model. Returns the number of each event.
fn conforms(world: &World) -> BTreeMap<String, usize> {
    let (ended, trace) = recorded(world);
    let jobs: usize = ended.ledger().plans.iter().map(|plan| plan.jobs.len()).sum();
    let (mut model, mut seen) = (Model::new(world), BTreeMap::new());
    for event in trace {
        model.apply(&event);
        *seen.entry(event.text("event")).or_default() += 1;
    }
    model.end();
    assert_eq!(model.places.len(), jobs);
    seen
}

#[test]
fn a_healthy_run_conforms() {
    for draw_policy in [DrawPolicy::Proportional, DrawPolicy::Uniform, DrawPolicy::Replay] {
        for epoch_barrier in [false, true] {
            let mut world = World { epoch_barrier, epochs: 2, ..World::default() };
            world.pool.draw_policy = draw_policy;
            let seen = conforms(&world);
            assert_eq!((seen["trained"], seen["leased"]), (seen["handed_out"], seen["claimed"]));
        }
    }
}

#[test]
fn a_run_with_every_kind_of_trouble_conforms() {
    let every = |n, wrong| Breakage { every: Some((n, wrong)), ..Breakage::default() };
    let hang = Breakage { until: Some(20), ..every(20, Wrong::Hang) };
    let world = World {
        targets: vec![hang, every(5, Wrong::Nan), Breakage { until: Some(9), ..every(9, Wrong::Panic) }],
        drafters: vec![every(7, Wrong::Fail), Breakage::default()],
        costs: CostModel { seconds_per_token: 0.003, ..World::default().costs },
        max_skip_fraction: 1.0,
        ..World::default()
    };
    let seen = conforms(&world);
    for event in ["requeued", "batch_returned", "cancelled", "trained"] {
        assert!(seen.contains_key(event), "{event} never happened: {seen:?}");
    }
    assert!(seen["leased"] > seen["claimed"], "a target failed or hung");
}

#[test]
fn a_run_whose_jobs_are_given_up_conforms() {
    let broken = Breakage { every: Some((3, Wrong::Fail)), ..Breakage::default() };
    let world = World { targets: vec![broken; 2], max_attempts: 1, max_skip_fraction: 1.0, ..World::default() };
    assert!(conforms(&world)["skipped"] > 0);
}

/// The model must be able to fail: an event that is missing or doubled does not pass.
#[test]
fn a_journal_that_was_tampered_with_does_not_conform() {
    let world = World { lengths: World::default().lengths[..60].to_vec(), ..World::default() };
    let (_, trace) = recorded(&world);
    let passes = |events: Vec<&Fields>| {
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let mut model = Model::new(&world);
            events.into_iter().for_each(|event| model.apply(event));
            model.end();
        }))
        .is_ok()
    };
    assert!(passes(trace.iter().collect()));
    let mut kinds = BTreeSet::new();
    for (at, event) in trace.iter().enumerate() {
        let what = event.text("event");
        // A pull more or less concerns no job; a lease that ends twice leaves no trace.
        if !kinds.insert(what.clone())
            || ["pulls", "returned", "reservation_requested", "drains"].contains(&what.as_str())
        {
            continue;
        }
        let without = trace.iter().enumerate().filter(|(i, _)| *i != at).map(|(_, e)| e).collect();
        let twice = trace[..=at].iter().chain(&trace[at..]).collect();
        assert!(!passes(without), "{what} may be missing");
        assert!(!passes(twice), "{what} may come twice");
    }
    assert!(kinds.len() >= 14, "{kinds:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn any_run_conforms(
        samples in 1_usize..120, slow in prop::collection::vec(0.1_f64..20.0, 1..5), drafters in 1_usize..4,
        accumulation in 1_usize..4, max_batches in 1_usize..9, min_ready in 1_usize..9, prefetch in 0_usize..4,
        draw_policy in prop::sample::select(vec![DrawPolicy::Proportional, DrawPolicy::Uniform, DrawPolicy::Replay]), epoch_barrier: bool, failing: bool,
    ) {
        let every = failing.then_some((4, Wrong::Fail));
        let mut world = World {
            targets: slow.iter().map(|&s| Breakage { slowness: Some(s), every, ..Breakage::default() }).collect(),
            drafters: vec![Breakage { every, ..Breakage::default() }; drafters],
            accumulation, prefetch, epoch_barrier, epochs: 2, max_attempts: 9, max_skip_fraction: 1.0,
            stop_at: None, checkpoint_takes: Duration::from_secs(1), checkpoint_every: 2, ..World::default()
        };
        world.lengths.truncate(samples);
        world.pool.max_batches = max_batches;
        world.pool.min_ready = min_ready.min(max_batches);
        world.pool.draw_policy = draw_policy;
        world.pool.replay_window = max_batches;
        conforms(&world);
    }
}
