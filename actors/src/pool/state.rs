//! Decisions of the pool, without waiting: grants of bytes, answers to draws, and the drain.

use super::replay::ReplayOrder;
use crate::{
    invariant,
    messages::types::{BucketId, JobId},
    runtime::{
        invariants::{l1, l2, l3},
        random::stream_seed,
        trace::lifecycle,
    },
};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::{collections::VecDeque, sync::Arc};

pub use super::settings::{Deadlock, DrawPolicy, Settings};

/// Identifier of a waiting reservation or draw.
pub type RequestId = u64;

/// Batch in the pool or checked out, with the data that the pool needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry<B> {
    pub job: JobId,
    pub bucket: BucketId,
    pub bytes: u64,
    /// Position in the draw order, with policy `replay`, once the batch was drawn for the first time.
    pub position: Option<u64>,
    /// A drafter returned the batch.
    pub returned: bool,
    pub batch: B,
}

/// Action for the loop.
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
    /// Gives a batch; the loop calls `State::on_delivered` or `State::on_undelivered` next.
    Give {
        request: RequestId,
        entry: Entry<B>,
    },
    NoMore {
        request: RequestId,
    },
    /// The last batch of a drain has been given out.
    Drained,
}

/// Bytes and batches that the pool accounts for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Occupancy {
    pub reserved_bytes: u64,
    pub ready_bytes: u64,
    pub checked_out_bytes: u64,
    pub reserved_batches: usize,
    pub ready_batches: usize,
    /// Batches that were given out but are not confirmed as delivered.
    pub leaving_batches: usize,
    pub checked_out_batches: usize,
    /// Ready batches that a drafter returned. Their bytes were counted throughout, and they leave with the next draws,
    /// so they wait in addition to `max_batches`.
    pub returned_batches: usize,
}

impl Occupancy {
    /// Returns all bytes that count against the limit.
    pub fn bytes(&self) -> u64 {
        self.reserved_bytes + self.ready_bytes + self.checked_out_bytes
    }

    /// Returns all batches that count against the limit.
    pub fn batches(&self) -> usize {
        self.reserved_batches + self.ready_batches + self.leaving_batches - self.returned_batches
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Filling,
    /// No batch arrives for now; a new reservation ends this phase.
    Draining,
    /// No further batch arrives.
    Last,
    Stopped,
}

/// Every decision of the pool. `B` is a batch; the state never looks into it.
#[derive(Debug)]
pub struct State<B> {
    settings: Settings,
    /// Ready batches, by bucket.
    ready: Vec<Vec<Entry<B>>>,
    occupancy: Occupancy,
    reserves: VecDeque<(RequestId, u64)>,
    draws: VecDeque<RequestId>,
    phase: Phase,
    /// The plan was cut short: with a fixed order the next job may never arrive.
    closed: bool,
    announced: bool,
    /// Planned jobs of each bucket, and drawn batches of each bucket.
    shares: Vec<u64>,
    drawn: Vec<u64>,
    /// Draw order of policy `replay`.
    order: Option<ReplayOrder>,
    draws_so_far: u64,
    passed: u64,
    rng: ChaCha8Rng,
}

impl<B> State<B> {
    pub fn new(settings: Settings) -> Self {
        Self {
            settings,
            ready: Vec::new(),
            occupancy: Occupancy::default(),
            reserves: VecDeque::new(),
            draws: VecDeque::new(),
            phase: Phase::Filling,
            closed: false,
            announced: true,
            shares: Vec::new(),
            drawn: Vec::new(),
            order: settings.window().map(|window| ReplayOrder::new(settings.seed, window)),
            draws_so_far: 0,
            passed: 0,
            rng: ChaCha8Rng::from_seed(stream_seed(settings.seed, "draws", &[settings.start_step])),
        }
    }

    /// Announces the open jobs of an epoch, as a number per bucket. `ended[i]` is true if job `i` already has an
    /// outcome.
    ///
    /// Shares and draws are counted over all epochs, because epochs overlap: the jobs of the next epoch are handed out
    /// while those of the previous one are drawn, and the lag of a bucket at that moment must be kept.
    pub fn on_epoch(&mut self, epoch: u32, open_of_bucket: &[u64], ended: Arc<[bool]>) -> Vec<Action<B>> {
        self.at_least(open_of_bucket.len());
        for (share, jobs) in self.shares.iter_mut().zip(open_of_bucket) {
            *share += jobs;
        }
        if let Some(order) = &mut self.order {
            order.begin(epoch, ended);
        }
        self.decide()
    }

    /// Removes a skipped job from the order.
    pub fn on_skipped(&mut self, job: JobId) -> Vec<Action<B>> {
        if self.order.as_mut().is_some_and(|order| order.on_skipped(job)) {
            self.passed += 1;
        }
        self.decide()
    }

    /// Applies changed limits, minimum and random policy at once, to waiting requests too. Batches above a lowered
    /// limit drain. Seed, window and a fixed order stay unchanged.
    pub fn reconfigure(&mut self, settings: Settings) -> Vec<Action<B>> {
        let Settings { max_bytes, max_batches, min_ready, draw_policy, .. } = settings;
        let fixed = self.order.is_some() || draw_policy == DrawPolicy::Replay;
        let draw_policy = if fixed { self.settings.draw_policy } else { draw_policy };
        self.settings = Settings { max_bytes, max_batches, min_ready, draw_policy, ..self.settings };
        self.decide()
    }

    /// A target requests bytes.
    pub fn on_reserve(&mut self, request: RequestId, bytes: u64) -> Vec<Action<B>> {
        if self.phase == Phase::Draining {
            self.phase = Phase::Filling;
        }
        lifecycle!("reservation_requested", bytes);
        self.reserves.push_back((request, bytes));
        self.decide()
    }

    /// The targets of these requests are gone.
    pub fn on_withdrawn(&mut self, requests: &[RequestId]) -> Vec<Action<B>> {
        self.reserves.retain(|(waiting, _)| !requests.contains(waiting));
        self.decide()
    }

    /// A reservation became a batch.
    pub fn on_filled(&mut self, job: JobId, bucket: BucketId, bytes: u64, batch: B) -> Vec<Action<B>> {
        lifecycle!("filled", job = %job, bytes);
        self.unreserve(bytes);
        self.put(Entry { job, bucket, bytes, position: None, returned: false, batch });
        self.decide()
    }

    /// A reservation was cancelled.
    pub fn on_cancelled(&mut self, bytes: u64) -> Vec<Action<B>> {
        lifecycle!("cancelled", bytes);
        self.unreserve(bytes);
        self.decide()
    }

    /// A drafter requests a batch.
    pub fn on_draw(&mut self, request: RequestId) -> Vec<Action<B>> {
        self.draws.push_back(request);
        self.decide()
    }

    /// A drafter is done with a batch.
    pub fn on_done(&mut self, bytes: u64) -> Vec<Action<B>> {
        lifecycle!("done", bytes);
        self.check_in(bytes);
        self.decide()
    }

    /// A drafter returns a batch that it could not train: another draw gets it.
    pub fn on_returned(&mut self, entry: Entry<B>) -> Vec<Action<B>> {
        lifecycle!("batch_returned", job = %entry.job, bytes = entry.bytes);
        self.check_in(entry.bytes);
        self.undraw(entry.bucket);
        self.put(Entry { returned: true, ..entry });
        self.decide()
    }

    /// A batch reached its drafter.
    pub fn on_delivered(&mut self) -> Vec<Action<B>> {
        self.occupancy.leaving_batches = self.occupancy.leaving_batches.saturating_sub(1);
        self.decide()
    }

    /// A batch did not reach its drafter: it returns as if it had not been drawn.
    pub fn on_undelivered(&mut self, entry: Entry<B>) -> Vec<Action<B>> {
        lifecycle!("undelivered", job = %entry.job, bytes = entry.bytes);
        self.occupancy.leaving_batches = self.occupancy.leaving_batches.saturating_sub(1);
        self.check_in(entry.bytes);
        self.undraw(entry.bucket);
        self.put(entry);
        self.decide()
    }

    /// All batches have arrived: for now, or permanently if `last`. `late` reservations will not be filled.
    pub fn on_drain(&mut self, last: bool, late: usize) -> Vec<Action<B>> {
        if self.phase == Phase::Stopped {
            return self.decide();
        }
        let waits = self.occupancy.reserved_batches + self.reserves.len();
        lifecycle!("drains", late, last);
        invariant!("L3", l3(waits, late), "drain while {waits} reservations are out, {late} of them late");
        self.phase = if last { Phase::Last } else { Phase::Draining };
        self.announced = false;
        self.decide()
    }

    /// No job leaves the planner any more. Batches are given out once a drain reports that all have arrived; with a
    /// fixed order only up to the first missing job.
    pub fn on_close(&mut self) -> Vec<Action<B>> {
        self.closed = true;
        self.decide()
    }

    /// Gives out nothing more and drops the ready batches.
    pub fn on_stop(&mut self) -> Vec<Action<B>> {
        self.phase = Phase::Stopped;
        self.ready.iter_mut().for_each(Vec::clear);
        (self.occupancy.ready_bytes, self.occupancy.ready_batches, self.occupancy.returned_batches) = (0, 0, 0);
        self.decide()
    }

    pub fn occupancy(&self) -> Occupancy {
        self.occupancy
    }

    /// Returns the unanswered draws and reservations.
    pub fn waiting(&self) -> (usize, usize) {
        (self.draws.len(), self.reserves.len())
    }

    pub fn is_draining(&self) -> bool {
        matches!(self.phase, Phase::Draining | Phase::Last)
    }

    /// Returns the jobs of the order that were drawn for the first time or never will be. With policy `replay` the
    /// planner stays within the window of this number.
    pub fn passed(&self) -> u64 {
        self.passed
    }

    /// Returns the ready batches of each bucket.
    pub fn depths(&self) -> impl Iterator<Item = usize> {
        self.ready.iter().map(Vec::len)
    }

    fn at_least(&mut self, buckets: usize) {
        let buckets = buckets.max(self.ready.len());
        self.ready.resize_with(buckets, Vec::new);
        self.drawn.resize(buckets, 0);
        self.shares.resize(buckets, 0);
    }

    fn put(&mut self, entry: Entry<B>) {
        if self.phase == Phase::Stopped {
            return;
        }
        let bucket = usize::from(entry.bucket);
        self.at_least(bucket + 1);
        self.occupancy.ready_bytes += entry.bytes;
        self.occupancy.ready_batches += 1;
        self.occupancy.returned_batches += usize::from(entry.returned);
        self.ready[bucket].push(entry);
    }

    fn check_in(&mut self, bytes: u64) {
        invariant!(
            "L1",
            bytes <= self.occupancy.checked_out_bytes && self.occupancy.checked_out_batches > 0,
            "{bytes} bytes were returned of {} checked out",
            self.occupancy.checked_out_bytes
        );
        self.occupancy.checked_out_bytes = self.occupancy.checked_out_bytes.saturating_sub(bytes);
        self.occupancy.checked_out_batches = self.occupancy.checked_out_batches.saturating_sub(1);
    }

    fn undraw(&mut self, bucket: BucketId) {
        if let Some(drawn) = self.drawn.get_mut(usize::from(bucket)) {
            *drawn = drawn.saturating_sub(1);
        }
    }

    fn unreserve(&mut self, bytes: u64) {
        invariant!(
            "L1",
            bytes <= self.occupancy.reserved_bytes && self.occupancy.reserved_batches > 0,
            "{bytes} bytes were returned of {} reserved",
            self.occupancy.reserved_bytes
        );
        self.occupancy.reserved_bytes = self.occupancy.reserved_bytes.saturating_sub(bytes);
        self.occupancy.reserved_batches = self.occupancy.reserved_batches.saturating_sub(1);
    }

    fn decide(&mut self) -> Vec<Action<B>> {
        let mut actions = Vec::new();
        self.grant(&mut actions);
        self.give(&mut actions);
        if self.closed && self.phase == Phase::Last {
            self.drop_unreachable();
        }
        // Checked-out batches may be returned: until they are done, "no more" is not answered.
        let over =
            self.occupancy.ready_batches + self.occupancy.leaving_batches + self.occupancy.checked_out_batches == 0;
        if self.is_draining() && over && !std::mem::replace(&mut self.announced, true) {
            actions.push(Action::Drained);
        }
        if (self.phase == Phase::Last && over) || self.phase == Phase::Stopped {
            actions.extend(self.draws.drain(..).map(|request| Action::NoMore { request }));
        }
        actions
    }

    /// Drops the batches after a job that will not arrive, with a fixed order. Their jobs stay open.
    fn drop_unreachable(&mut self) {
        let Some(wanted) = self.order.as_ref().map(ReplayOrder::wanted) else { return };
        if self.ready.iter().flatten().any(|entry| Some(entry.job) == wanted) {
            return;
        }
        let Occupancy { ready_bytes, ready_batches, .. } = &mut self.occupancy;
        for entry in self.ready.iter_mut().flat_map(|here| here.extract_if(.., |entry| entry.position.is_none())) {
            *ready_bytes -= entry.bytes;
            *ready_batches -= 1;
        }
    }

    fn grant(&mut self, actions: &mut Vec<Action<B>>) {
        let Settings { max_bytes, max_batches, .. } = self.settings;
        while let Some(&(request, bytes)) = self.reserves.front() {
            if bytes > max_bytes {
                self.reserves.pop_front();
                actions.push(Action::Refuse { request, bytes, max_bytes });
            } else if self.occupancy.bytes() + bytes <= max_bytes && self.occupancy.batches() < max_batches {
                self.reserves.pop_front();
                self.occupancy.reserved_bytes += bytes;
                self.occupancy.reserved_batches += 1;
                lifecycle!("granted", bytes);
                actions.push(Action::Grant { request, bytes });
                invariant!(
                    "L1",
                    l1(self.occupancy.bytes(), max_bytes, self.occupancy.batches(), max_batches),
                    "{:?} exceeds {max_bytes} bytes or {max_batches} batches",
                    self.occupancy
                );
            } else {
                break;
            }
        }
    }

    fn give(&mut self, actions: &mut Vec<Action<B>>) {
        while !self.draws.is_empty() {
            let Some((bucket, at)) = self.choose() else { break };
            let Some(request) = self.draws.pop_front() else { break };
            invariant!(
                "L2",
                l2(self.occupancy.ready_batches, self.settings.min_ready, self.is_draining(), self.order.is_some()),
                "a draw was answered with {} batches ready",
                self.occupancy.ready_batches
            );
            let mut entry = self.ready[bucket].swap_remove(at);
            lifecycle!("drawn", job = %entry.job, bytes = entry.bytes);
            self.occupancy.ready_batches -= 1;
            self.occupancy.returned_batches -= usize::from(entry.returned);
            self.occupancy.leaving_batches += 1;
            self.occupancy.checked_out_batches += 1;
            self.occupancy.ready_bytes -= entry.bytes;
            self.occupancy.checked_out_bytes += entry.bytes;
            self.drawn[bucket] += 1;
            if let (Some(order), None) = (&mut self.order, entry.position) {
                order.on_drawn();
                entry.position = Some(self.draws_so_far);
                self.draws_so_far += 1;
                self.passed += 1;
            }
            actions.push(Action::Give { request, entry });
        }
    }

    /// Returns the bucket to draw from and the index in it; `None` while no draw may be answered.
    fn choose(&mut self) -> Option<(usize, usize)> {
        if let Some(order) = &self.order {
            return self.next_in_order(order.wanted());
        }
        let least = if self.is_draining() { 1 } else { self.settings.min_ready.max(1) };
        if self.occupancy.ready_batches < least {
            return None;
        }
        let some = (0..self.ready.len()).filter(|&b| !self.ready[b].is_empty());
        let bucket = match self.settings.draw_policy {
            DrawPolicy::Uniform => {
                let mut left = self.rng.random_range(0..self.occupancy.ready_batches.max(1));
                some.into_iter().find(|&b| {
                    let here = left < self.ready[b].len();
                    left = left.saturating_sub(self.ready[b].len());
                    here
                })
            }
            DrawPolicy::Proportional | DrawPolicy::Replay => some.max_by_key(|&b| (self.lag(b), std::cmp::Reverse(b))),
        }?;
        Some((bucket, self.rng.random_range(0..self.ready[bucket].len())))
    }

    /// Returns the lag of a bucket's drawn share behind its planned share: share / plan - drawn_b / (drawn + 1). A
    /// common denominator keeps it exact.
    fn lag(&self, bucket: usize) -> i128 {
        let plan: u64 = self.shares.iter().sum();
        let drawn: u64 = self.drawn.iter().sum();
        i128::from(self.shares[bucket]) * i128::from(drawn + 1) - i128::from(self.drawn[bucket]) * i128::from(plan)
    }

    /// Returns the next batch of the order: first returned batches by their position, then the wanted job if it is
    /// present.
    fn next_in_order(&self, wanted: Option<JobId>) -> Option<(usize, usize)> {
        let all =
            self.ready.iter().enumerate().flat_map(|(b, here)| here.iter().enumerate().map(move |(i, e)| (b, i, e)));
        let next = all.filter(|(_, _, e)| e.position.is_some() || Some(e.job) == wanted);
        let next = next.min_by_key(|(_, _, e)| e.position.unwrap_or(u64::MAX));
        next.map(|(bucket, at, _)| (bucket, at))
    }
}
