//! The frozen target: a causal decoder whose forward ends at the last tapped layer.

mod batched;
pub mod batched_kv_cache;
mod cached;
pub mod kv_cache;

pub use cached::Extended;

use super::ModelError;
use super::batch::{Likeliest, Rows, Teacher};
use super::drafter::Shared;
use super::load::weight;
use super::ops::{HEAD_ROWS, attention, linear, rms_norm, spans};
use super::rope::{Rope, RopeTable};
use crate::config::TopK;
use crate::hf::config::TargetConfig;
use crate::hf::tensors::TensorFiles;
use std::iter::{once, repeat_n};
use tch::{Device, Kind, Tensor};

/// The part of a target that was loaded, on one device.
pub struct Target {
    config: TargetConfig,
    kind: Kind,
    device: Device,
    embedding: Tensor,
    layers: Vec<Layer>,
    rope: Rope,
    top: Option<Top>,
}

/// How much of the target to load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Depth {
    /// This many layers from the bottom: what taps need.
    Layers(usize),
    /// All layers, the final norm and the head.
    Whole,
}

/// Every intermediate result of a whole forward, each `[rows, width, ...]`.
pub struct Trace {
    /// The embedding's output, then the residual stream after each layer.
    pub hidden: Vec<Tensor>,
    /// After the final norm.
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
    /// Weights of the norms on query and key heads.
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
    fn share(&self) -> Layer {
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
    /// Loads weights as `kind`, whatever they were stored as. Nothing above `depth` is read.
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

    /// Made of what `weight` gives for a name and a shape: tensors of `kind` on `device`.
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
            read(&name)?.ok_or_else(|| ModelError::Input(format!("this family of targets has no tensor `{name}`")))
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

    /// The same weights once more, at no cost: for another thread.
    pub fn share(&self) -> Target {
        Target {
            config: self.config.clone(),
            kind: self.kind,
            device: self.device,
            embedding: self.embedding.shallow_clone(),
            layers: self.layers.iter().map(Layer::share).collect(),
            rope: self.rope.share(),
            top: self.top.as_ref().map(|top| Top { norm: top.norm.shallow_clone(), head: top.head.shallow_clone() }),
        }
    }

    pub fn config(&self) -> &TargetConfig {
        &self.config
    }

    pub fn device(&self) -> Device {
        self.device
    }

    /// Number type of weights and activations.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// What a drafter on the same device shares with this target, at no cost. Needs [`Depth::Whole`].
    pub fn shared(&self) -> Result<Shared, ModelError> {
        let top = self.top("a shared head needs")?;
        Ok(Shared { embedding: self.embedding.shallow_clone(), head: top.head.shallow_clone() })
    }

    /// Residual streams after the layers `taps`, side by side, of the real tokens alone: `[tokens, taps * hidden]` of
    /// `out`, row after row. Stops after the last tap.
    pub fn taps(&self, rows: &Rows<'_>, taps: &[usize], out: Kind) -> Result<Tensor, ModelError> {
        Ok(self.tapped(rows, taps, out, false)?.0)
    }

    /// The same, and what the target says at each real token: its `each` most likely ones behind the tokens before it in the row,
    /// with their shares among themselves. The first token of a row has none before it, and stands for itself. Needs [`Depth::Whole`].
    pub fn taps_and_likeliest(
        &self,
        rows: &Rows<'_>,
        taps: &[usize],
        out: Kind,
        each: usize,
    ) -> Result<(Tensor, Likeliest), ModelError> {
        let _no_grad = tch::no_grad_guard();
        let vocab = self.config.vocab_size;
        if !(1..=vocab).contains(&each) {
            return Err(ModelError::Input(format!("{each} labels at each place do not fit a vocabulary of {vocab}")));
        }
        let top = self.top("labels need")?;
        let (packed, x) = self.tapped(rows, taps, out, true)?;
        let (mut said, mut shares) = (Vec::new(), Vec::new());
        // Logits of all tokens at once would be larger than anything else here.
        for part in spans(x.size()[0], HEAD_ROWS) {
            let logits = self.head(top, &part.of(&x, 0)?)?;
            let (values, ids) = match each {
                1 => logits.f_max_dim(-1, true)?,
                _ => logits.f_topk(each as i64, -1, true, true)?,
            };
            let ids = Vec::<i64>::try_from(ids.f_flatten(0, -1)?.f_to_device(Device::Cpu)?)?;
            said.extend(ids.into_iter().map(|id| id as i32));
            shares.extend(Vec::<f32>::try_from(
                values.f_softmax(-1, Kind::Float)?.f_flatten(0, -1)?.f_to_device(Device::Cpu)?,
            )?);
        }
        let (_, width) = rows.padded();
        let mut teacher =
            Likeliest { each, ids: Vec::with_capacity(said.len()), shares: Vec::with_capacity(said.len()) };
        let mut at = 0;
        for (row, &len) in rows.lengths.iter().enumerate().filter(|(_, len)| **len > 0) {
            let before = at..at + (len as usize - 1) * each;
            teacher.ids.extend(repeat_n(rows.ids[row * width as usize], each));
            teacher.ids.extend_from_slice(&said[before.clone()]);
            teacher.shares.extend(once(1.0).chain(repeat_n(0.0, each - 1)));
            teacher.shares.extend_from_slice(&shares[before]);
            at += len as usize * each;
        }
        Ok((packed, teacher))
    }

    /// The one or the other: with the teacher where `labels` says how much of it.
    pub fn taught(
        &self,
        rows: &Rows<'_>,
        taps: &[usize],
        out: Kind,
        labels: Option<TopK>,
    ) -> Result<(Tensor, Option<Teacher>), ModelError> {
        Ok(match labels {
            None => (self.taps(rows, taps, out)?, None),
            Some(TopK::Likeliest(each)) => {
                let (hidden, said) = self.taps_and_likeliest(rows, taps, out, each as usize)?;
                (hidden, Some(Teacher::Likeliest(said)))
            }
            Some(TopK::All) => {
                let (hidden, states) = self.taps_and_last(rows, taps, out)?;
                (hidden, Some(Teacher::States(states)))
            }
        })
    }

    /// Taps, and what its head reads, `[tokens, hidden]`. Needs [`Depth::Whole`].
    pub fn taps_and_last(&self, rows: &Rows<'_>, taps: &[usize], out: Kind) -> Result<(Tensor, Tensor), ModelError> {
        let _no_grad = tch::no_grad_guard();
        let norm = self.final_norm()?;
        let (packed, x) = self.tapped(rows, taps, out, true)?;
        Ok((packed, rms_norm(&x, norm, self.config.rms_norm_eps)?.f_to_kind(out)?))
    }

    /// Weight of the norm before the head, `[hidden]`. Needs [`Depth::Whole`].
    pub fn final_norm(&self) -> Result<&Tensor, ModelError> {
        Ok(&self.top("the final norm needs")?.norm)
    }

    /// Taps of the real tokens, and the residual stream after the last layer that was computed: of the real tokens too where
    /// that is the target's last, of the padded rows where nobody reads it.
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
        let kept = |x: &Tensor| match &real {
            Some(real) => x.f_index_select(0, real),
            None => Ok(x.shallow_clone()),
        };
        let (mut x, table) = self.start(rows)?;
        let depth = if whole { self.layers.len() } else { last + 1 };
        for (index, layer) in self.layers.iter().enumerate().take(depth) {
            x = self.layer(layer, &x, &table, rows)?;
            for place in (0..taps.len()).filter(|&place| taps[place] == index) {
                packed.f_narrow(1, place as i64 * width, width)?.f_copy_(&kept(&x)?)?;
            }
        }
        let x = if whole { kept(&x)? } else { x };
        Ok((packed, x))
    }

    /// What lies above the layers, for whatever `needs` it.
    fn top(&self, needs: &str) -> Result<&Top, ModelError> {
        let missing = || ModelError::Input(format!("{needs} the whole target, but only its lower layers are loaded"));
        self.top.as_ref().ok_or_else(missing)
    }

    /// Logits of rows of the residual stream after the last layer.
    fn head(&self, top: &Top, x: &Tensor) -> Result<Tensor, ModelError> {
        linear(&rms_norm(x, &top.norm, self.config.rms_norm_eps)?, &top.head, None)
    }

    /// A whole forward with every intermediate result. Needs [`Depth::Whole`]. What stands on padding is arbitrary.
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

    /// Embeds the padded rows, `[rows * width, hidden]`, and makes their table of positions.
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
        // Rows are padded on the right, so a real token never sees padding under the causal mask alone.
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

    /// Adds what attention gathered, `[tokens, heads * head_dim]`, to the residual stream, and then the MLP.
    fn finish(&self, layer: &Layer, x: &Tensor, gathered: &Tensor) -> Result<Tensor, ModelError> {
        let x = x.f_add(&layer.o.apply(gathered)?)?;
        let inner = rms_norm(&x, &layer.post_norm, self.config.rms_norm_eps)?;
        let gated = layer.gate.apply(&inner)?.f_silu()?.f_mul(&layer.up.apply(&inner)?)?;
        Ok(x.f_add(&layer.down.apply(&gated)?)?)
    }
}
