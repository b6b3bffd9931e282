//! What a simulation found: the JSON object of `draftmill simulate --json`.

use super::Policy;
use draftmill_actors::pool::Draw;
use serde::Serialize;
use std::collections::BTreeMap;

/// How a node did.
///
/// The **bound** is what the slower stage reaches when it works without a pause, speeds and all, jitter and failures aside. With
/// the trained jobs `j` and the steps `s`:
///
/// ```text
/// targets   Σ_j extraction(j) / Σ target speeds
/// drafters  Σ_j micro-batch(j) / Σ drafter speeds + Σ_s (reduce + optimizer)     no drafter can work through the latter
/// bound     trained tokens / the longer of the two
/// ```
///
/// The **steady run** begins at the end of the first step (the pool has been filled, and every drafter works) and ends at the end of
/// the last step that was complete when the last job was handed out to a target (from then on targets run dry one by one).
/// A run too short for two such steps has no steady run: its figures are those of the whole. Chance (jitter, and which jobs lie in the
/// pool at either end) can take an efficiency a thousandth above 1.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// `tokens_per_second / bound_tokens_per_second`.
    pub efficiency: f64,
    /// The same with fill and drain: `tokens_per_second_with_ends / bound_tokens_per_second`.
    pub efficiency_with_ends: f64,
    /// Real tokens trained per second of the steady run.
    pub tokens_per_second: f64,
    /// Real tokens trained per second, from the first moment to the last.
    pub tokens_per_second_with_ends: f64,
    pub bound_tokens_per_second: f64,
    /// The stage that sets the bound.
    pub slower_stage: Stage,
    /// How much longer the slower stage needs than the other: 0.1 = a tenth.
    pub imbalance: f64,
    pub policy: Policy,
    pub draw: Draw,
    pub targets: Workers,
    pub drafters: Workers,
    pub trainer: Actor,
    pub pool: Pool,
    pub steps: Steps,
    pub jobs: Jobs,
    /// Share of the targets' token slots that were padding, in 0..1.
    pub padding_share: f64,
    /// Seconds of the simulated node.
    pub virtual_seconds: f64,
    /// Of these, seconds of the steady run.
    pub steady_seconds: f64,
    /// Seconds that the simulation took. The only figure that is not a function of the scenario.
    pub wall_seconds: f64,
}

/// The two stages, between which the pool stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    Targets,
    Drafters,
}

/// The workers of a stage, by index.
pub type Workers = Vec<Actor>;

/// What one actor did. Shares are of the whole run, ends included; what is left to 1 is time after its last work.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Actor {
    pub index: usize,
    /// 1 = as the cost model says.
    pub speed: f64,
    /// Jobs extracted, micro-batches trained, or steps taken.
    pub units: u64,
    /// Share of the run in which it worked, in 0..=1.
    pub busy: f64,
    /// Share of the run in which it waited, by what it waited for.
    pub waits: BTreeMap<&'static str, f64>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Pool {
    /// Most bytes reserved, waiting and with drafters at once.
    pub peak_bytes: u64,
    pub max_bytes: u64,
    /// Half of the time no more batches than this were ready to be drawn.
    pub depth_p50: u64,
    /// The same for 95 % of the time.
    pub depth_p95: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Steps {
    pub count: u64,
    pub micro_batches_per_step: u64,
    /// Buckets of the plan.
    pub buckets: usize,
    /// Length buckets among the micro-batches of a step, mean over full steps.
    pub distinct_buckets_mean: f64,
    /// Correlation of the mean sample length of a step with that of the next, over full steps: 0 where lengths mix.
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
