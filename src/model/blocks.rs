//! How a micro-batch's blocks are laid out for attention: groups of neighbours that share one cut of the context.

use super::ModelError;
use super::anchors::Anchors;
use super::batch::Packed;
use super::rope::{Rope, RopeTable};
use crate::hf::draft::{DraftConfig, LayerType};
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
    /// What some of the slots do not see; `None` when all see all of it.
    pub hidden: Option<Hidden>,
}

/// Tokens of a view that are hidden from some of its slots.
pub struct Hidden {
    /// Tokens of the view before this one are seen by all.
    pub from: i64,
    /// True where hidden, `[blocks, block_size or 1, 1, len - from]`: the third dimension is that of the heads.
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
        let (len, count) = (largest - from, anchors.len() as i64);
        // On full layers, tokens before the first anchor are hidden from no block.
        let partial = if window.is_some() { from } else { smallest };
        let hidden = if partial == largest {
            None
        } else {
            let anchor = Tensor::f_from_slice(anchors)?.f_to(device)?.f_reshape([count, 1, 1, 1])?;
            let position = Tensor::f_arange_start(partial, largest, (Kind::Int64, device))?;
            let mut mask = position.f_ge_tensor(&anchor)?;
            if let Some(window) = window {
                let place = Tensor::f_arange(size, (Kind::Int64, device))?.f_reshape([1, size, 1, 1])?;
                mask = mask.f_logical_or(&position.f_lt_tensor(&anchor.f_add(&place)?.f_sub_scalar(window - 1)?)?)?;
            }
            Some(Hidden { from: partial - from, mask })
        };
        Ok(View { start: row_start + from, len, slot, slots: count * size, hidden })
    }
}

/// Within a block on sliding layers: slot `j` sees slots `0 ..= j`.
fn own_mask(size: i64, device: Device) -> Result<Tensor, ModelError> {
    let place = Tensor::f_arange(size, (Kind::Int64, device))?;
    Ok(place.f_gt_tensor(&place.f_reshape([size, 1, 1])?)?)
}
