//! Fused training path: the drafter forward and backward by hand-written formulas without autograd, with minimal saved
//! activations and few memory passes.
//!
//! `layers` has the plain form of the same layers, for decoding and for the reference implementation that checks this
//! one.

mod around;
mod attention;
mod context;
mod heads;
mod layer;
mod mlp;
mod norm;
mod products;
mod weights;

use self::layer::{EdgeLayers, Layer, SavedActivations, Shape, spread};
use super::DraftOptions;
use super::blocks::Blocks;
use crate::hf::draft::DraftConfig;
use crate::model::ModelError;
use crate::model::rope::Rotation;
use tch::Tensor;

pub use self::context::Context;
pub use self::weights::{WeightGradients, Weights};

/// Fused forward and backward over the blocks of a micro-batch.
pub struct FusedDrafter<'a> {
    config: &'a DraftConfig,
    blocks: &'a Blocks,
    weights: &'a Weights,
    rotations: Rotations,
    /// Keys and values of the context in all layers: `[tokens, layers * 2 * kv_heads * head_dim]`.
    context: Option<Tensor>,
    options: &'a DraftOptions,
}

/// Saved activations of one layer, or its input to recompute them.
enum LayerActivations {
    Saved(Box<SavedActivations>),
    Input(Tensor),
}

/// Results of the forward that the backward needs.
pub struct Tape {
    layers: Vec<LayerActivations>,
    /// Residual stream after the last layer at the selected slots, and the scale of the final norm.
    last: Tensor,
    scale: Tensor,
    indices: Tensor,
}

struct Rotations {
    query: Rotation,
    key: Rotation,
    context: Rotation,
}

/// Gradients from [`FusedDrafter::backward`].
pub struct Gradients {
    pub weights: WeightGradients,
    /// Gradient of the context's keys and values.
    pub context: Option<Tensor>,
}

impl<'a> FusedDrafter<'a> {
    /// Prepares the rotations. Grad mode must be off here and in all methods.
    pub fn new(
        config: &'a DraftConfig,
        weights: &'a Weights,
        blocks: &'a Blocks,
        context: Option<Tensor>,
        options: &'a DraftOptions,
    ) -> Result<FusedDrafter<'a>, ModelError> {
        let rotations = Rotations {
            query: blocks.slot_table.rotation((config.head_dim as f64).powf(-0.5))?,
            key: blocks.slot_table.rotation(1.0)?,
            context: blocks.context_table.rotation(1.0)?,
        };
        Ok(FusedDrafter { config, blocks, weights, rotations, context, options })
    }

    /// Final hidden states of the slots at `indices`, `[indices, hidden]`. `x [blocks + 1, hidden]` holds the
    /// embeddings of the anchors and, as the last row, of the mask token.
    pub fn forward(&self, x: Tensor, indices: &Tensor) -> Result<(Tensor, Tape), ModelError> {
        let mut layers = Vec::with_capacity(self.weights.layers.len());
        let last = self.residual(x, Some(indices), |activations| layers.push(activations))?;
        let (hidden, scale) = norm::forward(&last, &self.weights.norm, self.config.rms_norm_eps)?;
        Ok((hidden, Tape { layers, last, scale, indices: indices.shallow_clone() }))
    }

    /// Final hidden states of all slots; saves nothing.
    pub fn hidden(&self, x: Tensor) -> Result<Tensor, ModelError> {
        Ok(norm::forward(&self.residual(x, None, drop)?, &self.weights.norm, self.config.rms_norm_eps)?.0)
    }

    /// Gradients from that of the output of [`FusedDrafter::forward`]. Frees the tape layer by layer.
    pub fn backward(&self, tape: Tape, d_hidden: &Tensor) -> Result<Gradients, ModelError> {
        let Tape { layers, last, scale, indices } = tape;
        let kind = last.f_kind()?;
        let (d_last, d_norm) = norm::backward(d_hidden, &last, &scale, &self.weights.norm)?;
        let mut d_last = d_last.f_to_kind(kind)?;
        if self.config.head.convolution().is_some() {
            let slots = (self.blocks.ids.size()[0] - 1) * self.config.block_size as i64;
            let mut all = Tensor::f_zeros([slots, d_last.size()[1]], (kind, d_last.device()))?;
            d_last = all.f_index_copy_(0, &indices, &d_last)?;
        }
        let mut dx = Some(d_last);
        let shape = self.shape();
        let (mut layer_gradients, mut d_keys_values) = (Vec::new(), Vec::new());
        for (index, activations) in layers.into_iter().enumerate().rev() {
            let Some(d_out) = dx else { break };
            let layer = self.layer(index, &shape, Some(&indices))?;
            let saved = match activations {
                LayerActivations::Saved(saved) => *saved,
                LayerActivations::Input(x) => layer.forward(x)?.1,
            };
            let grads = layer.backward(saved, &d_out)?;
            dx = grads.x;
            layer_gradients.push(grads.weights);
            d_keys_values.extend(grads.context);
        }
        layer_gradients.reverse();
        d_keys_values.reverse();
        let context = match d_keys_values.is_empty() {
            true => None,
            false => Some(Tensor::f_cat(&d_keys_values, 1)?),
        };
        Ok(Gradients { weights: WeightGradients { norm: d_norm, layers: layer_gradients, head: Vec::new() }, context })
    }

    /// Residual stream after the last layer, of all slots or of some.
    fn residual(
        &self,
        mut x: Tensor,
        indices: Option<&Tensor>,
        mut keep: impl FnMut(LayerActivations),
    ) -> Result<Tensor, ModelError> {
        let shape = self.shape();
        let whole_blocks = self.config.head.convolution().is_some();
        if whole_blocks {
            x = spread(&x, shape.block_size)?;
        }
        for index in 0..self.weights.layers.len() {
            let input = x.shallow_clone();
            let (out, saved) = self.layer(index, &shape, indices)?.forward(x)?;
            keep(if self.options.recompute {
                LayerActivations::Input(input)
            } else {
                LayerActivations::Saved(Box::new(saved))
            });
            x = out;
        }
        match indices.filter(|_| whole_blocks) {
            Some(indices) => Ok(x.f_index_select(0, indices)?),
            None => Ok(x),
        }
    }

    fn shape(&self) -> Shape<'_> {
        Shape {
            heads: self.config.num_attention_heads as i64,
            kv_heads: self.config.num_key_value_heads as i64,
            head_dim: self.config.head_dim as i64,
            block_size: self.config.block_size as i64,
            eps: self.config.rms_norm_eps,
            query_rotation: &self.rotations.query,
            key_rotation: &self.rotations.key,
            context_rotation: &self.rotations.context,
        }
    }

    fn layer<'b>(
        &'b self,
        index: usize,
        shape: &'b Shape<'b>,
        indices: Option<&'b Tensor>,
    ) -> Result<Layer<'b>, ModelError> {
        let width = 2 * shape.kv_heads * shape.head_dim;
        let part = |context: &Tensor| context.f_narrow(1, index as i64 * width, width);
        Ok(Layer {
            shape,
            weights: &self.weights.layers[index],
            attention: self.blocks.attention(self.config.layer_types[index]),
            by: self.options.attention,
            context: self.context.as_ref().map(part).transpose()?,
            // A convolution needs all slots of its block.
            edges: match self.config.head.convolution() {
                Some(_) => EdgeLayers::default(),
                None => EdgeLayers {
                    first: index == 0,
                    indices: indices.filter(|_| index + 1 == self.weights.layers.len()),
                },
            },
        })
    }
}
