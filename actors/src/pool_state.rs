//! Every decision of the pool, without waiting for anything: who gets room, who gets which batch, and when it drains.

use crate::{invariant, pool::RequestId, types::BucketId};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// Which batch answers a draw.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Draw {
    /// Any batch, all equally likely.
    Uniform,
    /// The bucket whose share of what was drawn lags its share of the plan most; a random batch of it.
    #[default]
    Proportional,
}

/// What shapes the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Bound on reserved, waiting and loaned bytes together.
    pub max_bytes: u64,
    /// Bound on reserved and waiting batches together.
    pub max_batches: usize,
    /// No draw is answered while fewer batches are ready, unless draining.
    pub min_ready: usize,
    pub draw: Draw,
    pub seed: u64,
}

impl Settings {
    /// Why these settings could wait for ever when the largest batch has `largest` bytes, with the arithmetic.
    ///
    /// While fewer than `min_ready` batches are ready nothing leaves, so all of them must fit at once, whatever their size.
    pub fn deadlock(&self, largest: u64) -> Option<String> {
        let Self { max_bytes, max_batches, min_ready, .. } = *self;
        let least = min_ready.max(1);
        let needed = (least as u64).saturating_mul(largest);
        if max_batches < least {
            return Some(format!(
                "pool.max_batches = {max_batches} can never hold pool.min_ready = {min_ready} batches; raise the one or lower the other"
            ));
        }
        (needed > max_bytes).then(|| {
            format!(
                "pool.min_ready = {min_ready} batches of up to {largest} bytes need {needed} bytes, but pool.max_bytes is {max_bytes}; \
                 raise pool.max_bytes, or lower pool.min_ready or plan.job_tokens"
            )
        })
    }
}

/// What the loop must do.
#[derive(Debug, PartialEq, Eq)]
pub enum Action<B> {
    Grant {
        request: RequestId,
        bytes: u64,
    },
    Refuse {
        request: RequestId,
        bytes: u64,
        max_bytes: u64,
    },
    /// Call `State::on_delivered` or `State::on_undelivered` next.
    Give {
        request: RequestId,
        bucket: BucketId,
        bytes: u64,
        batch: B,
    },
    NoMore {
        request: RequestId,
    },
    /// The last batch of a drain has been given out.
    Drained,
}

/// What the pool answers for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    pub reserved_bytes: u64,
    pub ready_bytes: u64,
    pub loaned_bytes: u64,
    pub reserved_batches: usize,
    pub ready_batches: usize,
    /// Given out, but not yet known to have arrived.
    pub leaving_batches: usize,
}

impl Held {
    /// All bytes that count against the limit.
    pub fn bytes(&self) -> u64 {
        self.reserved_bytes + self.ready_bytes + self.loaned_bytes
    }

    /// All batches that count against the limit.
    pub fn batches(&self) -> usize {
        self.reserved_batches + self.ready_batches + self.leaving_batches
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Filling,
    /// Nothing more comes for now; a new reservation ends this.
    Draining,
    /// Nothing more comes at all.
    Last,
    Stopped,
}

/// Every decision of the pool. `B` is a batch; the state never looks into it.
#[derive(Debug)]
pub struct State<B> {
    settings: Settings,
    /// Ready batches with their bytes, by bucket.
    ready: Vec<Vec<(u64, B)>>,
    held: Held,
    reserves: VecDeque<(RequestId, u64)>,
    draws: VecDeque<RequestId>,
    phase: Phase,
    announced: bool,
    shares: Vec<u64>,
    drawn: Vec<u64>,
    rng: ChaCha8Rng,
}

impl<B> State<B> {
    pub fn new(settings: Settings) -> Self {
        Self {
            settings,
            ready: Vec::new(),
            held: Held::default(),
            reserves: VecDeque::new(),
            draws: VecDeque::new(),
            phase: Phase::Filling,
            announced: true,
            shares: Vec::new(),
            drawn: Vec::new(),
            rng: ChaCha8Rng::seed_from_u64(settings.seed),
        }
    }

    /// How many jobs of each bucket the plan has; starts the count of draws anew when it changes.
    pub fn set_shares(&mut self, jobs_of_bucket: &[u64]) {
        if self.shares != jobs_of_bucket {
            self.shares = jobs_of_bucket.to_vec();
            self.drawn.clear();
            self.at_least(jobs_of_bucket.len());
        }
    }

    /// A target asks for room.
    pub fn on_reserve(&mut self, request: RequestId, bytes: u64) -> Vec<Action<B>> {
        if self.phase == Phase::Draining {
            self.phase = Phase::Filling;
        }
        self.reserves.push_back((request, bytes));
        self.decide()
    }

    /// A reservation became a batch.
    pub fn on_filled(&mut self, bucket: BucketId, bytes: u64, batch: B) -> Vec<Action<B>> {
        self.unreserve(bytes);
        self.put(bucket, bytes, batch);
        self.decide()
    }

    /// A reservation was given up.
    pub fn on_cancelled(&mut self, bytes: u64) -> Vec<Action<B>> {
        self.unreserve(bytes);
        self.decide()
    }

    /// A drafter asks for a batch.
    pub fn on_draw(&mut self, request: RequestId) -> Vec<Action<B>> {
        self.draws.push_back(request);
        self.decide()
    }

    /// A drafter is done with a batch.
    pub fn on_done(&mut self, bytes: u64) -> Vec<Action<B>> {
        invariant!(
            "L1",
            bytes <= self.held.loaned_bytes,
            "{bytes} bytes came back of {} on loan",
            self.held.loaned_bytes
        );
        self.held.loaned_bytes = self.held.loaned_bytes.saturating_sub(bytes);
        self.decide()
    }

    /// A batch that was given reached its drafter.
    pub fn on_delivered(&mut self) -> Vec<Action<B>> {
        self.held.leaving_batches = self.held.leaving_batches.saturating_sub(1);
        self.decide()
    }

    /// A batch that was given did not reach its drafter: as if it had never been drawn.
    pub fn on_undelivered(&mut self, bucket: BucketId, bytes: u64, batch: B) -> Vec<Action<B>> {
        self.held.leaving_batches = self.held.leaving_batches.saturating_sub(1);
        self.held.loaned_bytes = self.held.loaned_bytes.saturating_sub(bytes);
        let drawn = &mut self.drawn[usize::from(bucket)];
        *drawn = drawn.saturating_sub(1);
        self.put(bucket, bytes, batch);
        self.announced = false;
        self.decide()
    }

    /// Everything that will come is here: for now, or for good when `last`. `late` reservations may be out that will not be
    /// filled.
    pub fn on_drain(&mut self, last: bool, late: usize) -> Vec<Action<B>> {
        if self.phase == Phase::Stopped {
            return self.decide();
        }
        let waits = self.held.reserved_batches + self.reserves.len();
        invariant!("L3", waits <= late, "told to drain while {waits} reservations are out, {late} of them late");
        self.phase = if last { Phase::Last } else { Phase::Draining };
        self.announced = false;
        self.decide()
    }

    /// Gives nothing out any more and lets what waits go.
    pub fn on_stop(&mut self) -> Vec<Action<B>> {
        self.phase = Phase::Stopped;
        self.ready.iter_mut().for_each(Vec::clear);
        (self.held.ready_bytes, self.held.ready_batches) = (0, 0);
        self.decide()
    }

    pub fn held(&self) -> Held {
        self.held
    }

    pub fn is_draining(&self) -> bool {
        matches!(self.phase, Phase::Draining | Phase::Last)
    }

    /// Ready batches of each bucket.
    pub fn depths(&self) -> impl Iterator<Item = usize> {
        self.ready.iter().map(Vec::len)
    }

    fn at_least(&mut self, buckets: usize) {
        let buckets = buckets.max(self.ready.len());
        self.ready.resize_with(buckets, Vec::new);
        self.drawn.resize(buckets, 0);
    }

    fn put(&mut self, bucket: BucketId, bytes: u64, batch: B) {
        if self.phase == Phase::Stopped {
            return;
        }
        self.at_least(usize::from(bucket) + 1);
        self.ready[usize::from(bucket)].push((bytes, batch));
        self.held.ready_bytes += bytes;
        self.held.ready_batches += 1;
    }

    fn unreserve(&mut self, bytes: u64) {
        invariant!(
            "L1",
            bytes <= self.held.reserved_bytes && self.held.reserved_batches > 0,
            "{bytes} bytes came back of {} reserved",
            self.held.reserved_bytes
        );
        self.held.reserved_bytes = self.held.reserved_bytes.saturating_sub(bytes);
        self.held.reserved_batches = self.held.reserved_batches.saturating_sub(1);
    }

    fn decide(&mut self) -> Vec<Action<B>> {
        let mut actions = Vec::new();
        self.grant(&mut actions);
        self.give(&mut actions);
        let over = self.held.ready_batches + self.held.leaving_batches == 0;
        if self.is_draining() && over && !std::mem::replace(&mut self.announced, true) {
            actions.push(Action::Drained);
        }
        if (self.phase == Phase::Last && over) || self.phase == Phase::Stopped {
            actions.extend(self.draws.drain(..).map(|request| Action::NoMore { request }));
        }
        actions
    }

    fn grant(&mut self, actions: &mut Vec<Action<B>>) {
        let Settings { max_bytes, max_batches, .. } = self.settings;
        while let Some(&(request, bytes)) = self.reserves.front() {
            if bytes > max_bytes {
                self.reserves.pop_front();
                actions.push(Action::Refuse { request, bytes, max_bytes });
            } else if self.held.bytes() + bytes <= max_bytes && self.held.batches() < max_batches {
                self.reserves.pop_front();
                self.held.reserved_bytes += bytes;
                self.held.reserved_batches += 1;
                actions.push(Action::Grant { request, bytes });
                invariant!(
                    "L1",
                    self.held.bytes() <= max_bytes && self.held.batches() <= max_batches,
                    "{:?} exceeds {max_bytes} bytes or {max_batches} batches",
                    self.held
                );
            } else {
                break;
            }
        }
    }

    fn give(&mut self, actions: &mut Vec<Action<B>>) {
        let least = if self.is_draining() { 1 } else { self.settings.min_ready.max(1) };
        while self.held.ready_batches >= least {
            let Some(request) = self.draws.pop_front() else { break };
            let Some(bucket) = self.choose() else { break };
            invariant!(
                "L2",
                self.is_draining() || self.held.ready_batches >= self.settings.min_ready,
                "a draw was answered with {} batches ready",
                self.held.ready_batches
            );
            let at = self.rng.random_range(0..self.ready[bucket].len());
            let (bytes, batch) = self.ready[bucket].swap_remove(at);
            self.held.ready_batches -= 1;
            self.held.leaving_batches += 1;
            self.held.ready_bytes -= bytes;
            self.held.loaned_bytes += bytes;
            self.drawn[bucket] += 1;
            actions.push(Action::Give { request, bucket: bucket as BucketId, bytes, batch });
        }
    }

    /// The bucket to draw from: one that has a batch.
    fn choose(&mut self) -> Option<usize> {
        let lag = |bucket: usize| {
            let plan: u64 = self.shares.iter().sum();
            let drawn: u64 = self.drawn.iter().sum();
            let share = self.shares.get(bucket).copied().unwrap_or(0);
            // share / plan - drawn_b / (drawn + 1), brought to one denominator, so that it is exact.
            i128::from(share) * i128::from(drawn + 1) - i128::from(self.drawn[bucket]) * i128::from(plan)
        };
        let some = (0..self.ready.len()).filter(|&b| !self.ready[b].is_empty());
        match self.settings.draw {
            Draw::Proportional => some.max_by_key(|&b| (lag(b), std::cmp::Reverse(b))),
            Draw::Uniform => {
                let mut left = self.rng.random_range(0..self.held.ready_batches.max(1));
                some.into_iter().find(|&b| {
                    let here = left < self.ready[b].len();
                    left = left.saturating_sub(self.ready[b].len());
                    here
                })
            }
        }
    }
}
