//! Simulated engines: they sleep on tokio time by a cost model, so that a long run takes moments under paused time.

use super::noise::{AttemptCounters, NoiseSample, noise};
use crate::messages::{
    engine::{
        DraftEngine, EngineError, FeatureDtype, FeatureShape, Features, MicroFailure, MicroReport, Optimizer,
        StepReport, StepRequest, TargetEngine, Writing,
    },
    types::{BatchSource, JobId, JobSpec, PaddedBatch},
};
use std::{sync::Arc, time::Duration};

/// Cost of work, and the shape of its results.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CostModel {
    /// Target, per token slot of a padded batch.
    pub seconds_per_token: f64,
    /// Target, per token slot and token of its row's width: attention.
    pub seconds_per_token_squared: f64,
    /// Bandwidth at which a target moves its features out; it does nothing else meanwhile. 0 takes no time.
    pub bytes_per_second: f64,
    /// Drafter, per micro-batch.
    pub seconds_per_micro_batch: f64,
    /// Drafter, per context token.
    pub seconds_per_context_token: f64,
    /// Summation of the drafters' gradients, per step. No drafter can work meanwhile.
    pub seconds_per_reduce: f64,
    /// Optimizer, per step. No drafter can work meanwhile.
    pub seconds_per_step: f64,
    /// Relative standard deviation of every unit of work.
    pub jitter: f64,
    /// Fraction of extractions that fail, after their full duration.
    pub job_failures: f64,
    /// Fraction of micro-batches that fail, after their full duration.
    pub micro_batch_failures: f64,
    /// Seed of noise and failures.
    pub seed: u64,
    pub taps: u32,
    pub hidden_size: u32,
    pub dtype: FeatureDtype,
}

impl Default for CostModel {
    fn default() -> Self {
        Self {
            seconds_per_token: 20e-6,
            seconds_per_token_squared: 0.0,
            bytes_per_second: 0.0,
            seconds_per_micro_batch: 0.5,
            seconds_per_context_token: 0.0,
            seconds_per_reduce: 0.0,
            seconds_per_step: 0.05,
            jitter: 0.0,
            job_failures: 0.0,
            micro_batch_failures: 0.0,
            seed: 0,
            taps: 5,
            hidden_size: 4096,
            dtype: FeatureDtype::Bf16,
        }
    }
}

impl CostModel {
    /// Returns the shape of the features of a batch.
    pub fn shape(&self, tokens: u64) -> FeatureShape {
        FeatureShape { tokens, taps: self.taps, width: self.hidden_size, dtype: self.dtype }
    }

    /// Returns the bytes of the features of a batch.
    pub fn bytes(&self, tokens: u64) -> u64 {
        tokens * u64::from(self.taps) * u64::from(self.hidden_size) * self.dtype.bytes()
    }

    /// Returns the seconds in which a target of speed 1 extracts `slots` token slots in rows of `width`, of which
    /// `tokens` are real, and moves their features out.
    pub fn extract_seconds(&self, slots: u64, width: u64, tokens: u64) -> f64 {
        let compute = slots as f64 * (self.seconds_per_token + width as f64 * self.seconds_per_token_squared);
        let bytes = self.bytes(tokens) as f64;
        compute + if self.bytes_per_second > 0.0 { bytes / self.bytes_per_second } else { 0.0 }
    }

    /// Returns the seconds in which a drafter of speed 1 trains a micro-batch of `tokens` real context tokens.
    pub fn micro_batch_seconds(&self, tokens: u64) -> f64 {
        self.seconds_per_micro_batch + tokens as f64 * self.seconds_per_context_token
    }

    /// Returns the seconds of a step in which drafters wait: reduce and optimizer.
    pub fn step_seconds(&self) -> f64 {
        self.seconds_per_reduce + self.seconds_per_step
    }

    fn noise_of(&self, stage: &str, job: JobId, attempts: &AttemptCounters, rate: f64) -> NoiseSample {
        let words = [u64::from(job.epoch), u64::from(job.index), attempts.next(job)];
        noise(self.seed, stage, &words, self.jitter, rate)
    }
}

/// Features without values.
#[derive(Clone, Copy, Debug)]
pub struct SimFeatures {
    pub shape: FeatureShape,
    pub bytes: u64,
    pub finite: bool,
}

impl Features for SimFeatures {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn shape(&self) -> FeatureShape {
        self.shape
    }

    fn all_finite(&self) -> bool {
        self.finite
    }
}

/// Source of batches with lengths but without ids.
#[derive(Clone, Debug)]
pub struct SimSource {
    pub lengths: Arc<[u32]>,
}

impl BatchSource for SimSource {
    const BLOCKING: bool = false;

    fn pad(&self, job: &JobSpec) -> Result<PaddedBatch, String> {
        let length = |&s: &u32| self.lengths.get(s as usize).copied().ok_or_else(|| format!("there is no sample {s}"));
        let lengths = job.samples.iter().map(length).collect::<Result<Vec<_>, _>>()?;
        Ok(PaddedBatch {
            job: job.id,
            rows: lengths.len(),
            width: job.width as usize,
            lengths,
            ..PaddedBatch::default()
        })
    }
}

/// Sleeper that keeps the total exact although tokio's clock ticks in milliseconds: it carries the rounding error over
/// to the next sleep.
#[derive(Clone, Debug, Default)]
struct Sleeper {
    owed: f64,
}

impl Sleeper {
    async fn sleep(&mut self, seconds: f64) {
        self.owed += seconds;
        let ticks = (self.owed * 1e3).round().max(0.0);
        if ticks > 0.0 {
            self.owed -= ticks / 1e3;
            tokio::time::sleep(Duration::from_millis(ticks as u64)).await;
        }
    }
}

/// Creates one target for each speed; 1 is the cost model's, 0.5 is half of it.
pub fn targets(costs: CostModel, speeds: &[f64]) -> Vec<SimTarget> {
    let attempts = AttemptCounters::default();
    let target = |&speed: &f64| SimTarget { attempts: attempts.clone(), ..SimTarget::new(costs, 1.0 / speed) };
    speeds.iter().map(target).collect()
}

/// Creates one drafter for each speed; 1 is the cost model's, 0.5 is half of it.
pub fn drafters(costs: CostModel, speeds: &[f64]) -> Vec<SimDrafter> {
    let attempts = AttemptCounters::default();
    let drafter = |&speed: &f64| SimDrafter { attempts: attempts.clone(), ..SimDrafter::new(costs, 1.0 / speed) };
    speeds.iter().map(drafter).collect()
}

/// Simulated target.
#[derive(Clone, Debug)]
pub struct SimTarget {
    pub costs: CostModel,
    /// Factor on the cost model's durations.
    pub slowness: f64,
    attempts: AttemptCounters,
    sleeper: Sleeper,
}

impl SimTarget {
    /// Creates a target with its own attempt counters; [`targets`] creates several that share them.
    pub fn new(costs: CostModel, slowness: f64) -> Self {
        Self { costs, slowness, attempts: AttemptCounters::default(), sleeper: Sleeper::default() }
    }
}

impl TargetEngine for SimTarget {
    type Features = SimFeatures;

    fn expected_shape(&self, batch: &PaddedBatch) -> FeatureShape {
        self.costs.shape(batch.tokens())
    }

    fn feature_bytes(&self, batch: &PaddedBatch) -> u64 {
        self.costs.bytes(batch.tokens())
    }

    async fn extract(&mut self, batch: Arc<PaddedBatch>) -> Result<SimFeatures, EngineError> {
        let tokens = batch.tokens();
        let noise = self.costs.noise_of("simulated target", batch.job, &self.attempts, self.costs.job_failures);
        let seconds = self.costs.extract_seconds((batch.rows * batch.width) as u64, batch.width as u64, tokens);
        self.sleeper.sleep(seconds * self.slowness * noise.factor).await;
        if noise.fails {
            return Err(EngineError::Failed("a simulated failure of an extraction".into()));
        }
        Ok(SimFeatures { shape: self.costs.shape(tokens), bytes: self.costs.bytes(tokens), finite: true })
    }

    async fn restart(&mut self) -> Result<(), EngineError> {
        Ok(())
    }
}

/// Simulated drafter. Its gradient is the sum of the tokens that it trained.
#[derive(Clone, Debug)]
pub struct SimDrafter {
    pub costs: CostModel,
    /// Factor on the cost model's durations.
    pub slowness: f64,
    pub gradient: Option<f64>,
    /// Value of the one weight; the loss falls with it.
    pub weight: f64,
    attempts: AttemptCounters,
    sleeper: Sleeper,
}

impl SimDrafter {
    /// Creates a drafter with its own attempt counters; [`drafters`] creates several that share them.
    pub fn new(costs: CostModel, slowness: f64) -> Self {
        Self {
            costs,
            slowness,
            gradient: None,
            weight: 0.0,
            attempts: AttemptCounters::default(),
            sleeper: Sleeper::default(),
        }
    }
}

impl DraftEngine for SimDrafter {
    type Features = SimFeatures;
    type Gradient = f64;
    type Weights = f64;

    async fn micro_batch(
        &mut self,
        job: JobId,
        features: SimFeatures,
    ) -> Result<MicroReport, MicroFailure<SimFeatures>> {
        let tokens = features.shape.tokens;
        let noise = self.costs.noise_of("simulated drafter", job, &self.attempts, self.costs.micro_batch_failures);
        self.sleeper.sleep(self.costs.micro_batch_seconds(tokens) * self.slowness * noise.factor).await;
        if noise.fails {
            let error = EngineError::Failed("a simulated failure of a micro-batch".into());
            return Err(MicroFailure { error, features: Some(features) });
        }
        *self.gradient.get_or_insert(0.0) += tokens as f64;
        let (supervised, blocks) = (tokens as f64, tokens.div_ceil(16));
        Ok(MicroReport {
            loss_numerator: supervised * 10.0 / (1.0 + self.weight),
            loss_denominator: supervised,
            correct: supervised * self.weight / (1.0 + self.weight),
            supervised,
            // With accuracy `a` in each slot, the mean run is `a / (1 - a)`, at most the slots of a block.
            run_tokens: blocks as f64 * self.weight.min(15.0),
            run_blocks: blocks as f64,
            anchors: blocks,
            tokens,
            ..MicroReport::default()
        })
    }

    async fn take_gradient(&mut self) -> Result<Option<f64>, EngineError> {
        Ok(self.gradient.take())
    }

    async fn load_weights(&mut self, weights: f64) -> Result<(), EngineError> {
        self.weight = weights;
        Ok(())
    }

    async fn checksum(&mut self) -> Result<Option<u64>, EngineError> {
        Ok(Some(self.weight.to_bits()))
    }
}

/// Simulated optimizer. Each step adds 0.01 to the weight.
#[derive(Clone, Debug)]
pub struct SimOptimizer {
    pub costs: CostModel,
    pub weight: f64,
    sleeper: Sleeper,
}

impl SimOptimizer {
    pub fn new(costs: CostModel, weight: f64) -> Self {
        Self { costs, weight, sleeper: Sleeper::default() }
    }
}

impl Optimizer for SimOptimizer {
    type Gradient = f64;
    type Weights = f64;

    async fn step(&mut self, gradients: Vec<f64>, request: StepRequest) -> Result<StepReport, EngineError> {
        let noise = noise(self.costs.seed, "simulated step", &[request.step], self.costs.jitter, 0.0);
        self.sleeper.sleep(self.costs.step_seconds() * noise.factor).await;
        let sum: f64 = gradients.iter().sum();
        let grad_norm = if request.denominator > 0.0 { sum / request.denominator } else { 0.0 };
        if !gradients.is_empty() {
            self.weight += 0.01;
        }
        Ok(StepReport { grad_norm })
    }

    async fn weights(&mut self, _drafter: usize) -> Result<f64, EngineError> {
        Ok(self.weight)
    }

    async fn checksum(&mut self) -> Result<Option<u64>, EngineError> {
        Ok(Some(self.weight.to_bits()))
    }

    async fn save(&mut self, step: u64) -> Result<Writing, EngineError> {
        Ok(Box::pin(async move { Ok(format!("step-{step}")) }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::Instant;

    /// Returns the duration of the same batch on each target in turn, and if it fails.
    async fn attempts(targets: &mut [SimTarget], order: &[usize]) -> Vec<(Duration, bool)> {
        let batch = Arc::new(PaddedBatch { rows: 1, width: 1000, lengths: vec![900], ..PaddedBatch::default() });
        let mut seen = Vec::new();
        for &index in order {
            let start = Instant::now();
            let failed = targets[index].extract(batch.clone()).await.is_err();
            seen.push((start.elapsed(), failed));
        }
        seen
    }

    #[tokio::test(start_paused = true)]
    async fn every_try_has_a_luck_of_its_own_whichever_target_makes_it() {
        let costs = CostModel { seconds_per_token: 0.1, jitter: 0.1, job_failures: 0.5, ..CostModel::default() };
        let alone = attempts(&mut targets(costs, &[1.0]), &[0; 8]).await;
        let seconds: Vec<i64> = alone.iter().map(|(took, _)| took.as_millis() as i64).collect();
        assert!(seconds.windows(2).all(|pair| pair[0] != pair[1]), "{alone:?}");
        assert!(alone.iter().any(|(_, failed)| *failed) && alone.iter().any(|(_, failed)| !failed), "{alone:?}");
        let together = attempts(&mut targets(costs, &[1.0, 1.0]), &[0, 1, 1, 0, 0, 1, 0, 1]).await;
        let failures = |seen: &[(Duration, bool)]| seen.iter().map(|(_, failed)| *failed).collect::<Vec<_>>();
        assert_eq!(failures(&alone), failures(&together));
        // Each target rounds for itself, by less than a tick.
        let close = |(a, b): (&(Duration, bool), &(Duration, bool))| a.0.abs_diff(b.0) <= Duration::from_millis(1);
        assert!(alone.iter().zip(&together).all(close), "{alone:?} {together:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn half_the_speed_is_twice_the_time() {
        let costs = CostModel { seconds_per_token: 0.1, ..CostModel::default() };
        let seen = attempts(&mut targets(costs, &[1.0, 0.5]), &[0, 1]).await;
        assert_eq!(seen, [(Duration::from_secs(100), false), (Duration::from_secs(200), false)]);
    }
}
