//! Evaluation on held-out batches: loss and accuracy of the training forward, without gradients.

use super::Drafter;
use super::anchors::Anchors;
use crate::model::ModelError;
use crate::model::SlotCount;
use crate::model::batch::Packed;
use crate::model::loss::head_loss::Labels;
use crate::model::ops::{HEAD_ROWS, argmax, spans};
use draftmill_actors::messages::engine::MicroReport;
use tch::{Kind, Tensor};

impl Drafter {
    /// Sums that training would report for this batch, and correct and total predictions of each slot behind the
    /// anchor.
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
        let size = self.config().block_size;
        let mut counts = vec![SlotCount::default(); size - 1];
        let slots = anchors.slots(batch, size, gamma);
        let mut report =
            MicroReport { anchors: anchors.count() as u64, tokens: batch.ids.len() as u64, ..MicroReport::default() };
        if slots.indices.is_empty() {
            return Ok((report, counts));
        }
        let device = self.options().device;
        let hidden =
            self.hidden(batch, anchors)?.f_index_select(0, &Tensor::f_from_slice(&slots.indices)?.f_to(device)?)?;
        let labels = Labels::for_slots(&slots, batch.target_labels, &self.shared().head)?;
        let head = self.shared().head.f_transpose(0, 1)?;
        for part in spans(hidden.size()[0], HEAD_ROWS) {
            let start = part.start as usize;
            let log_softmax = |x: &Tensor| x.f_mm(&head)?.f_log_softmax(-1, Kind::Float);
            let scores = log_softmax(&part.of(&hidden, 0)?)?;
            let (first, terms) = match &labels {
                Labels::Tokens { ids, probabilities } => {
                    let (ids, p) = (part.of(ids, 0)?, part.of(probabilities, 0)?);
                    let terms = p.f_xlogy(&p)?.f_sub(&p.f_mul(&scores.f_gather(1, &ids, false)?)?)?;
                    (ids.f_select(1, 0)?, terms)
                }
                Labels::States { states, index } => {
                    let labels = log_softmax(&states.f_index_select(0, &part.of(index, 0)?)?)?;
                    (argmax(&labels)?, labels.f_exp()?.f_mul(&labels.f_sub(&scores)?)?)
                }
            };
            let first = Vec::<i64>::try_from(first)?;
            let losses = Vec::<f64>::try_from(terms.f_sum_dim_intlist(&[1i64][..], false, Kind::Double)?)?;
            let best = Vec::<i64>::try_from(argmax(&scores)?)?;
            for (row, ((loss, best), first)) in losses.iter().zip(best).zip(first).enumerate() {
                let at = start + row;
                let correct = best == first;
                report.loss_numerator += f64::from(slots.weights[at]) * loss;
                report.loss_denominator += f64::from(slots.weights[at]);
                report.correct += f64::from(u8::from(correct));
                report.supervised += 1.0;
                let count = &mut counts[slots.indices[at] as usize % size - 1];
                count.tried += 1;
                count.right += u64::from(correct);
            }
        }
        Ok((report, counts))
    }
}
