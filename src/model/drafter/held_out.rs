//! Evaluation on held-out batches: loss and accuracy of the training forward.

use super::anchors::Anchors;
use super::head::{self, HeadInput, HeadOutput};
use super::{DraftOptions, Drafter};
use crate::model::ModelError;
use crate::model::SlotCount;
use crate::model::batch::Packed;
use crate::model::loss::weighting::Weighting;
use draftmill_actors::messages::engine::MicroReport;
use tch::Tensor;

impl Drafter {
    /// Sums that training would report for this batch, and correct and total predictions of each predicting
    /// slot.
    ///
    /// # Errors
    /// Returns an error if the batch does not fit the drafter or libtorch fails.
    pub fn held_out(
        &self,
        batch: &Packed<'_>,
        anchors: &Anchors,
        gamma: Option<f64>,
    ) -> Result<(MicroReport, Vec<SlotCount>), ModelError> {
        let _no_grad = tch::no_grad_guard();
        let layout = head::layout(self.config());
        let first = self.config().head.first_slot();
        let mut counts = vec![SlotCount::default(); self.config().proposed_tokens()];
        let slots = anchors.slots(batch, layout, gamma);
        let mut report =
            MicroReport { anchors: anchors.count() as u64, tokens: batch.ids.len() as u64, ..MicroReport::default() };
        if slots.indices.is_empty() {
            return Ok((report, counts));
        }
        let device = self.options().device;
        let hidden =
            self.hidden(batch, anchors)?.f_index_select(0, &Tensor::f_from_slice(&slots.indices)?.f_to(device)?)?;
        let options = DraftOptions { weighting: Weighting::Decay(gamma), ..*self.options() };
        let input = HeadInput {
            config: self.config(),
            params: self.params(),
            shared: self.shared(),
            options: &options,
            batch,
            slots: &slots,
            hidden: &hidden,
        };
        let HeadOutput { report: sums, correct, .. } = head::loss(&input)?;
        report.add(&sums);
        for (index, right) in slots.indices.iter().zip(correct) {
            let count = &mut counts[*index as usize % layout.size - first];
            count.tried += 1;
            count.right += u64::from(right);
        }
        Ok((report, counts))
    }
}
