//! Engines that cost nothing: what is left of a run is the pipeline.
//!
//! `HOP` says where their nothing happens: in place, or on a blocking thread, one hop per unit of work, as with libtorch.

use draftmill_actors::messages::{
    engine::{
        DraftEngine, EngineError, FeatureDtype, FeatureShape, Features, MicroFailure, MicroReport, Optimizer,
        StepReport, StepRequest, TargetEngine, Writing,
    },
    types::{BatchSource, JobId, JobSpec, PaddedBatch},
};
use std::sync::Arc;
use tokio::task::spawn_blocking;

/// Bytes of the features of one token, as they are counted; nothing is allocated.
pub const BYTES_PER_TOKEN: u64 = 2;

/// Features that say their bytes and hold none.
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

/// A target whose forward returns at once.
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

/// A drafter whose gradient is the number of tokens that it saw.
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

/// An optimizer whose one weight is the number of tokens that were trained.
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

/// Pads by the plan alone: lengths, no ids.
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
