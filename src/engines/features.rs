//! Features of the torch engines: hidden states of one job, and the options under which a target makes them.

use crate::config::{ROW_BYTES, TopK, feature_bytes_per_token};
use crate::model::ModelError;
use crate::model::batch::{Packed, Teacher};
use draftmill_actors::messages::engine::{FeatureDtype, FeatureShape, Features};
use tch::{Device, Tensor};
use tokio::sync::oneshot;

/// Hidden states of one job's real tokens, with the ids and the loss mask that belong to them.
pub struct TorchFeatures {
    /// `[tokens, taps * width]`.
    pub(super) hidden: Tensor,
    pub(super) ids: Vec<i32>,
    /// What the target says of each place; `None` where the ids are the labels.
    pub(super) teacher: Option<Teacher>,
    pub(super) loss_mask: Vec<u8>,
    pub(super) lengths: Vec<u32>,
    pub(super) shape: FeatureShape,
    pub(super) finite: bool,
    /// A copy of `hidden` on its way to the drafter that has this batch in hand.
    pub(super) coming: Option<Coming>,
}

/// How a target extracts.
#[derive(Clone, Debug, PartialEq)]
pub struct TargetOptions {
    pub device: Device,
    /// Number type of weights and activations.
    pub compute: FeatureDtype,
    /// Number type of the features that leave.
    pub features: FeatureDtype,
    /// Where features wait to be drawn.
    pub features_on: Device,
    /// Tapped layers, in the order of the drafter's `target_layer_ids`.
    pub taps: Vec<usize>,
    /// So much of what the target says of each place is sent along. It is then loaded and computed whole.
    pub labels: Option<TopK>,
}

/// What gives the hidden states to the stream of the thread that calls it.
pub(super) type Take = Box<dyn FnOnce() -> Result<Tensor, ModelError> + Send>;

/// Hidden states that are on their way to a drafter's device.
pub(super) struct Coming(pub(super) oneshot::Receiver<Take>);

impl Coming {
    /// `None` where they could not be sent.
    pub(super) async fn here(self) -> Option<Take> {
        self.0.await.ok()
    }
}

impl Features for TorchFeatures {
    fn bytes(&self) -> u64 {
        bytes(&self.shape, self.lengths.len(), self.teacher.as_ref().map(Teacher::top_k))
    }

    fn shape(&self) -> FeatureShape {
        self.shape
    }

    fn all_finite(&self) -> bool {
        self.finite
    }
}

impl TorchFeatures {
    /// The rows as the drafter takes them.
    pub fn packed(&self) -> Packed<'_> {
        let TorchFeatures { hidden, ids, teacher, loss_mask, lengths, .. } = self;
        Packed { hidden, ids, teacher: teacher.as_ref(), loss_mask, lengths }
    }
}

/// What `draftmill check` counts for each token, and a length for each row.
pub(super) fn bytes(shape: &FeatureShape, rows: usize, labels: Option<TopK>) -> u64 {
    let per_token = feature_bytes_per_token(shape.taps as usize, shape.width as usize, shape.dtype, labels);
    shape.tokens * per_token + rows as u64 * ROW_BYTES
}
