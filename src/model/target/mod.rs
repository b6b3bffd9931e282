//! Frozen target: a causal decoder whose extraction forward ends at the last tapped layer.

mod batched;
pub mod batched_kv_cache;
mod cached;
pub mod kv_cache;

pub use cached::Extended;

use super::ModelError;
use super::batch::{Rows, TargetLabels, TopKLabels};
use super::drafter::Shared;
use super::load::weight;
use super::ops::{HEAD_ROWS, attention, linear, rms_norm, spans};
use super::rope::{Rope, RopeTable};
use crate::config::TopK;
use crate::hf::config::TargetConfig;
use crate::hf::tensors::TensorFiles;
use std::iter::{once, repeat_n};
use tch::{Device, Kind, Tensor};

/// Loaded part of a target, on one device.
pub struct Target {
    config: TargetConfig,
    kind: Kind,
    device: Device,
    embedding: Tensor,
    layers: Vec<Layer>,
    rope: Rope,
    top: Option<Top>,
}

/// Number of layers to load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Depth {
    /// This many layers from the bottom, enough for taps.
    Layers(usize),
    /// All layers, the final norm and the head.
    Whole,
}

/// All intermediate results of a whole forward, each `[rows, width, ...]`.
pub struct Trace {
    /// Output of the embedding, then the residual stream after each layer.
    pub hidden: Vec<Tensor>,
    /// States after the final norm.
    pub normed: Tensor,
    pub logits: Tensor,
}

struct Top {
    norm: Tensor,
    head: Tensor,
}

struct Layer {
    input_norm: Tensor,
    post_norm: Tensor,
    q: Projection,
    k: Projection,
    v: Projection,
    o: Projection,
    /// Norm weights of query and key heads.
    qk_norm: Option<(Tensor, Tensor)>,
    gate: Projection,
    up: Projection,
    down: Projection,
}

struct Projection {
    weight: Tensor,
    bias: Option<Tensor>,
}

impl Projection {
    fn apply(&self, x: &Tensor) -> Result<Tensor, ModelError> {
        linear(x, &self.weight, self.bias.as_ref())
    }
}

impl Layer {
    fn shallow_clone(&self) -> Layer {
        let projection = |from: &Projection| Projection {
            weight: from.weight.shallow_clone(),
            bias: from.bias.as_ref().map(Tensor::shallow_clone),
        };
        Layer {
            input_norm: self.input_norm.shallow_clone(),
            post_norm: self.post_norm.shallow_clone(),
            q: projection(&self.q),
            k: projection(&self.k),
            v: projection(&self.v),
            o: projection(&self.o),
            qk_norm: self.qk_norm.as_ref().map(|(q, k)| (q.shallow_clone(), k.shallow_clone())),
            gate: projection(&self.gate),
            up: projection(&self.up),
            down: projection(&self.down),
        }
    }
}

impl Target {
    /// Loads weights as `kind`, whatever their stored dtype. Tensors above `depth` are not read.
    ///
    /// # Errors
    /// Returns an error if tensors do not match the configuration, or libtorch fails.
    pub fn load(
        config: TargetConfig,
        files: &TensorFiles,
        depth: Depth,
        kind: Kind,
        device: Device,
    ) -> Result<Target, ModelError> {
        if let Some(error) = config.unexpected(files) {
            return Err(error.into());
        }
        Target::of(config, depth, kind, device, |name, shape| weight(files, name, shape, kind, device))
    }

    /// Builds a target from the tensors that `weight` returns for a name and shape, of `kind` on `device`.
    ///
    /// # Errors
    /// Returns an error if the target has too few layers or `weight` fails.
    pub fn of(
        config: TargetConfig,
        depth: Depth,
        kind: Kind,
        device: Device,
        weight: impl Fn(&str, &[usize]) -> Result<Tensor, ModelError>,
    ) -> Result<Target, ModelError> {
        let _no_grad = tch::no_grad_guard();
        let shapes = config.tensor_shapes();
        let read = |name: &str| match shapes.get(name) {
            Some(shape) => weight(name, shape).map(Some),
            None => Ok(None),
        };
        let need = |name: String| {
            read(&name)?.ok_or_else(|| ModelError::Input(format!("targets of this family have no tensor `{name}`")))
        };
        let count = match depth {
            Depth::Layers(count) if count <= config.num_hidden_layers => count,
            Depth::Layers(count) => {
                let have = config.num_hidden_layers;
                return Err(ModelError::Input(format!("the target has {have} layers, so {count} cannot be loaded")));
            }
            Depth::Whole => config.num_hidden_layers,
        };
        let layers = (0..count).map(|layer| {
            let name = |part: &str| format!("model.layers.{layer}.{part}");
            let projection = |part: &str| -> Result<Projection, ModelError> {
                let weight = need(name(&format!("{part}.weight")))?;
                Ok(Projection { weight, bias: read(&name(&format!("{part}.bias")))? })
            };
            Ok(Layer {
                input_norm: need(name("input_layernorm.weight"))?,
                post_norm: need(name("post_attention_layernorm.weight"))?,
                q: projection("self_attn.q_proj")?,
                k: projection("self_attn.k_proj")?,
                v: projection("self_attn.v_proj")?,
                o: projection("self_attn.o_proj")?,
                qk_norm: read(&name("self_attn.q_norm.weight"))?.zip(read(&name("self_attn.k_norm.weight"))?),
                gate: projection("mlp.gate_proj")?,
                up: projection("mlp.up_proj")?,
                down: projection("mlp.down_proj")?,
            })
        });
        let layers = layers.collect::<Result<Vec<Layer>, ModelError>>()?;
        let embedding = need("model.embed_tokens.weight".into())?;
        let top = if depth == Depth::Whole {
            let head = read("lm_head.weight")?.unwrap_or_else(|| embedding.shallow_clone());
            Some(Top { norm: need("model.norm.weight".into())?, head })
        } else {
            None
        };
        let rope = Rope::new(config.head_dim, config.rope_theta, config.rope_scaling, device)?;
        Ok(Target { config, kind, device, embedding, layers, rope, top })
    }

    /// Returns a handle to the same weights for another thread, without a copy.
    pub fn shallow_clone(&self) -> Target {
        Target {
            config: self.config.clone(),
            kind: self.kind,
            device: self.device,
            embedding: self.embedding.shallow_clone(),
            layers: self.layers.iter().map(Layer::shallow_clone).collect(),
            rope: self.rope.shallow_clone(),
            top: self.top.as_ref().map(|top| Top { norm: top.norm.shallow_clone(), head: top.head.shallow_clone() }),
        }
    }

    pub fn config(&self) -> &TargetConfig {
        &self.config
    }

    pub fn device(&self) -> Device {
        self.device
    }

    /// Dtype of weights and activations.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Embedding and head for a drafter on the same device, without a copy. Needs [`Depth::Whole`].
    ///
    /// # Errors
    /// Returns an error if the target is not whole.
    pub fn shared(&self) -> Result<Shared, ModelError> {
        let top = self.top("a shared head needs")?;
        Ok(Shared { embedding: self.embedding.shallow_clone(), head: top.head.shallow_clone() })
    }

    /// Residual streams after the layers `taps`, concatenated, of the real tokens: `[tokens, taps * hidden]` in dtype
    /// `out`, row by row. Ends after the last tap.
    ///
    /// # Errors
    /// `ModelError::Input` if a tap or id is invalid; otherwise if libtorch fails.
    pub fn taps(&self, rows: &Rows<'_>, taps: &[usize], out: Kind) -> Result<Tensor, ModelError> {
        Ok(self.tapped(rows, taps, out, false)?.0)
    }

    /// Taps and top-k labels: the `k` most likely tokens at each real token given the tokens before it in the row, with
    /// normalised probabilities. The first token of a row has no context and is its own label. Needs [`Depth::Whole`].
    ///
    /// # Errors
    /// `ModelError::Input` if `k` exceeds the vocabulary or a tap or id is invalid; otherwise if libtorch fails.
    pub fn forward_with_top_k(
        &self,
        rows: &Rows<'_>,
        taps: &[usize],
        out: Kind,
        k: usize,
    ) -> Result<(Tensor, TopKLabels), ModelError> {
        let _no_grad = tch::no_grad_guard();
        let vocab = self.config.vocab_size;
        if !(1..=vocab).contains(&k) {
            return Err(ModelError::Input(format!("{k} labels per token, expected 1 to {vocab}, the vocabulary")));
        }
        let top = self.top("labels need")?;
        let (packed, x) = self.tapped(rows, taps, out, true)?;
        let (mut top_ids, mut top_probabilities) = (Vec::new(), Vec::new());
        // All logits at once would be the largest tensor by far.
        for part in spans(x.size()[0], HEAD_ROWS) {
            let logits = self.head(top, &part.of(&x, 0)?)?;
            let (values, ids) = match k {
                1 => logits.f_max_dim(-1, true)?,
                _ => logits.f_topk(k as i64, -1, true, true)?,
            };
            let ids = Vec::<i64>::try_from(ids.f_flatten(0, -1)?.f_to_device(Device::Cpu)?)?;
            top_ids.extend(ids.into_iter().map(|id| id as i32));
            top_probabilities.extend(Vec::<f32>::try_from(
                values.f_softmax(-1, Kind::Float)?.f_flatten(0, -1)?.f_to_device(Device::Cpu)?,
            )?);
        }
        let (_, width) = rows.padded();
        let count = top_ids.len();
        let mut labels = TopKLabels { k, ids: Vec::with_capacity(count), probabilities: Vec::with_capacity(count) };
        let mut at = 0;
        for (row, &len) in rows.lengths.iter().enumerate().filter(|(_, len)| **len > 0) {
            let before = at..at + (len as usize - 1) * k;
            labels.ids.extend(repeat_n(rows.ids[row * width as usize], k));
            labels.ids.extend_from_slice(&top_ids[before.clone()]);
            labels.probabilities.extend(once(1.0).chain(repeat_n(0.0, k - 1)));
            labels.probabilities.extend_from_slice(&top_probabilities[before]);
            at += len as usize * k;
        }
        Ok((packed, labels))
    }

    /// Taps, with the labels that `labels` selects, if any.
    ///
    /// # Errors
    /// Returns the errors of the three forwards above and below.
    pub fn forward_with_labels(
        &self,
        rows: &Rows<'_>,
        taps: &[usize],
        out: Kind,
        labels: Option<TopK>,
    ) -> Result<(Tensor, Option<TargetLabels>), ModelError> {
        Ok(match labels {
            None => (self.taps(rows, taps, out)?, None),
            Some(TopK::Tokens(k)) => {
                let (hidden, labels) = self.forward_with_top_k(rows, taps, out, k as usize)?;
                (hidden, Some(TargetLabels::TopK(labels)))
            }
            Some(TopK::All) => {
                let (hidden, states) = self.forward_with_states(rows, taps, out)?;
                (hidden, Some(TargetLabels::States(states)))
            }
        })
    }

    /// Taps and final hidden states after the norm, `[tokens, hidden]`, both in dtype `out`. Needs [`Depth::Whole`].
    ///
    /// # Errors
    /// `ModelError::Input` if a tap or id is invalid or the target is not whole; otherwise if libtorch fails.
    pub fn forward_with_states(
        &self,
        rows: &Rows<'_>,
        taps: &[usize],
        out: Kind,
    ) -> Result<(Tensor, Tensor), ModelError> {
        let _no_grad = tch::no_grad_guard();
        let norm = self.final_norm()?;
        let (packed, x) = self.tapped(rows, taps, out, true)?;
        Ok((packed, rms_norm(&x, norm, self.config.rms_norm_eps)?.f_to_kind(out)?))
    }

    /// Weight of the final norm, `[hidden]`. Needs [`Depth::Whole`].
    ///
    /// # Errors
    /// Returns an error if the target is not whole.
    pub fn final_norm(&self) -> Result<&Tensor, ModelError> {
        Ok(&self.top("the final norm needs")?.norm)
    }

    /// Taps of the real tokens, and the residual stream after the last computed layer: of the real tokens if `whole`,
    /// else of the padded rows, which callers ignore.
    fn tapped(&self, rows: &Rows<'_>, taps: &[usize], out: Kind, whole: bool) -> Result<(Tensor, Tensor), ModelError> {
        let _no_grad = tch::no_grad_guard();
        let last = taps.iter().copied().max().unwrap_or(0);
        if last >= self.layers.len() {
            let have = self.layers.len();
            return Err(ModelError::Input(format!("layer {last} is tapped, but only {have} layers are loaded")));
        }
        let width = self.config.hidden_size as i64;
        let packed = Tensor::f_empty([rows.tokens(), taps.len() as i64 * width], (out, self.device))?;
        let real = rows.real_positions(self.device)?;
        let select = |x: &Tensor| match &real {
            Some(real) => x.f_index_select(0, real),
            None => Ok(x.shallow_clone()),
        };
        let (mut x, table) = self.start(rows)?;
        let depth = if whole { self.layers.len() } else { last + 1 };
        for (index, layer) in self.layers.iter().enumerate().take(depth) {
            x = self.layer(layer, &x, &table, rows)?;
            for tap in (0..taps.len()).filter(|&tap| taps[tap] == index) {
                packed.f_narrow(1, tap as i64 * width, width)?.f_copy_(&select(&x)?)?;
            }
        }
        let x = if whole { select(&x)? } else { x };
        Ok((packed, x))
    }

    /// Final norm and head; `needs` starts the error text.
    fn top(&self, needs: &str) -> Result<&Top, ModelError> {
        let missing = || ModelError::Input(format!("{needs} the whole target, but only its lower layers are loaded"));
        self.top.as_ref().ok_or_else(missing)
    }

    /// Logits of residual streams after the last layer.
    fn head(&self, top: &Top, x: &Tensor) -> Result<Tensor, ModelError> {
        linear(&rms_norm(x, &top.norm, self.config.rms_norm_eps)?, &top.head, None)
    }

    /// Whole forward with every intermediate result. Values at padding are arbitrary. Needs [`Depth::Whole`].
    ///
    /// # Errors
    /// Returns an error if the target is not whole, an id is invalid or libtorch fails.
    pub fn trace(&self, rows: &Rows<'_>) -> Result<Trace, ModelError> {
        let _no_grad = tch::no_grad_guard();
        let top = self.top("logits need")?;
        let (count, width) = rows.padded();
        let (mut x, table) = self.start(rows)?;
        let wide = |x: &Tensor| x.f_reshape([count, width, -1]);
        let mut hidden = vec![wide(&x)?];
        for layer in &self.layers {
            x = self.layer(layer, &x, &table, rows)?;
            hidden.push(wide(&x)?);
        }
        let normed = rms_norm(&x, &top.norm, self.config.rms_norm_eps)?;
        let logits = linear(&normed, &top.head, None)?;
        Ok(Trace { hidden, normed: wide(&normed)?, logits: wide(&logits)? })
    }

    /// Embeds the padded rows, `[rows * width, hidden]`, and builds their rope table.
    fn start(&self, rows: &Rows<'_>) -> Result<(Tensor, RopeTable), ModelError> {
        let (count, width) = rows.padded();
        rows.check_ids(self.config.vocab_size)?;
        let ids = Tensor::f_from_slice(rows.ids)?.f_to_device(self.device)?;
        let x = self.embedding.f_index_select(0, &ids)?;
        let positions: Vec<i64> = (0..width).collect();
        Ok((x, self.rope.table(&positions, self.kind)?.repeat(count)?))
    }

    fn layer(&self, layer: &Layer, x: &Tensor, table: &RopeTable, rows: &Rows<'_>) -> Result<Tensor, ModelError> {
        let (count, width) = rows.padded();
        let (q, k, v) = self.heads(layer, x, table)?;
        let dim = self.config.head_dim as i64;
        let by_head = |x: &Tensor| x.f_reshape([count, width, -1, dim])?.f_transpose(1, 2);
        // Rows are padded on the right, so the causal mask alone hides padding from real tokens.
        let mixed = attention(&by_head(&q)?, &by_head(&k)?, &by_head(&v)?, None, true)?;
        self.finish(layer, x, &mixed.f_transpose(1, 2)?.f_reshape([count * width, -1])?)
    }

    /// Queries, keys and values of `x [tokens, hidden]`, each `[tokens, heads, head_dim]`.
    fn heads(&self, layer: &Layer, x: &Tensor, table: &RopeTable) -> Result<(Tensor, Tensor, Tensor), ModelError> {
        let (dim, eps) = (self.config.head_dim as i64, self.config.rms_norm_eps);
        let inner = rms_norm(x, &layer.input_norm, eps)?;
        let split = |projection: &Projection| -> Result<Tensor, ModelError> {
            Ok(projection.apply(&inner)?.f_reshape([x.size()[0], -1, dim])?)
        };
        let (mut q, mut k) = (split(&layer.q)?, split(&layer.k)?);
        if let Some((q_norm, k_norm)) = &layer.qk_norm {
            q = rms_norm(&q, q_norm, eps)?;
            k = rms_norm(&k, k_norm, eps)?;
        }
        Ok((table.apply(&q)?, table.apply(&k)?, split(&layer.v)?))
    }

    /// Adds the attention output `[tokens, heads * head_dim]` and then the MLP to the residual stream.
    fn finish(&self, layer: &Layer, x: &Tensor, attended: &Tensor) -> Result<Tensor, ModelError> {
        let x = x.f_add(&layer.o.apply(attended)?)?;
        let inner = rms_norm(&x, &layer.post_norm, self.config.rms_norm_eps)?;
        let gated = layer.gate.apply(&inner)?.f_silu()?.f_mul(&layer.up.apply(&inner)?)?;
        Ok(x.f_add(&layer.down.apply(&gated)?)?)
    }
}
