//! The seam to the GPU: what actors ask of a target, of a drafter and of the optimizer, without ever seeing a tensor.
//!
//! An engine is owned by the one actor that drives it, so its methods take `&mut self`: one device never runs two units
//! of work at once. Every method is one unit of work; an implementation on real hardware moves its state into one
//! `spawn_blocking` call and back.

use super::types::{JobId, PaddedBatch};
use std::{
    fmt,
    future::{Future, ready},
    pin::Pin,
};
use thiserror::Error;

/// Why an engine could not do a unit of work. The text is a sentence for a person.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum EngineError {
    /// The device had no room; a smaller unit may succeed.
    #[error("out of memory: {0}")]
    OutOfMemory(String),
    /// This unit of work failed; another one may succeed.
    #[error("{0}")]
    Failed(String),
    /// The engine cannot be used any more (lost device, panic while it held its state).
    #[error("engine lost: {0}")]
    Lost(String),
}

/// Number type of the values in a feature tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FeatureDtype {
    F32,
    F16,
    Bf16,
}

impl FeatureDtype {
    /// Bytes of one value.
    pub fn bytes(self) -> u64 {
        match self {
            FeatureDtype::F32 => 4,
            FeatureDtype::F16 | FeatureDtype::Bf16 => 2,
        }
    }
}

/// Shape of extracted features: `[tokens, taps * width]` of `dtype`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FeatureShape {
    /// Real tokens; padding is dropped before features enter the pool.
    pub tokens: u64,
    /// Tapped layers of the target.
    pub taps: u32,
    /// Values of one tap: the target's hidden size.
    pub width: u32,
    pub dtype: FeatureDtype,
}

/// What a target engine hands over: hidden states with the ids and the loss mask that belong to them.
pub trait Features: Send + 'static {
    /// Bytes that the features occupy while they wait, ids and masks included. Exact: the pool's promise counts on it.
    fn bytes(&self) -> u64;
    /// The shape as it is, for the target actor to compare with what was expected.
    fn shape(&self) -> FeatureShape;
    /// False when any value is NaN or infinite. Computed by the engine on its blocking worker.
    fn all_finite(&self) -> bool;
}

/// A frozen target model on one device: padded batch in, features out.
pub trait TargetEngine: Send + 'static {
    type Features: Features;

    /// The shape that `extract` must give for this batch.
    fn expected_shape(&self, batch: &PaddedBatch) -> FeatureShape;

    /// The bytes that `extract`'s features will report for this batch. Reserved in the pool before the forward runs.
    fn feature_bytes(&self, batch: &PaddedBatch) -> u64;

    /// Runs the forward up to the last tapped layer.
    fn extract(
        &mut self,
        batch: std::sync::Arc<PaddedBatch>,
    ) -> impl Future<Output = Result<Self::Features, EngineError>> + Send;

    /// Brings an engine back that panicked, was lost or kept failing: loads what it needs anew and probes it with a small
    /// forward. `Ok` means that it answers again. May be called again after an error.
    fn restart(&mut self) -> impl Future<Output = Result<(), EngineError>> + Send;
}

/// A micro-batch that could not be trained, with its features where the engine still has them.
pub struct MicroFailure<F> {
    pub error: EngineError,
    /// `None` where they were lost together with the unit of work.
    pub features: Option<F>,
}

impl<F> fmt::Debug for MicroFailure<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}, features {}", self.error, if self.features.is_some() { "kept" } else { "lost" })
    }
}

/// Sums over the supervised positions of one micro-batch (`reference/dflash.md` section 3.5).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct MicroReport {
    /// Sum of weight times cross-entropy, in nats.
    pub loss_numerator: f64,
    /// Sum of the weights (the decay included).
    pub loss_denominator: f64,
    /// Supervised positions whose most likely token is the label.
    pub correct: f64,
    /// Supervised positions.
    pub supervised: f64,
    /// Blocks that were trained.
    pub anchors: u64,
    /// Real context tokens of the micro-batch.
    pub tokens: u64,
}

impl MicroReport {
    pub fn add(&mut self, other: &MicroReport) {
        self.loss_numerator += other.loss_numerator;
        self.loss_denominator += other.loss_denominator;
        self.correct += other.correct;
        self.supervised += other.supervised;
        self.anchors += other.anchors;
        self.tokens += other.tokens;
    }

    /// Mean loss in nats; 0 where nothing was supervised.
    pub fn loss(&self) -> f64 {
        if self.loss_denominator > 0.0 { self.loss_numerator / self.loss_denominator } else { 0.0 }
    }

    /// Share of supervised positions that were right, in 0..=1; 0 where nothing was supervised.
    pub fn accuracy(&self) -> f64 {
        if self.supervised > 0.0 { self.correct / self.supervised } else { 0.0 }
    }
}

/// Begins to bring features to where an engine computes, and returns at once.
pub type Staging<F> = Box<dyn FnMut(&mut F) + Send>;

/// A drafter's replica on one device: adds up gradients of loss *numerators*, micro-batch by micro-batch.
pub trait DraftEngine: Send + 'static {
    type Features: Features;
    type Gradient: Send + 'static;
    type Weights: Send + 'static;

    /// From the next micro-batch on, so many blocks are trained in each sample. An engine without blocks ignores it.
    fn set_anchors(&mut self, anchors: usize) {
        let _ = anchors;
    }

    /// What is done with each batch as soon as the drafter has it in hand, often while another one is in work: the
    /// features are on their way by the time that `micro_batch` needs them. An engine that reads them where they are brings nothing.
    fn staging(&mut self) -> Staging<Self::Features> {
        Box::new(|_| ())
    }

    /// Samples anchors from a stream seeded by (run seed, job), runs forward and backward, and adds the gradient of the
    /// loss numerator to what this engine holds. A batch without a valid anchor adds nothing and is no error.
    /// After an error nothing of this batch remains in the sum, and its features come back with it.
    fn micro_batch(
        &mut self,
        job: JobId,
        features: Self::Features,
    ) -> impl Future<Output = Result<MicroReport, MicroFailure<Self::Features>>> + Send;

    /// Moves the accumulated gradient out and starts again from zero. `None` when no micro-batch added anything.
    fn take_gradient(&mut self) -> impl Future<Output = Result<Option<Self::Gradient>, EngineError>> + Send;

    /// Replaces the weights that the next micro-batch uses.
    fn load_weights(&mut self, weights: Self::Weights) -> impl Future<Output = Result<(), EngineError>> + Send;

    /// A checksum of the weights as they are now, which equals [`Optimizer::checksum`] where they are those that it gave.
    /// `None` of an engine that cannot tell.
    fn checksum(&mut self) -> impl Future<Output = Result<Option<u64>, EngineError>> + Send {
        ready(Ok(None))
    }
}

/// What the trainer asks of the optimizer for one update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepRequest {
    /// The first step is 1.
    pub step: u64,
    /// Sum of the loss denominators of every micro-batch of the step: gradients are divided by it once.
    pub denominator: f64,
    pub learning_rate: f64,
    /// Largest global L2 norm of the gradient; larger ones are scaled down to it.
    pub max_grad_norm: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepReport {
    /// Global L2 norm of the gradient before clipping.
    pub grad_norm: f64,
}

/// The optimizer: fp32 masters and moments, one update per step, weights out to every drafter.
pub trait Optimizer: Send + 'static {
    type Gradient: Send + 'static;
    type Weights: Send + 'static;

    /// Sums the drafters' gradients in the order given, divides by the denominator, clips, and updates.
    /// With no gradient at all the weights stay as they are and the norm is 0.
    fn step(
        &mut self,
        gradients: Vec<Self::Gradient>,
        request: StepRequest,
    ) -> impl Future<Output = Result<StepReport, EngineError>> + Send;

    /// A copy of the weights for the drafter with this index.
    fn weights(&mut self, drafter: usize) -> impl Future<Output = Result<Self::Weights, EngineError>> + Send;

    /// The checksum of a faithful copy of the weights as they are now: see [`DraftEngine::checksum`].
    fn checksum(&mut self) -> impl Future<Output = Result<Option<u64>, EngineError>> + Send {
        ready(Ok(None))
    }

    /// Copies what a checkpoint of `step` needs, and returns the writing of it, during which steps may go on. The writing
    /// gives the checkpoint's name, under which it then lies complete and synced on disk.
    fn save(&mut self, step: u64) -> impl Future<Output = Result<Writing, EngineError>> + Send;
}

/// A checkpoint that is being written.
pub type Writing = Pin<Box<dyn Future<Output = Result<String, EngineError>> + Send>>;
