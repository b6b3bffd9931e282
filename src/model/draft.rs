//! The drafter as it trains: one flat list of blocks, no dead ones, and the loss behind the head in chunks.

use super::anchors::Anchors;
use super::batch::Packed;
use super::blocks::{Blocks, View};
use super::layers::{Layer, Layers};
use super::load::weight;
use super::loss::head_loss;
use super::ops::{GradGuard, attention};
use super::params::{Gradient, ParamSet, Weights};
use super::rope::Rope;
use super::{ModelError, rope::RopeTable};
use crate::hf::config::{RopeScaling, TargetConfig};
use crate::hf::draft::DraftConfig;
use crate::hf::tensors::TensorFiles;
use draftmill_actors::engine::MicroReport;
use tch::{Device, Kind, Tensor};

/// The target's embedding and head, frozen, `[vocab, hidden]` each, in the number type that the drafter computes in.
pub struct Shared {
    pub embedding: Tensor,
    pub head: Tensor,
}

/// How a drafter computes; none of it changes what it computes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DraftOptions {
    /// Number type of activations: fp32 or bf16. Weights and gradients are fp32 in any case.
    pub kind: Kind,
    pub device: Device,
    /// Decay of the loss along the block (`reference/dflash.md` section 3.5); `None` or 0 for none.
    pub loss_decay_gamma: Option<f64>,
    /// Slots whose logits are held at once.
    pub head_rows: usize,
    /// Slots that attend together.
    pub group_slots: usize,
}

impl DraftOptions {
    /// fp32 without decay, in chunks that suit CPUs and GPUs alike.
    pub fn new(device: Device) -> DraftOptions {
        DraftOptions { kind: Kind::Float, device, loss_decay_gamma: None, head_rows: 256, group_slots: 256 }
    }
}

/// A DFlash drafter on one device. Weights are fp32 leaves of autograd, cast inside each forward.
pub struct Drafter {
    config: DraftConfig,
    shared: Shared,
    options: DraftOptions,
    rope: Rope,
    params: ParamSet,
}

impl Shared {
    /// Reads both from a target's weights; a tied head is the embedding.
    pub fn load(target: &TargetConfig, files: &TensorFiles, kind: Kind, device: Device) -> Result<Shared, ModelError> {
        let shape = [target.vocab_size, target.hidden_size];
        let embedding = weight(files, "model.embed_tokens.weight", &shape, kind, device)?;
        let head = if target.tie_word_embeddings {
            embedding.shallow_clone()
        } else {
            weight(files, "lm_head.weight", &shape, kind, device)?
        };
        Ok(Shared { embedding, head })
    }
}

impl Drafter {
    /// Without weights as yet: see [`Drafter::load_weights`].
    pub fn new(config: DraftConfig, shared: Shared, options: DraftOptions) -> Result<Drafter, ModelError> {
        config.validate()?;
        if !matches!(options.kind, Kind::Float | Kind::BFloat16) {
            return Err(ModelError::Input(format!("a drafter computes in fp32 or bf16, not in {:?}", options.kind)));
        }
        let want = [config.vocab_size as i64, config.hidden_size as i64];
        for (name, table) in [("embedding", &shared.embedding), ("head", &shared.head)] {
            if table.size() != want || table.f_kind()? != options.kind || table.device() != options.device {
                return Err(ModelError::Input(format!(
                    "the target's {name} is {:?} of {:?} on {:?}, but the drafter needs {want:?} of {:?} on {:?}",
                    table.size(),
                    table.f_kind()?,
                    table.device(),
                    options.kind,
                    options.device
                )));
            }
        }
        let rope = Rope::new(config.head_dim, config.rope_theta, RopeScaling::None, options.device)?;
        Ok(Drafter { config, shared, options, rope, params: ParamSet::new(Vec::new()) })
    }

    pub fn config(&self) -> &DraftConfig {
        &self.config
    }

    pub fn options(&self) -> &DraftOptions {
        &self.options
    }

    pub fn shared(&self) -> &Shared {
        &self.shared
    }

    pub fn rope(&self) -> &Rope {
        &self.rope
    }

    /// The leaves themselves: reading them is free, writing them changes the next forward.
    pub fn params(&self) -> &ParamSet {
        &self.params
    }

    /// Replaces the weights. They must have the drafter's names and shapes.
    pub fn load_weights(&mut self, weights: Weights) -> Result<(), ModelError> {
        self.params = leaves(&self.config, weights, self.options.device)?;
        Ok(())
    }

    /// Weighted cross-entropy over the supervised slots of all blocks, and the gradient of its *numerator* with respect
    /// to every weight, in fp32. `None` where nothing is supervised.
    pub fn loss_and_gradient(
        &self,
        batch: &Packed<'_>,
        anchors: &Anchors,
    ) -> Result<(MicroReport, Option<Gradient>), ModelError> {
        self.check(batch, anchors)?;
        let (tokens, count) = (batch.ids.len() as u64, anchors.count() as u64);
        let slots = anchors.slots(batch, self.config.block_size, self.options.loss_decay_gamma);
        if slots.places.is_empty() {
            return Ok((MicroReport { anchors: count, tokens, ..MicroReport::default() }, None));
        }
        let device = self.options.device;
        let places = Tensor::f_from_slice(&slots.places)?.f_to(device)?;
        let labels = Tensor::f_from_slice(&slots.labels)?.f_to(device)?;
        let weights = Tensor::f_from_slice(&slots.weights)?.f_to(device)?;

        let _grad = GradGuard::enable();
        let layers = Layers::new(&self.config, &self.params, self.options.kind)?;
        let x = self.residual(&layers, batch, anchors)?;
        let hidden = layers.normed(&x.f_index_select(0, &places)?)?;
        let loss = {
            let _no_grad = tch::no_grad_guard();
            head_loss(&hidden.f_detach()?, &self.shared.head, &labels, &weights, self.options.head_rows as i64)?
        };
        // The head's gradient is known, so the sum below has the loss's gradient and none of its memory.
        let lever = hidden.f_to_kind(Kind::Float)?.f_mul(&loss.gradient)?.f_sum(Kind::Float)?;
        let gradient = self.differentiate(&lever)?;

        let numerator = loss.losses.f_mul(&weights)?.f_sum(Kind::Double)?.f_double_value(&[])?;
        let correct = loss.predicted.f_eq_tensor(&labels)?.f_sum(Kind::Int64)?.f_int64_value(&[])?;
        let report = MicroReport {
            loss_numerator: numerator,
            loss_denominator: slots.weights.iter().map(|&weight| f64::from(weight)).sum(),
            correct: correct as f64,
            supervised: slots.places.len() as f64,
            anchors: count,
            tokens,
        };
        Ok((report, Some(gradient)))
    }

    /// What the head sees of every slot, `[blocks * block_size, hidden]`, block after block. Without gradients.
    pub fn hidden(&self, batch: &Packed<'_>, anchors: &Anchors) -> Result<Tensor, ModelError> {
        self.check(batch, anchors)?;
        let _no_grad = tch::no_grad_guard();
        let layers = Layers::new(&self.config, &self.params, self.options.kind)?;
        layers.normed(&self.residual(&layers, batch, anchors)?)
    }

    /// The residual stream of all slots after the last layer.
    fn residual(&self, layers: &Layers, batch: &Packed<'_>, anchors: &Anchors) -> Result<Tensor, ModelError> {
        let (rope, kind) = (&self.rope, self.options.kind);
        let blocks = Blocks::new(&self.config, rope, batch, anchors, self.options.group_slots, kind)?;
        let context = blocks.context.as_ref().map(|hidden| layers.context(hidden)).transpose()?;
        let mut x = self.shared.embedding.f_index_select(0, &blocks.ids)?;
        for (layer, &layer_type) in layers.layers.iter().zip(&self.config.layer_types) {
            let source = context.as_ref().map(|context| (context, &blocks.context_table));
            let gathered = gather(layer, &x, &blocks.slot_table, source, blocks.views(layer_type))?;
            x = layer.finish(&x, &gathered)?;
        }
        Ok(x)
    }

    fn check(&self, batch: &Packed<'_>, anchors: &Anchors) -> Result<(), ModelError> {
        let width = self.config.target_layer_ids.len() * self.config.hidden_size;
        batch.check(width, self.config.vocab_size)?;
        anchors.check(batch.lengths)?;
        if self.params.is_empty() {
            return Err(ModelError::Input("the drafter has no weights yet; load some first".into()));
        }
        if batch.hidden.device() != self.options.device {
            let (found, want) = (batch.hidden.device(), self.options.device);
            return Err(ModelError::Input(format!("features lie on {found:?}, but the drafter on {want:?}")));
        }
        Ok(())
    }

    /// Gradients of a scalar for every weight. Nothing is left on the leaves, so that a failure leaves no trace.
    fn differentiate(&self, scalar: &Tensor) -> Result<Gradient, ModelError> {
        let gradients = Tensor::f_run_backward(&[scalar], self.params.tensors(), false, false)?;
        let mut pairs = Vec::with_capacity(self.params.len());
        for ((name, leaf), gradient) in self.params.iter().zip(gradients) {
            // Without any visible context its weights take no part, and libtorch gives them no gradient.
            let gradient = if gradient.defined() { gradient } else { leaf.f_zeros_like()? };
            pairs.push((name.to_string(), gradient.f_detach()?));
        }
        Ok(ParamSet::new(pairs))
    }
}

/// Attention of all slots over their context and their own blocks, `[slots, heads * head_dim]`.
fn gather(
    layer: &Layer,
    x: &Tensor,
    slot_table: &RopeTable,
    context: Option<(&Tensor, &RopeTable)>,
    views: &[View],
) -> Result<Tensor, ModelError> {
    let inner = layer.inner(x)?;
    let queries = layer.queries(&inner, slot_table)?;
    let own = layer.keys_values(&inner, slot_table)?;
    let before = context.map(|(context, table)| layer.keys_values(context, table)).transpose()?;
    let by_head = |x: &Tensor| x.f_unsqueeze(0)?.f_transpose(1, 2);
    let mut parts = Vec::with_capacity(views.len());
    for view in views {
        let visible = |before: Option<&Tensor>, own: &Tensor| -> Result<Tensor, ModelError> {
            let own = own.f_narrow(0, view.slot, view.slots)?;
            let both = match before.filter(|_| view.len > 0) {
                Some(before) => Tensor::f_cat(&[before.f_narrow(0, view.start, view.len)?, own], 0)?,
                None => own,
            };
            Ok(by_head(&both)?)
        };
        let keys = visible(before.as_ref().map(|(keys, _)| keys), &own.0)?;
        let values = visible(before.as_ref().map(|(_, values)| values), &own.1)?;
        let queries = by_head(&queries.f_narrow(0, view.slot, view.slots)?)?;
        let mixed = attention(&queries, &keys, &values, Some(&view.mask), false)?;
        parts.push(mixed.f_transpose(1, 2)?.f_reshape([view.slots, -1])?);
    }
    Ok(Tensor::f_cat(&parts, 0)?)
}

/// Checks names and shapes, and turns weights into fp32 leaves on `device`.
fn leaves(config: &DraftConfig, weights: Weights, device: Device) -> Result<ParamSet, ModelError> {
    let shapes = config.tensor_shapes();
    if weights.len() != shapes.len() {
        let (have, want) = (weights.len(), shapes.len());
        return Err(ModelError::Input(format!("the drafter has {want} tensors, but {have} were given")));
    }
    let mut pairs = Vec::with_capacity(weights.len());
    for (name, tensor) in weights.into_pairs() {
        let want = shapes.get(&name).map(|shape| shape.iter().map(|&n| n as i64).collect::<Vec<_>>());
        let found = tensor.size();
        if want.as_ref() != Some(&found) {
            return Err(ModelError::Input(format!("the drafter's `{name}` is {found:?}, but it should be {want:?}")));
        }
        let leaf = tensor.f_detach()?.f_to_device_(device, Kind::Float, false, false)?.f_set_requires_grad(true)?;
        pairs.push((name, leaf));
    }
    Ok(ParamSet::new(pairs))
}
