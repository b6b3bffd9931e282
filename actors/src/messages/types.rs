//! Types that actors share: samples, buckets, jobs, outcomes, and the padded batch that a target receives.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Index of a sample in the prepared store.
pub type SampleId = u32;

/// Index of a length bucket, shortest first.
pub type BucketId = u16;

/// Permanent identifier of a job: its epoch and its index in that epoch's plan.
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

/// Planned job: samples of one bucket that are extracted together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobSpec {
    pub id: JobId,
    pub bucket: BucketId,
    pub samples: Vec<SampleId>,
    /// Real tokens of all samples.
    pub tokens: u32,
    /// Tokens of the longest sample: every row is padded to this width.
    pub width: u32,
}

impl JobSpec {
    /// Returns the token slots of the padded batch, padding included. The token budget limits this number.
    pub fn padded_tokens(&self) -> u64 {
        self.samples.len() as u64 * u64::from(self.width)
    }
}

/// Rows of a job, right-padded with 0 to one width.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PaddedBatch {
    /// Job that the rows belong to. The simulated engine derives its noise from it, so that the noise does not depend
    /// on the target.
    pub job: JobId,
    pub rows: usize,
    pub width: usize,
    /// Real tokens of each row.
    pub lengths: Vec<u32>,
    /// Token ids, `[rows, width]`, row-major. Empty in a simulation, which needs only the lengths.
    pub ids: Vec<i32>,
    /// Loss mask, `[rows, width]`, row-major: 1 for a supervised token, 0 on padding. Empty together with `ids`.
    pub loss_mask: Vec<u8>,
}

impl PaddedBatch {
    /// Returns the real tokens of all rows.
    pub fn tokens(&self) -> u64 {
        self.lengths.iter().map(|&n| u64::from(n)).sum()
    }
}

/// Final outcome of a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    /// Its gradient is part of the update of this optimizer step; the first step is 1.
    Trained { step: u64 },
    /// The job was skipped, for this reason.
    Skipped { reason: String, attempts: u32 },
}

/// Source of padded batches. It runs on CPU threads and must block on nothing but the disk.
pub trait BatchSource: Send + Sync + 'static {
    /// Selects a blocking thread for padding. Set it to `false` if padding is trivial: padding then runs in place,
    /// which is cheaper and keeps a simulation a function of its seed.
    const BLOCKING: bool = true;

    fn pad(&self, job: &JobSpec) -> Result<PaddedBatch, String>;
}
