//! Per-slot accuracy of a drafter given the true context, as in training.

use super::sampling::most_likely;
use crate::model::batch::Packed;
use crate::model::drafter::Drafter;
use crate::model::drafter::anchors::Anchors;
use crate::model::drafter::head::{
    self,
    runs::{Runs, leading_runs},
};
use crate::model::ops::{HEAD_ROWS, spans};
use crate::model::target::Target;
use crate::model::{ModelError, SlotCount};

/// Predictions of a drafter along a response of the target.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SlotAccuracy {
    /// Correct and total predictions of each predicting slot.
    pub slots: Vec<SlotCount>,
    /// Leading correct runs of the blocks at all positions: along a greedy response, the tokens that verification accepts.
    pub runs: Runs,
}

/// Counts, for each predicting slot, how often drafter and target predict the same
/// token.
///
/// Each token of `response` except the last is the anchor of one block, after the true tokens before it. Slots past the
/// end are skipped. Uses the training forward, not the decoding one.
///
/// # Errors
/// Returns an error if an id is outside the vocabulary or libtorch fails.
pub fn slot_accuracy(
    target: &Target,
    drafter: &Drafter,
    prompt: &[u32],
    response: &[u32],
) -> Result<SlotAccuracy, ModelError> {
    let _no_grad = tch::no_grad_guard();
    let config = drafter.config();
    let (layout, first_slot) = (head::layout(config), config.head.first_slot());
    let mut slots = vec![SlotCount::default(); config.proposed_tokens()];
    if response.len() < 2 {
        return Ok(SlotAccuracy { slots, runs: Runs::default() });
    }
    let ids: Vec<i32> = prompt.iter().chain(response).map(|&id| id as i32).collect();
    let seen = target.extend(&mut target.cache(), &ids, &config.target_layer_ids)?;
    // The label of a position is the target's prediction at the position before.
    let before = prompt.len() as i64 - 1;
    let normed = seen.normed.f_narrow(0, before, response.len() as i64)?;
    let mut labels = Vec::new();
    for part in spans(normed.size()[0], HEAD_ROWS) {
        labels.extend(most_likely(&target.logits(&part.of(&normed, 0)?)?)?);
    }

    let first = prompt.len() as u32;
    let anchors = Anchors { rows: vec![(first..first + response.len() as u32 - 1).collect()] };
    let (mask, lengths) = (vec![1; ids.len()], [ids.len() as u32]);
    let packed = Packed::of_ids(&seen.taps, &ids, &mask, &lengths);
    let hidden = drafter.hidden(&packed, &anchors)?;
    // The true token before each slot's label; a slot that predicts nothing has any.
    let token = |at: usize| i64::from(ids[at.min(ids.len() - 1)]);
    let all = (0..anchors.count()).flat_map(|anchor| (0..layout.size).map(move |slot| (anchor, slot)));
    let before = |(anchor, slot)| token(prompt.len() + anchor + layout.distance(slot).unwrap_or(1) - 1);
    let previous: Vec<i64> = all.clone().map(before).collect();
    let guesses = head::predict(config, drafter.params(), drafter.shared(), &hidden, &previous)?;
    let (mut indices, mut correct) = (Vec::new(), Vec::new());
    for ((anchor, slot), guess) in all.zip(&guesses) {
        let label = layout.distance(slot).and_then(|distance| labels.get(anchor + distance));
        let Some(label) = label else { continue };
        slots[slot - first_slot].tried += 1;
        slots[slot - first_slot].right += u64::from(guess == label);
        indices.push((anchor * layout.size + slot) as i64);
        correct.push(guess == label);
    }
    Ok(SlotAccuracy { slots, runs: leading_runs(&indices, &correct, &layout) })
}
