//! How a micro-batch's blocks are laid out for attention: groups of neighbours that share one cut of the context.

use super::anchors::Anchors;
use crate::hf::draft::{DraftConfig, LayerType};
use crate::model::ModelError;
use crate::model::batch::Packed;
use crate::model::ops::Span;
use crate::model::rope::{Rope, RopeTable};
use tch::{Device, Kind, Tensor};

/// Blocks of a micro-batch as one flat list in row order, and what of its context they see.
pub struct Blocks {
    /// Positions of the context: of each row the tokens before its largest anchor.
    pub context_table: RopeTable,
    pub slot_table: RopeTable,
    /// `[blocks + 1]`: the anchors' tokens, and the mask token, which all other slots hold.
    pub ids: Tensor,
    full: Vec<View>,
    sliding: Vec<View>,
    sliding_own: Option<Tensor>,
}

/// Neighbouring blocks of one row, and the part of the row's context that they see together.
pub struct View {
    /// Place of the first visible token in the context, and the number of tokens.
    pub start: i64,
    pub len: i64,
    /// Place of the first slot, and the number of slots.
    pub slot: i64,
    pub slots: i64,
    /// Tokens of the view that all slots see. It may be empty.
    pub clear: Span,
    /// All others, in order.
    pub hidden: Vec<Hidden>,
}

/// Neighbouring tokens of a view, each hidden from some of its slots.
pub struct Hidden {
    pub span: Span,
    /// True where hidden, `[blocks, block_size or 1, 1, tokens]`: the third dimension is that of the heads.
    pub mask: Tensor,
}

/// What the layers of one type see.
#[derive(Clone, Copy)]
pub struct Sight<'a> {
    /// In the order of the slots, which they cover.
    pub views: &'a [View],
    /// True where a slot does not see a slot of its own block, `[block_size, 1, block_size]`.
    pub own_mask: Option<&'a Tensor>,
}

impl Blocks {
    /// `group_slots` bounds the slots of a group: larger groups make fewer, longer attention calls, of which each slot
    /// uses a smaller share.
    pub fn new(
        config: &DraftConfig,
        rope: &Rope,
        batch: &Packed<'_>,
        anchors: &Anchors,
        group_slots: usize,
        kind: Kind,
    ) -> Result<Blocks, ModelError> {
        let _no_grad = tch::no_grad_guard();
        let device = batch.hidden.device();
        let size = config.block_size as i64;
        let has = |layer_type| config.layer_types.contains(&layer_type);
        let window = config.sliding_window.map(|window| window as i64);
        let (mut full, mut sliding) = (Vec::new(), Vec::new());
        let (mut context_positions, mut slot_positions) = (Vec::new(), Vec::new());
        for (row, cut) in anchors.rows.iter().zip(anchors.cuts()) {
            let row: Vec<i64> = row.iter().map(|&anchor| i64::from(anchor)).collect();
            let row_start = context_positions.len() as i64;
            for group in row.chunks((group_slots / config.block_size).max(1)) {
                let slot = slot_positions.len() as i64;
                if has(LayerType::Full) {
                    full.push(View::new(group, size, None, row_start, slot, device)?);
                }
                if has(LayerType::Sliding) {
                    sliding.push(View::new(group, size, window, row_start, slot, device)?);
                }
                slot_positions.extend(group.iter().flat_map(|&anchor| anchor..anchor + size));
            }
            context_positions.extend(0..cut);
        }
        let mut ids = anchors.ids(batch);
        ids.push(config.mask_token_id.into());
        Ok(Blocks {
            context_table: rope.table(&context_positions, kind)?,
            slot_table: rope.table(&slot_positions, kind)?,
            ids: Tensor::f_from_slice(&ids)?.f_to_device(device)?,
            full,
            sliding,
            sliding_own: has(LayerType::Sliding).then(|| own_mask(size, device)).transpose()?,
        })
    }

    pub fn sight(&self, layer_type: LayerType) -> Sight<'_> {
        match layer_type {
            LayerType::Full => Sight { views: &self.full, own_mask: None },
            LayerType::Sliding => Sight { views: &self.sliding, own_mask: self.sliding_own.as_ref() },
        }
    }
}

impl View {
    /// Visible to slot `j` of a block with anchor `a`: context strictly before `a`, and the slots of its own block. On
    /// sliding layers only context from `a + j - (window - 1)` on, and only slots up to `j`. What a slot sees is
    /// decided by positions, never by the order of blocks, since blocks overlap (SpecForge#470).
    fn new(
        anchors: &[i64],
        size: i64,
        window: Option<i64>,
        row_start: i64,
        slot: i64,
        device: Device,
    ) -> Result<View, ModelError> {
        let (smallest, largest) = (anchors.first().copied().unwrap_or(0), anchors.last().copied().unwrap_or(0));
        let from = window.map_or(0, |window| (smallest - (window - 1)).max(0));
        let count = anchors.len() as i64;
        // Where the last slot of the last block begins to see; the first block sees up to its anchor.
        let all_from = window.map_or(from, |window| (largest + size - window).max(from));
        let clear = if all_from < smallest { (all_from, smallest) } else { (from, from) };
        let mut hidden = Vec::new();
        for (first, end) in [(from, clear.0), (clear.1, largest)] {
            if first == end {
                continue;
            }
            let anchor = Tensor::f_from_slice(anchors)?.f_to(device)?.f_reshape([count, 1, 1, 1])?;
            let position = Tensor::f_arange_start(first, end, (Kind::Int64, device))?;
            let mut mask = position.f_ge_tensor(&anchor)?;
            if let Some(window) = window {
                let place = Tensor::f_arange(size, (Kind::Int64, device))?.f_reshape([1, size, 1, 1])?;
                mask = mask.f_logical_or(&position.f_lt_tensor(&anchor.f_add(&place)?.f_sub_scalar(window - 1)?)?)?;
            }
            hidden.push(Hidden { span: Span { start: first - from, len: end - first }, mask });
        }
        let clear = Span { start: clear.0 - from, len: clear.1 - clear.0 };
        Ok(View { start: row_start + from, len: largest - from, slot, slots: count * size, clear, hidden })
    }
}

/// Within a block on sliding layers: slot `j` sees slots `0 ..= j`.
fn own_mask(size: i64, device: Device) -> Result<Tensor, ModelError> {
    let place = Tensor::f_arange(size, (Kind::Int64, device))?;
    Ok(place.f_gt_tensor(&place.f_reshape([size, 1, 1])?)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        /// Each slot sees what the definition says, token by token, and what is called clear is what all slots see.
        #[test]
        fn a_view_shows_each_slot_what_the_definition_says(
            anchors in prop::collection::btree_set(0i64..60, 1..6), size in 1i64..9, window in prop::option::of(1i64..80),
        ) {
            let anchors: Vec<i64> = anchors.into_iter().collect();
            let view = View::new(&anchors, size, window, 1000, 7, Device::Cpu).unwrap();
            let (smallest, largest) = (anchors[0], anchors[anchors.len() - 1]);
            let from = view.start - 1000;
            prop_assert_eq!((view.slot, view.slots, from + view.len), (7, anchors.len() as i64 * size, largest));
            let mut parts: Vec<(i64, i64)> = view.hidden.iter().map(|h| (h.span.start, h.span.len)).collect();
            parts.push((view.clear.start, view.clear.len));
            let places: Vec<i64> = parts.iter().flat_map(|&(start, len)| start..start + len).collect();
            prop_assert_eq!(places.len() as i64, view.len);
            prop_assert_eq!(places.into_iter().collect::<BTreeSet<_>>(), (0..view.len).collect::<BTreeSet<_>>());

            let mut all_see = Vec::new();
            for position in 0..largest {
                let sees = |block: usize, slot: i64| {
                    let anchor = anchors[block];
                    position < anchor && window.is_none_or(|window| position >= anchor + slot - (window - 1))
                };
                let slots = || (0..anchors.len()).flat_map(|block| (0..size).map(move |slot| (block, slot)));
                if slots().all(|(block, slot)| sees(block, slot)) {
                    all_see.push(position);
                }
                let place = position - from;
                if place < 0 {
                    prop_assert!(slots().all(|(block, slot)| !sees(block, slot)));
                }
                for hidden in &view.hidden {
                    let span = hidden.span;
                    if (span.start..span.start + span.len).contains(&place) {
                        let mask = hidden.mask.expand([anchors.len() as i64, size, 1, span.len], false);
                        for (block, slot) in slots() {
                            let masked = mask.int64_value(&[block as i64, slot, 0, place - span.start]) != 0;
                            prop_assert_eq!(masked, !sees(block, slot), "position {}, slot {} of {}", position, slot, block);
                        }
                    }
                }
            }
            let clear: Vec<i64> = (view.clear.start..view.clear.start + view.clear.len).map(|place| place + from).collect();
            prop_assert_eq!(clear, all_see);
            prop_assert!(window.is_some() || view.clear.len == smallest);
        }
    }
}
