//! Properties of the drafter's `State`: single requests, the draw order, and an end with empty hands.

use draftmill_actors::{
    drafter::{
        Settings,
        state::{Recovery, Request, State},
    },
    messages::{
        engine::{EngineError, MicroReport},
        types::JobId,
    },
};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

/// Event outside of the drafter.
#[derive(Clone, Debug)]
enum Event {
    /// The pool replies to the draw.
    Reply,
    Ticket,
    Trained,
    /// The micro-batch fails; the engine keeps the features or loses them.
    Failed(bool),
    /// The step takes in this number of further batches.
    Collect(u64),
    Reconfigure(Settings),
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        4 => Just(Event::Reply),
        4 => Just(Event::Ticket),
        4 => Just(Event::Trained),
        2 => prop::bool::weighted(0.8).prop_map(Event::Failed),
        2 => (0_u64..6).prop_map(Event::Collect),
        1 => settings().prop_map(Event::Reconfigure),
    ]
}

fn settings() -> impl Strategy<Value = Settings> {
    (0_usize..4, 1_u32..4, prop::collection::vec(0_usize..3, 0..2)).prop_map(|(prefetch, max_attempts, paused)| {
        Settings { prefetch, max_attempts, max_failures_in_a_row: u32::MAX, paused }
    })
}

const DRAFTER: usize = 1;

/// Pool, trainer and engine around one drafter.
struct Outside {
    state: State<u64>,
    settings: Settings,
    ordered: bool,
    /// Batches in the pool; the number of a batch is its position in the draw order.
    pool: BTreeSet<u64>,
    held: BTreeSet<u64>,
    /// Failures of each batch.
    failures: BTreeMap<u64, u32>,
    training: Option<u64>,
    below: u64,
    drawing: bool,
    exhausted: bool,
    requested: bool,
    finished: bool,
    trained: BTreeSet<u64>,
    skipped: BTreeSet<u64>,
    /// A batch was returned: it may be drawn even if the buffer is full.
    extra: bool,
}

impl Outside {
    fn is_paused(&self) -> bool {
        self.settings.paused.contains(&DRAFTER)
    }

    /// Sends what the drafter asks for now. While a micro-batch is in work it asks for nothing.
    fn ask(&mut self) {
        if self.training.is_some() {
            return;
        }
        for request in self.state.requests() {
            match request {
                Request::Batch => self.draw(),
                Request::Ticket => {
                    assert!(!self.requested && !self.finished, "two tickets");
                    let first = self.held.first().expect("a ticket without a batch");
                    assert!(!self.ordered || *first < self.below, "batch {first} belongs to a later step");
                    self.requested = true;
                }
                Request::Finished => {
                    assert!(self.exhausted && self.held.is_empty() && !self.finished, "finished too early");
                    self.finished = true;
                }
            }
        }
        assert_eq!(self.state.needs_batch(), self.held.is_empty() && !self.exhausted);
    }

    fn draw(&mut self) {
        assert!(!self.drawing && !self.exhausted && !self.finished, "a draw that is not wanted");
        assert!(!self.is_paused(), "a paused drafter draws");
        let fits = self.held.len() < self.settings.prefetch.max(1);
        assert!(std::mem::take(&mut self.extra) || fits, "{:?} held", self.held);
        self.drawing = true;
    }

    fn step(&mut self, event: Event) {
        match event {
            Event::Reply if self.drawing => {
                self.drawing = false;
                match self.pool.pop_first() {
                    Some(batch) => {
                        self.held.insert(batch);
                        self.state.on_batch(self.ordered.then_some(batch), batch);
                    }
                    // Checked-out batches may be returned: the pool does not reply before.
                    None if self.training.is_some() || !self.held.is_empty() => self.drawing = true,
                    None => {
                        self.exhausted = true;
                        self.state.on_exhausted();
                    }
                }
            }
            Event::Ticket if self.requested => {
                self.requested = false;
                let training = self.state.on_ticket().expect("the batch for which the ticket was requested");
                if self.ordered {
                    assert_eq!(Some(&training.batch), self.held.first(), "the first in the order");
                }
                assert!(self.held.remove(&training.batch));
                if training.draw {
                    self.draw();
                }
                self.training = Some(training.batch);
            }
            Event::Trained => {
                let Some(batch) = self.training.take() else { return };
                self.state.on_report(job(batch), &MicroReport::default()).unwrap();
                self.trained.insert(batch);
            }
            Event::Failed(kept) => {
                let Some(batch) = self.training.take() else { return };
                let attempts = self.failures.entry(batch).or_default();
                *attempts += 1;
                let error = EngineError::Failed("no".into());
                match self.state.on_failure(job(batch), *attempts, &error, kept.then_some(batch)) {
                    Recovery::ReturnBatch(same) => {
                        assert_eq!(same, batch);
                        assert!(*attempts < self.settings.max_attempts);
                        self.extra = true;
                        self.pool.insert(batch);
                    }
                    Recovery::SkipJob { .. } => {
                        assert!(!kept || *attempts >= self.settings.max_attempts, "skipped too early");
                        self.skipped.insert(batch);
                    }
                    Recovery::Fault(message) => panic!("{message}"),
                }
            }
            Event::Collect(more) => {
                self.below += more;
                self.state.on_collect(self.below);
            }
            Event::Reconfigure(settings) => {
                self.settings = settings.clone();
                let withdraw = self.state.reconfigure(settings);
                assert_eq!(withdraw, self.drawing && self.is_paused());
                if withdraw {
                    self.drawing = false;
                    self.state.on_withdrawn();
                }
            }
            _ => {}
        }
        self.ask();
    }
}

fn job(batch: u64) -> JobId {
    JobId { epoch: 0, index: batch as u32 }
}

proptest! {
    #[test]
    fn every_batch_is_trained_or_skipped_and_the_drafter_reports_its_end_once(
        batches in 0_u64..30, ordered: bool, settings in settings(), events in prop::collection::vec(event(), 0..200),
    ) {
        let mut outside = Outside {
            state: State::new(DRAFTER, settings.clone()), settings, ordered, pool: (0..batches).collect(),
            held: BTreeSet::new(), failures: BTreeMap::new(), training: None, below: 0, drawing: false, exhausted: false,
            requested: false, finished: false, trained: BTreeSet::new(), skipped: BTreeSet::new(), extra: false,
        };
        outside.ask();
        for event in events {
            outside.step(event);
        }
        let settings = Settings { paused: Vec::new(), ..outside.settings.clone() };
        outside.step(Event::Reconfigure(settings));
        outside.step(Event::Collect(batches));
        for _ in 0..4 * batches + 4 {
            [Event::Reply, Event::Ticket, Event::Trained].into_iter().for_each(|event| outside.step(event));
        }
        prop_assert!(outside.finished, "the drafter never ends");
        prop_assert_eq!(outside.trained.len() + outside.skipped.len(), batches as usize, "a batch was lost");
        prop_assert!(outside.held.is_empty() && outside.pool.is_empty());
    }
}
