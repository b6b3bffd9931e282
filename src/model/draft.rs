//! The drafter as it trains: one flat list of blocks, no dead ones, and the loss behind the head in chunks.

use super::ModelError;
use super::anchors::Anchors;
use super::batch::Packed;
use super::blocks::Blocks;
use super::load::weight;
use super::loss::{Labels, Tile, head_loss};
use super::ops::wide;
use super::params::{Gradient, ParamSet, Weights};
use super::pass::Pass;
use super::rope::Rope;
use super::weighting::{Weighting, d_pace};
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

/// How a drafter computes, and how much each slot counts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DraftOptions {
    /// Number type of activations: fp32 or bf16, with weights and gradients in fp32; or fp64 throughout, for tests.
    pub kind: Kind,
    pub device: Device,
    pub weighting: Weighting,
    /// Logits that are held at once.
    pub tile: Tile,
    /// Slots that attend together.
    pub group_slots: usize,
    /// Keep no more than each layer's input for the backward pass, and compute the layer again there.
    pub recompute: bool,
}

impl DraftOptions {
    /// fp32 without decay, in chunks that suit CPUs and GPUs alike.
    pub fn new(device: Device) -> DraftOptions {
        let tile = Tile { slots: 1024, tokens: 2048 };
        let weighting = Weighting::Decay(None);
        DraftOptions { kind: Kind::Float, device, weighting, tile, group_slots: 256, recompute: false }
    }
}

/// A DFlash drafter on one device. Weights are kept in fp32 and cast inside each forward.
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
        if !matches!(options.kind, Kind::Float | Kind::BFloat16 | Kind::Double) {
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

    /// The weights themselves: reading them is free, writing them changes the next forward.
    pub fn params(&self) -> &ParamSet {
        &self.params
    }

    /// Replaces the weights. They must have the drafter's names and shapes.
    pub fn load_weights(&mut self, weights: Weights) -> Result<(), ModelError> {
        self.params = kept(&self.config, weights, &self.options)?;
        Ok(())
    }

    /// Weighted loss over the supervised slots of all blocks, and the gradient of its *numerator* with respect
    /// to every weight. `None` where nothing is supervised.
    pub fn loss_and_gradient(
        &self,
        batch: &Packed<'_>,
        anchors: &Anchors,
    ) -> Result<(MicroReport, Option<Gradient>), ModelError> {
        self.check(batch, anchors)?;
        let (tokens, count) = (batch.ids.len() as u64, anchors.count() as u64);
        let size = self.config.block_size;
        let slots = anchors.slots(batch, size, self.options.weighting.gamma());
        if slots.places.is_empty() {
            return Ok((MicroReport { anchors: count, tokens, ..MicroReport::default() }, None));
        }
        let device = self.options.device;
        let places = Tensor::f_from_slice(&slots.places)?.f_to(device)?;

        let _no_grad = tch::no_grad_guard();
        let blocks = self.blocks(batch, anchors)?;
        let pass = Pass::new(&self.config, &self.params, &blocks, &self.options)?;
        let (hidden, tape) = pass.forward(self.shared.embedding.f_index_select(0, &blocks.ids)?, &places)?;
        let labels = Labels::of(&slots, batch.teacher, &self.shared.head)?;
        let mut loss = head_loss(&hidden, &self.shared.head, &labels, self.options.tile)?;
        let weights = match self.options.weighting {
            Weighting::Decay(_) => Tensor::f_from_slice(&slots.weights)?.f_to(device)?,
            Weighting::DPace(alpha) => d_pace(&loss.surprise, &places, size as i64, alpha)?,
        };
        let d_hidden = loss.gradient.f_mul_(&weights.f_unsqueeze(1)?)?;
        let gradient = pass.backward(tape, &d_hidden, &self.params)?;

        let numerator = loss.losses.f_mul(&weights)?.f_sum(Kind::Double)?.f_double_value(&[])?;
        let correct = loss.correct.f_sum(Kind::Int64)?.f_int64_value(&[])?;
        let report = MicroReport {
            loss_numerator: numerator,
            // D-PACE's weights are no share of anything: there it is the number of slots, over all drafters alike.
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
        let blocks = self.blocks(batch, anchors)?;
        let pass = Pass::new(&self.config, &self.params, &blocks, &self.options)?;
        pass.hidden(self.shared.embedding.f_index_select(0, &blocks.ids)?)
    }

    fn blocks(&self, batch: &Packed<'_>, anchors: &Anchors) -> Result<Blocks, ModelError> {
        Blocks::new(&self.config, &self.rope, batch, anchors, self.options.group_slots, self.options.kind)
    }

    fn check(&self, batch: &Packed<'_>, anchors: &Anchors) -> Result<(), ModelError> {
        let DraftConfig { target_layer_ids, hidden_size, vocab_size, .. } = &self.config;
        batch.check(target_layer_ids.len(), *hidden_size, *vocab_size)?;
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
}

/// Checks names and shapes, and puts weights on `device` in the number type that they are kept in.
fn kept(config: &DraftConfig, weights: Weights, options: &DraftOptions) -> Result<ParamSet, ModelError> {
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
        pairs.push((name, tensor.f_detach()?.f_to_device_(options.device, wide(options.kind), false, false)?));
    }
    Ok(ParamSet::new(pairs))
}
