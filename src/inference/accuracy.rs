//! Per-slot accuracy of a drafter given the true context, as in training.

use super::sampling::most_likely;
use crate::model::batch::Packed;
use crate::model::drafter::Drafter;
use crate::model::drafter::anchors::Anchors;
use crate::model::drafter::head::{self, runs::Runs};
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
    let (size, first_slot) = (config.block_size, config.head.first_slot());
    let mut counts = vec![SlotCount::default(); size - first_slot];
    let mut runs = Runs::default();
    if response.len() < 2 {
        return Ok(SlotAccuracy { slots: counts, runs });
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
    // Distance from the anchor to a slot's label, and the true token before the label.
    let distance = |slot: usize| slot + 1 - first_slot;
    let last = ids.len() - 1;
    let token = |at: usize| i64::from(ids[at.min(last)]);
    let blocks = 0..anchors.count();
    let previous: Vec<i64> = blocks
        .flat_map(|anchor| (0..size).map(move |slot| (anchor, slot)))
        .map(|(anchor, slot)| token(prompt.len() + anchor + distance(slot).max(1) - 1))
        .collect();
    let guesses = head::predict(config, drafter.params(), drafter.shared(), &hidden, &previous)?;
    for (anchor, block) in guesses.chunks(size).enumerate() {
        runs.blocks += 1;
        let mut leads = true;
        for (slot, guess) in block.iter().enumerate().skip(first_slot) {
            let Some(label) = labels.get(anchor + distance(slot)) else { break };
            leads &= guess == label;
            runs.tokens += u64::from(leads);
            counts[slot - first_slot].tried += 1;
            counts[slot - first_slot].right += u64::from(guess == label);
        }
    }
    Ok(SlotAccuracy { slots: counts, runs })
}
