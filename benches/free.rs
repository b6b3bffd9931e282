//! Engines that cost nothing, so that a run measures the pipeline alone.
//!
//! `HOP` selects whether they return in place, or on a blocking thread as with libtorch: one hop per unit of work.

use draftmill_actors::messages::{
    engine::{
        DraftEngine, EngineError, FeatureDtype, FeatureShape, Features, MicroFailure, MicroReport, Optimizer,
        StepReport, StepRequest, TargetEngine, Writing,
    },
    types::{BatchSource, JobId, JobSpec, PaddedBatch},
};
use std::sync::Arc;
use tokio::task::spawn_blocking;

/// Counted bytes of the features of one token; nothing is allocated.
pub const BYTES_PER_TOKEN: u64 = 2;

/// Features that report a size and hold no data.
#[derive(Clone, Copy, Debug)]
pub struct FreeFeatures {
    tokens: u64,
}

fn shape(tokens: u64) -> FeatureShape {
    FeatureShape { tokens, taps: 1, width: 1, dtype: FeatureDtype::Bf16 }
}

impl Features for FreeFeatures {
    fn bytes(&self) -> u64 {
        self.tokens * BYTES_PER_TOKEN
    }

    fn shape(&self) -> FeatureShape {
        shape(self.tokens)
    }

    fn all_finite(&self) -> bool {
        true
    }
}

/// Target whose forward returns at once.
pub struct FreeTarget<const HOP: bool>;

impl<const HOP: bool> TargetEngine for FreeTarget<HOP> {
    type Features = FreeFeatures;

    fn expected_shape(&self, batch: &PaddedBatch) -> FeatureShape {
        shape(batch.tokens())
    }

    fn feature_bytes(&self, batch: &PaddedBatch) -> u64 {
        batch.tokens() * BYTES_PER_TOKEN
    }

    async fn extract(&mut self, batch: Arc<PaddedBatch>) -> Result<FreeFeatures, EngineError> {
        let tokens = if HOP { hop(move || batch.tokens()).await? } else { batch.tokens() };
        Ok(FreeFeatures { tokens })
    }

    async fn restart(&mut self) -> Result<(), EngineError> {
        Ok(())
    }
}

/// Drafter whose gradient is its number of tokens.
#[derive(Default)]
pub struct FreeDrafter<const HOP: bool> {
    gradient: Option<u64>,
}

impl<const HOP: bool> DraftEngine for FreeDrafter<HOP> {
    type Features = FreeFeatures;
    type Gradient = u64;
    type Weights = u64;

    async fn micro_batch(
        &mut self,
        _job: JobId,
        features: FreeFeatures,
    ) -> Result<MicroReport, MicroFailure<FreeFeatures>> {
        let gradient = if HOP {
            hop(move || features.tokens).await.map_err(|error| MicroFailure { error, features: Some(features) })?
        } else {
            features.tokens
        };
        *self.gradient.get_or_insert(0) += gradient;
        let supervised = features.tokens as f64;
        Ok(MicroReport {
            loss_numerator: supervised,
            loss_denominator: supervised,
            supervised,
            tokens: features.tokens,
            ..MicroReport::default()
        })
    }

    async fn take_gradient(&mut self) -> Result<Option<u64>, EngineError> {
        Ok(self.gradient.take())
    }

    async fn load_weights(&mut self, _weights: u64) -> Result<(), EngineError> {
        Ok(())
    }
}

/// Optimizer whose only weight is the number of trained tokens.
#[derive(Default)]
pub struct FreeOptimizer {
    trained: u64,
}

impl Optimizer for FreeOptimizer {
    type Gradient = u64;
    type Weights = u64;

    async fn step(&mut self, gradients: Vec<u64>, _request: StepRequest) -> Result<StepReport, EngineError> {
        self.trained += gradients.iter().sum::<u64>();
        Ok(StepReport::default())
    }

    async fn weights(&mut self, _drafter: usize) -> Result<u64, EngineError> {
        Ok(self.trained)
    }

    async fn save(&mut self, step: u64) -> Result<Writing, EngineError> {
        Ok(Box::pin(async move { Ok(format!("step-{step}")) }))
    }
}

async fn hop(work: impl FnOnce() -> u64 + Send + 'static) -> Result<u64, EngineError> {
    spawn_blocking(work).await.map_err(|error| EngineError::Lost(error.to_string()))
}

/// Padding from the lengths of the plan, without ids.
pub struct FreeSource<const HOP: bool> {
    pub lengths: Arc<[u32]>,
}

impl<const HOP: bool> BatchSource for FreeSource<HOP> {
    const BLOCKING: bool = HOP;

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
