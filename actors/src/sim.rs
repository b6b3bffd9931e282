//! The simulated engine: sleeps on tokio time by a cost model, so that under paused time a long run takes moments.

use crate::{
    engine::{
        DraftEngine, EngineError, FeatureDtype, FeatureShape, Features, MicroFailure, MicroReport, Optimizer,
        StepReport, StepRequest, TargetEngine, Writing,
    },
    types::{BatchSource, JobId, JobSpec, PaddedBatch},
};
use std::{sync::Arc, time::Duration};

/// What work costs, and the shape of what it makes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CostModel {
    /// Target, per token slot of a padded batch.
    pub seconds_per_token: f64,
    /// Target, per token slot and token of its row: attention.
    pub seconds_per_token_squared: f64,
    /// Drafter, per micro-batch.
    pub seconds_per_micro_batch: f64,
    /// Drafter, per context token.
    pub seconds_per_context_token: f64,
    /// Optimizer, per step.
    pub seconds_per_step: f64,
    pub taps: u32,
    pub hidden_size: u32,
    pub dtype: FeatureDtype,
}

impl Default for CostModel {
    fn default() -> Self {
        Self {
            seconds_per_token: 20e-6,
            seconds_per_token_squared: 0.0,
            seconds_per_micro_batch: 0.5,
            seconds_per_context_token: 0.0,
            seconds_per_step: 0.05,
            taps: 5,
            hidden_size: 4096,
            dtype: FeatureDtype::Bf16,
        }
    }
}

impl CostModel {
    /// The shape of the features of a batch.
    pub fn shape(&self, tokens: u64) -> FeatureShape {
        FeatureShape { tokens, taps: self.taps, width: self.hidden_size, dtype: self.dtype }
    }

    /// Bytes of the features of a batch.
    pub fn bytes(&self, tokens: u64) -> u64 {
        tokens * u64::from(self.taps) * u64::from(self.hidden_size) * self.dtype.bytes()
    }
}

/// Features without values: what they would be.
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

/// Pads by the plan alone: lengths, no ids.
#[derive(Clone, Debug)]
pub struct SimSource {
    pub lengths: Arc<[u32]>,
}

impl BatchSource for SimSource {
    const BLOCKING: bool = false;

    fn pad(&self, job: &JobSpec) -> Result<PaddedBatch, String> {
        let length = |&s: &u32| self.lengths.get(s as usize).copied().ok_or_else(|| format!("there is no sample {s}"));
        let lengths = job.samples.iter().map(length).collect::<Result<Vec<_>, _>>()?;
        Ok(PaddedBatch { rows: lengths.len(), width: job.width as usize, lengths, ..PaddedBatch::default() })
    }
}

/// A target that takes its time.
#[derive(Clone, Debug)]
pub struct SimTarget {
    pub costs: CostModel,
    /// Times slower than the cost model says.
    pub slowness: f64,
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
        let (slots, width) = ((batch.rows * batch.width) as f64, batch.width as f64);
        let seconds = slots * (self.costs.seconds_per_token + width * self.costs.seconds_per_token_squared);
        sleep(seconds * self.slowness).await;
        let tokens = batch.tokens();
        Ok(SimFeatures { shape: self.costs.shape(tokens), bytes: self.costs.bytes(tokens), finite: true })
    }

    async fn restart(&mut self) -> Result<(), EngineError> {
        Ok(())
    }
}

/// A drafter that takes its time. Its "gradient" is the sum of the tokens that it saw.
#[derive(Clone, Debug)]
pub struct SimDrafter {
    pub costs: CostModel,
    /// Times slower than the cost model says.
    pub slowness: f64,
    pub gradient: Option<f64>,
    /// Value of the one weight; the loss falls with it.
    pub weight: f64,
}

impl SimDrafter {
    pub fn new(costs: CostModel, slowness: f64) -> Self {
        Self { costs, slowness, gradient: None, weight: 0.0 }
    }
}

impl DraftEngine for SimDrafter {
    type Features = SimFeatures;
    type Gradient = f64;
    type Weights = f64;

    async fn micro_batch(
        &mut self,
        _job: JobId,
        features: SimFeatures,
    ) -> Result<MicroReport, MicroFailure<SimFeatures>> {
        let tokens = features.shape.tokens;
        let seconds = self.costs.seconds_per_micro_batch + tokens as f64 * self.costs.seconds_per_context_token;
        sleep(seconds * self.slowness).await;
        *self.gradient.get_or_insert(0.0) += tokens as f64;
        let supervised = tokens as f64;
        Ok(MicroReport {
            loss_numerator: supervised * 10.0 / (1.0 + self.weight),
            loss_denominator: supervised,
            correct: supervised * self.weight / (1.0 + self.weight),
            supervised,
            anchors: tokens.div_ceil(16),
            tokens,
        })
    }

    async fn take_gradient(&mut self) -> Result<Option<f64>, EngineError> {
        Ok(self.gradient.take())
    }

    async fn load_weights(&mut self, weights: f64) -> Result<(), EngineError> {
        self.weight = weights;
        Ok(())
    }
}

/// An optimizer that takes its time. Each step adds a hundredth to the weight.
#[derive(Clone, Debug)]
pub struct SimOptimizer {
    pub costs: CostModel,
    pub weight: f64,
}

impl Optimizer for SimOptimizer {
    type Gradient = f64;
    type Weights = f64;

    async fn step(&mut self, gradients: Vec<f64>, request: StepRequest) -> Result<StepReport, EngineError> {
        sleep(self.costs.seconds_per_step).await;
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

    async fn save(&mut self, step: u64) -> Result<Writing, EngineError> {
        Ok(Box::pin(async move { Ok(format!("step-{step}")) }))
    }
}

async fn sleep(seconds: f64) {
    if seconds > 0.0 {
        tokio::time::sleep(Duration::from_secs_f64(seconds)).await;
    }
}
