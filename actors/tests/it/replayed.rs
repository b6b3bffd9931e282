//! Properties of the pool's `State` with policy `replay`: the order of the plan, and space for the next job.

use draftmill_actors::{
    messages::types::JobId,
    pool::{
        replay::ReplayOrder,
        state::{Action, DrawPolicy, Entry, Settings, State},
    },
};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

/// Event of a job in a pool that replays.
#[derive(Clone, Copy, Debug)]
enum Turn {
    Hand,
    Fill(usize),
    Retry(usize),
    GiveUp(usize),
    Draw,
    Done(usize),
    GiveBack(usize),
}

fn turn() -> impl Strategy<Value = Turn> {
    prop_oneof![
        4 => Just(Turn::Hand),
        4 => any::<usize>().prop_map(Turn::Fill),
        1 => any::<usize>().prop_map(Turn::Retry),
        1 => any::<usize>().prop_map(Turn::GiveUp),
        4 => Just(Turn::Draw),
        4 => any::<usize>().prop_map(Turn::Done),
        1 => any::<usize>().prop_map(Turn::GiveBack),
    ]
}

/// Plan that is replayed through the smallest pool that the settings allow.
struct Replayed {
    state: State<u64>,
    jobs: u64,
    handed: u64,
    window: u64,
    /// Requests and jobs that wait for bytes, have them, or are checked out.
    asked: BTreeMap<u64, u64>,
    extracting: Vec<u64>,
    checked_out: Vec<Entry<u64>>,
    seen: Vec<u64>,
    given_up: BTreeSet<u64>,
    requests: u64,
}

const LARGEST: u64 = 10;

impl Replayed {
    fn bytes(job: u64) -> u64 {
        LARGEST - job % 4
    }

    fn apply(&mut self, actions: Vec<Action<u64>>) {
        for action in actions {
            match action {
                Action::Grant { request, .. } => self.extracting.extend(self.asked.remove(&request)),
                Action::Give { entry, .. } => {
                    let order = entry.position.expect("a draw of an order has its position") as usize;
                    if order == self.seen.len() {
                        self.seen.push(entry.batch);
                    }
                    assert_eq!(self.seen[order], entry.batch, "a batch that came back keeps its place");
                    self.checked_out.push(entry);
                    let more = self.state.on_delivered();
                    self.apply(more);
                }
                Action::NoMore { .. } | Action::Drained => {
                    assert!(self.checked_out.is_empty() && self.extracting.is_empty(), "L3");
                }
                Action::Refuse { .. } => panic!("every job fits"),
            }
        }
        let held = self.state.occupancy();
        assert!(held.bytes() <= self.window * LARGEST && held.batches() as u64 <= self.window, "L1: {held:?}");
    }

    fn turn(&mut self, turn: Turn) -> bool {
        let pick = |i: usize, n: usize| if n == 0 { None } else { Some(i % n) };
        self.requests += 1;
        let actions = match turn {
            Turn::Hand if self.handed < self.jobs && self.handed < self.state.passed() + self.window => {
                self.asked.insert(self.requests, self.handed);
                self.handed += 1;
                self.state.on_reserve(self.requests, Self::bytes(self.handed - 1))
            }
            Turn::Fill(i) => {
                let Some(i) = pick(i, self.extracting.len()) else { return false };
                let job = self.extracting.swap_remove(i);
                self.state.on_filled(JobId { epoch: 0, index: job as u32 }, 0, Self::bytes(job), job)
            }
            Turn::Retry(i) => {
                let Some(i) = pick(i, self.extracting.len()) else { return false };
                let job = self.extracting.swap_remove(i);
                self.asked.insert(self.requests, job);
                let cancelled = self.state.on_cancelled(Self::bytes(job));
                self.apply(cancelled);
                self.state.on_reserve(self.requests, Self::bytes(job))
            }
            Turn::GiveUp(i) => {
                let Some(i) = pick(i, self.extracting.len()) else { return false };
                let job = self.extracting.swap_remove(i);
                self.given_up.insert(job);
                let cancelled = self.state.on_cancelled(Self::bytes(job));
                self.apply(cancelled);
                self.state.on_skipped(JobId { epoch: 0, index: job as u32 })
            }
            Turn::Draw => self.state.on_draw(self.requests),
            Turn::Done(i) => {
                let Some(i) = pick(i, self.checked_out.len()) else { return false };
                self.state.on_done(self.checked_out.swap_remove(i).bytes)
            }
            Turn::GiveBack(i) => {
                let Some(i) = pick(i, self.checked_out.len()) else { return false };
                let entry = self.checked_out.swap_remove(i);
                self.state.on_returned(entry)
            }
            Turn::Hand => return false,
        };
        self.apply(actions);
        true
    }
}

proptest! {
    /// A pool of `window` jobs of the largest size never waits forever, whatever the order of arrivals, retries, skips
    /// and returns. Its output is the order of the plan, without the skipped jobs.
    #[test]
    fn replay_never_waits_for_a_job_that_has_no_room(
        window in 1_usize..8, jobs in 0_u64..40, seed: u64, turns in prop::collection::vec(turn(), 0..200),
    ) {
        let max_bytes = window as u64 * LARGEST;
        let settings =
            Settings { max_bytes, max_batches: window, min_ready: 1, draw_policy: DrawPolicy::Replay, replay_window: window, start_step: 0, seed };
        prop_assert_eq!(settings.deadlock(LARGEST), None);
        let mut state = State::new(settings);
        state.on_epoch(0, &[jobs], vec![false; jobs as usize].into());
        let mut r = Replayed {
            state, jobs, handed: 0, window: window as u64, asked: BTreeMap::new(), extracting: Vec::new(), checked_out: Vec::new(),
            seen: Vec::new(), given_up: BTreeSet::new(), requests: 0,
        };
        for turn in turns {
            r.turn(turn);
        }
        for _ in 0..10_000 {
            let moved = [Turn::Hand, Turn::Fill(0), Turn::Done(0)].map(|turn| r.turn(turn));
            r.turn(Turn::Draw);
            if moved == [false; 3] && r.seen.len() + r.given_up.len() == jobs as usize {
                break;
            }
        }
        let mut order = ReplayOrder::new(seed, window);
        order.begin(0, vec![false; jobs as usize].into());
        let whole = std::iter::from_fn(|| {
            let job = order.wanted();
            order.on_drawn();
            job.map(|job| u64::from(job.index))
        });
        let expected: Vec<u64> = whole.filter(|job| !r.given_up.contains(job)).collect();
        prop_assert_eq!(r.seen, expected);
    }
}
