//! What training's loss and accuracy are on a batch that is not trained: the same forward, and no gradient.

use super::ModelError;
use super::anchors::Anchors;
use super::batch::Packed;
use super::decode::SlotCount;
use super::draft::Drafter;
use super::loss::Labels;
use super::ops::{HEAD_ROWS, largest, spans};
use draftmill_actors::engine::MicroReport;
use tch::{Kind, Tensor};

impl Drafter {
    /// The sums that training would report of this batch, and hits and tries of each slot behind the anchor.
    pub fn held_out(
        &self,
        batch: &Packed<'_>,
        anchors: &Anchors,
        gamma: Option<f64>,
    ) -> Result<(MicroReport, Vec<SlotCount>), ModelError> {
        let _no_grad = tch::no_grad_guard();
        let size = self.config().block_size;
        let mut counts = vec![SlotCount::default(); size - 1];
        let slots = anchors.slots(batch, size, gamma);
        let mut report =
            MicroReport { anchors: anchors.count() as u64, tokens: batch.ids.len() as u64, ..MicroReport::default() };
        if slots.places.is_empty() {
            return Ok((report, counts));
        }
        let device = self.options().device;
        let hidden =
            self.hidden(batch, anchors)?.f_index_select(0, &Tensor::f_from_slice(&slots.places)?.f_to(device)?)?;
        let head = self.shared().head.f_transpose(0, 1)?;
        let Labels { ids, shares } = Labels::of(&slots, device)?;
        for part in spans(hidden.size()[0], HEAD_ROWS) {
            let (start, ids, shares) = (part.start as usize, part.of(&ids, 0)?, part.of(&shares, 0)?);
            let scores = part.of(&hidden, 0)?.f_mm(&head)?.f_log_softmax(-1, Kind::Float)?;
            let terms = shares.f_xlogy(&shares)?.f_sub(&shares.f_mul(&scores.f_gather(1, &ids, false)?)?)?;
            let losses = Vec::<f64>::try_from(terms.f_sum_dim_intlist(&[1i64][..], false, Kind::Double)?)?;
            let best = Vec::<i64>::try_from(largest(&scores)?)?;
            for (row, (loss, best)) in losses.iter().zip(best).enumerate() {
                let at = start + row;
                let right = best == slots.labels[at * slots.each];
                report.loss_numerator += f64::from(slots.weights[at]) * loss;
                report.loss_denominator += f64::from(slots.weights[at]);
                report.correct += f64::from(u8::from(right));
                report.supervised += 1.0;
                let count = &mut counts[slots.places[at] as usize % size - 1];
                count.tried += 1;
                count.right += u64::from(right);
            }
        }
        Ok((report, counts))
    }
}
