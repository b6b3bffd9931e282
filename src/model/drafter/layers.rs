//! Plain form of the drafter's layers on flat lists of positions, for decoding and the reference implementation.

use super::convolution::{Convolution, Side};
use crate::hf::draft::{DraftConfig, layer_weight};
use crate::model::ModelError;
use crate::model::ops::{linear, rms_norm};
use crate::model::params::ParamSet;
use crate::model::rope::RopeTable;
use tch::{Kind, Tensor};

/// Weights of one forward, cast to the compute dtype. Autograd differentiates through the cast.
pub struct Layers {
    fc: Tensor,
    hidden_norm: Tensor,
    norm: Tensor,
    eps: f64,
    pub layers: Vec<Layer>,
}

pub struct Layer {
    input_norm: Tensor,
    post_norm: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    head_dim: i64,
    eps: f64,
    /// Convolutions around attention and MLP, and the slots of a block.
    convolutions: Option<([Convolution; 2], i64)>,
}

impl Layers {
    pub fn new(config: &DraftConfig, params: &ParamSet, kind: Kind) -> Result<Layers, ModelError> {
        let get = |name: &str| -> Result<Tensor, ModelError> { Ok(params.need(name)?.f_to_kind(kind)?) };
        let layer = |index: usize| -> Result<Layer, ModelError> {
            let part = |name: &str| get(&layer_weight(index, name));
            Ok(Layer {
                input_norm: part("input_layernorm")?,
                post_norm: part("post_attention_layernorm")?,
                q: part("self_attn.q_proj")?,
                k: part("self_attn.k_proj")?,
                v: part("self_attn.v_proj")?,
                o: part("self_attn.o_proj")?,
                q_norm: part("self_attn.q_norm")?,
                k_norm: part("self_attn.k_norm")?,
                gate: part("mlp.gate_proj")?,
                up: part("mlp.up_proj")?,
                down: part("mlp.down_proj")?,
                head_dim: config.head_dim as i64,
                eps: config.rms_norm_eps,
                convolutions: Convolution::load(config, params, index, kind)?
                    .map(|around| (around, config.block_size as i64)),
            })
        };
        Ok(Layers {
            fc: get("fc.weight")?,
            hidden_norm: get("hidden_norm.weight")?,
            norm: get("norm.weight")?,
            eps: config.rms_norm_eps,
            layers: (0..config.num_hidden_layers).map(layer).collect::<Result<_, _>>()?,
        })
    }

    /// Context feature `[tokens, hidden]`, which all layers share, from tapped hidden states `[tokens, taps * hidden]`.
    ///
    /// # Errors
    /// Returns an error if libtorch fails.
    pub fn context(&self, hidden: &Tensor) -> Result<Tensor, ModelError> {
        let hidden = hidden.f_to_kind(self.fc.f_kind()?)?;
        rms_norm(&linear(&hidden, &self.fc, None)?, &self.hidden_norm, self.eps)
    }

    /// Final norm.
    ///
    /// # Errors
    /// Returns an error if libtorch fails.
    pub fn normed(&self, x: &Tensor) -> Result<Tensor, ModelError> {
        rms_norm(x, &self.norm, self.eps)
    }
}

impl Layer {
    /// Input norm of the residual stream `[slots, hidden]`.
    ///
    /// # Errors
    /// Returns an error if libtorch fails.
    pub fn inner(&self, x: &Tensor) -> Result<Tensor, ModelError> {
        rms_norm(x, &self.input_norm, self.eps)
    }

    /// Input of attention from normed slots `[slots, hidden]` of whole blocks: their convolution, if the head has it.
    ///
    /// # Errors
    /// Returns an error if libtorch fails.
    pub fn attended(&self, inner: &Tensor) -> Result<Tensor, ModelError> {
        self.convolved(0, Side::Before, inner, inner)
    }

    /// Queries of normed slots, `[slots, heads, head_dim]`.
    ///
    /// # Errors
    /// Returns an error if libtorch fails.
    pub fn queries(&self, inner: &Tensor, table: &RopeTable) -> Result<Tensor, ModelError> {
        table.apply(&rms_norm(&self.heads(inner, &self.q)?, &self.q_norm, self.eps)?)
    }

    /// Keys and values, each `[positions, kv_heads, head_dim]`, of normed slots or of the context feature. Both use the
    /// same matrices; the context skips the layer's input norm.
    ///
    /// # Errors
    /// Returns an error if libtorch fails.
    pub fn keys_values(&self, source: &Tensor, table: &RopeTable) -> Result<(Tensor, Tensor), ModelError> {
        let keys = table.apply(&rms_norm(&self.heads(source, &self.k)?, &self.k_norm, self.eps)?)?;
        Ok((keys, self.heads(source, &self.v)?))
    }

    /// Adds the attention output `[slots, heads * head_dim]` and then the MLP to the residual stream. `inner` is the normed
    /// input of attention.
    ///
    /// # Errors
    /// Returns an error if libtorch fails.
    pub fn finish(&self, x: &Tensor, inner: &Tensor, gathered: &Tensor) -> Result<Tensor, ModelError> {
        let x = x.f_add(&self.convolved(0, Side::After, &linear(gathered, &self.o, None)?, inner)?)?;
        let normed = rms_norm(&x, &self.post_norm, self.eps)?;
        let inner = self.convolved(1, Side::Before, &normed, &normed)?;
        let gated = linear(&inner, &self.gate, None)?.f_silu()?.f_mul(&linear(&inner, &self.up, None)?)?;
        Ok(x.f_add(&self.convolved(1, Side::After, &linear(&gated, &self.down, None)?, &normed)?)?)
    }

    /// Convolution of `x` with the kernels of the sublayer's normed input, or `x` itself.
    fn convolved(&self, sublayer: usize, side: Side, x: &Tensor, normed: &Tensor) -> Result<Tensor, ModelError> {
        match &self.convolutions {
            None => Ok(x.shallow_clone()),
            Some((around, size)) => around[sublayer].apply(side, x, &around[sublayer].kernels(normed)?, *size),
        }
    }

    fn heads(&self, x: &Tensor, weight: &Tensor) -> Result<Tensor, ModelError> {
        // Computed explicitly, because libtorch cannot infer a dimension of an empty context.
        let heads = weight.size()[0] / self.head_dim;
        Ok(linear(x, weight, None)?.f_reshape([x.size()[0], heads, self.head_dim])?)
    }
}
