//! Forward and backward of one drafter layer.

use super::around::Around;
use super::attention::{Gradients, Inputs, Output};
use super::heads::Heads;
use super::products::product;
use super::weights::LayerWeights;
use super::{mlp, norm};
use crate::model::ModelError;
use crate::model::drafter::AttentionBackend;
use crate::model::drafter::blocks::LayerAttention;
use crate::model::drafter::convolution::Convolution;
use crate::model::ops::wide;
use crate::model::rope::Rotation;
use tch::Tensor;

/// Sizes and rotations that all layers share.
pub struct Shape<'a> {
    pub heads: i64,
    pub kv_heads: i64,
    pub head_dim: i64,
    pub block_size: i64,
    pub eps: f64,
    /// Rotation with the factor `1 / sqrt(head_dim)`; the others have none.
    pub query_rotation: &'a Rotation,
    pub key_rotation: &'a Rotation,
    pub context_rotation: &'a Rotation,
}

/// One layer applied to the slots.
pub struct Layer<'a> {
    pub shape: &'a Shape<'a>,
    pub weights: &'a LayerWeights,
    pub attention: LayerAttention<'a>,
    pub by: AttentionBackend,
    /// Keys and values of the context before norm and rotation, `[tokens, 2 * kv_heads * head_dim]`.
    pub context: Option<Tensor>,
    pub edges: EdgeLayers<'a>,
}

/// First and last layer, which compute fewer rows than there are slots.
#[derive(Clone, Copy, Default)]
pub struct EdgeLayers<'a> {
    /// First layer: all slots except anchors hold the mask token, so the input has one row per anchor and one for the
    /// mask.
    pub first: bool,
    /// Last layer: after attention, only these slots are computed.
    pub indices: Option<&'a Tensor>,
}

/// Activations saved for the backward pass. Products that one memory pass can recompute are not saved.
pub struct SavedActivations {
    /// Residual stream before the layer and between attention and MLP, with the scales of their norms. First and last
    /// layer have fewer rows than slots.
    x: Tensor,
    scale: Tensor,
    middle: Tensor,
    middle_scale: Tensor,
    projected: Projected,
    attention: Output,
    gate_up: Tensor,
    /// Outputs of attention and MLP before their convolutions, if there are any.
    outputs: Option<[Tensor; 2]>,
}

impl SavedActivations {
    /// Output of a sublayer before its convolution.
    fn output(&self, sublayer: usize) -> Option<&Tensor> {
        self.outputs.as_ref().map(|outputs| &outputs[sublayer])
    }
}

/// Inputs of attention.
struct Projected {
    /// Queries, keys and values of the slots before norm and rotation.
    qkv: Tensor,
    queries: Heads,
    keys: Heads,
    context_keys: Option<Heads>,
}

/// Gradients of one layer.
pub struct LayerGrads {
    /// Gradient of the input; `None` for the first layer, as embeddings are frozen.
    pub x: Option<Tensor>,
    pub context: Option<Tensor>,
    pub weights: LayerWeights,
}

impl Layer<'_> {
    /// Residual stream `[slots, hidden]` after the layer; the last layer returns only the selected slots.
    pub fn forward(&self, x: Tensor) -> Result<(Tensor, SavedActivations), ModelError> {
        let (w, shape) = (self.weights, self.shape);
        let (normed, scale) = norm::forward(&x, &w.input_norm, shape.eps)?;
        let around_attention = self.around(0, &normed)?;
        let inner = around_attention.before(&normed)?;
        let qkv = self.spread(inner.f_linear(&w.qkv, None::<Tensor>)?)?;
        let heads = |raw: Tensor, weight: &Tensor, rotation: &Rotation| {
            Heads::forward(&raw, weight, shape.eps, rotation, shape.kv_heads)
        };
        let queries = heads(self.raw_queries(&qkv)?, &w.q_norm, shape.query_rotation)?;
        let keys = heads(self.raw_keys(&qkv)?, &w.k_norm, shape.key_rotation)?;
        let context_keys = match &self.context {
            Some(context) => Some(heads(self.raw_context_keys(context)?, &w.k_norm, shape.context_rotation)?),
            None => None,
        };
        let projected = Projected { qkv, queries, keys, context_keys };
        let attention = self.with_inputs(&projected, |inputs| inputs.forward())?;
        let gathered = self.select(self.flat(&attention.gathered)?)?.f_linear(&w.o, None::<Tensor>)?;
        let middle = self.select(self.spread(x.shallow_clone())?)?.f_add(&around_attention.after(&gathered)?)?;
        let (normed, middle_scale) = norm::forward(&middle, &w.post_norm, shape.eps)?;
        let around_mlp = self.around(1, &normed)?;
        let gate_up = around_mlp.before(&normed)?.f_linear(&w.gate_up, None::<Tensor>)?;
        let output = mlp::forward(&gate_up, &w.down)?;
        let (out, outputs) = match w.convolutions {
            None => (output.shallow_clone().f_add_(&middle)?, None),
            Some(_) => (around_mlp.after(&output)?.f_add_(&middle)?, Some([gathered, output])),
        };
        Ok((out, SavedActivations { x, scale, middle, middle_scale, projected, attention, gate_up, outputs }))
    }

    /// Gradients from that of the layer's output.
    pub fn backward(&self, saved: SavedActivations, d_out: &Tensor) -> Result<LayerGrads, ModelError> {
        let (w, shape) = (self.weights, self.shape);
        let kind = d_out.f_kind()?;
        let normed = norm::apply(&saved.middle, &saved.middle_scale, &w.post_norm)?;
        let around_mlp = self.around(1, &normed)?;
        let (d_output, after_mlp) = around_mlp.after_backward(saved.output(1), d_out)?;
        let mlp = mlp::backward(&d_output, &saved.gate_up, &around_mlp.before(&normed)?, w)?;
        let (d_normed, mlp_convolution) = around_mlp.before_backward(&normed, &mlp.inner, after_mlp)?;
        let (d_middle, d_post_norm) = norm::backward(&d_normed, &saved.middle, &saved.middle_scale, &w.post_norm)?;
        let d_middle = d_middle.f_to_kind(kind)?.f_add_(d_out)?;

        let normed = norm::apply(&saved.x, &saved.scale, &w.input_norm)?;
        let around_attention = self.around(0, &normed)?;
        let (d_attended, after_attention) = around_attention.after_backward(saved.output(0), &d_middle)?;

        let projected = &saved.projected;
        let slots = projected.qkv.size()[0];
        let d_o = product(&d_attended, &self.select(self.flat(&saved.attention.gathered)?)?)?;
        let d_gathered = self.by_head(&self.to_slots(d_attended.f_mm(&w.o)?, slots)?)?;
        let gradients = self.with_inputs(projected, |inputs| inputs.backward(&saved.attention, &d_gathered))?;
        let Gradients { queries: d_queries, own: (d_keys, d_values), context: d_context } = gradients;
        let d_qkv = projected.qkv.f_empty_like()?;
        let head_gradient =
            |heads: &Heads, d_rotated: &Tensor, [raw, d_raw]: [Tensor; 2], weight: &Tensor, rotation: &Rotation| {
                heads.backward(d_rotated, &raw, &d_raw, weight, rotation)
            };
        let raw = [self.raw_queries(&projected.qkv)?, self.raw_queries(&d_qkv)?];
        let d_q_norm = head_gradient(&projected.queries, &d_queries, raw, &w.q_norm, shape.query_rotation)?;
        let raw = [self.raw_keys(&projected.qkv)?, self.raw_keys(&d_qkv)?];
        let mut d_k_norm = head_gradient(&projected.keys, &d_keys, raw, &w.k_norm, shape.key_rotation)?;
        self.raw_values(&d_qkv)?.f_copy_(&d_values.f_transpose(0, 1)?)?;
        let context = match (&self.context, &projected.context_keys, d_context) {
            (Some(context), Some(keys), Some((d_keys, d_values))) => {
                let d_context = context.f_empty_like()?;
                let raw = [self.raw_context_keys(context)?, self.raw_context_keys(&d_context)?];
                let d_norm = head_gradient(keys, &d_keys.f_to_kind(kind)?, raw, &w.k_norm, shape.context_rotation)?;
                d_k_norm = d_k_norm.f_add_(&d_norm)?;
                self.raw_context_values(&d_context)?.f_copy_(&d_values.f_transpose(0, 1)?)?;
                Some(d_context)
            }
            _ => None,
        };
        let d_qkv = self.collect(d_qkv)?;
        let d_qkv_weight = product(&d_qkv, &around_attention.before(&normed)?)?;
        let (d_normed, attention_convolution) =
            around_attention.before_backward(&normed, &d_qkv.f_mm(&w.qkv)?, after_attention)?;
        let (dx, d_input_norm) = norm::backward(&d_normed, &saved.x, &saved.scale, &w.input_norm)?;
        let x = match self.edges.first {
            true => None,
            false => Some(dx.f_to_kind(kind)?.f_add_(&self.to_slots(d_middle, slots)?)?),
        };
        Ok(LayerGrads {
            x,
            context,
            weights: LayerWeights {
                input_norm: d_input_norm,
                post_norm: d_post_norm,
                q_norm: d_q_norm,
                k_norm: d_k_norm,
                qkv: d_qkv_weight,
                o: d_o,
                gate_up: mlp.gate_up,
                down: mlp.down,
                convolutions: attention_convolution.zip(mlp_convolution).map(<[Convolution; 2]>::from),
            },
        })
    }

    /// Convolutions around a sublayer with the kernels of its normed input.
    fn around(&self, sublayer: usize, normed: &Tensor) -> Result<Around<'_>, ModelError> {
        let convolution = self.weights.convolutions.as_ref().map(|around| &around[sublayer]);
        let kernels = convolution.map(|convolution| convolution.kernels(normed)).transpose()?;
        Ok(Around { convolution: convolution.zip(kernels), block_size: self.shape.block_size })
    }

    /// Expands rows of the first layer's input to slots.
    fn spread(&self, rows: Tensor) -> Result<Tensor, ModelError> {
        if self.edges.first { spread(&rows, self.shape.block_size) } else { Ok(rows) }
    }

    /// Gradient of [`Layer::spread`].
    fn collect(&self, slots: Tensor) -> Result<Tensor, ModelError> {
        if !self.edges.first {
            return Ok(slots);
        }
        let (size, width, kind) = (self.shape.block_size, slots.size()[1], slots.f_kind()?);
        let blocks = slots.f_view([-1, size, width])?;
        let masks = blocks.f_narrow(1, 1, size - 1)?.f_sum_dim_intlist(&[0i64, 1][..], false, wide(kind))?;
        Ok(Tensor::f_cat(&[blocks.f_select(1, 0)?, masks.f_to_kind(kind)?.f_unsqueeze(0)?], 0)?)
    }

    fn select(&self, slots: Tensor) -> Result<Tensor, ModelError> {
        Ok(match self.edges.indices {
            Some(indices) => slots.f_index_select(0, indices)?,
            None => slots,
        })
    }

    /// Gradient of [`Layer::select`].
    fn to_slots(&self, indices: Tensor, slots: i64) -> Result<Tensor, ModelError> {
        let Some(index) = self.edges.indices else { return Ok(indices) };
        let mut all = Tensor::f_zeros([slots, indices.size()[1]], (indices.f_kind()?, indices.device()))?;
        Ok(all.f_index_copy_(0, index, &indices)?)
    }

    fn with_inputs<T>(
        &self,
        Projected { qkv, queries, keys, context_keys }: &Projected,
        compute: impl FnOnce(Inputs<'_>) -> Result<T, ModelError>,
    ) -> Result<T, ModelError> {
        let values = self.raw_values(qkv)?.f_transpose(0, 1)?.f_contiguous()?;
        let keys = keys.rotated.f_squeeze_dim(2)?;
        let context = match (context_keys, &self.context) {
            (Some(keys), Some(context)) => {
                Some((keys.rotated.f_squeeze_dim(2)?, self.raw_context_values(context)?.f_transpose(0, 1)?))
            }
            _ => None,
        };
        compute(Inputs {
            queries: &queries.rotated,
            own: (&keys, &values),
            context: context.as_ref().map(|(keys, values)| (keys, values)),
            attention: self.attention,
            block_size: self.shape.block_size,
            by: self.by,
        })
    }

    fn raw_queries(&self, qkv: &Tensor) -> Result<Tensor, ModelError> {
        self.part(qkv, 0, self.shape.heads)
    }

    fn raw_keys(&self, qkv: &Tensor) -> Result<Tensor, ModelError> {
        self.part(qkv, self.shape.heads, self.shape.kv_heads)
    }

    fn raw_values(&self, qkv: &Tensor) -> Result<Tensor, ModelError> {
        self.part(qkv, self.shape.heads + self.shape.kv_heads, self.shape.kv_heads)
    }

    fn raw_context_keys(&self, context: &Tensor) -> Result<Tensor, ModelError> {
        self.part(context, 0, self.shape.kv_heads)
    }

    fn raw_context_values(&self, context: &Tensor) -> Result<Tensor, ModelError> {
        self.part(context, self.shape.kv_heads, self.shape.kv_heads)
    }

    /// Some heads of a product, `[positions, heads, head_dim]`, as a view.
    fn part(&self, x: &Tensor, from: i64, heads: i64) -> Result<Tensor, ModelError> {
        let dim = self.shape.head_dim;
        Ok(x.f_narrow(1, from * dim, heads * dim)?.f_view([x.size()[0], heads, dim])?)
    }

    /// `[kv_heads, rows, head_dim]` as `[slots, heads * head_dim]`.
    fn flat(&self, x: &Tensor) -> Result<Tensor, ModelError> {
        let Shape { heads, kv_heads, head_dim, .. } = *self.shape;
        let x = x.f_view([kv_heads, -1, heads / kv_heads, head_dim])?.f_transpose(0, 1)?;
        Ok(x.f_reshape([-1, heads * head_dim])?)
    }

    /// Inverse of [`Layer::flat`].
    fn by_head(&self, x: &Tensor) -> Result<Tensor, ModelError> {
        let Shape { heads, kv_heads, head_dim, .. } = *self.shape;
        let x = x.f_view([-1, kv_heads, heads / kv_heads, head_dim])?.f_transpose(0, 1)?;
        Ok(x.f_contiguous()?.f_view([kv_heads, -1, head_dim])?)
    }
}

/// Rows of all slots, `[blocks * block_size, width]`, from those of the anchors and, last, of the mask token.
pub fn spread(rows: &Tensor, block_size: i64) -> Result<Tensor, ModelError> {
    let (blocks, width) = (rows.size()[0] - 1, rows.size()[1]);
    let slots = Tensor::f_empty([blocks, block_size, width], (rows.f_kind()?, rows.device()))?;
    slots.f_select(1, 0)?.f_copy_(&rows.f_narrow(0, 0, blocks)?)?;
    slots.f_narrow(1, 1, block_size - 1)?.f_copy_(&rows.f_narrow(0, blocks, 1)?.f_unsqueeze(0)?)?;
    Ok(slots.f_view([blocks * block_size, width])?)
}
