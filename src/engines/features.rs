//! Features of the torch engines (hidden states of one job), and the options of their extraction.

use crate::config::{ROW_BYTES, TopK, feature_bytes_per_token};
use crate::model::ModelError;
use crate::model::batch::{Packed, TargetLabels};
use draftmill_actors::messages::engine::{FeatureDtype, FeatureShape, Features};
use tch::{Device, Tensor};
use tokio::sync::oneshot;

/// Hidden states of one job's real tokens, with token ids and loss mask.
pub struct TorchFeatures {
    /// `[tokens, taps * width]`.
    pub(super) hidden: Tensor,
    pub(super) ids: Vec<i32>,
    /// Target predictions at each position; `None` if the ids are the labels.
    pub(super) target_labels: Option<TargetLabels>,
    pub(super) loss_mask: Vec<u8>,
    pub(super) lengths: Vec<u32>,
    pub(super) shape: FeatureShape,
    pub(super) finite: bool,
    /// Pending copy of `hidden` to the device of the drafter that drew this batch.
    pub(super) prefetch: Option<Prefetch>,
}

/// Options of feature extraction.
#[derive(Clone, Debug, PartialEq)]
pub struct TargetOptions {
    pub device: Device,
    /// Dtype of weights and activations.
    pub compute: FeatureDtype,
    /// Dtype of the extracted features.
    pub features: FeatureDtype,
    /// Device that stores features until they are drawn.
    pub features_on: Device,
    /// Tapped layers, in the order of the drafter's `target_layer_ids`.
    pub taps: Vec<usize>,
    /// Label probabilities to extract at each position. If set, the target is loaded and computed up to its head.
    pub labels: Option<TopK>,
}

/// Makes the calling thread's stream wait for the copy, and returns the copied tensor.
pub(super) type FinishCopy = Box<dyn FnOnce() -> Result<Tensor, ModelError> + Send>;

/// Pending copy of hidden states to a drafter's device.
pub(super) struct Prefetch(pub(super) oneshot::Receiver<FinishCopy>);

impl Prefetch {
    /// Waits until the copy is enqueued; `None` if it failed.
    pub(super) async fn enqueued(self) -> Option<FinishCopy> {
        self.0.await.ok()
    }
}

impl Features for TorchFeatures {
    fn bytes(&self) -> u64 {
        bytes(&self.shape, self.lengths.len(), self.target_labels.as_ref().map(TargetLabels::top_k))
    }

    fn shape(&self) -> FeatureShape {
        self.shape
    }

    fn all_finite(&self) -> bool {
        self.finite
    }
}

impl TorchFeatures {
    /// Packed rows, the drafter's input.
    pub fn packed(&self) -> Packed<'_> {
        let TorchFeatures { hidden, ids, target_labels, loss_mask, lengths, .. } = self;
        Packed { hidden, ids, target_labels: target_labels.as_ref(), loss_mask, lengths }
    }
}

/// Bytes of features: the per-token bytes that `draftmill check` uses, plus one length for each row.
pub(super) fn bytes(shape: &FeatureShape, rows: usize, labels: Option<TopK>) -> u64 {
    let per_token = feature_bytes_per_token(shape.taps as usize, shape.width as usize, shape.dtype, labels);
    shape.tokens * per_token + rows as u64 * ROW_BYTES
}
