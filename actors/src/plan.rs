//! The plan of an epoch: which samples are extracted together, and in what order. Pure functions of (lengths, seed, epoch, settings).

use crate::types::JobSpec;
use serde::{Deserialize, Serialize};

/// The order of an epoch's jobs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Order {
    /// A uniform shuffle.
    Shuffle,
    /// Each bucket's jobs evenly over the epoch with a random phase, so that no stretch, the tail included, lacks a length.
    #[default]
    Spread,
}

/// What shapes a plan beside the lengths.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanSettings {
    pub seed: u64,
    /// Most token slots of a job, padding included.
    pub job_tokens: u32,
    pub order: Order,
    /// Longest sample of each bucket, ascending; the last one is at least the longest sample.
    pub bounds: Vec<u32>,
}

/// One epoch's jobs in the order in which they leave.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    pub epoch: u32,
    pub bounds: Vec<u32>,
    pub jobs: Vec<JobSpec>,
}
