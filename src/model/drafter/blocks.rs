//! Attention layout of a micro-batch's blocks: groups of neighbouring blocks that share a span of the context.

use super::DraftOptions;
use super::anchors::Anchors;
use crate::config::WindowStart;
use crate::hf::draft::{DraftConfig, LayerType};
use crate::model::ModelError;
use crate::model::batch::Packed;
use crate::model::ops::Span;
use crate::model::rope::{Rope, RopeTable};
use tch::{Device, Kind, Tensor};

/// Blocks of a micro-batch as a flat list in row order, with the context that they see.
pub struct Blocks {
    /// Rope table of the context: the tokens before the largest anchor of each row.
    pub context_table: RopeTable,
    pub slot_table: RopeTable,
    /// Ids of the anchor tokens, then the mask token, which fills all other slots, `[blocks + 1]`.
    pub ids: Tensor,
    full: Vec<AttentionWindow>,
    sliding: Vec<AttentionWindow>,
    sliding_own: Option<Tensor>,
}

/// Context that a slot of a sliding layer sees.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    /// Number of positions.
    pub size: i64,
    pub start: WindowStart,
}

impl Window {
    /// First visible position for slot `slot` of a block at `anchor`; may be negative.
    pub fn first(self, anchor: i64, slot: i64) -> i64 {
        match self.start {
            WindowStart::Slot => anchor + slot - (self.size - 1),
            WindowStart::Anchor => anchor - self.size,
        }
    }
}

/// Group of neighbouring blocks of one row, and the context that they see together.
pub struct AttentionWindow {
    /// First visible token in the packed context, and number of tokens.
    pub start: i64,
    pub len: i64,
    /// First slot, and number of slots.
    pub slot: i64,
    pub slots: i64,
    /// Tokens of the window that all slots see; may be empty.
    pub unmasked: Span,
    /// Remaining tokens of the window, in order.
    pub masked: Vec<MaskedSpan>,
}

/// Contiguous tokens of a window that are masked for some of its slots.
pub struct MaskedSpan {
    pub span: Span,
    /// True if masked, `[blocks, block_size or 1, 1, tokens]`; the third dimension broadcasts over heads.
    pub mask: Tensor,
}

/// Attention of the layers of one type.
#[derive(Clone, Copy)]
pub struct LayerAttention<'a> {
    /// Windows in slot order; together they cover all slots.
    pub windows: &'a [AttentionWindow],
    /// True if a slot does not see another slot of its block, `[block_size, 1, block_size]`.
    pub own_mask: Option<&'a Tensor>,
}

impl Blocks {
    /// Builds the layout. `options.group_slots` limits the slots of a group: larger groups give fewer, longer attention
    /// calls, but more masked scores.
    ///
    /// # Errors
    /// Returns an error if libtorch fails.
    pub fn new(
        config: &DraftConfig,
        rope: &Rope,
        batch: &Packed<'_>,
        anchors: &Anchors,
        options: &DraftOptions,
    ) -> Result<Blocks, ModelError> {
        let _no_grad = tch::no_grad_guard();
        let &DraftOptions { group_slots, kind, window_start, .. } = options;
        let device = batch.hidden.device();
        let size = config.block_size as i64;
        let has = |layer_type| config.layer_types.contains(&layer_type);
        let window = config.sliding_window.map(|size| Window { size: size as i64, start: window_start });
        let (mut full, mut sliding) = (Vec::new(), Vec::new());
        let (mut context_positions, mut slot_positions) = (Vec::new(), Vec::new());
        for (row, cut) in anchors.rows.iter().zip(anchors.context_lengths()) {
            let row: Vec<i64> = row.iter().map(|&anchor| i64::from(anchor)).collect();
            let row_start = context_positions.len() as i64;
            for group in row.chunks((group_slots / config.block_size).max(1)) {
                let slot = slot_positions.len() as i64;
                if has(LayerType::Full) {
                    full.push(AttentionWindow::new(group, size, None, row_start, slot, device)?);
                }
                if has(LayerType::Sliding) {
                    sliding.push(AttentionWindow::new(group, size, window, row_start, slot, device)?);
                }
                slot_positions.extend(group.iter().flat_map(|&anchor| anchor..anchor + size));
            }
            context_positions.extend(0..cut);
        }
        let causal = has(LayerType::Sliding) && config.sliding_causal;
        let mut ids = anchors.ids(batch);
        ids.push(config.mask_token_id.into());
        Ok(Blocks {
            context_table: rope.table(&context_positions, kind)?,
            slot_table: rope.table(&slot_positions, kind)?,
            ids: Tensor::f_from_slice(&ids)?.f_to_device(device)?,
            full,
            sliding,
            sliding_own: causal.then(|| own_mask(size, device)).transpose()?,
        })
    }

    /// Attention of the layers of this type.
    pub fn attention(&self, layer_type: LayerType) -> LayerAttention<'_> {
        match layer_type {
            LayerType::Full => LayerAttention { windows: &self.full, own_mask: None },
            LayerType::Sliding => LayerAttention { windows: &self.sliding, own_mask: self.sliding_own.as_ref() },
        }
    }
}

impl AttentionWindow {
    /// Builds the window of a group (`docs/dflash.md#attention-mask`). Slot `j` of a block with anchor `a` sees the
    /// context before `a` and the slots of the same block. On sliding layers it sees context from `window.first(a, j)` on.
    /// Visibility depends on positions only, as blocks overlap (SpecForge#470).
    fn new(
        anchors: &[i64],
        size: i64,
        window: Option<Window>,
        row_start: i64,
        slot: i64,
        device: Device,
    ) -> Result<AttentionWindow, ModelError> {
        let (smallest, largest) = (anchors.first().copied().unwrap_or(0), anchors.last().copied().unwrap_or(0));
        let from = window.map_or(0, |window| window.first(smallest, 0).max(0));
        let count = anchors.len() as i64;
        // First token that the last slot of the last block sees; the first block sees tokens up to its anchor.
        let all_from = window.map_or(from, |window| window.first(largest, size - 1).max(from));
        let unmasked = if all_from < smallest { (all_from, smallest) } else { (from, from) };
        let mut masked = Vec::new();
        for (first, end) in [(from, unmasked.0), (unmasked.1, largest)] {
            if first == end {
                continue;
            }
            let anchor = Tensor::f_from_slice(anchors)?.f_to(device)?.f_reshape([count, 1, 1, 1])?;
            let position = Tensor::f_arange_start(first, end, (Kind::Int64, device))?;
            let mut mask = position.f_ge_tensor(&anchor)?;
            if let Some(window) = window {
                // First visible position of each slot, relative to its anchor.
                let first: Vec<i64> = (0..size).map(|slot| window.first(0, slot)).collect();
                let first = Tensor::f_from_slice(&first)?.f_to(device)?.f_reshape([1, size, 1, 1])?;
                mask = mask.f_logical_or(&position.f_lt_tensor(&anchor.f_add(&first)?)?)?;
            }
            masked.push(MaskedSpan { span: Span { start: first - from, len: end - first }, mask });
        }
        let unmasked = Span { start: unmasked.0 - from, len: unmasked.1 - unmasked.0 };
        Ok(AttentionWindow {
            start: row_start + from,
            len: largest - from,
            slot,
            slots: count * size,
            unmasked,
            masked,
        })
    }
}

/// Mask within a block on sliding layers: slot `j` sees slots `0 ..= j`.
fn own_mask(size: i64, device: Device) -> Result<Tensor, ModelError> {
    let slot = Tensor::f_arange(size, (Kind::Int64, device))?;
    Ok(slot.f_gt_tensor(&slot.f_reshape([size, 1, 1])?)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        /// Matches the definition token by token; the unmasked span is exactly what all slots see.
        #[test]
        fn visible_tokens_match_the_definition(
            anchors in prop::collection::btree_set(0i64..60, 1..6), size in 1i64..9, window in prop::option::of(1i64..80),
            from_slot: bool,
        ) {
            let start = if from_slot { WindowStart::Slot } else { WindowStart::Anchor };
            let window = window.map(|size| Window { size, start });
            let anchors: Vec<i64> = anchors.into_iter().collect();
            let group = AttentionWindow::new(&anchors, size, window, 1000, 7, Device::Cpu).unwrap();
            let (smallest, largest) = (anchors[0], anchors[anchors.len() - 1]);
            let from = group.start - 1000;
            prop_assert_eq!((group.slot, group.slots, from + group.len), (7, anchors.len() as i64 * size, largest));
            let mut spans: Vec<(i64, i64)> = group.masked.iter().map(|m| (m.span.start, m.span.len)).collect();
            spans.push((group.unmasked.start, group.unmasked.len));
            let indices: Vec<i64> = spans.iter().flat_map(|&(start, len)| start..start + len).collect();
            prop_assert_eq!(indices.len() as i64, group.len);
            prop_assert_eq!(indices.into_iter().collect::<BTreeSet<_>>(), (0..group.len).collect::<BTreeSet<_>>());

            let mut all_see = Vec::new();
            for position in 0..largest {
                let sees = |block: usize, slot: i64| {
                    let anchor = anchors[block];
                    let near = |Window { size, start }| match start {
                        WindowStart::Slot => position >= anchor + slot - (size - 1),
                        WindowStart::Anchor => position >= anchor - size,
                    };
                    position < anchor && window.is_none_or(near)
                };
                let slots = || (0..anchors.len()).flat_map(|block| (0..size).map(move |slot| (block, slot)));
                if slots().all(|(block, slot)| sees(block, slot)) {
                    all_see.push(position);
                }
                let index = position - from;
                if index < 0 {
                    prop_assert!(slots().all(|(block, slot)| !sees(block, slot)));
                }
                for masked in &group.masked {
                    let span = masked.span;
                    if (span.start..span.start + span.len).contains(&index) {
                        let mask = masked.mask.expand([anchors.len() as i64, size, 1, span.len], false);
                        for (block, slot) in slots() {
                            let is_masked = mask.int64_value(&[block as i64, slot, 0, index - span.start]) != 0;
                            prop_assert_eq!(is_masked, !sees(block, slot), "position {}, slot {} of {}", position, slot, block);
                        }
                    }
                }
            }
            let unmasked: Vec<i64> = (group.unmasked.start..group.unmasked.start + group.unmasked.len).map(|index| index + from).collect();
            prop_assert_eq!(unmasked, all_see);
            prop_assert!(window.is_some() || group.unmasked.len == smallest);
        }
    }
}
