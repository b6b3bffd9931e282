//! Fused weight matrices of the training path, and conversion of their gradients to single tensors.

use crate::hf::draft::{DraftConfig, layer_weight};
use crate::hf::head::{BASE_KERNEL, CONVOLUTIONS, KERNEL_PROJECTION, convolution_tensor};
use crate::model::ModelError;
use crate::model::drafter::convolution::Convolution;
use crate::model::params::{Gradient, ParamSet};
use tch::{Kind, Tensor};

/// All weights in the dtype of the activations. Weights with the same input are one matrix.
pub struct Weights {
    pub fc: Tensor,
    pub hidden_norm: Tensor,
    pub norm: Tensor,
    /// Keys and values of the context for all layers, `[layers * 2 * kv_heads * head_dim, hidden]`.
    pub context: Tensor,
    pub layers: Vec<LayerWeights>,
}

/// Weights of one layer.
pub struct LayerWeights {
    pub input_norm: Tensor,
    pub post_norm: Tensor,
    pub q_norm: Tensor,
    pub k_norm: Tensor,
    /// `[(heads + 2 * kv_heads) * head_dim, hidden]`
    pub qkv: Tensor,
    pub o: Tensor,
    /// `[2 * intermediate, hidden]`
    pub gate_up: Tensor,
    pub down: Tensor,
    /// Around attention and MLP, if the draft head has convolutions.
    pub convolutions: Option<[Convolution; 2]>,
}

impl LayerWeights {
    fn all(&self) -> impl Iterator<Item = &Tensor> {
        let LayerWeights { input_norm, post_norm, q_norm, k_norm, qkv, o, gate_up, down, convolutions } = self;
        let around = convolutions.iter().flatten().flat_map(|one| [&one.base, &one.projection]);
        [input_norm, post_norm, q_norm, k_norm, qkv, o, gate_up, down].into_iter().chain(around)
    }

    fn all_mut(&mut self) -> impl Iterator<Item = &mut Tensor> {
        let LayerWeights { input_norm, post_norm, q_norm, k_norm, qkv, o, gate_up, down, convolutions } = self;
        let around = convolutions.iter_mut().flatten().flat_map(|one| [&mut one.base, &mut one.projection]);
        [input_norm, post_norm, q_norm, k_norm, qkv, o, gate_up, down].into_iter().chain(around)
    }
}

const KEY: &str = "self_attn.k_proj";
const VALUE: &str = "self_attn.v_proj";
const QKV: [&str; 3] = ["self_attn.q_proj", KEY, VALUE];
const GATE_UP: [&str; 2] = ["mlp.gate_proj", "mlp.up_proj"];

impl Weights {
    pub fn new(config: &DraftConfig, params: &ParamSet, kind: Kind) -> Result<Weights, ModelError> {
        let get = |name: &str| -> Result<Tensor, ModelError> { Ok(params.need(name)?.f_to_kind(kind)?) };
        let (mut layers, mut context) = (Vec::new(), Vec::new());
        for index in 0..config.num_hidden_layers {
            let part = |name: &str| get(&layer_weight(index, name));
            let joined = |names: &[&str]| -> Result<Tensor, ModelError> {
                Ok(Tensor::f_cat(&names.iter().map(|name| part(name)).collect::<Result<Vec<_>, _>>()?, 0)?)
            };
            context.extend([part(KEY)?, part(VALUE)?]);
            layers.push(LayerWeights {
                input_norm: part("input_layernorm")?,
                post_norm: part("post_attention_layernorm")?,
                q_norm: part("self_attn.q_norm")?,
                k_norm: part("self_attn.k_norm")?,
                qkv: joined(&QKV)?,
                o: part("self_attn.o_proj")?,
                gate_up: joined(&GATE_UP)?,
                down: part("mlp.down_proj")?,
                convolutions: Convolution::load(config, params, index, kind)?,
            });
        }
        Ok(Weights {
            fc: get("fc.weight")?,
            hidden_norm: get("hidden_norm.weight")?,
            norm: get("norm.weight")?,
            context: Tensor::f_cat(&context, 0)?,
            layers,
        })
    }
}

/// Gradients of the weights, except the contribution of the context.
pub struct WeightGradients {
    pub norm: Tensor,
    pub layers: Vec<LayerWeights>,
    /// Gradients of the draft head's own tensors, by name; the same names in each chunk.
    pub head: Vec<(String, Tensor)>,
}

pub struct ContextGradients {
    pub fc: Tensor,
    pub hidden_norm: Tensor,
    pub keys_values: Tensor,
}

impl WeightGradients {
    /// Adds the gradients of other blocks.
    pub fn add(&mut self, other: WeightGradients) -> Result<(), ModelError> {
        let _ = self.norm.f_add_(&other.norm)?;
        for (layer, other) in self.layers.iter_mut().zip(&other.layers) {
            for (sum, part) in layer.all_mut().zip(other.all()) {
                let _ = sum.f_add_(part)?;
            }
        }
        for ((_, sum), (_, part)) in self.head.iter_mut().zip(&other.head) {
            let _ = sum.f_add_(part)?;
        }
        Ok(())
    }

    /// Splits the gradients into the names, shapes and dtype of `params`, and adds the contribution of the context.
    /// `context` is `None` if no block sees any.
    pub fn into_gradient(
        self,
        context: Option<ContextGradients>,
        config: &DraftConfig,
        params: &ParamSet,
    ) -> Result<Gradient, ModelError> {
        let kv_rows = (config.num_key_value_heads * config.head_dim) as i64;
        let mut named = vec![("norm.weight".to_string(), self.norm)];
        named.extend(self.head);
        let context_rows = |layer: usize| -> Result<Option<Tensor>, ModelError> {
            let rows = |all: &ContextGradients| all.keys_values.f_narrow(0, layer as i64 * 2 * kv_rows, 2 * kv_rows);
            Ok(context.as_ref().map(rows).transpose()?)
        };
        for (index, layer) in self.layers.into_iter().enumerate() {
            let mut add = |name: &str, x: Tensor| named.push((layer_weight(index, name), x));
            add("input_layernorm", layer.input_norm);
            add("post_attention_layernorm", layer.post_norm);
            add("self_attn.q_norm", layer.q_norm);
            add("self_attn.k_norm", layer.k_norm);
            add("self_attn.o_proj", layer.o);
            add("mlp.down_proj", layer.down);
            for (name, one) in CONVOLUTIONS.iter().zip(layer.convolutions.into_iter().flatten()) {
                named.push((convolution_tensor(index, name, BASE_KERNEL), one.base));
                named.push((convolution_tensor(index, name, KERNEL_PROJECTION), one.projection));
            }
            let mut add = |name: &str, x: Tensor| named.push((layer_weight(index, name), x));
            if let Some(context) = context_rows(index)? {
                let all = layer.qkv.size()[0];
                let _ = layer.qkv.f_narrow(0, all - 2 * kv_rows, 2 * kv_rows)?.f_add_(&context)?;
            }
            let query_rows = layer.qkv.size()[0] - 2 * kv_rows;
            for (name, part) in QKV.iter().zip(layer.qkv.f_split_with_sizes([query_rows, kv_rows, kv_rows], 0)?) {
                add(name, part);
            }
            for (name, part) in GATE_UP.iter().zip(layer.gate_up.f_chunk(2, 0)?) {
                add(name, part);
            }
        }
        if let Some(context) = context {
            named.push(("fc.weight".into(), context.fc));
            named.push(("hidden_norm.weight".into(), context.hidden_norm));
        } else {
            for name in ["fc.weight", "hidden_norm.weight"] {
                named.push((name.into(), params.need(name)?.f_zeros_like()?));
            }
        }
        // Another dtype is converted anyway, into one buffer.
        ParamSet::new(named).into_kind(params.need("norm.weight")?.f_kind()?)
    }
}
