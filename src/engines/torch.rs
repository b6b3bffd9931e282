//! Target and drafter engines on libtorch. Each unit of work is one blocking call that owns the engine's state.

use super::features::{FinishCopy, bytes};
pub use super::features::{TargetOptions, TorchFeatures};
use super::oom_split::{FitLimit, add, sums_split_on_oom};
use super::target_forward::Forward;
use super::transfer::staging;
use super::worker::{Worker, engine_error, panicked};
use crate::hf::config::TargetConfig;
use crate::hf::draft::DraftConfig;
use crate::hf::tensors::TensorFiles;
use crate::model::ModelError;
use crate::model::batch::Packed;
use crate::model::drafter::anchors::{Anchors, job_rng};
use crate::model::drafter::{DraftOptions, Drafter, Shared};
use crate::model::load::kind_of;
use crate::model::params::{Gradient, Weights};
use crate::model::target::{Depth, Target};
use draftmill_actors::messages::engine::{
    DraftEngine, EngineError, FeatureShape, MicroFailure, MicroReport, Staging, TargetEngine,
};
use draftmill_actors::messages::types::{JobId, PaddedBatch};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use tch::Device;

pub use crate::model::libtorch::init_libtorch;

/// A frozen target on one device.
pub struct TorchTarget {
    worker: Worker<Forward>,
    /// Configuration and weights, to load the target again after it is lost.
    source: Arc<Source>,
    options: TargetOptions,
}

struct Source {
    config: TargetConfig,
    files: Arc<TensorFiles>,
}

/// Options of drafter training.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DrafterOptions {
    pub model: DraftOptions,
    /// Limit of blocks in one row.
    pub num_anchors: usize,
    /// The run's seed. Seed and job determine the anchors.
    pub seed: u64,
}

/// A drafter's replica on one device.
pub struct TorchDrafter {
    /// Limit of blocks in each sample of the next micro-batch.
    anchors: usize,
    device: Device,
    worker: Worker<Replica>,
}

struct Replica {
    drafter: Drafter,
    options: DrafterOptions,
    sum: Option<Gradient>,
    limit: FitLimit,
}

impl TorchTarget {
    /// Loads the layers up to the last tap from a Hugging Face folder. Reads gigabytes: call it on a blocking thread.
    ///
    /// # Errors
    /// An unreadable folder, an unsupported model, or a libtorch failure.
    pub fn load(folder: &Path, options: TargetOptions) -> Result<TorchTarget, ModelError> {
        TorchTarget::new(TargetConfig::load(folder)?, Arc::new(TensorFiles::open(folder)?), options)
    }

    /// Loads the target from open files.
    ///
    /// # Errors
    /// As [`TorchTarget::load`].
    pub fn new(
        config: TargetConfig,
        files: Arc<TensorFiles>,
        options: TargetOptions,
    ) -> Result<TorchTarget, ModelError> {
        let source = Arc::new(Source { config, files });
        let target = source.load(&options)?;
        Ok(TorchTarget { worker: Worker::new(Forward::new(target)), source, options })
    }
}

impl Source {
    fn load(&self, options: &TargetOptions) -> Result<Target, ModelError> {
        let Some(&last) = options.taps.iter().max() else {
            return Err(ModelError::Input("no tapped layers, expected at least one".into()));
        };
        let depth = if options.labels.is_some() { Depth::Whole } else { Depth::Layers(last + 1) };
        let kind = kind_of(options.compute);
        Target::load(self.config.clone(), &self.files, depth, kind, options.device)
    }
}

impl TargetEngine for TorchTarget {
    type Features = TorchFeatures;

    fn expected_shape(&self, batch: &PaddedBatch) -> FeatureShape {
        FeatureShape {
            tokens: batch.tokens(),
            taps: self.options.taps.len() as u32,
            width: self.source.config.hidden_size as u32,
            dtype: self.options.features,
        }
    }

    fn feature_bytes(&self, batch: &PaddedBatch) -> u64 {
        bytes(&self.expected_shape(batch), batch.rows, self.options.labels)
    }

    async fn extract(&mut self, batch: Arc<PaddedBatch>) -> Result<TorchFeatures, EngineError> {
        let options = self.options.clone();
        self.worker.run(move |forward| forward.extract(&batch, &options)).await
    }

    async fn restart(&mut self) -> Result<(), EngineError> {
        let (source, options) = (self.source.clone(), self.options.clone());
        // Frees the old weights first: two copies may not fit on the device.
        self.worker = Worker::lost();
        let mut loading = Worker::new(());
        let forward = loading.run(move |()| {
            let mut forward = Forward::new(source.load(&options)?);
            let features = forward.extract(&probe(), &options)?;
            match features.finite {
                true => Ok(forward),
                false => Err(ModelError::Input("hidden states of the probe batch are NaN or infinite".into())),
            }
        });
        self.worker = Worker::new(forward.await?);
        Ok(())
    }
}

/// Batch of 4 tokens that every target can extract.
fn probe() -> PaddedBatch {
    PaddedBatch {
        rows: 1,
        width: 4,
        lengths: vec![4],
        ids: vec![0; 4],
        loss_mask: vec![0; 4],
        ..PaddedBatch::default()
    }
}

impl TorchDrafter {
    /// Drafter with the embedding and head of the target in `folder`. Reads gigabytes: call it on a blocking thread.
    ///
    /// # Errors
    /// An unreadable folder, a drafter that does not match the target, or a libtorch failure.
    pub fn load(config: DraftConfig, folder: &Path, options: DrafterOptions) -> Result<TorchDrafter, ModelError> {
        let (target, files) = (TargetConfig::load(folder)?, TensorFiles::open(folder)?);
        let shared = Shared::load(&target, &files, options.model.kind, options.model.device)?;
        TorchDrafter::new(config, shared, options)
    }

    /// Drafter without weights; [`DraftEngine::load_weights`] sets them. `shared` must be on the drafter's device, in its
    /// compute dtype.
    ///
    /// # Errors
    /// A drafter configuration that does not match `shared`.
    pub fn new(config: DraftConfig, shared: Shared, options: DrafterOptions) -> Result<TorchDrafter, ModelError> {
        let drafter = Drafter::new(config, shared, options.model)?;
        let (anchors, device) = (options.num_anchors, options.model.device);
        let limit = FitLimit::new(device);
        Ok(TorchDrafter { anchors, device, worker: Worker::new(Replica { drafter, options, sum: None, limit }) })
    }
}

impl DraftEngine for TorchDrafter {
    type Features = TorchFeatures;
    type Gradient = Gradient;
    type Weights = Weights;

    fn set_anchors(&mut self, anchors: usize) {
        self.anchors = anchors;
    }

    fn staging(&mut self) -> Staging<TorchFeatures> {
        staging(self.device)
    }

    async fn micro_batch(
        &mut self,
        job: JobId,
        mut features: TorchFeatures,
    ) -> Result<MicroReport, MicroFailure<TorchFeatures>> {
        let anchors = self.anchors;
        let copied = match features.prefetch.take() {
            Some(prefetch) => prefetch.enqueued().await,
            None => None,
        };
        let work = move |replica: &mut Replica| {
            replica.options.num_anchors = anchors;
            // The features must survive a panic, so that another drafter can train them.
            let trained = catch_unwind(AssertUnwindSafe(|| replica.micro_batch(job, &features, copied)));
            Ok((trained.map_err(panicked), features))
        };
        let lost = |error| MicroFailure { error, features: None };
        let (trained, features) = self.worker.run(work).await.map_err(lost)?;
        let error = match trained {
            Ok(Ok(report)) => return Ok(report),
            Ok(Err(error)) => engine_error(error),
            Err(panic) => {
                // The gradient sum may be incomplete.
                self.worker = Worker::lost();
                EngineError::Lost(panic)
            }
        };
        Err(MicroFailure { error, features: Some(features) })
    }

    async fn take_gradient(&mut self) -> Result<Option<Gradient>, EngineError> {
        self.worker.run(|replica| Ok(replica.sum.take())).await
    }

    async fn load_weights(&mut self, weights: Weights) -> Result<(), EngineError> {
        self.worker.run(move |replica| replica.drafter.load_weights(weights)).await
    }

    async fn checksum(&mut self) -> Result<Option<u64>, EngineError> {
        self.worker.run(|replica| replica.drafter.params().checksum().map(Some)).await
    }
}

impl Replica {
    /// Loss and gradient of one micro-batch. `copied` is the prefetched copy of the hidden states, if any.
    fn micro_batch(
        &mut self,
        job: JobId,
        features: &TorchFeatures,
        copied: Option<FinishCopy>,
    ) -> Result<MicroReport, ModelError> {
        let options = &self.options;
        let hidden = match copied {
            Some(finish) => finish()?,
            None => features.hidden.f_to_device(options.model.device)?,
        };
        let batch = Packed { hidden: &hidden, ..features.packed() };
        let mut rng = job_rng(options.seed, job);
        let anchors = Anchors::sample(batch.loss_mask, batch.lengths, options.num_anchors, &mut rng)?;
        let compute = |piece: &Anchors| self.drafter.loss_and_gradient(&batch, piece);
        let (report, gradient) = sums_split_on_oom(&anchors, &mut self.limit, compute)?;
        add(&mut self.sum, gradient)?;
        Ok(report)
    }
}
