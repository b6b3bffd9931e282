//! Plan of an epoch: the samples that are extracted together, and their order. Pure functions of (lengths, seed, epoch,
//! settings).

use super::buckets::{BoundsError, bucket_of, check_bounds, share_of_padding};
use crate::messages::types::{BucketId, JobId, JobSpec, SampleId};
use crate::runtime::random::{shuffle, stream_seed};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};
use std::cmp::Ordering;
use thiserror::Error;

/// Order of an epoch's jobs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum JobOrder {
    /// Uniform shuffle.
    Shuffle,
    /// Jobs of each bucket evenly spread over the epoch with a random phase, so that every stretch, the tail included,
    /// holds every length.
    ///
    /// Job `k` of a bucket's `n` is placed at `(k + phase) / n` of the epoch, so any stretch of the epoch holds the
    /// bucket's share of it to within one job. It follows that any `w` consecutive jobs of a plan of `N` jobs in `B`
    /// buckets hold `w * n / N` jobs of that bucket, give or take at most `1 + (B - 2) * n / N`.
    #[default]
    Spread,
}

/// Settings of a plan, in addition to the lengths.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanSettings {
    pub seed: u64,
    /// Limit on the token slots of a job, padding included.
    pub job_tokens: u32,
    pub order: JobOrder,
    /// Longest sample of each bucket, ascending; the last one is at least the longest sample.
    pub bounds: Vec<u32>,
}

/// Jobs of one epoch in the order in which they leave.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    pub epoch: u32,
    pub bounds: Vec<u32>,
    pub jobs: Vec<JobSpec>,
}

/// Error of planning. Samples are named by their index in the prepared store.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum PlanError {
    #[error("there is no sample to plan; prepare data that holds at least one")]
    NoSamples,
    #[error("{count} samples are more than the {max} that one plan can name; prepare fewer", max = u32::MAX)]
    TooManySamples { count: usize },
    #[error("sample {sample} has no tokens; prepare the data again, so that empty samples are rejected")]
    EmptySample { sample: SampleId },
    #[error(
        "sample {sample} has {length} tokens, more than a job may hold (job_tokens = {job_tokens}); raise job_tokens to at \
         least {length}, or prepare the data with max_len = {job_tokens} or less"
    )]
    SampleTooLong { sample: SampleId, length: u32, job_tokens: u32 },
    #[error(transparent)]
    Bounds(#[from] BoundsError),
}

/// Plans an epoch. `lengths[i]` is the length of sample `i` in tokens, at least 1.
///
/// The sample indices are shuffled with (seed, epoch), distributed to their buckets, and cut into jobs of one bucket
/// each. Rows times longest row of a job stay within `job_tokens`. The jobs are then ordered. Only integers are
/// compared and only algorithms of this crate draw from the random stream, so the same input gives the same plan
/// everywhere.
///
/// # Errors
///
/// Fails if there is no sample, a sample is empty or longer than `job_tokens`, or the bounds do not fit.
pub fn plan_epoch(lengths: &[u32], settings: &PlanSettings, epoch: u32) -> Result<Plan, PlanError> {
    check(lengths, settings)?;
    let mut rng = ChaCha8Rng::from_seed(stream_seed(settings.seed, "plan", &[u64::from(epoch)]));
    let mut samples: Vec<SampleId> = (0..lengths.len() as u32).collect();
    shuffle(&mut samples, &mut rng);
    let mut buckets = cut_jobs(&samples, lengths, settings, epoch);
    let mut jobs = match settings.order {
        JobOrder::Shuffle => {
            let mut jobs: Vec<JobSpec> = buckets.into_iter().flatten().collect();
            shuffle(&mut jobs, &mut rng);
            jobs
        }
        JobOrder::Spread => {
            // A bucket's last job is the one that may be part-full; it must not always close the epoch.
            buckets.iter_mut().for_each(|jobs| shuffle(jobs, &mut rng));
            spread(buckets, &mut rng)
        }
    };
    for (index, job) in jobs.iter_mut().enumerate() {
        job.id.index = index as u32;
    }
    Ok(Plan { epoch, bounds: settings.bounds.clone(), jobs })
}

impl Plan {
    /// Returns the fraction of the plan's token slots that is padding, in 0..1; `None` for a plan without jobs.
    pub fn padding_share(&self) -> Option<f64> {
        let real = self.jobs.iter().map(|job| u64::from(job.tokens)).sum();
        share_of_padding(real, self.jobs.iter().map(JobSpec::padded_tokens).sum())
    }

    /// Returns the number of jobs of each bucket, empty buckets included.
    pub fn jobs_per_bucket(&self) -> Vec<u32> {
        let mut jobs = vec![0; self.bounds.len()];
        for job in &self.jobs {
            jobs[usize::from(job.bucket)] += 1;
        }
        jobs
    }

    /// Returns the first violation of invariant P1 as a sentence: each sample is in exactly one job; each job has one
    /// bucket and stays within the token budget. Returns `None` if P1 holds.
    pub fn p1_violation(&self, lengths: &[u32], job_tokens: u32) -> Option<String> {
        let mut planned = vec![false; lengths.len()];
        for (index, job) in self.jobs.iter().enumerate() {
            let id = job.id;
            let length = |sample: &SampleId| lengths.get(*sample as usize).copied();
            let Some(rows) = job.samples.iter().map(length).collect::<Option<Vec<u32>>>() else {
                return Some(format!("job {id} holds a sample that does not exist"));
            };
            let width = rows.iter().copied().max().unwrap_or(0);
            let tokens: u64 = rows.iter().map(|&n| u64::from(n)).sum();
            if id != (JobId { epoch: self.epoch, index: index as u32 }) {
                return Some(format!("job {id} is at index {index} of epoch {}", self.epoch));
            }
            if rows.is_empty() || width != job.width || tokens != u64::from(job.tokens) {
                return Some(format!("job {id} is empty or miscounts its tokens"));
            }
            if job.padded_tokens() > u64::from(job_tokens) {
                return Some(format!("job {id} has {} token slots, more than {job_tokens}", job.padded_tokens()));
            }
            if rows.iter().any(|&n| bucket_of(&self.bounds, n) != Some(job.bucket)) {
                return Some(format!("job {id} holds a sample of another bucket than {}", job.bucket));
            }
            for &sample in &job.samples {
                if std::mem::replace(&mut planned[sample as usize], true) {
                    return Some(format!("sample {sample} is planned twice"));
                }
            }
        }
        planned.iter().position(|&p| !p).map(|sample| format!("sample {sample} is in no job"))
    }
}

fn check(lengths: &[u32], settings: &PlanSettings) -> Result<(), PlanError> {
    if lengths.is_empty() {
        return Err(PlanError::NoSamples);
    }
    if u32::try_from(lengths.len()).is_err() {
        return Err(PlanError::TooManySamples { count: lengths.len() });
    }
    let job_tokens = settings.job_tokens;
    for (sample, &length) in lengths.iter().enumerate() {
        let sample = sample as SampleId;
        if length == 0 {
            return Err(PlanError::EmptySample { sample });
        }
        if length > job_tokens {
            return Err(PlanError::SampleTooLong { sample, length, job_tokens });
        }
    }
    Ok(check_bounds(&settings.bounds, lengths.iter().copied().max().unwrap_or(0))?)
}

/// Cuts the jobs of each bucket. A job is closed when the next sample of its bucket would exceed the budget.
fn cut_jobs(samples: &[SampleId], lengths: &[u32], settings: &PlanSettings, epoch: u32) -> Vec<Vec<JobSpec>> {
    let mut buckets: Vec<Vec<JobSpec>> = vec![Vec::new(); settings.bounds.len()];
    for &sample in samples {
        let length = lengths[sample as usize];
        // `check` has verified that every sample has a bucket.
        let Some(bucket) = bucket_of(&settings.bounds, length) else { continue };
        let jobs = &mut buckets[usize::from(bucket)];
        match jobs.last_mut().filter(|job| fits(job, length, settings.job_tokens)) {
            Some(job) => {
                job.samples.push(sample);
                job.tokens += length;
                job.width = job.width.max(length);
            }
            None => {
                let id = JobId { epoch, index: 0 };
                jobs.push(JobSpec { id, bucket, samples: vec![sample], tokens: length, width: length });
            }
        }
    }
    buckets
}

fn fits(job: &JobSpec, length: u32, job_tokens: u32) -> bool {
    let rows = job.samples.len() as u64 + 1;
    rows * u64::from(job.width.max(length)) <= u64::from(job_tokens)
}

/// Merges the buckets by the positions of [`JobOrder::Spread`]. Positions are exact fractions. Of equal positions, the
/// shorter bucket's comes first.
fn spread(buckets: Vec<Vec<JobSpec>>, rng: &mut impl Rng) -> Vec<JobSpec> {
    let mut placed = Vec::new();
    for jobs in buckets {
        let count = jobs.len() as u64;
        let phase = u64::from(rng.next_u32());
        placed.extend(jobs.into_iter().zip(0u64..).map(|(job, k)| (Position { at: k << 32 | phase, of: count }, job)));
    }
    // Within a bucket positions differ, so (position, bucket) orders all jobs.
    placed.sort_unstable_by(|(a, x), (b, y)| a.cmp(b).then(BucketId::cmp(&x.bucket, &y.bucket)));
    placed.into_iter().map(|(_, job)| job).collect()
}

/// Position in the epoch, in 0..1: `at / (of * 2^32)`.
struct Position {
    at: u64,
    of: u64,
}

impl Position {
    fn cmp(&self, other: &Position) -> Ordering {
        (u128::from(self.at) * u128::from(other.of)).cmp(&(u128::from(other.at) * u128::from(self.of)))
    }
}

#[cfg(test)]
mod tests;
