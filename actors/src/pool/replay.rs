//! Draw order of policy `replay`: the plan's jobs, shuffled within a window, fixed by the plan and the seed alone.
//!
//! The order of an epoch is the output of a shuffle buffer. The buffer holds the first `window` positions of the plan,
//! emits one of them at random, and takes in the next position. After `k` draws the next job is therefore among the
//! first `window` positions that were not emitted. If no more than `window` undrawn jobs are handed out, the next job
//! is one of them, and a pool for `window` jobs always has space for it.
//!
//! Epochs follow each other. Jobs with an outcome are passed over but take part in the shuffle: the order of the others
//! does not depend on them. A resumed run therefore continues in the order of an uninterrupted one.

use crate::{
    messages::types::JobId,
    runtime::random::{below, stream_seed},
};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use std::{
    collections::{BTreeSet, VecDeque},
    sync::Arc,
};

/// Order of the draws over all epochs.
#[derive(Debug)]
pub struct ReplayOrder {
    seed: u64,
    window: usize,
    /// Epochs that have begun and are not used up; the first one is being drawn.
    epochs: VecDeque<Epoch>,
    wanted: Option<JobId>,
    /// Jobs that were skipped before they were wanted.
    skipped: BTreeSet<JobId>,
}

impl ReplayOrder {
    /// Creates an order. `window` 0 counts as 1: the order of the plan.
    pub fn new(seed: u64, window: usize) -> Self {
        Self { seed, window: window.max(1), epochs: VecDeque::new(), wanted: None, skipped: BTreeSet::new() }
    }

    /// Appends the jobs of an epoch. `ended[i]` is true if job `i` already has an outcome.
    pub fn begin(&mut self, epoch: u32, ended: Arc<[bool]>) {
        let rng = ChaCha8Rng::from_seed(stream_seed(self.seed, "replay", &[u64::from(epoch)]));
        self.epochs.push_back(Epoch { number: epoch, ended, rng, buffer: Vec::new(), next: 0 });
        self.settle();
    }

    /// Returns the job to draw next; `None` if no further job is known.
    pub fn wanted(&self) -> Option<JobId> {
        self.wanted
    }

    /// Records that the wanted job was drawn.
    pub fn on_drawn(&mut self) {
        self.wanted = None;
        self.settle();
    }

    /// Removes a skipped job. Returns false if it was drawn before: the order then does not wait for it.
    pub fn on_skipped(&mut self, job: JobId) -> bool {
        let to_come = self.wanted == Some(job) || self.epochs.iter().any(|e| e.holds(job));
        if to_come && self.skipped.insert(job) {
            self.settle();
        }
        to_come
    }

    fn settle(&mut self) {
        loop {
            match self.wanted {
                Some(job) if self.skipped.remove(&job) => self.wanted = None,
                Some(_) => return,
                None => {
                    let Some(epoch) = self.epochs.front_mut() else { return };
                    self.wanted = epoch.take(self.window);
                    if self.wanted.is_none() {
                        self.epochs.pop_front();
                    }
                }
            }
        }
    }
}

#[derive(Debug)]
struct Epoch {
    number: u32,
    ended: Arc<[bool]>,
    rng: ChaCha8Rng,
    /// Positions of the plan that entered the window and were not emitted.
    buffer: Vec<u32>,
    next: u32,
}

impl Epoch {
    /// Returns the next job without an outcome.
    fn take(&mut self, window: usize) -> Option<JobId> {
        loop {
            while self.buffer.len() < window && (self.next as usize) < self.ended.len() {
                self.buffer.push(self.next);
                self.next += 1;
            }
            if self.buffer.is_empty() {
                return None;
            }
            let index = self.buffer.swap_remove(below(self.buffer.len() as u64, &mut self.rng) as usize);
            if !self.ended[index as usize] {
                return Some(JobId { epoch: self.number, index });
            }
        }
    }

    fn holds(&self, job: JobId) -> bool {
        job.epoch == self.number && (job.index >= self.next || self.buffer.contains(&job.index))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn rest(order: &mut ReplayOrder) -> Vec<JobId> {
        let mut all = Vec::new();
        while let Some(job) = order.wanted() {
            all.push(job);
            order.on_drawn();
        }
        all
    }

    fn whole(seed: u64, window: usize, jobs: &[usize]) -> Vec<JobId> {
        let mut order = ReplayOrder::new(seed, window);
        for (epoch, &jobs) in (0..).zip(jobs) {
            order.begin(epoch, vec![false; jobs].into());
        }
        rest(&mut order)
    }

    #[test]
    fn the_order_is_shuffled_and_each_epoch_has_its_own() {
        let all = whole(1, 16, &[200, 200]);
        let (first, second) = all.split_at(200);
        let indices = |jobs: &[JobId]| jobs.iter().map(|j| j.index).collect::<Vec<_>>();
        assert_ne!(indices(first), indices(second));
        assert!(indices(first).windows(2).filter(|p| p[0] > p[1]).count() > 50, "{first:?}");
        assert_ne!(whole(2, 16, &[200, 200]), all);
        assert_eq!(indices(&whole(1, 1, &[5])), [0, 1, 2, 3, 4], "a window of one is the plan");
    }

    proptest! {
        /// Property that keeps a pool of `window` jobs from waiting forever: the wanted job is among the first open
        /// ones.
        #[test]
        fn the_wanted_job_is_always_within_the_window(
            seed: u64, window in 1_usize..20, jobs in prop::collection::vec(0_usize..40, 1..4),
        ) {
            let all = whole(seed, window, &jobs);
            let mut open: Vec<JobId> = all.clone();
            open.sort_unstable();
            prop_assert_eq!(open.len(), jobs.iter().sum::<usize>());
            for job in all {
                let at = open.binary_search(&job).unwrap();
                prop_assert!(at < window, "{} jobs before {}", at, job);
                open.remove(at);
            }
        }

        /// Property of jobs with an outcome, whenever it becomes known: the others keep their order.
        #[test]
        fn what_has_an_outcome_is_left_out_and_nothing_else_changes(
            seed: u64, window in 1_usize..12, jobs in 1_usize..60, done in any::<u64>(), given_up in any::<u64>(), at in 0_usize..60,
        ) {
            let is = |set: u64, j: &JobId| set >> (j.index % 64) & 1 == 1;
            let mut order = ReplayOrder::new(seed, window);
            order.begin(0, (0..jobs as u32).map(|index| is(done, &JobId { epoch: 0, index })).collect());
            let open: Vec<JobId> = whole(seed, window, &[jobs]).into_iter().filter(|j| !is(done, j)).collect();
            let (before, after) = open.split_at(at.min(open.len()));
            let mut seen = Vec::new();
            for _ in before {
                seen.extend(order.wanted());
                order.on_drawn();
            }
            prop_assert_eq!(&seen, before);
            for job in open.iter().filter(|j| is(given_up, j)) {
                prop_assert_eq!(order.on_skipped(*job), after.contains(job), "{} was drawn before", job);
            }
            let expected: Vec<JobId> = after.iter().copied().filter(|j| !is(given_up, j)).collect();
            prop_assert_eq!(rest(&mut order), expected);
            prop_assert!(order.skipped.is_empty() && order.epochs.is_empty(), "nothing stays behind");
        }
    }
}
