//! Properties of the trainer's `State`: T1 for any mixture of fast, slow, finishing and failing drafters, and the
//! batches of each step with a draw order.

use draftmill_actors::{
    messages::engine::MicroReport,
    trainer::{
        Ticket,
        state::{Action, State},
    },
};
use proptest::prelude::*;
use std::collections::BTreeSet;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Doing {
    Idle,
    /// Holds the batch at this position of the order.
    Holding(u64),
    Waiting(u64),
    Training(u64, u64),
    Finished,
}

/// Fate of a micro-batch.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fate {
    Trained,
    /// The batch returns to the pool.
    Back,
    Skipped,
}

fn fate() -> impl Strategy<Value = Fate> {
    prop_oneof![8 => Just(Fate::Trained), 1 => Just(Fate::Back), 1 => Just(Fate::Skipped)]
}

/// Drafters around the state, and a pool that gives out batches in order.
struct Outside {
    state: State,
    doing: Vec<Doing>,
    /// Positions in the order that are undrawn or returned.
    pool: BTreeSet<u64>,
    ordered: bool,
    below: u64,
    /// Trained positions, by step.
    steps: Vec<Vec<u64>>,
    collected: Vec<u64>,
    skipped: BTreeSet<u64>,
    over: bool,
    reducing: Option<u64>,
    paused: Vec<usize>,
    /// Micro-batches of the running step and of the next, and the expected number of each step.
    size: usize,
    next: usize,
    wanted: Vec<usize>,
}

impl Outside {
    fn apply(&mut self, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Issue { drafter, step } => {
                    let Doing::Waiting(place) = self.doing[drafter] else { panic!("an unexpected ticket") };
                    assert_eq!(self.reducing, None, "T1: a ticket while a step is reduced");
                    self.doing[drafter] = Doing::Training(step, place);
                }
                Action::Refuse { drafter } => {
                    assert!(matches!(self.doing[drafter], Doing::Waiting(_)));
                    self.doing[drafter] = Doing::Finished;
                }
                Action::Collect { step, below } => {
                    assert_eq!(step, self.state.step());
                    self.below = below;
                }
                Action::Reduce { step } => {
                    assert!(!self.doing.iter().any(|d| matches!(d, Doing::Training(..))), "reduced while one trains");
                    self.reducing = Some(step);
                }
                Action::Step => {
                    assert_eq!(self.collected.len() as u64, self.state.micro_batches());
                    self.steps.push(std::mem::take(&mut self.collected));
                    self.wanted.push(std::mem::replace(&mut self.size, self.next));
                    self.reducing = None;
                    let next = self.state.on_stepped();
                    self.apply(next);
                }
                Action::End => self.over = true,
            }
        }
    }

    /// Changes accumulation and paused drafters, never pausing all of them.
    fn reconfigure(&mut self, accumulation: usize, paused: Vec<usize>) {
        let begun = !self.collected.is_empty() || self.doing.iter().any(|d| matches!(d, Doing::Training(..)));
        self.next = accumulation * (self.doing.len() - paused.len());
        if !begun && self.reducing.is_none() {
            self.size = self.next;
        }
        self.paused.clone_from(&paused);
        let actions = self.state.reconfigure(accumulation, &paused);
        self.apply(actions);
    }

    /// Lets drafter `d` do its next thing. Returns true if a micro-batch had its fate.
    fn turn(&mut self, d: usize, fate: Fate) -> bool {
        if let Some(step) = self.reducing {
            for drafter in 0..self.doing.len() {
                let actions = self.state.on_gradient(drafter, step);
                self.apply(actions);
            }
            return false;
        }
        let on_loan = |d: &Doing| matches!(d, Doing::Holding(_) | Doing::Waiting(_) | Doing::Training(..));
        let actions = match self.doing[d] {
            Doing::Idle if self.paused.contains(&d) => return false,
            Doing::Idle => match self.pool.pop_first() {
                Some(place) => {
                    self.doing[d] = Doing::Holding(place);
                    return false;
                }
                // Checked-out batches may be returned.
                None if self.doing.iter().any(on_loan) => return false,
                None => {
                    self.doing[d] = Doing::Finished;
                    self.state.on_finished(d)
                }
            },
            // With an order, a drafter requests a ticket only for a batch of the current step.
            Doing::Holding(place) if self.ordered && place >= self.below => return false,
            Doing::Holding(place) => {
                self.doing[d] = Doing::Waiting(place);
                self.state.on_ticket(d)
            }
            Doing::Training(step, place) => {
                self.doing[d] = Doing::Idle;
                let ticket = Ticket { step, drafter: d, anchors: 1 };
                let order = self.ordered.then_some(place);
                match fate {
                    Fate::Trained => {
                        self.collected.push(place);
                        self.state.on_report(&ticket, order, 0, &MicroReport::default())
                    }
                    Fate::Back => {
                        self.pool.insert(place);
                        self.state.on_ticket_returned(&ticket, false)
                    }
                    Fate::Skipped => {
                        self.skipped.insert(place);
                        self.state.on_ticket_returned(&ticket, true)
                    }
                }
            }
            Doing::Waiting(_) | Doing::Finished => return false,
        };
        self.apply(actions);
        true
    }
}

struct Case {
    drafters: usize,
    accumulation: usize,
    batches: u64,
    max_steps: u64,
    ordered: bool,
}

/// Event in addition to the drafters' turns: the turn, the accumulation, and the paused drafters.
type Change = (usize, usize, Vec<usize>);

fn run(case: &Case, turns: &[(usize, Fate)], stop_at: usize, changes: &[Change]) -> Outside {
    run_until(case, turns, (stop_at, State::on_stop), changes)
}

/// Turn and event of the end.
type End = (usize, fn(&mut State) -> Vec<Action>);

fn run_until(case: &Case, turns: &[(usize, Fate)], (end_at, end): End, changes: &[Change]) -> Outside {
    let &Case { drafters, accumulation, batches, max_steps, ordered } = case;
    let mut o = Outside {
        state: State::new(drafters, accumulation, 0, max_steps),
        doing: vec![Doing::Idle; drafters],
        pool: (0..batches).collect(),
        ordered,
        below: (drafters * accumulation) as u64,
        steps: Vec::new(),
        collected: Vec::new(),
        skipped: BTreeSet::new(),
        over: false,
        reducing: None,
        paused: Vec::new(),
        size: drafters * accumulation,
        next: drafters * accumulation,
        wanted: Vec::new(),
    };
    let start = o.state.reconfigure(accumulation, &[]);
    o.apply(start);
    let endless = (0..).map(|i| (i % drafters, Fate::Trained));
    for (i, (d, fate)) in turns.iter().map(|&(d, f)| (d % drafters, f)).chain(endless).take(100_000).enumerate() {
        if i == end_at {
            let actions = end(&mut o.state);
            o.apply(actions);
        }
        if o.over {
            break;
        }
        for (_, accumulation, paused) in changes.iter().filter(|(at, ..)| *at == i) {
            let paused: BTreeSet<usize> = paused.iter().map(|d| d % drafters).collect();
            if paused.len() < drafters {
                o.reconfigure(*accumulation, paused.into_iter().collect());
            }
        }
        o.turn(d, fate);
    }
    assert!(o.over, "the trainer never ends");
    o
}

proptest! {
    #[test]
    fn every_step_is_full_or_the_last_one(
        drafters in 1_usize..5, accumulation in 1_usize..5, batches in 0_u64..100, max_steps in 0_u64..8, ordered: bool,
        turns in prop::collection::vec((any::<usize>(), fate()), 0..300),
    ) {
        let case = Case { drafters, accumulation, batches, max_steps, ordered };
        let o = run(&case, &turns, usize::MAX, &[]);
        let size = drafters * accumulation;
        let sizes: Vec<usize> = o.steps.iter().map(Vec::len).collect();
        for (i, &n) in sizes.iter().enumerate() {
            prop_assert!(n == size || (n < size && n > 0 && i + 1 == sizes.len()), "T1: {:?}", sizes);
        }
        if max_steps > 0 {
            prop_assert!(sizes.len() as u64 <= max_steps);
        } else {
            let trained = sizes.iter().sum::<usize>() as u64;
            prop_assert_eq!(trained + o.skipped.len() as u64, batches, "a batch that came back was stranded");
        }
        // With an order, the steps follow from the order and the skipped batches, whatever the speeds.
        if ordered {
            let kept: Vec<u64> = (0..batches).filter(|place| !o.skipped.contains(place)).collect();
            for (step, expected) in o.steps.iter().zip(kept.chunks(size)) {
                let seen: BTreeSet<u64> = step.iter().copied().collect();
                prop_assert_eq!(seen, expected.iter().copied().collect::<BTreeSet<u64>>());
            }
        }
    }

    #[test]
    fn a_stop_ends_without_a_partial_step(
        drafters in 1_usize..5, accumulation in 1_usize..5, stop_at in 0_usize..200, ordered: bool,
        turns in prop::collection::vec((any::<usize>(), fate()), 0..200),
    ) {
        let case = Case { drafters, accumulation, batches: 1000, max_steps: 0, ordered };
        let o = run(&case, &turns, stop_at, &[]);
        prop_assert!(o.steps.iter().all(|step| step.len() == drafters * accumulation));
    }

    #[test]
    fn a_close_makes_every_whole_step_that_the_batches_give(
        drafters in 1_usize..5, accumulation in 1_usize..5, batches in 0_u64..100,
        close_at in prop::option::of(0_usize..200), ordered: bool,
        turns in prop::collection::vec((any::<usize>(), fate()), 0..200),
    ) {
        let case = Case { drafters, accumulation, batches, max_steps: 0, ordered };
        let o = run_until(&case, &turns, (close_at.unwrap_or(0), State::on_close), &[]);
        let size = drafters * accumulation;
        let trained = o.steps.iter().map(Vec::len).sum::<usize>() + o.skipped.len();
        // The trainer may have ended before the close.
        if close_at.is_none() || trained as u64 != batches {
            prop_assert!(o.steps.iter().all(|step| step.len() == size), "T1");
            prop_assert!(batches - (trained as u64) < size as u64, "{} of {}", trained, batches);
        }
    }

    /// A step has the size that was requested before it began, and a paused drafter strands nothing.
    #[test]
    fn steps_change_their_size_at_their_borders_only(
        drafters in 1_usize..5, accumulation in 1_usize..5, batches in 0_u64..100, stop_at in prop::option::of(0_usize..300),
        turns in prop::collection::vec((any::<usize>(), fate()), 0..300),
        changes in prop::collection::vec((0_usize..400, 1_usize..5, prop::collection::vec(0_usize..5, 0..4)), 0..12),
    ) {
        let case = Case { drafters, accumulation, batches, max_steps: 0, ordered: false };
        let o = run(&case, &turns, stop_at.unwrap_or(usize::MAX), &changes);
        let trained: u64 = o.steps.iter().map(|step| step.len() as u64).sum();
        let all = trained + o.skipped.len() as u64 == batches;
        for (i, (step, &wanted)) in o.steps.iter().zip(&o.wanted).enumerate() {
            let last = i + 1 == o.steps.len() && all;
            prop_assert!(step.len() == wanted || (last && step.len() < wanted), "T1: {} of {}", step.len(), wanted);
        }
        prop_assert!(all || stop_at.is_some(), "a batch was stranded: {} of {} trained", trained, batches);
    }
}
