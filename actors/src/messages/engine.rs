//! Engine interface: the operations that the actors need from a target, a drafter and the optimizer. No tensor appears
//! in it.
//!
//! One actor owns each engine and drives it, so methods take `&mut self`: one device never runs two units of work at
//! once. Every method is one unit of work. An implementation on real hardware moves its state into one `spawn_blocking`
//! call and back.
//!
//! # Cancellation
//!
//! Dropping a returned future abandons the unit of work. The engine may then be in any state. The actors drop such a
//! future only when the run is aborted, and drop the engine with it.

use super::types::{JobId, PaddedBatch};
use std::{
    fmt,
    future::{Future, ready},
    pin::Pin,
};
use thiserror::Error;

/// Error of one unit of work. The text is a sentence for a person.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum EngineError {
    /// The device is out of memory; a smaller unit may succeed.
    #[error("out of memory: {0}")]
    OutOfMemory(String),
    /// This unit of work failed; another one may succeed.
    #[error("{0}")]
    Failed(String),
    /// The engine is unusable: the device is lost, or a panic occurred while it held the engine's state.
    #[error("engine lost: {0}")]
    Lost(String),
}

/// Dtype of the values in a feature tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FeatureDtype {
    F32,
    F16,
    Bf16,
}

impl FeatureDtype {
    /// Returns the bytes of one value.
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

/// Output of a target engine: hidden states with the token ids and the loss mask that belong to them.
pub trait Features: Send + 'static {
    /// Returns the bytes that the waiting features occupy, ids and masks included. The pool's byte limit depends on the
    /// exact number.
    fn bytes(&self) -> u64;
    /// Returns the actual shape; the target actor compares it with the expected one.
    fn shape(&self) -> FeatureShape;
    /// Returns false if any value is NaN or infinite. The engine computes this on its blocking worker.
    fn all_finite(&self) -> bool;
}

/// Frozen target model on one device: padded batch in, features out.
pub trait TargetEngine: Send + 'static {
    type Features: Features;

    /// Returns the shape that [`extract`](Self::extract) must produce for this batch: `[tokens, taps * width]`, where
    /// `tokens` counts real tokens only.
    fn expected_shape(&self, batch: &PaddedBatch) -> FeatureShape;

    /// Returns the bytes that the features of this batch will report. The target reserves them in the pool before the
    /// forward.
    fn feature_bytes(&self, batch: &PaddedBatch) -> u64;

    /// Runs the forward up to the last tapped layer.
    ///
    /// The input is `[rows, width]`, row-major and right-padded. The output is `[tokens, taps * width]`: the real
    /// tokens of all rows in row order, taps side by side in layer order.
    ///
    /// # Errors
    ///
    /// `OutOfMemory` and `Failed` concern this batch only. After `Lost` the actor restarts the engine.
    ///
    /// # Cancellation
    ///
    /// Dropping the future abandons the forward; the actor does so only when the run is aborted.
    fn extract(
        &mut self,
        batch: std::sync::Arc<PaddedBatch>,
    ) -> impl Future<Output = Result<Self::Features, EngineError>> + Send;

    /// Restarts an engine that panicked, was lost or kept failing: reloads its state and probes it with a small
    /// forward.
    ///
    /// # Errors
    ///
    /// Fails if the engine still does not respond. The actor may call this again later.
    ///
    /// # Cancellation
    ///
    /// The future may be dropped at shutdown; the engine is not used afterwards.
    fn restart(&mut self) -> impl Future<Output = Result<(), EngineError>> + Send;
}

/// Micro-batch that failed, with its features if the engine still has them.
pub struct MicroFailure<F> {
    pub error: EngineError,
    /// Features to return to the pool; `None` if they were lost with the unit of work.
    pub features: Option<F>,
}

impl<F> fmt::Debug for MicroFailure<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}, features {}", self.error, if self.features.is_some() { "kept" } else { "lost" })
    }
}

/// Sums over the supervised positions of one micro-batch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct MicroReport {
    /// Sum of weight times cross-entropy, in nats.
    pub loss_numerator: f64,
    /// Sum of the weights, decay included.
    pub loss_denominator: f64,
    /// Supervised positions whose most likely token is the label.
    pub correct: f64,
    /// Supervised positions.
    pub supervised: f64,
    /// Tokens of the leading correct run of each block: predictions from its first slot on that are right without a gap.
    pub run_tokens: f64,
    /// Blocks with a supervised position.
    pub run_blocks: f64,
    /// Supervised positions whose label is among the candidates of a selector; 0 without a selector.
    pub candidate_hits: f64,
    /// As `run_tokens`, by the most likely tokens before the selector; 0 without a selector.
    pub unary_run_tokens: f64,
    /// Trained blocks.
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
        self.run_tokens += other.run_tokens;
        self.run_blocks += other.run_blocks;
        self.candidate_hits += other.candidate_hits;
        self.unary_run_tokens += other.unary_run_tokens;
        self.anchors += other.anchors;
        self.tokens += other.tokens;
    }

    /// Returns the mean loss in nats; 0 without supervised positions.
    pub fn loss(&self) -> f64 {
        if self.loss_denominator > 0.0 { self.loss_numerator / self.loss_denominator } else { 0.0 }
    }

    /// Returns the mean leading correct run of a block, in tokens; 0 without blocks.
    pub fn leading_run(&self) -> f64 {
        if self.run_blocks > 0.0 { self.run_tokens / self.run_blocks } else { 0.0 }
    }

    /// Returns the fraction of supervised positions whose label is a candidate of the selector; `None` without a selector.
    pub fn candidate_recall(&self) -> Option<f64> {
        (self.candidate_hits > 0.0).then(|| self.candidate_hits / self.supervised)
    }

    /// Returns the mean tokens by which the selector lengthens the leading run of a block; `None` without a selector.
    pub fn selector_gain(&self) -> Option<f64> {
        let blocks = self.run_blocks;
        (self.candidate_hits > 0.0 && blocks > 0.0).then(|| (self.run_tokens - self.unary_run_tokens) / blocks)
    }

    /// Returns the fraction of correct supervised positions, in 0..=1; 0 without supervised positions.
    pub fn accuracy(&self) -> f64 {
        if self.supervised > 0.0 { self.correct / self.supervised } else { 0.0 }
    }
}

/// Function that starts an asynchronous copy of features to the engine's device and returns at once.
pub type Staging<F> = Box<dyn FnMut(&mut F) + Send>;

/// Drafter replica on one device. It accumulates gradients of the loss *numerator*, micro-batch by micro-batch.
pub trait DraftEngine: Send + 'static {
    type Features: Features;
    type Gradient: Send + 'static;
    type Weights: Send + 'static;

    /// Sets the blocks per sample, from the next micro-batch on. An engine without blocks ignores this.
    fn set_anchors(&mut self, anchors: usize) {
        let _ = anchors;
    }

    /// Returns the function that the drafter calls on each drawn batch, often while another batch is in work. It starts
    /// the copy to the device, so that the features are there when `micro_batch` needs them. The default does nothing.
    fn staging(&mut self) -> Staging<Self::Features> {
        Box::new(|_| ())
    }

    /// Trains one micro-batch: samples anchors from a stream seeded by (run seed, job), runs forward and backward, and
    /// adds the gradient of the loss numerator to the accumulated one.
    ///
    /// The features are `[tokens, taps * width]`. A batch without a valid anchor adds nothing and is not an error.
    ///
    /// # Errors
    ///
    /// After an error the accumulated gradient does not contain this batch. The failure returns the features unless
    /// they are lost. After `Lost` the run ends.
    ///
    /// # Cancellation
    ///
    /// Dropping the future abandons the micro-batch and the accumulated gradient; the actor does so only when the run
    /// is aborted.
    fn micro_batch(
        &mut self,
        job: JobId,
        features: Self::Features,
    ) -> impl Future<Output = Result<MicroReport, MicroFailure<Self::Features>>> + Send;

    /// Moves the accumulated gradient out and resets it to zero. Returns `None` if no micro-batch added anything.
    ///
    /// # Errors
    ///
    /// The gradient is lost on an error, and the run ends.
    fn take_gradient(&mut self) -> impl Future<Output = Result<Option<Self::Gradient>, EngineError>> + Send;

    /// Replaces the weights that the next micro-batch uses.
    ///
    /// # Errors
    ///
    /// The weights are undefined after an error, and the run ends.
    fn load_weights(&mut self, weights: Self::Weights) -> impl Future<Output = Result<(), EngineError>> + Send;

    /// Returns a checksum of the current weights. It equals [`Optimizer::checksum`] if the weights are those that the
    /// optimizer published. Returns `None` if the engine computes no checksums.
    ///
    /// # Errors
    ///
    /// An error costs this comparison only; training continues.
    fn checksum(&mut self) -> impl Future<Output = Result<Option<u64>, EngineError>> + Send {
        ready(Ok(None))
    }
}

/// Arguments of one optimizer update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepRequest {
    /// Number of the step; the first is 1.
    pub step: u64,
    /// Sum of the loss denominators of every micro-batch of the step. Gradients are divided by it once.
    pub denominator: f64,
    pub learning_rate: f64,
    /// Limit on the global L2 norm of the gradient; a larger gradient is scaled down to it.
    pub max_grad_norm: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepReport {
    /// Global L2 norm of the gradient before clipping.
    pub grad_norm: f64,
}

/// Optimizer: holds fp32 master weights and moments, updates them once per step, and publishes weights to every
/// drafter.
pub trait Optimizer: Send + 'static {
    type Gradient: Send + 'static;
    type Weights: Send + 'static;

    /// Sums the drafters' gradients in the given order, divides by the denominator, clips, and updates. Without any
    /// gradient the weights stay unchanged and the norm is 0.
    ///
    /// # Errors
    ///
    /// The weights are undefined after an error, and the run ends.
    fn step(
        &mut self,
        gradients: Vec<Self::Gradient>,
        request: StepRequest,
    ) -> impl Future<Output = Result<StepReport, EngineError>> + Send;

    /// Returns a copy of the weights for the drafter with this index.
    ///
    /// # Errors
    ///
    /// An error ends the run.
    fn weights(&mut self, drafter: usize) -> impl Future<Output = Result<Self::Weights, EngineError>> + Send;

    /// Returns the checksum of an exact copy of the current weights: see [`DraftEngine::checksum`].
    ///
    /// # Errors
    ///
    /// An error costs this comparison only; training continues.
    fn checksum(&mut self) -> impl Future<Output = Result<Option<u64>, EngineError>> + Send {
        ready(Ok(None))
    }

    /// Copies the state that a checkpoint of `step` needs, and returns the future that writes it. Further steps may run
    /// while it is written. The future resolves to the checkpoint's name once the checkpoint is complete and synced on
    /// disk.
    ///
    /// # Errors
    ///
    /// An error of the copy or of the write costs this checkpoint only; earlier ones stay.
    ///
    /// # Cancellation
    ///
    /// Dropping the returned future abandons the checkpoint. An incomplete one must not appear under its final name.
    fn save(&mut self, step: u64) -> impl Future<Output = Result<Writing, EngineError>> + Send;
}

/// Write of a checkpoint in progress.
pub type Writing = Pin<Box<dyn Future<Output = Result<String, EngineError>> + Send>>;
