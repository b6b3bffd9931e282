//! Drafter in training: a flat list of blocks without padding, and a loss in tiles of the vocabulary.

pub mod anchors;
pub mod blocks;
mod convolution;
mod fused;
pub mod head;
pub mod held_out;
#[cfg(any(test, feature = "testing"))]
pub mod infer;
pub mod layers;
pub mod least_squares_init;
mod parallel;
#[cfg(any(test, feature = "testing"))]
pub mod reference;

use self::anchors::Anchors;
use self::blocks::Blocks;
use self::fused::{Context, FusedDrafter, Gradients, WeightGradients};
use self::head::{HeadInput, HeadOutput, LossOptions};
use self::parallel::map_on_threads;
use super::ModelError;
use super::batch::Packed;
use super::load::weight;
use super::loss::head_loss::Tile;
use super::loss::weighting::Weighting;
use super::ops::wide;
use super::params::{Gradient, ParamSet, Weights};
use super::rope::Rope;
use crate::config::WindowStart;
use crate::hf::config::{RopeScaling, TargetConfig};
use crate::hf::draft::DraftConfig;
use crate::hf::tensors::TensorFiles;
use draftmill_actors::messages::engine::MicroReport;
use tch::{Device, Kind, Tensor};

/// Frozen embedding and head of the target, `[vocab, hidden]` each, in the drafter's compute dtype.
pub struct Shared {
    pub embedding: Tensor,
    pub head: Tensor,
}

/// Attention implementation for the context that all slots of a group see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionBackend {
    /// libtorch's attention kernels, which store no scores; plain products for dtypes without a kernel.
    Kernel,
    /// Plain products, which store the scores of one group at a time.
    Plain,
}

/// Compute options of a drafter, and the weighting of its loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DraftOptions {
    /// Dtype of activations: fp32 or bf16, with weights and gradients in fp32; or fp64 throughout, for tests.
    pub kind: Kind,
    pub device: Device,
    pub weighting: Weighting,
    pub loss: LossOptions,
    /// Tile of logits that is held at once.
    pub tile: Tile,
    /// Limit on the slots of an attention group.
    pub group_slots: usize,
    pub attention: AttentionBackend,
    /// Start of a sliding layer's window in training.
    pub window_start: WindowStart,
    /// Saves only each layer's input for the backward pass, and recomputes the layer there.
    pub recompute: bool,
}

impl DraftOptions {
    /// Defaults: fp32, no decay, and chunk sizes that suit CPUs and GPUs.
    pub fn new(device: Device) -> DraftOptions {
        let tile = Tile { slots: 1024, tokens: 2048 };
        let weighting = Weighting::Decay(None);
        // On a CPU stored scores fit into the cache, and the kernel was not measurably faster (benches/README.md).
        let attention = if device.is_cuda() { AttentionBackend::Kernel } else { AttentionBackend::Plain };
        DraftOptions {
            kind: Kind::Float,
            device,
            weighting,
            loss: LossOptions::default(),
            tile,
            group_slots: 256,
            attention,
            window_start: WindowStart::Slot,
            recompute: false,
        }
    }
}

/// Drafter on one device. Weights are kept in fp32 and cast in each forward.
pub struct Drafter {
    config: DraftConfig,
    shared: Shared,
    options: DraftOptions,
    rope: Rope,
    params: ParamSet,
}

impl Shared {
    /// Loads both from a target's weights; a tied head is the embedding.
    ///
    /// # Errors
    /// Returns an error if a tensor is absent or has another shape.
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
    /// Creates a drafter without weights: see [`Drafter::load_weights`].
    ///
    /// # Errors
    /// Returns an error if the configuration is invalid, the dtype is not supported, or a shared table does not fit.
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

    /// Replaces the loss of later batches.
    pub fn set_loss(&mut self, loss: LossOptions) {
        self.options.loss = loss;
    }

    pub fn shared(&self) -> &Shared {
        &self.shared
    }

    pub fn rope(&self) -> &Rope {
        &self.rope
    }

    /// Weights in place: reading is free, and a write affects the next forward.
    pub fn params(&self) -> &ParamSet {
        &self.params
    }

    /// Replaces the weights.
    ///
    /// # Errors
    /// `ModelError::Input` if names or shapes differ from the configuration's.
    pub fn load_weights(&mut self, weights: Weights) -> Result<(), ModelError> {
        self.params = checked_params(&self.config, weights, &self.options)?;
        Ok(())
    }

    /// Weighted loss over the supervised slots of all blocks, and the gradient of its *numerator* with respect to every
    /// weight. The gradient is `None` if nothing is supervised.
    ///
    /// # Errors
    /// Returns an error if the batch or the anchors do not fit the drafter, or libtorch fails.
    pub fn loss_and_gradient(
        &self,
        batch: &Packed<'_>,
        anchors: &Anchors,
    ) -> Result<(MicroReport, Option<Gradient>), ModelError> {
        self.check(batch, anchors)?;
        let _no_grad = tch::no_grad_guard();
        let weights = fused::Weights::new(&self.config, &self.params, self.options.kind)?;
        let context = Context::new(batch, anchors, &weights, self.config.rms_norm_eps)?;
        let count = self.thread_count(anchors);
        let chunks: Vec<Anchors> = (0..count).map(|number| anchors.chunk(number, count)).collect();
        // SAFETY: each call creates its own tensors from weights, context and features, and writes to none of these.
        let trained = unsafe {
            map_on_threads(&chunks, |chunk| self.chunk_loss_and_gradient(batch, chunk, &weights, context.as_ref()))
        }?;

        let mut total = MicroReport { tokens: batch.ids.len() as u64, ..MicroReport::default() };
        let (mut sum, mut d_context) = (None::<WeightGradients>, None);
        for (chunk, (report, gradients)) in chunks.iter().zip(trained) {
            total.add(&report);
            let Some(Gradients { weights, context: of_context }) = gradients else { continue };
            match &mut sum {
                None => sum = Some(weights),
                Some(sum) => sum.add(weights)?,
            }
            if let (Some(context), Some(part)) = (&context, of_context) {
                context.add(&mut d_context, chunk, part)?;
            }
        }
        let Some(sum) = sum else { return Ok((total, None)) };
        let of_context = match (&context, &d_context) {
            (Some(context), Some(gradient)) => Some(context.backward(gradient, &weights)?),
            _ => None,
        };
        Ok((total, Some(sum.into_gradient(of_context, &self.config, &self.params)?)))
    }

    /// Final hidden states of every slot, `[blocks * block_size, hidden]`, block after block. Without gradients.
    ///
    /// # Errors
    /// Returns an error if the batch or the anchors do not fit the drafter, or libtorch fails.
    pub fn hidden(&self, batch: &Packed<'_>, anchors: &Anchors) -> Result<Tensor, ModelError> {
        self.check(batch, anchors)?;
        let _no_grad = tch::no_grad_guard();
        let weights = fused::Weights::new(&self.config, &self.params, self.options.kind)?;
        let context = Context::new(batch, anchors, &weights, self.config.rms_norm_eps)?;
        let blocks = self.blocks(batch, anchors)?;
        let fused = self.fused(&blocks, anchors, &weights, context.as_ref())?;
        fused.hidden(self.shared.embedding.f_index_select(0, &blocks.ids)?)
    }

    /// Loss and gradients of a chunk of blocks; no gradients if none of their slots is supervised. Does not count
    /// tokens, which chunks share.
    fn chunk_loss_and_gradient(
        &self,
        batch: &Packed<'_>,
        anchors: &Anchors,
        weights: &fused::Weights,
        context: Option<&Context>,
    ) -> Result<(MicroReport, Option<Gradients>), ModelError> {
        // Set on each thread, as grad mode is thread-local.
        let _no_grad = tch::no_grad_guard();
        let mut report = MicroReport { anchors: anchors.count() as u64, ..MicroReport::default() };
        let slots = anchors.slots(batch, head::layout(&self.config), self.options.weighting.gamma());
        if slots.indices.is_empty() {
            return Ok((report, None));
        }
        let device = self.options.device;
        let indices = Tensor::f_from_slice(&slots.indices)?.f_to(device)?;
        let blocks = self.blocks(batch, anchors)?;
        let fused = self.fused(&blocks, anchors, weights, context)?;
        let (hidden, tape) = fused.forward(self.shared.embedding.f_index_select(0, &blocks.ids)?, &indices)?;
        let input = HeadInput {
            config: &self.config,
            params: &self.params,
            shared: &self.shared,
            options: &self.options,
            batch,
            slots: &slots,
            hidden: &hidden,
        };
        let HeadOutput { report: of_head, d_hidden, modules, .. } = head::loss(&input)?;
        let mut gradients = fused.backward(tape, &d_hidden)?;
        gradients.weights.head = modules;
        report.add(&of_head);
        Ok((report, Some(gradients)))
    }

    /// Number of threads for these blocks: 1 on a GPU; on a CPU as many as can fill a group of slots each.
    pub fn thread_count(&self, anchors: &Anchors) -> usize {
        let most = anchors.count() / (self.options.group_slots / self.config.block_size).max(1);
        let threads = if self.options.device == Device::Cpu { tch::get_num_threads() } else { 1 };
        usize::try_from(threads).unwrap_or(1).min(most).max(1)
    }

    fn blocks(&self, batch: &Packed<'_>, anchors: &Anchors) -> Result<Blocks, ModelError> {
        Blocks::new(&self.config, &self.rope, batch, anchors, &self.options)
    }

    fn fused<'a>(
        &'a self,
        blocks: &'a Blocks,
        anchors: &Anchors,
        weights: &'a fused::Weights,
        context: Option<&Context>,
    ) -> Result<FusedDrafter<'a>, ModelError> {
        let seen = context.map(|context| context.of_chunk(anchors)).transpose()?.flatten();
        FusedDrafter::new(&self.config, weights, blocks, seen, &self.options)
    }

    fn check(&self, batch: &Packed<'_>, anchors: &Anchors) -> Result<(), ModelError> {
        let DraftConfig { target_layer_ids, hidden_size, vocab_size, .. } = &self.config;
        batch.check(target_layer_ids.len(), *hidden_size, *vocab_size)?;
        anchors.check(batch.lengths)?;
        if self.params.is_empty() {
            return Err(ModelError::Input("the drafter has no weights; load them first".into()));
        }
        if batch.hidden.device() != self.options.device {
            let (found, want) = (batch.hidden.device(), self.options.device);
            return Err(ModelError::Input(format!("the features are on {found:?}, but the drafter is on {want:?}")));
        }
        Ok(())
    }
}

/// Checks names and shapes, and moves weights to the drafter's device and weight dtype.
fn checked_params(config: &DraftConfig, weights: Weights, options: &DraftOptions) -> Result<ParamSet, ModelError> {
    let shapes = config.tensor_shapes();
    if weights.len() != shapes.len() {
        let (have, want) = (weights.len(), shapes.len());
        return Err(ModelError::Input(format!("the drafter has {want} tensors, but {have} were given")));
    }
    for (name, tensor) in weights.iter() {
        let want = shapes.get(name).map(|shape| shape.iter().map(|&n| n as i64).collect::<Vec<_>>());
        let found = tensor.size();
        if want.as_ref() != Some(&found) {
            return Err(ModelError::Input(format!("the drafter's `{name}` is {found:?}, but it should be {want:?}")));
        }
    }
    let (device, kind) = (options.device, wide(options.kind));
    let fits = |tensor: &Tensor| tensor.device() == device && tensor.kind() == kind && !tensor.requires_grad();
    if weights.tensors().iter().all(fits) { Ok(weights) } else { weights.deep_copy(device, kind) }
}
