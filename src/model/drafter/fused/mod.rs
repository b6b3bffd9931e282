//! The pass that trains: the drafter forward and backward by hand-written formulas, with nothing left to autograd, so that
//! only what the gradients need is kept and passes over memory are few.
//!
//! `layers` has the same layers in their plain form, for the oracle that this one must agree with and for decoding.

mod attention;
mod context;
mod heads;
mod layer;
mod mlp;
mod norm;
mod products;
mod weights;

use self::layer::{Ends, Kept, Layer, Shape};
use super::DraftOptions;
use super::blocks::Blocks;
use crate::hf::draft::DraftConfig;
use crate::model::ModelError;
use tch::Tensor;

pub use self::context::Context;
pub use self::weights::{WeightGradients, Weights};

/// Blocks of a micro-batch on their way through the drafter.
pub struct Pass<'a> {
    config: &'a DraftConfig,
    blocks: &'a Blocks,
    weights: &'a Weights,
    turns: Turns,
    /// Keys and values of what the blocks see, of all layers: `[tokens, layers * 2 * kv_heads * head_dim]`.
    context: Option<Tensor>,
    options: &'a DraftOptions,
}

/// Of one layer: all that its gradient needs, or the input to compute that again.
enum Held {
    All(Box<Kept>),
    Input(Tensor),
}

/// What the backward pass needs of the forward pass.
pub struct Tape {
    layers: Vec<Held>,
    /// The residual stream after the last layer at the places asked for, and the scale of the final norm.
    last: Tensor,
    scale: Tensor,
    places: Tensor,
}

struct Turns {
    query: crate::model::rope::Turn,
    key: crate::model::rope::Turn,
    context: crate::model::rope::Turn,
}

/// What [`Pass::backward`] gives.
pub struct Gradients {
    pub weights: WeightGradients,
    /// Of the context's keys and values.
    pub context: Option<Tensor>,
}

impl<'a> Pass<'a> {
    /// Grad mode must be off, here and in what follows.
    pub fn new(
        config: &'a DraftConfig,
        weights: &'a Weights,
        blocks: &'a Blocks,
        context: Option<Tensor>,
        options: &'a DraftOptions,
    ) -> Result<Pass<'a>, ModelError> {
        let turns = Turns {
            query: blocks.slot_table.turn((config.head_dim as f64).powf(-0.5))?,
            key: blocks.slot_table.turn(1.0)?,
            context: blocks.context_table.turn(1.0)?,
        };
        Ok(Pass { config, blocks, weights, turns, context, options })
    }

    /// What the head sees of the slots at `places`, `[places, hidden]`. `x [blocks + 1, hidden]` are the embeddings of the
    /// anchors and, as the last row, of the mask token.
    pub fn forward(&self, x: Tensor, places: &Tensor) -> Result<(Tensor, Tape), ModelError> {
        let mut layers = Vec::with_capacity(self.weights.layers.len());
        let last = self.residual(x, Some(places), |held| layers.push(held))?;
        let (hidden, scale) = norm::forward(&last, &self.weights.norm, self.config.rms_norm_eps)?;
        Ok((hidden, Tape { layers, last, scale, places: places.shallow_clone() }))
    }

    /// The same of all slots, with nothing kept.
    pub fn hidden(&self, x: Tensor) -> Result<Tensor, ModelError> {
        Ok(norm::forward(&self.residual(x, None, drop)?, &self.weights.norm, self.config.rms_norm_eps)?.0)
    }

    /// Gradients from that of what [`Pass::forward`] gave. Consumes the tape as it goes.
    pub fn backward(&self, tape: Tape, d_hidden: &Tensor) -> Result<Gradients, ModelError> {
        let Tape { layers, last, scale, places } = tape;
        let kind = last.f_kind()?;
        let (d_last, d_norm) = norm::backward(d_hidden, &last, &scale, &self.weights.norm)?;
        let mut dx = Some(d_last.f_to_kind(kind)?);
        let shape = self.shape();
        let (mut layer_gradients, mut d_keys_values) = (Vec::new(), Vec::new());
        for (index, held) in layers.into_iter().enumerate().rev() {
            let Some(d_out) = dx else { break };
            let layer = self.layer(index, &shape, Some(&places))?;
            let kept = match held {
                Held::All(kept) => *kept,
                Held::Input(x) => layer.forward(x)?.1,
            };
            let back = layer.backward(kept, &d_out)?;
            dx = back.x;
            layer_gradients.push(back.weights);
            d_keys_values.extend(back.context);
        }
        layer_gradients.reverse();
        d_keys_values.reverse();
        let context = match d_keys_values.is_empty() {
            true => None,
            false => Some(Tensor::f_cat(&d_keys_values, 1)?),
        };
        Ok(Gradients { weights: WeightGradients { norm: d_norm, layers: layer_gradients }, context })
    }

    /// The residual stream after the last layer, of all slots or of some.
    fn residual(
        &self,
        mut x: Tensor,
        places: Option<&Tensor>,
        mut keep: impl FnMut(Held),
    ) -> Result<Tensor, ModelError> {
        let shape = self.shape();
        for index in 0..self.weights.layers.len() {
            let input = x.shallow_clone();
            let (out, kept) = self.layer(index, &shape, places)?.forward(x)?;
            keep(if self.options.recompute { Held::Input(input) } else { Held::All(Box::new(kept)) });
            x = out;
        }
        Ok(x)
    }

    fn shape(&self) -> Shape<'_> {
        Shape {
            heads: self.config.num_attention_heads as i64,
            kv_heads: self.config.num_key_value_heads as i64,
            head_dim: self.config.head_dim as i64,
            block_size: self.config.block_size as i64,
            eps: self.config.rms_norm_eps,
            query_turn: &self.turns.query,
            key_turn: &self.turns.key,
            context_turn: &self.turns.context,
        }
    }

    fn layer<'b>(
        &'b self,
        index: usize,
        shape: &'b Shape<'b>,
        places: Option<&'b Tensor>,
    ) -> Result<Layer<'b>, ModelError> {
        let width = 2 * shape.kv_heads * shape.head_dim;
        let part = |context: &Tensor| context.f_narrow(1, index as i64 * width, width);
        Ok(Layer {
            shape,
            weights: &self.weights.layers[index],
            sight: self.blocks.sight(self.config.layer_types[index]),
            by: self.options.attention,
            context: self.context.as_ref().map(part).transpose()?,
            ends: Ends { first: index == 0, places: places.filter(|_| index + 1 == self.weights.layers.len()) },
        })
    }
}
