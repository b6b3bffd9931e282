//! Reference implementation of the drafter for tests: all blocks of all rows, padded, under one dense mask, with
//! autograd. Slow and large by design; the training path must agree with it.

use super::Drafter;
use super::anchors::{Anchors, decay};
use super::layers::Layers;
use crate::hf::draft::{DraftConfig, LayerType};
use crate::model::ModelError;
use crate::model::batch::Packed;
use crate::model::ops::{GradGuard, additive_mask, attention, linear, wide};
use crate::model::params::{Gradient, ParamSet};
use tch::{Kind, Tensor};

/// Right-padded rows with the same number of blocks each.
pub struct Dense {
    pub rows: usize,
    pub width: usize,
    /// Blocks per row, including padding blocks.
    pub blocks: usize,
    /// `[rows, width]`, 0 on padding.
    pub ids: Vec<i64>,
    pub loss_mask: Vec<f64>,
    /// `[rows, width, taps * hidden]`, 0 on padding.
    pub hidden: Tensor,
    /// `[rows, blocks]`, sorted within a row; 0 where `keep` is false.
    pub anchors: Vec<i64>,
    pub keep: Vec<bool>,
}

/// All results of one forward. Slots are `[rows, blocks * block_size, ...]`.
pub struct Trace {
    pub noise_ids: Tensor,
    /// Positions of the context, then of the slots: `[rows, width + slots]`.
    pub positions: Tensor,
    pub context: Tensor,
    pub layer_outputs: Vec<Tensor>,
    pub hidden: Tensor,
    pub logits: Tensor,
    pub labels: Tensor,
    /// 1 for trained slots.
    pub supervised: Tensor,
    /// `supervised` times the decay.
    pub weights: Tensor,
    pub losses: Tensor,
    pub predicted: Tensor,
    /// Sum of weights times losses.
    pub numerator: f64,
    pub denominator: f64,
    pub correct: f64,
    /// Gradient of the numerator.
    pub gradient: Gradient,
}

impl Dense {
    /// Pads packed rows, and pads each row to the same number of blocks.
    ///
    /// # Errors
    /// Returns an error if libtorch fails.
    pub fn pad(batch: &Packed<'_>, anchors: &Anchors) -> Result<Dense, ModelError> {
        let rows = batch.lengths.len();
        let width = batch.lengths.iter().copied().max().unwrap_or(0) as usize;
        let blocks = anchors.rows.iter().map(Vec::len).max().unwrap_or(0);
        let hidden = Tensor::f_zeros(
            [rows as i64, width as i64, batch.hidden.size()[1]],
            (batch.hidden.f_kind()?, batch.hidden.device()),
        )?;
        let mut dense = Dense {
            rows,
            width,
            blocks,
            ids: vec![0; rows * width],
            loss_mask: vec![0.0; rows * width],
            hidden,
            anchors: vec![0; rows * blocks],
            keep: vec![false; rows * blocks],
        };
        for (row, (offset, &len)) in batch.offsets().into_iter().zip(batch.lengths).enumerate() {
            for position in 0..len as usize {
                dense.ids[row * width + position] = batch.ids[offset + position].into();
                dense.loss_mask[row * width + position] = batch.loss_mask[offset + position].into();
            }
            let source = batch.hidden.f_narrow(0, offset as i64, len.into())?;
            dense.hidden.f_get(row as i64)?.f_narrow(0, 0, len.into())?.f_copy_(&source)?;
            for (block, &anchor) in anchors.rows[row].iter().enumerate() {
                dense.anchors[row * blocks + block] = anchor.into();
                dense.keep[row * blocks + block] = true;
            }
        }
        Ok(dense)
    }

    /// Visible keys of each slot, `[rows, slots, width + slots]` row-major: context before the anchor, and the own
    /// block; none in padding blocks.
    pub fn allowed(&self, block_size: usize, window: Option<usize>, causal: bool) -> Vec<bool> {
        let slots = self.blocks * block_size;
        let mut allowed = Vec::with_capacity(self.rows * slots * (self.width + slots));
        for row in 0..self.rows {
            for query in 0..slots {
                let (block, slot) = (query / block_size, query % block_size);
                let anchor = self.anchors[row * self.blocks + block] as usize;
                let keep = self.keep[row * self.blocks + block];
                let near = |position: usize| window.is_none_or(|window| position + window > anchor + slot);
                allowed.extend((0..self.width).map(|position| keep && position < anchor && near(position)));
                let earlier = |key: usize| window.is_none() || !causal || key % block_size <= slot;
                allowed.extend((0..slots).map(|key| keep && key / block_size == block && earlier(key)));
            }
        }
        allowed
    }

    /// Additive mask. Padding blocks see themselves, so that no row of scores is fully masked.
    fn additive(&self, config: &DraftConfig, window: Option<usize>, like: &Tensor) -> Result<Tensor, ModelError> {
        let block_size = config.block_size;
        let slots = self.blocks * block_size;
        let mut allowed = self.allowed(block_size, window, config.sliding_causal);
        for (query, row) in allowed.chunks_mut(self.width + slots).enumerate() {
            let block = query % slots / block_size;
            if !self.keep[query / block_size] {
                row[self.width + block * block_size..self.width + (block + 1) * block_size].fill(true);
            }
        }
        let size = [self.rows as i64, 1, slots as i64, (self.width + slots) as i64];
        additive_mask(&Tensor::f_from_slice(&allowed)?.f_reshape(size)?.f_to(like.device())?, like.f_kind()?)
    }
}

impl Drafter {
    /// Runs the whole definition, with gradients of every weight.
    ///
    /// # Errors
    /// Returns an error if libtorch fails.
    pub fn trace(&self, dense: &Dense) -> Result<Trace, ModelError> {
        let _grad = GradGuard::enable();
        let (config, options) = (self.config(), self.options());
        let (size, rows, width) = (config.block_size, dense.rows as i64, dense.width as i64);
        let slots = (dense.blocks * size) as i64;
        let on =
            |values: &[i64]| -> Result<Tensor, ModelError> { Ok(Tensor::f_from_slice(values)?.f_to(options.device)?) };
        let block_of = |row: usize, slot: usize| row * dense.blocks + slot / size;
        let cells = || (0..dense.rows).flat_map(|row| (0..dense.blocks * size).map(move |slot| (row, slot)));
        let position = |row: usize, slot: usize| dense.anchors[block_of(row, slot)] as usize + slot % size;

        let noise = cells().map(|(row, slot)| {
            let given = slot % size == 0 && dense.keep[block_of(row, slot)];
            if given { dense.ids[row * dense.width + position(row, slot)] } else { config.mask_token_id.into() }
        });
        let noise_ids = on(&noise.collect::<Vec<i64>>())?;
        let context_positions: Vec<i64> = (0..width).collect::<Vec<i64>>().repeat(dense.rows);
        let slot_positions: Vec<i64> = cells().map(|(row, slot)| position(row, slot) as i64).collect();
        let context_table = self.rope().table(&context_positions, options.kind)?;
        let slot_table = self.rope().table(&slot_positions, options.kind)?;

        let leaf = |(name, x): (&str, &Tensor)| -> Result<(String, Tensor), ModelError> {
            Ok((name.to_string(), x.f_detach()?.f_set_requires_grad(true)?))
        };
        let leaves = ParamSet::new(self.params().iter().map(leaf).collect::<Result<_, _>>()?);
        let layers = Layers::new(config, &leaves, options.kind)?;
        let context = layers.context(&dense.hidden.f_flatten(0, 1)?)?;
        let mut x = self.shared().embedding.f_index_select(0, &noise_ids)?;
        let mut layer_outputs = Vec::new();
        for (layer, &layer_type) in layers.layers.iter().zip(&config.layer_types) {
            let window = config.sliding_window.filter(|_| layer_type == LayerType::Sliding);
            let mask = dense.additive(config, window, &x)?;
            let normed = layer.inner(&x)?;
            let inner = layer.attended(&normed)?;
            let by_row = |x: &Tensor| x.f_reshape([rows, -1, x.size()[1], x.size()[2]]);
            let (before, own) = (layer.keys_values(&context, &context_table)?, layer.keys_values(&inner, &slot_table)?);
            let keys = Tensor::f_cat(&[by_row(&before.0)?, by_row(&own.0)?], 1)?.f_transpose(1, 2)?;
            let values = Tensor::f_cat(&[by_row(&before.1)?, by_row(&own.1)?], 1)?.f_transpose(1, 2)?;
            let queries = by_row(&layer.queries(&inner, &slot_table)?)?.f_transpose(1, 2)?;
            let mixed = attention(&queries, &keys, &values, Some(&mask), false)?;
            x = layer.finish(&x, &normed, &mixed.f_transpose(1, 2)?.f_reshape([rows * slots, -1])?)?;
            layer_outputs.push(x.f_detach()?.f_reshape([rows, slots, -1])?);
        }
        let hidden = layers.normed(&x)?;
        let logits = linear(&hidden, &self.shared().head, None)?;

        let decay = decay(size, options.weighting.gamma());
        let (mut labels, mut supervised, mut weights) = (Vec::new(), Vec::new(), Vec::new());
        for (row, slot) in cells() {
            // Past the end, the last token is a placeholder label with weight 0.
            let at = position(row, slot);
            let cell = row * dense.width + at.min(dense.width - 1);
            let trained = dense.keep[block_of(row, slot)] && at < dense.width && slot % size > 0;
            let weight = if trained { dense.loss_mask[cell] } else { 0.0 };
            labels.push(dense.ids[cell]);
            supervised.push(weight as f32);
            weights.push((weight * decay[slot % size]) as f32);
        }
        let (labels, supervised) = (on(&labels)?, Tensor::f_from_slice(&supervised)?.f_to(options.device)?);
        let weights = Tensor::f_from_slice(&weights)?.f_to(options.device)?;
        let scores = logits.f_log_softmax(-1, wide(options.kind))?;
        let losses = scores.f_gather(1, &labels.f_unsqueeze(1)?, false)?.f_squeeze_dim(1)?.f_neg()?;
        let total = losses.f_mul(&weights)?.f_sum(wide(options.kind))?;
        let gradients = Tensor::f_run_backward(&[&total], leaves.tensors(), false, false)?;
        let pairs = leaves.iter().zip(gradients).map(|((name, _), gradient)| (name.to_string(), gradient));
        let gradient = ParamSet::new(pairs.collect());

        let predicted = logits.f_argmax(-1, false)?;
        let right = predicted.f_eq_tensor(&labels)?.f_to_kind(Kind::Float)?.f_mul(&supervised)?;
        let (context_positions, slot_positions) = (on(&context_positions)?, on(&slot_positions)?);
        let by_row = |x: &Tensor| -> Result<Tensor, ModelError> { Ok(x.f_detach()?.f_reshape([rows, -1])?) };
        let cube =
            |x: &Tensor, len: i64| -> Result<Tensor, ModelError> { Ok(x.f_detach()?.f_reshape([rows, len, -1])?) };
        Ok(Trace {
            noise_ids: by_row(&noise_ids)?,
            positions: Tensor::f_cat(&[by_row(&context_positions)?, by_row(&slot_positions)?], 1)?,
            context: cube(&context, width)?,
            layer_outputs,
            hidden: cube(&hidden, slots)?,
            logits: cube(&logits, slots)?,
            labels: by_row(&labels)?,
            supervised: by_row(&supervised)?,
            numerator: losses.f_mul(&weights)?.f_sum(Kind::Double)?.f_double_value(&[])?,
            denominator: weights.f_sum(Kind::Double)?.f_double_value(&[])?,
            weights: by_row(&weights)?,
            losses: by_row(&losses)?,
            predicted: by_row(&predicted)?,
            correct: right.f_sum(Kind::Double)?.f_double_value(&[])?,
            gradient,
        })
    }
}
