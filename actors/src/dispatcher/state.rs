//! Decisions of the dispatcher, without waiting: which jobs are padded, which target gets which job, and which job is retried.

use super::{
    forward_times::ForwardTimeEstimate,
    messages::{Failure, LeaseId, PullId, Return, Settings},
    queue::{Entry, JobQueue, Position},
};
use crate::{
    invariant,
    messages::{
        job::Job,
        types::{JobId, JobSpec, PaddedBatch},
    },
    runtime::{invariants::d2, metrics as m, trace::lifecycle},
};
use metrics::counter;
use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};
use tokio::time::Instant;

/// Action for the loop.
#[derive(Debug)]
pub enum Action {
    Pad(JobSpec),
    Lease {
        pull: PullId,
        lease: LeaseId,
        job: JobId,
        batch: Arc<PaddedBatch>,
    },
    NoMore {
        pull: PullId,
    },
    /// All jobs so far are in the pool: drain it. `late` forwards, whose results are not needed, still run.
    Drain {
        last: bool,
        late: usize,
    },
}

#[derive(Clone, Copy, Debug)]
struct Pull {
    id: PullId,
    target: usize,
}

/// Job that is being extracted by one target, or by two after an offer.
#[derive(Debug)]
struct Extraction {
    /// Job, until the first result claims it.
    job: Option<Job>,
    batch: Arc<PaddedBatch>,
    failed: Vec<usize>,
    leases: usize,
}

/// Lease as the dispatcher remembers it.
#[derive(Debug)]
struct LeaseRecord {
    job: JobId,
    target: usize,
    started: Option<Instant>,
    /// Straggler deadline, while it is in the future.
    due: Option<Instant>,
    straggles: bool,
    /// This lease had the first result.
    claimed: bool,
}

/// Every decision of the dispatcher.
#[derive(Debug)]
pub struct State {
    settings: Settings,
    queue: JobQueue,
    pulls: VecDeque<Pull>,
    extractions: BTreeMap<JobId, Extraction>,
    leases: BTreeMap<LeaseId, LeaseRecord>,
    /// Jobs of stragglers that another target may take.
    offers: VecDeque<JobId>,
    next_lease: LeaseId,
    forward_times: ForwardTimeEstimate,
    barrier: bool,
    ended: bool,
    closed: bool,
    stopped: bool,
    drained: bool,
}

impl State {
    pub fn new(settings: Settings) -> Self {
        Self {
            settings,
            queue: JobQueue::default(),
            pulls: VecDeque::new(),
            extractions: BTreeMap::new(),
            leases: BTreeMap::new(),
            offers: VecDeque::new(),
            next_lease: 0,
            forward_times: ForwardTimeEstimate::default(),
            barrier: false,
            ended: false,
            closed: false,
            stopped: false,
            drained: false,
        }
    }

    /// Returns true if another job may enter.
    pub fn has_room(&self) -> bool {
        self.queue.len() < self.settings.queue_jobs && !self.barrier && !self.closed
    }

    pub fn on_job(&mut self, job: Job) -> Vec<Action> {
        self.drained = false;
        lifecycle!("queued", job = %job.id());
        self.queue.push_back(job);
        self.decide()
    }

    pub fn on_barrier(&mut self) -> Vec<Action> {
        self.barrier = true;
        // Two barriers may follow each other without a job between them: each one is answered.
        self.drained = false;
        self.decide()
    }

    /// The plan has ended: no further job arrives.
    pub fn on_end(&mut self) -> Vec<Action> {
        (self.ended, self.drained) = (true, false);
        self.decide()
    }

    pub fn on_pull(&mut self, id: PullId, target: usize) -> Vec<Action> {
        lifecycle!("pulls", target_index = target);
        self.pulls.push_back(Pull { id, target });
        self.decide()
    }

    pub fn on_padded(&mut self, job: JobId, result: Result<PaddedBatch, String>) -> Vec<Action> {
        match result {
            Ok(batch) => {
                if self.queue.finish_padding(job, batch) {
                    lifecycle!("padded", job = %job);
                }
            }
            Err(message) => {
                if let Some(entry) = self.queue.fail_padding(job) {
                    self.retry(entry, message);
                }
            }
        }
        self.decide()
    }

    /// A forward begins: its time counts from now on.
    pub fn on_started(&mut self, lease: LeaseId, now: Instant) {
        if let Some(record) = self.leases.get_mut(&lease) {
            record.started = Some(now);
        }
        self.expect();
    }

    /// Applies changed settings at once. A shorter queue empties as jobs leave it. A job that has used up its attempts by now is
    /// skipped at its next failure.
    pub fn reconfigure(&mut self, settings: Settings) -> Vec<Action> {
        let old = std::mem::replace(&mut self.settings, settings);
        if old.straggler_factor != self.settings.straggler_factor {
            self.leases.values_mut().for_each(|record| record.due = None);
            self.expect();
        }
        match (old.offer_stragglers, self.settings.offer_stragglers) {
            (true, false) => self.offers.clear(),
            (false, true) => self.offer_all(),
            _ => {}
        }
        self.decide()
    }

    /// Offers every job that only stragglers hold.
    fn offer_all(&mut self) {
        let Self { leases, extractions, offers, .. } = self;
        let wanted = extractions.iter().filter(|(_, extraction)| extraction.job.is_some()).map(|(job, _)| *job);
        offers.extend(
            wanted.filter(|job| leases.values().filter(|record| record.job == *job).all(|record| record.straggles)),
        );
    }

    /// Sets the straggler deadlines that were unknown and can be estimated by now.
    fn expect(&mut self) {
        let Self { leases, extractions, forward_times, settings, .. } = self;
        for record in leases.values_mut().filter(|record| record.due.is_none() && !record.straggles) {
            let (Some(started), Some(job)) =
                (record.started, extractions.get(&record.job).and_then(|extraction| extraction.job.as_ref()))
            else {
                continue;
            };
            let deadline =
                forward_times.straggler_deadline(job.spec.bucket, job.spec.padded_tokens(), settings.straggler_factor);
            record.due = deadline.and_then(|deadline| started.checked_add(deadline));
        }
    }

    /// Claims the job of a complete result. The first result of a job gets it; a later one gets `None`.
    pub fn on_claim(&mut self, lease: LeaseId, now: Instant) -> Option<Job> {
        let record = self.leases.get_mut(&lease)?;
        let job = self.extractions.get_mut(&record.job)?.job.take()?;
        lifecycle!("claimed", job = %record.job, target_index = record.target);
        record.claimed = true;
        record.due = None;
        if let Some(started) = record.started {
            self.forward_times.learn(job.spec.bucket, job.spec.padded_tokens(), now.duration_since(started));
            // A forward that hangs may have begun before any estimate existed.
            self.expect();
        }
        Some(job)
    }

    pub fn on_return(&mut self, back: Return) -> Vec<Action> {
        let lease = back.lease();
        let record = self.leases.remove(&lease);
        invariant!("D1", record.is_some(), "unknown lease {lease} was returned");
        let Some(record) = record else { return self.decide() };
        lifecycle!("returned", job = %record.job, target_index = record.target);
        match back {
            Return::Done { .. } => drop(self.extractions.remove(&record.job)),
            Return::Unused { .. } => self.revoke(&record),
            Return::Late { .. } if self.stopped => {}
            Return::Late { .. } => {
                counter!(m::LATE_RESULTS).increment(1);
                tracing::info!(job = %record.job, target_index = record.target, "late result dropped");
                self.release(&record);
            }
            Return::Failed { failure, message, .. } => {
                self.release(&record);
                self.failed(&record, failure, message);
            }
        }
        self.decide()
    }

    /// Returns the time of the next straggler deadline, for `on_time`.
    pub fn next_due(&self) -> Option<Instant> {
        self.leases.values().filter_map(|record| record.due).min()
    }

    /// Reports each new straggler once, and offers its job if `offer_stragglers` is set.
    pub fn on_time(&mut self, now: Instant) -> Vec<Action> {
        for record in self.leases.values_mut().filter(|record| record.due.is_some_and(|due| due <= now)) {
            (record.due, record.straggles) = (None, true);
            let seconds = record.started.map_or(0.0, |started| now.duration_since(started).as_secs_f64());
            counter!(m::STRAGGLERS).increment(1);
            tracing::warn!(job = %record.job, target_index = record.target, seconds, "straggler detected");
            if self.settings.offer_stragglers
                && self.extractions.get(&record.job).is_some_and(|extraction| extraction.job.is_some())
            {
                self.offers.push_back(record.job);
            }
        }
        self.decide()
    }

    /// Stops handing out jobs. Queued jobs are dropped and stay open. Running forwards are waited for; then the pool
    /// drains permanently, even if a barrier has drained it already.
    pub fn on_close(&mut self) -> Vec<Action> {
        (self.closed, self.drained) = (true, false);
        self.queue.clear();
        self.offers.clear();
        self.decide()
    }

    /// Stops handing out jobs. Queued jobs and those in extraction are dropped and stay open.
    pub fn on_stop(&mut self) -> Vec<Action> {
        (self.closed, self.stopped) = (true, true);
        self.queue.clear();
        // The pool accepts nothing more, and a hanging forward must not delay the end.
        self.extractions.clear();
        self.leases.values_mut().for_each(|record| record.due = None);
        self.decide()
    }

    /// Returns the queued jobs, and the padded ones among them.
    pub fn depth(&self) -> (usize, usize) {
        (self.queue.len(), self.queue.padded())
    }

    /// Returns the number of waiting pulls.
    pub fn pulls(&self) -> usize {
        self.pulls.len()
    }

    /// Undoes a lease.
    fn revoke(&mut self, record: &LeaseRecord) {
        self.release(record);
        match self.extractions.get(&record.job).map(|extraction| extraction.leases) {
            Some(0) => self.requeue(record.job),
            Some(_) => self.offers.push_front(record.job),
            None => {}
        }
    }

    fn release(&mut self, record: &LeaseRecord) {
        if let Some(extraction) = self.extractions.get_mut(&record.job) {
            extraction.leases -= 1;
            if record.claimed {
                // The target ended while it held the job: the receipt has informed the planner.
                self.extractions.remove(&record.job);
            }
        }
    }

    fn failed(&mut self, record: &LeaseRecord, failure: Failure, message: String) {
        counter!(m::JOBS_RETURNED, "cause" => failure.as_str()).increment(1);
        let Some(extraction) = self.extractions.get_mut(&record.job) else { return };
        extraction.failed.push(record.target);
        if let Some(job) = &mut extraction.job {
            job.attempts += 1;
            tracing::warn!(job = %record.job, attempts = job.attempts, reason = message, "job failed");
        }
        // Another lease that is no straggler continues. A straggler may hang, so the job does not depend on it alone.
        if self.leases.values().any(|other| other.job == record.job && !other.straggles) {
            return;
        }
        match self.extractions.get(&record.job) {
            Some(Extraction { job: Some(job), .. }) if job.attempts >= self.settings.max_attempts => {
                if let Some(job) = self.extractions.remove(&record.job).and_then(|extraction| extraction.job) {
                    skip(job, failure.as_str(), message);
                }
            }
            Some(Extraction { leases: 0, .. }) => self.requeue(record.job),
            Some(_) if self.settings.offer_stragglers => self.offers.push_back(record.job),
            _ => {}
        }
    }

    /// Returns a job that no target extracts to the head of the queue.
    fn requeue(&mut self, job: JobId) {
        let Some(Extraction { job: Some(job), batch, failed, .. }) = self.extractions.remove(&job) else { return };
        if !self.closed {
            lifecycle!("requeued", job = %job.id());
            self.queue.push_front(Entry { job, failed }, Some(batch));
        }
    }

    /// Retries a job whose padding failed, or skips it.
    fn retry(&mut self, mut entry: Entry, message: String) {
        counter!(m::JOBS_RETURNED, "cause" => Failure::Failed.as_str()).increment(1);
        entry.job.attempts += 1;
        let attempts = entry.job.attempts;
        tracing::warn!(job = %entry.job.id(), attempts, reason = message, "padding failed");
        if attempts >= self.settings.max_attempts {
            skip(entry.job, "padding", message);
        } else {
            self.queue.push_front(entry, None);
        }
    }

    fn decide(&mut self) -> Vec<Action> {
        let mut actions = Vec::new();
        if !self.closed {
            self.lease(&mut actions);
            self.pad(&mut actions);
        }
        invariant!(
            "D2",
            d2(self.pulls.iter().filter(|p| serves(p, &self.settings)).count(), self.queue.padded()),
            "{} targets wait while padded jobs are ready",
            self.pulls.len()
        );
        let idle = self.queue.is_empty() && self.extractions.is_empty();
        let finished = self.ended || self.closed;
        if idle && !self.drained && (finished || std::mem::take(&mut self.barrier)) {
            self.drained = true;
            actions.push(Action::Drain { last: finished, late: self.leases.len() });
        }
        if self.closed || (finished && idle) {
            actions.extend(self.pulls.drain(..).map(|pull| Action::NoMore { pull: pull.id }));
        }
        actions
    }

    fn lease(&mut self, actions: &mut Vec<Action>) {
        self.lease_offers(false, actions);
        while let Some((pull, position)) = self.next_pair() {
            let Some((Entry { job, failed }, batch)) = self.queue.take_padded(position) else { break };
            let id = job.id();
            let new = Extraction { job: Some(job), batch, failed, leases: 0 };
            invariant!("D1", self.extractions.insert(id, new).is_none(), "job {id} is leased twice");
            self.give(pull, id, actions);
        }
        // A target gets a job that it failed at only if nothing else is left to do.
        self.lease_offers(true, actions);
    }

    fn lease_offers(&mut self, again: bool, actions: &mut Vec<Action>) {
        while let Some((pull, job)) = self.next_offer(again) {
            self.offers.retain(|offered| *offered != job);
            self.give(pull, job, actions);
        }
    }

    fn give(&mut self, pull: usize, job: JobId, actions: &mut Vec<Action>) {
        let (Some(pull), Some(extraction)) = (self.pulls.remove(pull), self.extractions.get_mut(&job)) else { return };
        extraction.leases += 1;
        self.next_lease += 1;
        let lease = self.next_lease;
        lifecycle!("leased", job = %job, target_index = pull.target);
        self.leases.insert(
            lease,
            LeaseRecord { job, target: pull.target, started: None, due: None, straggles: false, claimed: false },
        );
        actions.push(Action::Lease { pull: pull.id, lease, job, batch: extraction.batch.clone() });
    }

    /// Returns a waiting pull, by index, and the straggler's job that it gets. The target must not hold the job
    /// already, and must not have failed at it unless `again`.
    fn next_offer(&mut self, again: bool) -> Option<(usize, JobId)> {
        let Self { offers, extractions, leases, pulls, settings, .. } = self;
        offers.retain(|job| extractions.get(job).is_some_and(|extraction| extraction.job.is_some()));
        offers.iter().find_map(|&job| {
            let has_it = |target| leases.values().any(|record| record.job == job && record.target == target);
            let failed = |target| extractions.get(&job).is_some_and(|extraction| extraction.failed.contains(&target));
            let may = |pull: &Pull| serves(pull, settings) && !has_it(pull.target) && (again || !failed(pull.target));
            Some((pulls.iter().position(may)?, job))
        })
    }

    /// Returns a waiting pull and the padded job that it gets, both by position: preferably a job that its target has not failed
    /// at.
    fn next_pair(&self) -> Option<(usize, Position)> {
        let waiting = || self.pulls.iter().enumerate().filter(|(_, pull)| serves(pull, &self.settings));
        let preferred = waiting().find_map(|(at, pull)| {
            let position = self.queue.first_padded(|entry| !entry.failed.contains(&pull.target))?;
            Some((at, position))
        });
        preferred.or_else(|| Some((waiting().next()?.0, self.queue.first_padded(|_| true)?)))
    }

    fn pad(&mut self, actions: &mut Vec<Action>) {
        let ahead = self.settings.pad_ahead + self.pulls.len();
        actions.extend(self.queue.start_padding(ahead).into_iter().map(Action::Pad));
    }
}

/// Returns true if the target of a pull may get jobs at present.
fn serves(pull: &Pull, settings: &Settings) -> bool {
    !settings.paused && !settings.paused_targets.contains(&pull.target)
}

fn skip(job: Job, cause: &'static str, reason: String) {
    counter!(m::JOBS_SKIPPED, "cause" => cause).increment(1);
    lifecycle!("skip_decided", job = %job.id());
    job.receipt.skip(reason, job.attempts);
}
