//! Properties of the pool's `State`: L1, L2, L3 and its draws under random histories.

use draftmill_actors::{
    messages::types::JobId,
    pool::state::{Action, DrawPolicy, Entry, Settings, State},
};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Next event of a history; numbers choose among the possible options.
#[derive(Clone, Debug)]
enum Event {
    Reserve(u64),
    Fill(usize, u16),
    Cancel(usize),
    Draw,
    /// A draw whose drafter is gone when it is answered.
    LostDraw,
    Done(usize),
    /// A drafter returns a batch.
    GiveBack(usize),
    Reconfigure(Settings),
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        3 => (1_u64..60).prop_map(Event::Reserve),
        3 => (any::<usize>(), 0_u16..4).prop_map(|(i, b)| Event::Fill(i, b)),
        1 => any::<usize>().prop_map(Event::Cancel),
        3 => Just(Event::Draw),
        3 => any::<usize>().prop_map(Event::Done),
        1 => any::<usize>().prop_map(Event::GiveBack),
        1 => Just(Event::LostDraw),
        1 => settings().prop_map(Event::Reconfigure),
    ]
}

/// Model of the surroundings: it computes the same numbers by other means.
struct Model {
    state: State<u64>,
    settings: Settings,
    /// Ceiling for bytes and batches above lowered limits: they must only fall.
    ceiling: (u64, usize),
    next: u64,
    asked: BTreeMap<u64, u64>,
    granted: Vec<u64>,
    checked_out: Vec<Entry<u64>>,
    ready: BTreeSet<u64>,
    ready_bytes: u64,
    draws: BTreeSet<u64>,
    lost: BTreeSet<u64>,
    given: BTreeSet<u64>,
    /// Ready batches that were returned.
    returned: BTreeSet<u64>,
    refused: usize,
    draining: bool,
    drained: usize,
    ended: usize,
}

impl Model {
    fn new(settings: Settings) -> Self {
        let mut state = State::new(settings);
        state.on_epoch(0, &[5, 3, 2, 1], vec![false; 11].into());
        Self {
            state,
            settings,
            ceiling: (0, 0),
            next: 0,
            asked: BTreeMap::new(),
            granted: Vec::new(),
            checked_out: Vec::new(),
            ready: BTreeSet::new(),
            ready_bytes: 0,
            draws: BTreeSet::new(),
            lost: BTreeSet::new(),
            given: BTreeSet::new(),
            returned: BTreeSet::new(),
            refused: 0,
            draining: false,
            drained: 0,
            ended: 0,
        }
    }

    fn apply(&mut self, actions: Vec<Action<u64>>) {
        let mut actions: VecDeque<_> = actions.into();
        let mut leaving = actions.iter().filter(|a| matches!(a, Action::Give { .. })).count();
        while let Some(action) = actions.pop_front() {
            match action {
                Action::Grant { request, bytes } => {
                    assert_eq!(self.asked.remove(&request), Some(bytes));
                    self.granted.push(bytes);
                }
                Action::Refuse { request, bytes, max_bytes } => {
                    assert_eq!(self.asked.remove(&request), Some(bytes));
                    assert!(bytes > max_bytes);
                    self.refused += 1;
                }
                Action::Give { request, entry } => {
                    let Entry { bytes, batch, .. } = entry;
                    assert!(self.draws.remove(&request));
                    let ready = self.ready.len();
                    assert!(ready >= self.settings.min_ready || self.draining, "L2: {ready} ready");
                    assert!(self.ready.contains(&batch), "D1: batch {batch} was not there");
                    leaving -= 1;
                    let more = if self.lost.remove(&request) {
                        self.state.on_undelivered(entry)
                    } else {
                        self.ready.remove(&batch);
                        self.returned.remove(&batch);
                        assert!(self.given.insert(batch), "D1: batch {batch} was given twice");
                        self.ready_bytes -= bytes;
                        self.checked_out.push(entry);
                        self.state.on_delivered()
                    };
                    leaving += more.iter().filter(|a| matches!(a, Action::Give { .. })).count();
                    actions.extend(more);
                }
                Action::NoMore { request } => {
                    assert!(self.draws.remove(&request) && self.ready.is_empty());
                    assert!(self.checked_out.is_empty(), "told that there is no more while a batch may come back");
                    self.ended += 1;
                }
                Action::Drained => {
                    assert!(self.ready.is_empty() && self.checked_out.is_empty(), "L3: {} left", self.ready.len());
                    self.drained += 1;
                }
            }
        }
        let bytes =
            self.granted.iter().sum::<u64>() + self.ready_bytes + self.checked_out.iter().map(|e| e.bytes).sum::<u64>();
        assert_eq!(leaving, 0);
        assert_eq!(self.state.occupancy().bytes(), bytes, "accounting follows a batch through every owner");
        assert!(bytes <= self.settings.max_bytes.max(self.ceiling.0), "L1");
        let batches = self.granted.len() + self.ready.len() - self.returned.len();
        assert!(batches <= self.settings.max_batches.max(self.ceiling.1), "L1");
        self.ceiling = (self.ceiling.0.min(bytes), self.ceiling.1.min(batches));
        let ready = self.state.occupancy().ready_batches;
        assert!(self.draws.is_empty() || ready < self.settings.min_ready.max(1), "{ready} are ready, and a draw waits");
        let room = |&&bytes: &&u64| self.state.occupancy().bytes() + bytes <= self.settings.max_bytes;
        let first = self.asked.values().next().filter(room);
        assert!(first.is_none() || batches >= self.settings.max_batches, "there is room, and a reservation waits");
        assert_eq!(self.state.occupancy().batches(), batches);
        assert_eq!(self.state.occupancy().checked_out_batches, self.checked_out.len());
    }

    fn step(&mut self, event: Event) {
        self.next += 1;
        let actions = match event {
            Event::Reserve(bytes) => {
                self.asked.insert(self.next, bytes);
                self.state.on_reserve(self.next, bytes)
            }
            Event::Fill(i, bucket) if !self.granted.is_empty() => {
                let bytes = self.granted.swap_remove(i % self.granted.len());
                self.ready.insert(self.next);
                self.ready_bytes += bytes;
                self.state.on_filled(JobId { epoch: 0, index: self.next as u32 }, bucket, bytes, self.next)
            }
            Event::Cancel(i) if !self.granted.is_empty() => {
                let bytes = self.granted.swap_remove(i % self.granted.len());
                self.state.on_cancelled(bytes)
            }
            Event::Draw | Event::LostDraw => {
                self.draws.insert(self.next);
                if matches!(event, Event::LostDraw) {
                    self.lost.insert(self.next);
                }
                self.state.on_draw(self.next)
            }
            Event::Done(i) if !self.checked_out.is_empty() => {
                let entry = self.checked_out.swap_remove(i % self.checked_out.len());
                self.state.on_done(entry.bytes)
            }
            Event::GiveBack(i) if !self.checked_out.is_empty() => {
                let entry = self.checked_out.swap_remove(i % self.checked_out.len());
                self.given.remove(&entry.batch);
                self.ready.insert(entry.batch);
                self.returned.insert(entry.batch);
                self.ready_bytes += entry.bytes;
                self.state.on_returned(entry)
            }
            Event::Reconfigure(settings) => {
                self.settings = settings;
                self.ceiling = (self.state.occupancy().bytes(), self.state.occupancy().batches());
                self.state.reconfigure(settings)
            }
            _ => return,
        };
        self.apply(actions);
    }
}

fn settings() -> impl Strategy<Value = Settings> {
    let any = (60_u64..900, 1_usize..12, 0_usize..12, any::<bool>(), any::<u64>());
    let any = any.prop_map(|(max_bytes, max_batches, min_ready, uniform, seed)| Settings {
        max_bytes,
        max_batches,
        min_ready,
        draw_policy: if uniform { DrawPolicy::Uniform } else { DrawPolicy::Proportional },
        replay_window: 1,
        start_step: 0,
        seed,
    });
    any.prop_filter("refused at load", |s| s.deadlock(59).is_none())
}

proptest! {
    #[test]
    fn promises_hold_in_every_history_and_draining_gives_everything_out(
        settings in settings(),
        events in prop::collection::vec(event(), 0..200),
    ) {
        let mut m = Model::new(settings);
        for e in events {
            m.step(e);
        }
        // The plan ends: everything requested is granted, filled and drawn, and then nothing is left anywhere.
        for _ in 0..10_000 {
            if !m.granted.is_empty() {
                m.step(Event::Fill(0, 1));
            } else if !m.checked_out.is_empty() {
                m.step(Event::Done(0));
            } else if !m.asked.is_empty() {
                m.step(Event::Draw);
            } else {
                break;
            }
        }
        prop_assert!(m.asked.is_empty() && m.granted.is_empty() && m.checked_out.is_empty(), "a request waits forever");
        m.draining = true;
        m.next += 1;
        let actions = m.state.on_drain(true, 0);
        m.apply(actions);
        for turn in 0..10_000 {
            if m.ready.is_empty() && m.checked_out.is_empty() {
                break;
            }
            m.step(Event::Draw);
            // Batches may be returned during the drain too.
            m.step(if turn < 5 { Event::GiveBack(0) } else { Event::Done(0) });
        }
        prop_assert_eq!(m.drained, 1);
        prop_assert!(m.draws.is_empty(), "a draw waits forever");
        let before = m.ended;
        m.step(Event::Draw);
        prop_assert_eq!(m.ended, before + 1, "a draw after the end is answered at once");
        while !m.checked_out.is_empty() {
            m.step(Event::Done(0));
        }
        prop_assert_eq!(m.state.occupancy().bytes(), 0);
    }

    /// Reverb's size test ignored the minimum: here no draw is answered below it, and every one at it.
    #[test]
    fn a_draw_is_answered_exactly_at_min_ready(min_ready in 1_usize..10, seed in any::<u64>()) {
        let settings = Settings { max_bytes: 1000, max_batches: 10, min_ready, draw_policy: DrawPolicy::Uniform, replay_window: 1, start_step: 0, seed };
        let mut m = Model::new(settings);
        m.step(Event::Draw);
        for i in 0..min_ready {
            prop_assert_eq!(m.given.len(), 0, "{} ready", i);
            m.step(Event::Reserve(10));
            m.step(Event::Fill(0, 0));
        }
        prop_assert_eq!(m.given.len(), 1);
    }
}

fn filled(draw_policy: DrawPolicy, seed: u64, depth: usize) -> State<u64> {
    let settings = Settings {
        max_bytes: u64::MAX,
        max_batches: usize::MAX,
        min_ready: 1,
        draw_policy,
        replay_window: 1,
        start_step: 0,
        seed,
    };
    let mut state = State::new(settings);
    state.on_epoch(0, &[60, 30, 10], vec![false; 100].into());
    for i in 0..depth as u64 * 3 {
        state.on_reserve(i, 1);
        state.on_filled(JobId { epoch: 0, index: i as u32 }, (i % 3) as u16, 1, i);
    }
    state
}

#[test]
fn ms_swift_10111_proportional_draws_keep_the_plans_mix_in_every_window() {
    let mut state = filled(DrawPolicy::Proportional, 5, 600);
    let mut drawn = Vec::new();
    for request in 0..900 {
        for action in state.on_draw(10_000 + request) {
            if let Action::Give { entry, .. } = action {
                drawn.push(entry.bucket);
            }
        }
    }
    assert_eq!(drawn.len(), 900);
    for window in drawn.windows(50) {
        for (bucket, share) in [(0, 30.0), (1, 15.0), (2, 5.0)] {
            let n = window.iter().filter(|&&b| b == bucket).count() as f64;
            assert!((n - share).abs() <= 2.0, "bucket {bucket}: {n} of 50, plan {share}");
        }
    }
}

#[test]
fn uniform_draws_choose_every_batch_equally_often() {
    let mut counts = [0_u32; 6];
    for seed in 0..6000 {
        let mut state = filled(DrawPolicy::Uniform, seed, 2);
        for action in state.on_draw(99) {
            if let Action::Give { entry, .. } = action {
                counts[entry.batch as usize] += 1;
            }
        }
    }
    // Chi-square with 5 degrees of freedom: 25.7 is exceeded once in ten thousand.
    let chi: f64 = counts.iter().map(|&c| (f64::from(c) - 1000.0).powi(2) / 1000.0).sum();
    assert!(chi < 25.7, "{counts:?}");
}

/// Reverb's `MinSize(8)` over 20 items that are taken once yields 13: the other 7 can never be read. Here the end of
/// the plan is reported, and then the minimum no longer counts; a batch that is returned meanwhile is given out again.
#[test]
fn reverb_strands_7_of_20_items_below_its_minimum_and_a_drain_gives_them_out() {
    for draw_policy in [DrawPolicy::Uniform, DrawPolicy::Proportional] {
        let settings = Settings {
            max_bytes: 1000,
            max_batches: 20,
            min_ready: 8,
            draw_policy,
            replay_window: 1,
            start_step: 0,
            seed: 1,
        };
        let mut m = Model::new(settings);
        for _ in 0..20 {
            m.step(Event::Reserve(10));
            m.step(Event::Fill(0, 0));
        }
        for _ in 0..21 {
            m.step(Event::Draw);
        }
        assert_eq!((m.given.len(), m.draws.len()), (13, 8));
        m.draining = true;
        let actions = m.state.on_drain(true, 0);
        m.apply(actions);
        assert_eq!((m.given.len(), m.draws.len(), m.ended), (20, 1, 0));
        // The last draw waits for a batch that may be returned, and gets it.
        m.step(Event::GiveBack(3));
        assert_eq!((m.given.len(), m.draws.len(), m.ended), (20, 0, 0));
        while !m.checked_out.is_empty() {
            m.step(Event::Done(0));
        }
        m.step(Event::Draw);
        assert_eq!((m.drained, m.ended, m.state.occupancy().bytes()), (1, 1, 0));
    }
}
