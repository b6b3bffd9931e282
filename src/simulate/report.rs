//! Result of a simulation: the JSON object of `draftmill simulate --json`.

use super::Policy;
use draftmill_actors::pool::DrawPolicy;
use serde::Serialize;
use std::collections::BTreeMap;

/// Throughput of a simulated node.
///
/// The **bound** is the throughput of the slower stage without pauses, jitter and failures, for the trained jobs `j` and the
/// steps `s`:
///
/// ```text
/// targets   Σ_j extraction(j) / Σ target speeds
/// drafters  Σ_j micro-batch(j) / Σ drafter speeds + Σ_s (reduce + optimizer)     no drafter works during reduce and optimizer
/// bound     trained tokens / the longer of the two
/// ```
///
/// The **steady run** starts at the end of the first step, after the fill of the pool. It ends with the last step that was
/// complete when a target got the last job; after that time targets become idle. A run with fewer than two such steps has no
/// steady run, and the whole run replaces it. An efficiency can exceed 1 by a thousandth, due to jitter and to the jobs in the
/// pool at both ends.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// `tokens_per_second / bound_tokens_per_second`.
    pub efficiency: f64,
    /// `tokens_per_second_with_ends / bound_tokens_per_second`, with fill and drain.
    pub efficiency_with_ends: f64,
    /// Real tokens trained per second of the steady run.
    pub tokens_per_second: f64,
    /// Real tokens trained per second of the whole run.
    pub tokens_per_second_with_ends: f64,
    pub bound_tokens_per_second: f64,
    /// Stage that sets the bound.
    pub slower_stage: Stage,
    /// Relative extra time of the slower stage: 0.1 = 10 % more than the other stage.
    pub imbalance: f64,
    pub policy: Policy,
    pub draw: DrawPolicy,
    pub targets: Workers,
    pub drafters: Workers,
    pub trainer: Actor,
    pub pool: Pool,
    pub steps: Steps,
    pub jobs: Jobs,
    /// Fraction of the targets' token slots that were padding, in `0..1`.
    pub padding_share: f64,
    /// Duration of the run on the simulated clock.
    pub virtual_seconds: f64,
    /// Duration of the steady run on the simulated clock.
    pub steady_seconds: f64,
    /// Real duration of the simulation. The only value that is not a function of the scenario.
    pub wall_seconds: f64,
}

/// Stages before and after the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    Targets,
    Drafters,
}

/// Workers of a stage, by index.
pub type Workers = Vec<Actor>;

/// Times of one actor as fractions of the whole run. The remainder to 1 is the time after its last work.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Actor {
    pub index: usize,
    /// Speed factor: 1 = as in the cost model.
    pub speed: f64,
    /// Extracted jobs, trained micro-batches, or steps.
    pub units: u64,
    /// Fraction of the run at work, in `0..=1`.
    pub busy: f64,
    /// Fraction of the run in waits, by cause.
    pub waits: BTreeMap<&'static str, f64>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Pool {
    /// Maximum bytes reserved, waiting and checked out.
    pub peak_bytes: u64,
    pub max_bytes: u64,
    /// Median number of ready batches, weighted by time.
    pub depth_p50: u64,
    /// 95th percentile of the number of ready batches, weighted by time.
    pub depth_p95: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Steps {
    pub count: u64,
    pub micro_batches_per_step: u64,
    /// Buckets of the plan.
    pub buckets: usize,
    /// Mean number of length buckets in a step, over full steps.
    pub distinct_buckets_mean: f64,
    /// Autocorrelation at lag 1 of the mean sample length of a step, over full steps; 0 = lengths are mixed.
    pub length_correlation: f64,
    /// Standard deviation of the mean sample length of a step, in tokens, over full steps.
    pub length_deviation: f64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Jobs {
    pub planned: u64,
    pub trained: u64,
    pub skipped: u64,
}
