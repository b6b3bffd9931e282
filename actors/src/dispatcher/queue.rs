//! Queue of the jobs that wait for a target. Every operation costs O(log n) in the number of jobs.

use crate::messages::{
    job::Job,
    types::{JobId, JobSpec, PaddedBatch},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

/// Position in the queue; smaller ones leave first.
pub(super) type Position = i64;

/// Waiting job.
#[derive(Debug)]
pub(super) struct Entry {
    pub job: Job,
    /// Targets that failed at the job.
    pub failed: Vec<usize>,
}

/// Jobs in the order in which they leave. Each one is unpadded, being padded, or padded.
#[derive(Debug, Default)]
pub(super) struct JobQueue {
    jobs: BTreeMap<Position, Entry>,
    unpadded: BTreeSet<Position>,
    padding: BTreeMap<JobId, Position>,
    padded: BTreeMap<Position, Arc<PaddedBatch>>,
    /// Positions of the next job at the head and at the tail.
    head: Position,
    tail: Position,
}

impl JobQueue {
    pub fn len(&self) -> usize {
        self.jobs.len()
    }

    pub fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }

    /// Number of padded jobs.
    pub fn padded(&self) -> usize {
        self.padded.len()
    }

    /// Adds an unpadded job at the tail.
    pub fn push_back(&mut self, job: Job) {
        let position = self.tail;
        self.tail += 1;
        self.insert(position, Entry { job, failed: Vec::new() }, None);
    }

    /// Adds a job at the head: padded if it has a batch.
    pub fn push_front(&mut self, entry: Entry, batch: Option<Arc<PaddedBatch>>) {
        self.head -= 1;
        self.insert(self.head, entry, batch);
    }

    fn insert(&mut self, position: Position, entry: Entry, batch: Option<Arc<PaddedBatch>>) {
        match batch {
            Some(batch) => drop(self.padded.insert(position, batch)),
            None => drop(self.unpadded.insert(position)),
        }
        self.jobs.insert(position, entry);
    }

    /// Marks the first unpadded jobs as being padded, until `ahead` jobs are padded or being padded. Returns the new ones.
    pub fn start_padding(&mut self, ahead: usize) -> Vec<JobSpec> {
        let mut started = Vec::new();
        while self.padding.len() + self.padded.len() < ahead {
            let Some(position) = self.unpadded.pop_first() else { break };
            let Some(entry) = self.jobs.get(&position) else { continue };
            self.padding.insert(entry.job.id(), position);
            started.push(entry.job.spec.clone());
        }
        started
    }

    /// Stores the batch of a job that was being padded. Returns false if the job has left the queue.
    pub fn finish_padding(&mut self, job: JobId, batch: PaddedBatch) -> bool {
        let Some(position) = self.padding.remove(&job) else { return false };
        self.padded.insert(position, Arc::new(batch));
        true
    }

    /// Removes a job whose padding failed.
    pub fn fail_padding(&mut self, job: JobId) -> Option<Entry> {
        let position = self.padding.remove(&job)?;
        self.jobs.remove(&position)
    }

    /// Returns the position of the first padded job that fits. The cost grows with the padded jobs before it, which are only
    /// those that the asking target failed at.
    pub fn first_padded(&self, fits: impl Fn(&Entry) -> bool) -> Option<Position> {
        self.padded.keys().copied().find(|position| self.jobs.get(position).is_some_and(&fits))
    }

    /// Removes a padded job.
    pub fn take_padded(&mut self, position: Position) -> Option<(Entry, Arc<PaddedBatch>)> {
        let batch = self.padded.remove(&position)?;
        Some((self.jobs.remove(&position)?, batch))
    }

    /// Drops every job.
    pub fn clear(&mut self) {
        *self = Self { head: self.head, tail: self.tail, ..Self::default() };
    }
}
