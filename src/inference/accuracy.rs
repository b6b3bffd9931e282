//! How often a drafter is right at each slot when every token before its block is given: the accuracy that training sees.

use super::sampling::most_likely;
use crate::model::batch::Packed;
use crate::model::drafter::Drafter;
use crate::model::drafter::anchors::Anchors;
use crate::model::ops::{HEAD_ROWS, linear, spans};
use crate::model::target::Target;
use crate::model::{ModelError, SlotCount};

/// For every slot behind the anchor, `block_size - 1` in all: how often the drafter's most likely token is the target's most
/// likely token there. Every token of `response` but the last is the anchor of a block once, behind the true tokens before
/// it, and slots past the end are not tried. It takes the forward that trains, not the one that decodes.
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
    let said = |hidden: &tch::Tensor, head: &dyn Fn(&tch::Tensor) -> Result<tch::Tensor, ModelError>| {
        let mut said = Vec::new();
        for part in spans(hidden.size()[0], HEAD_ROWS) {
            said.extend(most_likely(&head(&part.of(hidden, 0)?)?)?);
        }
        Ok::<_, ModelError>(said)
    };
    // The token at a position is what the target says at the one before.
    let before = prompt.len() as i64 - 1;
    let labels = said(&seen.normed.f_narrow(0, before, response.len() as i64)?, &|x| target.logits(x))?;

    let first = prompt.len() as u32;
    let anchors = Anchors { rows: vec![(first..first + response.len() as u32 - 1).collect()] };
    let (mask, lengths) = (vec![1; ids.len()], [ids.len() as u32]);
    let packed = Packed::of_ids(&seen.taps, &ids, &mask, &lengths);
    let hidden = drafter.hidden(&packed, &anchors)?;
    let guesses = said(&hidden, &|x| linear(x, &drafter.shared().head, None))?;
    for (anchor, block) in guesses.chunks(size).enumerate() {
        for (slot, guess) in block.iter().enumerate().skip(1) {
            let Some(label) = labels.get(anchor + slot) else { break };
            counts[slot - 1].tried += 1;
            counts[slot - 1].right += u64::from(guess == label);
        }
    }
    Ok(counts)
}
