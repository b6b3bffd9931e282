//! Least-squares initialisation of the drafter from the target's hidden states (`docs/dflash.md#initial-weights`).
//!
//! Random weights spend about a thousand steps on learning to attend to the anchor and to the newest context. Here the
//! first layer copies the anchor's embedding `e`, and the second layer copies the context feature `c` of the newest token
//! before it. Two matrices map both to the target's last hidden state at the anchor: `A e + C c` is the ridge regression
//! of that state.
//!
//! With DFlash and DFlash 2, all masked slots copy both. With DSpark, the anchor's slot predicts the first token, so only
//! this slot copies the anchor. The other slots know the token before their label through the Markov head, which starts
//! from a second regression.
//!
//! The first drafted token is then right about as often as a linear map allows. The rest is left to training, and so is
//! one third of the heads.

mod regression;

use super::Shared;
use super::anchors::candidates;
use crate::hf::draft::{DraftConfig, layer_weight};
use crate::hf::head::{HeadConfig, MARKOV_W1, MARKOV_W2, MarkovKind};
use crate::model::ModelError;
use crate::model::ops::rms_norm;
use crate::model::params::ParamSet;
use regression::{Fit, Moments, Regression, functional, main_axes, to_f64};
use tch::{Device, Kind, Tensor};

/// Factor on the random weights that are kept next to the fitted ones.
const RANDOM_SCALE: f64 = 0.3;
/// Ratio of the fitted part of a key or query to the random part.
const FITTED_RATIO: f64 = 8.0;
/// Logit range between newest and oldest token in the second layer's attention.
const SHARPNESS: f64 = 40.0;
/// Limit on the anchors whose slots determine the second layer's keys.
const MAX_SLOTS: usize = 8192;
/// Ridge of the functionals that separate classes.
const SEPARATION: f64 = 1e-3;

/// Regressions over anchors.
pub struct LeastSquaresInit<'a> {
    config: &'a DraftConfig,
    shared: &'a Shared,
    /// Random initial weights, modified in place.
    start: ParamSet,
    /// Weight of the target's final norm.
    norm: Tensor,
    /// Initial residual of a masked slot: the mask token's embedding.
    mask: Tensor,
    /// From `[e, c]` of an anchor to the state that predicts the token after it.
    first: Regression,
    /// From `[e, c]` to the state that predicts the second token, where `e` is the embedding of the first one; `None` without
    /// a Markov head that it can set.
    second: Option<Regression>,
    anchors: Vec<i64>,
}

impl<'a> LeastSquaresInit<'a> {
    /// Starts from the random weights `start` of `config`; `norm [D]` is the weight of the target's final norm.
    ///
    /// # Errors
    /// `ModelError::Input` if the drafter has fewer than two layers; otherwise if libtorch fails.
    pub fn new(
        config: &'a DraftConfig,
        shared: &'a Shared,
        start: ParamSet,
        norm: &Tensor,
    ) -> Result<LeastSquaresInit<'a>, ModelError> {
        let _no_grad = tch::no_grad_guard();
        if config.num_hidden_layers < 2 {
            return Err(ModelError::Input("least-squares initialisation needs a drafter of two layers or more".into()));
        }
        let width = config.hidden_size as i64;
        let mut start = start;
        // The last tap passes through unchanged; the other taps and the random part are scaled by 0.2.
        let newest = (0..config.target_layer_ids.len()).max_by_key(|&tap| config.target_layer_ids[tap]).unwrap_or(0);
        let fc = start.need_mut("fc.weight")?.f_mul_scalar_(0.2)?;
        let eye = Tensor::f_eye(width, (Kind::Float, Device::Cpu))?;
        let _ = fc.f_narrow(1, newest as i64 * width, width)?.f_add_(&eye)?;
        let mask = to_f64(&shared.embedding.f_get(config.mask_token_id.into())?)?;
        let regression = || Regression::new(2 * width, width);
        Ok(LeastSquaresInit {
            config,
            shared,
            start,
            norm: to_f64(norm)?,
            mask,
            first: regression()?,
            second: markov_rank(config).map(|_| regression()).transpose()?,
            anchors: Vec::new(),
        })
    }

    /// Number of anchors so far.
    pub fn anchors(&self) -> usize {
        self.anchors.len()
    }

    /// Adds one row: ids, loss mask, tapped hidden states `[tokens, taps * D]` and final normed states `[tokens, D]` of
    /// the target.
    ///
    /// # Errors
    /// Returns an error if libtorch fails.
    pub fn add(&mut self, ids: &[i32], loss_mask: &[u8], taps: &Tensor, last: &Tensor) -> Result<(), ModelError> {
        let _no_grad = tch::no_grad_guard();
        // The newest context of a block is the token before its anchor.
        let at: Vec<i64> = candidates(loss_mask).into_iter().filter(|&a| a > 0).map(i64::from).collect();
        if at.is_empty() {
            return Ok(());
        }
        let tokens: Vec<i64> = at.iter().map(|&a| i64::from(ids[a as usize])).collect();
        let fc = to_f64(self.start.need("fc.weight")?)?;
        let taps = taps.f_index_select(0, &Tensor::f_from_slice(&at)?.f_sub_scalar(1)?.f_to(taps.device())?)?;
        let context = self.unit(&to_f64(&taps)?.f_mm(&fc.f_transpose(0, 1)?)?)?;
        let scale = self.scale()?;
        let states = |at: &[i64]| -> Result<Tensor, ModelError> {
            let states = last.f_index_select(0, &Tensor::f_from_slice(at)?.f_to(last.device())?)?;
            Ok(to_f64(&states)?.f_div(&scale)?)
        };
        let x = Tensor::f_cat(&[&self.embedded(&tokens)?, &context], 1)?;
        self.first.add(&x, &states(&at)?.f_sub(&self.residual(&tokens)?)?)?;
        // Anchors whose second token is supervised too.
        let kept = (0..at.len()).filter(|&index| at.binary_search(&(at[index] + 1)).is_ok());
        let kept: Vec<i64> = kept.map(|index| index as i64).collect();
        if self.second.is_some() && !kept.is_empty() {
            let next: Vec<i64> = kept.iter().map(|&index| at[index as usize] + 1).collect();
            let known: Vec<i64> = next.iter().map(|&at| i64::from(ids[at as usize])).collect();
            let context = context.f_index_select(0, &Tensor::f_from_slice(&kept)?)?;
            let x = Tensor::f_cat(&[self.embedded(&known)?, context], 1)?;
            let y = states(&next)?.f_sub(&self.mask)?;
            if let Some(second) = &mut self.second {
                second.add(&x, &y)?;
            }
        }
        self.anchors.extend(tokens);
        Ok(())
    }

    /// Solves the regressions and returns the initial weights.
    ///
    /// # Errors
    /// `ModelError::Input` if no row had an anchor; otherwise if libtorch fails.
    pub fn finish(mut self) -> Result<ParamSet, ModelError> {
        let _no_grad = tch::no_grad_guard();
        let (config, width) = (self.config, self.config.hidden_size as i64);
        if self.anchors.is_empty() {
            return Err(ModelError::Input(
                "no sample has a position where a block could start, so least-squares initialisation has no data"
                    .into(),
            ));
        }
        let zeros = Tensor::f_zeros([1, width], (Kind::Double, Device::Cpu))?;
        let from_anchor = config.head.predicts_from_anchor();
        if from_anchor {
            // Masked slots attend to each other in the first layer, which then adds nothing to them.
            self.first.map_to_zero(Tensor::f_cat(&[&self.unit(&self.mask.f_unsqueeze(0)?)?, &zeros], 1)?);
        }
        let fit = self.first.solve()?;
        if let (Some(rank), Some(second)) = (markov_rank(config), self.second.take().filter(|it| it.rows() > 0)) {
            let known = self.set_markov(rank, &second)?;
            let _ = fit.map.f_narrow(1, 0, width)?.f_sub_(&known)?;
        }
        let ((of_anchor, anchors), (of_context, context)) = (fit.part(0, width)?, fit.part(width, width)?);
        let mask = Moments::of(&self.unit(&self.mask.f_unsqueeze(0)?)?)?;

        // First layer: the slots that predict the first token attend to their anchor, not to mask tokens or context. With
        // DSpark, masked slots attend to mask tokens, which adds nothing to them.
        let half = config.head_dim / 2;
        let slow: Vec<usize> = (3 * half / 4..half).collect();
        let among = |one, others: [_; 2]| functional(&[(one, 1.0), (others[0], -1.0), (others[1], -1.0)], SEPARATION);
        let of_anchors = among(&anchors, [&mask, &context])?;
        if from_anchor {
            let of_masks = among(&mask, [&anchors, &context])?;
            let (one, other) = if slow.len() > 1 { slow.split_at(slow.len() / 2) } else { (&slow[..], &slow[..]) };
            let only = |one, other| functional(&[(one, 1.0), (other, 0.0)], SEPARATION);
            let (from_anchors, from_masks) = (only(&anchors, &mask)?, only(&mask, &anchors)?);
            self.set_attention(0, &[(&from_anchors, &of_anchors, one), (&from_masks, &of_masks, other)])?;
        } else {
            let query = mask.mean.f_div(&mask.mean.f_dot(&mask.mean)?)?;
            self.set_attention(0, &[(&query, &of_anchors, &slow)])?;
        }
        self.set_values(0, &of_anchor, &anchors.square)?;
        // Second layer: every slot attends to the newest context token.
        let anchor_ids = &self.anchors[..self.anchors.len().min(MAX_SLOTS)];
        let carried = self.embedded(anchor_ids)?.f_mm(&of_anchor.f_transpose(0, 1)?)?;
        let masked =
            if from_anchor { mask.mean.f_unsqueeze(0)?.f_mm(&of_anchor.f_transpose(0, 1)?)? } else { carried.copy() };
        let masked = Moments::of(&self.unit(&masked.f_add(&self.mask)?)?)?;
        let own = Moments::of(&self.unit(&carried.f_add(&to_f64(&self.rows(anchor_ids)?)?)?)?)?;
        let predicting = if from_anchor { &[(&masked, 1.0), (&own, 1.0)][..] } else { &[(&masked, 1.0)] };
        let pairs = position_pairs(config);
        let of_context_keys = among(&context, [&masked, &own])?;
        self.set_attention(1, &[(&functional(predicting, 0.05)?, &of_context_keys, &pairs)])?;
        let factor = (SHARPNESS / (config.head_dim as f64).sqrt()).sqrt();
        for name in ["self_attn.q_norm", "self_attn.k_norm"] {
            let norm = self.start.need_mut(&layer_weight(1, name))?;
            for dim in pairs.iter().flat_map(|&pair| [pair, pair + half]) {
                let _ = norm.f_get(dim as i64)?.f_fill_(factor)?;
            }
        }
        self.set_values(1, &of_context, &context.square)?;
        for layer in 0..config.num_hidden_layers {
            let scaled = if layer < 2 { &["mlp.down_proj"][..] } else { &["mlp.down_proj", "self_attn.o_proj"][..] };
            for name in scaled {
                let _ = self.start.need_mut(&layer_weight(layer, name))?.f_mul_scalar_(0.1)?;
            }
        }
        // A regression underestimates the length of its target by what it cannot explain; the final norm would hide
        // that.
        let scale = self.scale()?.f_mul_scalar(self.length(&fit)?)?;
        self.start.need_mut("norm.weight")?.f_copy_(&scale)?;
        Ok(self.start)
    }

    /// Sets the Markov head to the part of the second regression that reads the token before the label. Returns the map
    /// from that token's embedding to the final state whose logits are the bias, `[D, D]`.
    fn set_markov(&mut self, rank: i64, second: &Regression) -> Result<Tensor, ModelError> {
        let width = self.config.hidden_size as i64;
        let (of_known, known) = second.solve()?.part(0, width)?;
        let scale = self.scale()?.f_unsqueeze(1)?;
        let map = of_known.f_mul(&scale)?;
        let kept = rank.min(width);
        let axes = main_axes(&map, &known.square, kept)?;
        let into = axes.f_transpose(0, 1)?.f_mm(&map)?;
        let codes = self.unit(&to_f64(&self.shared.embedding)?)?.f_mm(&into.f_transpose(0, 1)?)?;
        let rows = to_f64(&self.shared.head)?.f_mm(&axes)?;
        for (name, values) in [(MARKOV_W1, codes), (MARKOV_W2, rows)] {
            let tensor = self.start.need_mut(name)?.f_zero_()?;
            tensor.f_narrow(1, 0, kept)?.f_copy_(&values)?;
        }
        Ok(axes.f_mm(&into)?.f_div(&scale)?)
    }

    /// Initial residual of the slot that predicts the first token, `[D]` or `[tokens, D]`.
    fn residual(&self, tokens: &[i64]) -> Result<Tensor, ModelError> {
        if self.config.head.predicts_from_anchor() { to_f64(&self.rows(tokens)?) } else { Ok(self.mask.copy()) }
    }

    /// Ratio of the root mean square of the predicted states to that of the target's.
    fn length(&self, fit: &Fit) -> Result<f64, ModelError> {
        let (map, mut residual) = (fit.map.copy(), self.mask.copy());
        if self.config.head.predicts_from_anchor() {
            // An embedding is its norm times the unit vector that the regression reads. The mean norm serves for all.
            let norm = to_f64(&self.shared.embedding)?.f_square()?.f_mean(Kind::Double)?.f_sqrt()?;
            let _ = map.f_narrow(1, 0, map.size()[0])?.f_diagonal(0, 0, 1)?.f_add_(&norm)?;
            residual = residual.f_zeros_like()?;
        }
        let square = map.f_mm(&fit.inputs.square)?.f_mul(&map)?.f_sum(Kind::Double)?;
        let cross = map.f_mv(&fit.inputs.mean)?.f_dot(&residual)?.f_mul_scalar(2.0)?;
        let total = square.f_add(&cross)?.f_add(&residual.f_dot(&residual)?)?.f_double_value(&[])?;
        Ok((total.max(0.0) / self.config.hidden_size as f64).sqrt())
    }

    /// Sets queries `[D]` and keys `[D]` of a layer on the rotary pairs given with them, for all fitted heads.
    fn set_attention(&mut self, layer: usize, parts: &[(&Tensor, &Tensor, &[usize])]) -> Result<(), ModelError> {
        let config = self.config;
        let (dim, half) = (config.head_dim, config.head_dim / 2);
        let strength = FITTED_RATIO * RANDOM_SCALE * 0.02 * ((config.hidden_size * dim) as f64).sqrt();
        let kv = fitted_kv_heads(config);
        let group = config.num_attention_heads / config.num_key_value_heads;
        for (name, heads, is_key) in [("self_attn.q_proj", kv * group, false), ("self_attn.k_proj", kv, true)] {
            let rest = self.start.need_mut(&layer_weight(layer, name))?.f_mul_scalar_(RANDOM_SCALE)?;
            for (query, key, pairs) in parts {
                let mut direction = vec![0.0; dim];
                for &pair in *pairs {
                    (direction[pair], direction[pair + half]) = (1.0, 1.0);
                }
                let norm = (2.0 * pairs.len() as f64).sqrt();
                let direction = Tensor::f_from_slice(&direction)?.f_mul_scalar(strength / norm)?.f_unsqueeze(1)?;
                let of = if is_key { key } else { query };
                let fitted = direction.f_mm(&of.f_unsqueeze(0)?)?.f_repeat([heads as i64, 1])?;
                let _ = rest.f_narrow(0, 0, (heads * dim) as i64)?.f_add_(&fitted.f_to_kind(Kind::Float)?)?;
            }
        }
        Ok(())
    }

    /// Sets values and outputs of a layer that add `map x` of the attended tokens, with mean square `square [D, D]`. If
    /// the heads cannot hold all directions, keeps those with the largest variance.
    fn set_values(&mut self, layer: usize, map: &Tensor, square: &Tensor) -> Result<(), ModelError> {
        let config = self.config;
        let (dim, kv) = (config.head_dim as i64, fitted_kv_heads(config) as i64);
        let group = (config.num_attention_heads / config.num_key_value_heads) as i64;
        let (width, kept) = (config.hidden_size as i64, (kv * dim).min(config.hidden_size as i64));
        let axes = main_axes(map, square, kept)?;
        let values = axes.f_transpose(0, 1)?.f_mm(map)?.f_to_kind(Kind::Float)?;
        let into = self.start.need_mut(&layer_weight(layer, "self_attn.v_proj"))?;
        into.f_narrow(0, 0, kept)?.f_copy_(&values)?;
        let _ = into.f_narrow(0, kept, kv * dim - kept)?.f_zero_()?;
        // Each query head of a group contributes an equal fraction of the same values.
        let pad = Tensor::f_zeros([width, kv * dim - kept], (Kind::Double, Device::Cpu))?;
        let outputs =
            Tensor::f_cat(&[axes, pad], 1)?.f_view([width, kv, 1, dim])?.f_expand([width, kv, group, dim], false)?;
        let outputs =
            outputs.f_reshape([width, kv * group * dim])?.f_div_scalar(group as f64)?.f_to_kind(Kind::Float)?;
        let into = self.start.need_mut(&layer_weight(layer, "self_attn.o_proj"))?;
        into.f_narrow(1, 0, kv * group * dim)?.f_copy_(&outputs)?;
        Ok(())
    }

    fn rows(&self, tokens: &[i64]) -> Result<Tensor, ModelError> {
        let table = &self.shared.embedding;
        Ok(table.f_index_select(0, &Tensor::f_from_slice(tokens)?.f_to(table.device())?)?)
    }

    /// Normed embeddings of tokens, as a layer sees them.
    fn embedded(&self, tokens: &[i64]) -> Result<Tensor, ModelError> {
        self.unit(&to_f64(&self.rows(tokens)?)?)
    }

    fn unit(&self, x: &Tensor) -> Result<Tensor, ModelError> {
        rms_norm(x, &Tensor::f_ones([x.size()[1]], (Kind::Double, Device::Cpu))?, self.config.rms_norm_eps)
    }

    /// Weight of the final norm with its smallest entries raised, as it is a divisor.
    fn scale(&self) -> Result<Tensor, ModelError> {
        let size = self.norm.f_abs()?;
        let least = size.f_mean(Kind::Double)?.f_mul_scalar(0.2)?;
        let sign = self.norm.f_ge(0.0)?.f_to_kind(Kind::Double)?.f_mul_scalar(2.0)?.f_sub_scalar(1.0)?;
        Ok(size.f_maximum(&least)?.f_mul(&sign)?)
    }
}

/// Rank of a Markov head that the fit can set: its bias must be linear in the embedding.
fn markov_rank(config: &DraftConfig) -> Option<i64> {
    match config.head {
        HeadConfig::Dspark(head) if head.markov == MarkovKind::Vanilla && head.rank > 0 => Some(head.rank as i64),
        _ => None,
    }
}

/// Number of fitted key heads; the others stay random.
fn fitted_kv_heads(config: &DraftConfig) -> usize {
    let heads = config.num_key_value_heads;
    heads - heads / 3
}

/// Rotary pairs whose wavelength exceeds a block's reach but still separates its positions.
fn position_pairs(config: &DraftConfig) -> Vec<usize> {
    let half = config.head_dim / 2;
    let wave = |pair: usize| config.rope_theta.powf(-(pair as f64) / half as f64);
    let pairs: Vec<usize> = (0..half).filter(|&pair| (0.008..0.5).contains(&wave(pair))).collect();
    if pairs.is_empty() { (0..half).collect() } else { pairs }
}

#[cfg(test)]
mod tests;
