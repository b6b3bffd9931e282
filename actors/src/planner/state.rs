//! Decisions of the planner, without waiting: the next job, and the limit on skipped jobs.

use super::plan::Plan;
use crate::messages::types::{JobId, JobSpec, Outcome};
use std::collections::VecDeque;

/// Counts of the planner.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Jobs that this run handed out.
    pub planned: u64,
    pub trained: u64,
    pub skipped: u64,
    /// Jobs that were returned without an outcome; they stay open.
    pub unfinished: u64,
    pub real_tokens: u64,
    pub padded_tokens: u64,
    /// True if every job of every epoch was handed out; false after an earlier stop.
    pub plan_ended: bool,
}

/// Next step of the loop.
#[derive(Debug, PartialEq)]
pub enum Next {
    /// Plans this epoch; the plan goes to `State::begin`.
    Plan(u32),
    /// Hands this job out.
    Job(JobSpec),
    /// Waits until every handed-out job has left the pool.
    Barrier,
    /// No job is left to hand out.
    Ended,
}

/// Every decision of the planner.
#[derive(Debug)]
pub struct State {
    epochs: u32,
    barrier: bool,
    max_skip_fraction: f64,
    epoch: u32,
    open: Option<VecDeque<JobSpec>>,
    barrier_due: bool,
    jobs_in_epoch: u64,
    skipped_in_epoch: u64,
    stopped: bool,
    counts: Counts,
}

impl State {
    pub fn new(epochs: u32, barrier: bool, max_skip_fraction: f64) -> Self {
        Self {
            epochs,
            barrier,
            max_skip_fraction,
            epoch: 0,
            open: None,
            barrier_due: false,
            jobs_in_epoch: 0,
            skipped_in_epoch: 0,
            stopped: false,
            counts: Counts::default(),
        }
    }

    /// Changes the limit on skipped jobs. It applies from the next skipped job on.
    pub fn allow_skips(&mut self, fraction: f64) {
        self.max_skip_fraction = fraction;
    }

    /// Returns the next step, and removes its job from the plan.
    pub fn take_next(&mut self) -> Next {
        if self.stopped || self.epoch >= self.epochs {
            self.counts.plan_ended = !self.stopped;
            return Next::Ended;
        }
        let Some(open) = &mut self.open else {
            if std::mem::take(&mut self.barrier_due) {
                return Next::Barrier;
            }
            return Next::Plan(self.epoch);
        };
        match open.pop_front() {
            Some(job) => Next::Job(job),
            None => {
                self.open = None;
                self.epoch += 1;
                self.barrier_due = self.barrier;
                self.take_next()
            }
        }
    }

    /// Starts the epoch of `Next::Plan`. `ended[i]` is true if job `i` already has an outcome.
    pub fn begin(&mut self, plan: Plan, ended: &[bool]) {
        self.jobs_in_epoch = plan.jobs.len() as u64;
        self.skipped_in_epoch = 0;
        let jobs = plan.jobs.into_iter().zip(ended).filter(|(_, ended)| !**ended).map(|(job, _)| job);
        self.open = Some(jobs.collect());
    }

    /// Counts a job that leaves.
    pub fn on_handed_out(&mut self, job: &JobSpec) {
        self.counts.planned += 1;
        self.counts.real_tokens += u64::from(job.tokens);
        self.counts.padded_tokens += job.padded_tokens();
    }

    /// Counts the outcome of a job.
    ///
    /// # Errors
    ///
    /// Fails if more jobs were skipped than `max_skip_fraction` allows.
    pub fn on_outcome(&mut self, job: JobId, outcome: &Outcome) -> Result<(), String> {
        let Outcome::Skipped { reason, .. } = outcome else {
            self.counts.trained += 1;
            return Ok(());
        };
        self.counts.skipped += 1;
        self.skipped_in_epoch += 1;
        let share = self.skipped_in_epoch as f64 / self.jobs_in_epoch.max(1) as f64;
        if share <= self.max_skip_fraction {
            return Ok(());
        }
        Err(format!(
            "{} of the {} jobs of epoch {} were skipped, more than dispatch.max_skip_fraction = {} allows; the last one, {job}: {reason}",
            self.skipped_in_epoch, self.jobs_in_epoch, job.epoch, self.max_skip_fraction
        ))
    }

    pub fn on_unfinished(&mut self) {
        self.counts.unfinished += 1;
    }

    /// Stops handing out jobs.
    pub fn stop(&mut self) {
        self.stopped = true;
    }

    pub fn counts(&self) -> &Counts {
        &self.counts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn skips_are_counted_against_their_epoch_and_exactly_the_fraction_is_allowed() {
        let jobs = |epoch| -> Vec<JobSpec> {
            let id = |index| JobId { epoch, index };
            (0..10).map(|i| JobSpec { id: id(i), bucket: 0, samples: vec![i], tokens: 1, width: 1 }).collect()
        };
        let skip = Outcome::Skipped { reason: "why".into(), attempts: 1 };
        let mut state = State::new(2, false, 0.2);
        for epoch in 0..2 {
            assert_eq!(state.take_next(), Next::Plan(epoch));
            state.begin(Plan { epoch, bounds: vec![1], jobs: jobs(epoch) }, &[false; 10]);
            for index in 0..10 {
                let id = JobId { epoch, index };
                assert!(matches!(state.take_next(), Next::Job(job) if job.id == id));
                if index < 2 {
                    assert_eq!(state.on_outcome(id, &skip), Ok(()), "two of ten are allowed in each epoch");
                }
            }
        }
        let message = state.on_outcome(JobId { epoch: 1, index: 2 }, &skip).unwrap_err();
        assert!(message.starts_with("3 of the 10 jobs of epoch 1 were skipped"), "{message}");
    }
}
