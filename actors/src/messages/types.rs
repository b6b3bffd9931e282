//! The words that actors share: samples, buckets, jobs, outcomes and the padded batch that a target receives.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Index of a sample in the prepared store.
pub type SampleId = u32;

/// Index of a length bucket, shortest first.
pub type BucketId = u16;

/// Names a job for good: its epoch and its place in that epoch's plan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct JobId {
    pub epoch: u32,
    pub index: u32,
}

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.epoch, self.index)
    }
}

/// What a plan says of a job: samples of one bucket that are extracted together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobSpec {
    pub id: JobId,
    pub bucket: BucketId,
    pub samples: Vec<SampleId>,
    /// Real tokens of all samples.
    pub tokens: u32,
    /// Tokens of the longest sample: the width that every row is padded to.
    pub width: u32,
}

impl JobSpec {
    /// Token slots of the padded batch, padding included: what the token budget bounds.
    pub fn padded_tokens(&self) -> u64 {
        self.samples.len() as u64 * u64::from(self.width)
    }
}

/// The rows of a job, right-padded with 0 to one width.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PaddedBatch {
    /// Whose rows these are. The simulated engine draws its chance by it, so that it is the same whoever computes.
    pub job: JobId,
    pub rows: usize,
    pub width: usize,
    /// Real tokens of each row.
    pub lengths: Vec<u32>,
    /// Token ids, `[rows, width]`, row-major. Empty where an engine needs only the lengths (simulation).
    pub ids: Vec<i32>,
    /// 1 where a token is supervised, `[rows, width]`, row-major; 0 on padding. Empty together with `ids`.
    pub loss_mask: Vec<u8>,
}

impl PaddedBatch {
    /// Real tokens of all rows.
    pub fn tokens(&self) -> u64 {
        self.lengths.iter().map(|&n| u64::from(n)).sum()
    }
}

/// What became of a job, once and for all.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    /// Its gradient is part of the update of this optimizer step (the first step is 1).
    Trained { step: u64 },
    /// Given up, and why.
    Skipped { reason: String, attempts: u32 },
}

/// Turns the rows of a job into a padded batch. Runs on CPU threads; must not block on anything but the disk.
pub trait BatchSource: Send + Sync + 'static {
    /// Whether padding is real work and belongs on a blocking thread. `false` where it is next to nothing: then it happens in
    /// place, which is cheaper, and a simulation stays a function of its seed.
    const BLOCKING: bool = true;

    fn pad(&self, job: &JobSpec) -> Result<PaddedBatch, String>;
}
