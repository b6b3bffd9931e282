//! Per-slot accuracy of a drafter given the true context, as in training.

use super::sampling::most_likely;
use crate::model::batch::Packed;
use crate::model::drafter::Drafter;
use crate::model::drafter::anchors::Anchors;
use crate::model::ops::{HEAD_ROWS, linear, spans};
use crate::model::target::Target;
use crate::model::{ModelError, SlotCount};

/// Counts, for each slot behind the anchor (`block_size - 1` in all), how often drafter and target predict the same
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
) -> Result<Vec<SlotCount>, ModelError> {
    let _no_grad = tch::no_grad_guard();
    let size = drafter.config().block_size;
    let mut counts = vec![SlotCount::default(); size - 1];
    if response.len() < 2 {
        return Ok(counts);
    }
    let ids: Vec<i32> = prompt.iter().chain(response).map(|&id| id as i32).collect();
    let seen = target.extend(&mut target.cache(), &ids, &drafter.config().target_layer_ids)?;
    let predictions = |hidden: &tch::Tensor, head: &dyn Fn(&tch::Tensor) -> Result<tch::Tensor, ModelError>| {
        let mut ids = Vec::new();
        for part in spans(hidden.size()[0], HEAD_ROWS) {
            ids.extend(most_likely(&head(&part.of(hidden, 0)?)?)?);
        }
        Ok::<_, ModelError>(ids)
    };
    // The label of a position is the target's prediction at the position before.
    let before = prompt.len() as i64 - 1;
    let labels = predictions(&seen.normed.f_narrow(0, before, response.len() as i64)?, &|x| target.logits(x))?;

    let first = prompt.len() as u32;
    let anchors = Anchors { rows: vec![(first..first + response.len() as u32 - 1).collect()] };
    let (mask, lengths) = (vec![1; ids.len()], [ids.len() as u32]);
    let packed = Packed::of_ids(&seen.taps, &ids, &mask, &lengths);
    let hidden = drafter.hidden(&packed, &anchors)?;
    let guesses = predictions(&hidden, &|x| linear(x, &drafter.shared().head, None))?;
    for (anchor, block) in guesses.chunks(size).enumerate() {
        for (slot, guess) in block.iter().enumerate().skip(1) {
            let Some(label) = labels.get(anchor + slot) else { break };
            counts[slot - 1].tried += 1;
            counts[slot - 1].right += u64::from(guess == label);
        }
    }
    Ok(counts)
}
