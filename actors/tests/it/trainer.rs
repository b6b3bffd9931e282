//! Properties of the trainer's `State`: T1 for any mixture of fast, slow, finishing and failing drafters.

use draftmill_actors::{
    engine::MicroReport,
    trainer::Ticket,
    trainer_state::{Action, State},
};
use proptest::prelude::*;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Doing {
    Idle,
    Waiting,
    Training(u64),
    Finished,
}

struct Outside {
    state: State,
    doing: Vec<Doing>,
    batches: u64,
    steps: Vec<u64>,
    over: bool,
    reducing: Option<u64>,
}

impl Outside {
    fn apply(&mut self, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Issue { drafter, step } => {
                    assert_eq!(self.doing[drafter], Doing::Waiting);
                    assert_eq!(self.reducing, None, "T1: a ticket while a step is reduced");
                    self.doing[drafter] = Doing::Training(step);
                }
                Action::Refuse { drafter } => {
                    assert_eq!(self.doing[drafter], Doing::Waiting);
                    self.doing[drafter] = Doing::Finished;
                }
                Action::Reduce { step } => {
                    assert!(!self.doing.iter().any(|d| matches!(d, Doing::Training(_))), "reduced while one trains");
                    self.reducing = Some(step);
                }
                Action::Step => {
                    self.steps.push(self.state.micro_batches());
                    self.reducing = None;
                    let next = self.state.on_stepped();
                    self.apply(next);
                }
                Action::End => self.over = true,
            }
        }
    }

    /// Drafter `d` does its next thing.
    fn turn(&mut self, d: usize, fails: bool) {
        if let Some(step) = self.reducing {
            for drafter in 0..self.doing.len() {
                let actions = self.state.on_gradient(drafter, step);
                self.apply(actions);
            }
            return;
        }
        let actions = match self.doing[d] {
            Doing::Idle if self.batches > 0 => {
                self.batches -= 1;
                self.doing[d] = Doing::Waiting;
                self.state.on_ticket(d)
            }
            Doing::Idle => {
                self.doing[d] = Doing::Finished;
                self.state.on_finished(d)
            }
            Doing::Training(step) => {
                self.doing[d] = Doing::Idle;
                let ticket = Ticket { step, drafter: d };
                if fails {
                    self.state.on_give_back(&ticket)
                } else {
                    self.state.on_report(&ticket, 0, &MicroReport::default())
                }
            }
            Doing::Waiting | Doing::Finished => return,
        };
        self.apply(actions);
    }
}

fn run(
    drafters: usize,
    accumulation: usize,
    batches: u64,
    max_steps: u64,
    turns: &[(usize, bool)],
    stop_at: usize,
) -> Outside {
    let state = State::new(drafters, accumulation, 0, max_steps);
    let mut o =
        Outside { state, doing: vec![Doing::Idle; drafters], batches, steps: Vec::new(), over: false, reducing: None };
    let start = o.state.start();
    o.apply(start);
    let endless = (0..).map(|i| (i % drafters, false));
    for (i, (d, fails)) in turns.iter().map(|&(d, f)| (d % drafters, f)).chain(endless).take(100_000).enumerate() {
        if i == stop_at {
            let actions = o.state.on_stop();
            o.apply(actions);
        }
        if o.over {
            break;
        }
        o.turn(d, fails);
    }
    assert!(o.over, "the trainer never ends");
    o
}

proptest! {
    #[test]
    fn every_step_is_full_or_the_last_one(
        drafters in 1_usize..5, accumulation in 1_usize..5, batches in 0_u64..100, max_steps in 0_u64..8,
        turns in prop::collection::vec((any::<usize>(), prop::bool::weighted(0.1)), 0..300),
    ) {
        let failed = turns.iter().filter(|(_, f)| *f).count() as u64;
        let o = run(drafters, accumulation, batches, max_steps, &turns, usize::MAX);
        let size = (drafters * accumulation) as u64;
        for (i, &n) in o.steps.iter().enumerate() {
            prop_assert!(n == size || (n < size && n > 0 && i + 1 == o.steps.len()), "T1: {:?}", o.steps);
        }
        if max_steps > 0 {
            prop_assert!(o.steps.len() as u64 <= max_steps);
        } else {
            let trained: u64 = o.steps.iter().sum();
            prop_assert!(trained + failed >= batches && trained <= batches);
        }
    }

    #[test]
    fn a_stop_ends_without_a_partial_step(
        drafters in 1_usize..5, accumulation in 1_usize..5, stop_at in 0_usize..200,
        turns in prop::collection::vec((any::<usize>(), Just(false)), 0..200),
    ) {
        let o = run(drafters, accumulation, 1_000_000, 0, &turns, stop_at);
        prop_assert!(o.steps.iter().all(|&n| n == (drafters * accumulation) as u64));
    }
}
