//! Draft heads: the slots that predict, the modules behind the backbone, the loss, and the proposal of a block.
//!
//! Everything that depends on the head stands in this folder, in `hf::head` (configuration and tensors), and for DFlash 2
//! in `convolution`. A new head is a file here, a variant of [`HeadConfig`], and its keys.

pub mod dspark;
pub mod markov;
pub mod runs;
pub mod selector;

use super::anchors::{BlockLayout, Slots};
use super::{DraftOptions, Shared};
use crate::config::MissingLabel;
use crate::hf::draft::DraftConfig;
use crate::hf::head::HeadConfig;
use crate::model::ModelError;
use crate::model::batch::Packed;
use crate::model::loss::head_loss::Labels;
use crate::model::loss::soft_loss::{LossInput, LossSettings, LowRank, Projection, WeightedLoss, weighted_loss};
use crate::model::loss::{CeLabel, LossTerms};
use crate::model::ops::{HEAD_ROWS, argmax, linear, spans, wide};
use crate::model::params::ParamSet;
use draftmill_actors::messages::engine::MicroReport;
use tch::{Device, Tensor};

/// Options of the loss that do not depend on the slots' weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossOptions {
    pub terms: LossTerms,
    pub ce_label: CeLabel,
    /// Weight of the confidence head's loss in addition to the terms.
    pub confidence_weight: f64,
    /// Weight of the selector's loss in addition to the terms.
    pub selector_weight: f64,
    pub selector_missing: MissingLabel,
}

impl Default for LossOptions {
    fn default() -> LossOptions {
        LossOptions {
            terms: LossTerms::KL,
            ce_label: CeLabel::Labels,
            confidence_weight: 1.0,
            selector_weight: 1.0,
            selector_missing: MissingLabel::Skip,
        }
    }
}

/// Trained slots of a chunk of blocks, as a head's loss needs them.
pub struct HeadInput<'a> {
    pub config: &'a DraftConfig,
    pub params: &'a ParamSet,
    pub shared: &'a Shared,
    pub options: &'a DraftOptions,
    pub batch: &'a Packed<'a>,
    pub slots: &'a Slots,
    /// Final hidden states of the slots, `[slots, hidden]`.
    pub hidden: &'a Tensor,
}

impl HeadInput<'_> {
    /// True token before the label of each slot, `[slots]`.
    fn tokens_before(&self) -> Result<Tensor, ModelError> {
        let ids = self.slots.previous_tokens.iter().map(|&at| i64::from(self.batch.ids[at as usize]));
        Ok(Tensor::f_from_slice(&ids.collect::<Vec<_>>())?.f_to(self.hidden.device())?)
    }
}

/// Loss of a chunk, and gradients of its numerator.
pub struct HeadOutput {
    /// Sums of the chunk, without tokens and anchors.
    pub report: MicroReport,
    /// Gradient by the hidden states, `[slots, hidden]` in at least fp32.
    pub d_hidden: Tensor,
    /// Gradients of the head's own tensors, by name, in at least fp32.
    pub modules: Vec<(String, Tensor)>,
    /// True for each slot that predicts its label.
    pub correct: Vec<bool>,
}

/// Tokens that a drafter proposes after the anchor.
pub struct Proposal {
    pub tokens: Vec<u32>,
    /// Logits that each token was drawn from, `[tokens, vocab]`.
    pub logits: Tensor,
    /// Predicted acceptance of each token after accepted ones, if the head has a confidence head.
    pub confidence: Option<Vec<f64>>,
}

impl Proposal {
    /// Predicted probability that each token and all before it are accepted; empty without a confidence head.
    pub fn survival(&self) -> Vec<f64> {
        let product = |all: &mut f64, &own: &f64| {
            *all *= own;
            Some(*all)
        };
        self.confidence.iter().flatten().scan(1.0, product).collect()
    }

    /// Drops the tokens from the first one on whose survival is below `least`. The survival of a token depends on the tokens
    /// before it only, so sampled output keeps the target's distribution.
    ///
    /// # Errors
    /// Returns an error if libtorch fails.
    pub fn cut(mut self, least: f64) -> Result<Proposal, ModelError> {
        if let Some(kept) = self.survival().iter().position(|&survival| survival < least) {
            self.tokens.truncate(kept);
            self.logits = self.logits.f_narrow(0, 0, kept as i64)?;
            if let Some(confidence) = &mut self.confidence {
                confidence.truncate(kept);
            }
        }
        Ok(self)
    }
}

/// Function that draws a token from each row of `logits [rows, vocab]`.
pub type Draw<'a> = &'a mut dyn FnMut(&Tensor) -> Result<Vec<u32>, ModelError>;

/// Layout of a block: which position each slot predicts.
pub fn layout(config: &DraftConfig) -> BlockLayout {
    BlockLayout { size: config.block_size, from_anchor: config.head.predicts_from_anchor() }
}

/// Loss of the trained slots. Grad mode must be off.
///
/// # Errors
/// Returns an error if a tensor is absent or libtorch fails.
pub fn loss(input: &HeadInput<'_>) -> Result<HeadOutput, ModelError> {
    match input.config.head {
        HeadConfig::Dspark(config) => dspark::loss(input, &config),
        HeadConfig::Dflash2(config) => selector::loss(input, &config),
        HeadConfig::Dflash => plain_loss(input),
    }
}

/// Proposes at most `limit` tokens after the anchor `last` from the final hidden states of its block,
/// `[block_size, hidden]`.
///
/// # Errors
/// Returns the error of `draw`, or an error of libtorch.
pub fn propose(
    config: &DraftConfig,
    params: &ParamSet,
    shared: &Shared,
    hidden: &Tensor,
    last: u32,
    limit: usize,
    draw: Draw<'_>,
) -> Result<Proposal, ModelError> {
    let slots = config.proposed_tokens().min(limit) as i64;
    let hidden = hidden.f_narrow(0, config.head.first_slot() as i64, slots)?;
    match config.head {
        HeadConfig::Dspark(head) if slots > 0 => dspark::propose(&head, params, shared, &hidden, last, draw),
        HeadConfig::Dflash2(head) if slots > 0 => selector::propose(&head, params, shared, &hidden, last, draw),
        _ => {
            let logits = linear(&hidden, &shared.head, None)?;
            Ok(Proposal { tokens: draw(&logits)?, logits, confidence: None })
        }
    }
}

/// Loss through the target's head alone.
fn plain_loss(input: &HeadInput<'_>) -> Result<HeadOutput, ModelError> {
    output(input, terms_of(input, None, false)?, Vec::new())
}

/// Most likely token of every slot of every block given the true token before its label, from `hidden [blocks *
/// block_size, hidden]`. `previous` has that token for each slot.
///
/// # Errors
/// Returns an error if a tensor is absent or libtorch fails.
pub fn predict(
    config: &DraftConfig,
    params: &ParamSet,
    shared: &Shared,
    hidden: &Tensor,
    previous: &[i64],
) -> Result<Vec<u32>, ModelError> {
    let codes = match &config.head {
        HeadConfig::Dspark(head) => dspark::codes_of(head, params, hidden, previous, config.block_size)?,
        HeadConfig::Dflash | HeadConfig::Dflash2(_) => None,
    };
    let mut ids = Vec::new();
    for part in spans(hidden.size()[0], HEAD_ROWS) {
        if let HeadConfig::Dflash2(head) = &config.head {
            let previous = &previous[part.start as usize..(part.start + part.len) as usize];
            ids.extend(selector::predict(head, params, shared, &part.of(hidden, 0)?, previous)?);
            continue;
        }
        let mut logits = linear(&part.of(hidden, 0)?, &shared.head, None)?;
        if let Some((codes, rows)) = &codes {
            logits = logits.f_addmm_(&part.of(codes, 0)?, &rows.f_transpose(0, 1)?)?;
        }
        ids.extend(Vec::<i64>::try_from(argmax(&logits)?.f_to_device(Device::Cpu)?)?.into_iter().map(|id| id as u32));
    }
    Ok(ids)
}

/// Drafts one token after the other for the slots of `hidden [slots, D]`. `row` gives the logits of a slot, `[1, vocab]`,
/// from its hidden state and its logits through the target's head, `[1, ..]` each, and the token before.
fn draft_in_order(
    shared: &Shared,
    hidden: &Tensor,
    last: u32,
    draw: Draw<'_>,
    mut row: impl FnMut(&Tensor, Tensor, &Tensor) -> Result<Tensor, ModelError>,
) -> Result<Proposal, ModelError> {
    let logits = linear(hidden, &shared.head, None)?;
    let (mut tokens, mut rows) = (Vec::new(), Vec::new());
    let mut before = last;
    for slot in 0..hidden.size()[0] {
        let id = Tensor::f_from_slice(&[i64::from(before)])?.f_to(hidden.device())?;
        let row = row(&hidden.f_narrow(0, slot, 1)?, logits.f_narrow(0, slot, 1)?, &id)?;
        let drawn = draw(&row)?;
        rows.push(row);
        let Some(&token) = drawn.first() else { break };
        tokens.push(token);
        before = token;
    }
    Ok(Proposal { tokens, logits: Tensor::f_cat(&rows, 0)?, confidence: None })
}

/// Tensor `name` in at least fp32.
fn wide_tensor(params: &ParamSet, name: &str) -> Result<Tensor, ModelError> {
    let tensor = params.need(name)?;
    Ok(tensor.f_to_kind(wide(tensor.f_kind()?))?)
}

/// Loss of the configured terms. `bias` is a trainable part of the logits.
fn terms_of(input: &HeadInput<'_>, bias: Option<LowRank<'_>>, acceptance: bool) -> Result<WeightedLoss, ModelError> {
    let options = input.options;
    let labels = Labels::for_slots(input.slots, input.batch.target_labels, &input.shared.head)?;
    let settings =
        LossSettings { terms: options.loss.terms, ce_label: options.loss.ce_label, weighting: options.weighting };
    let input = LossInput {
        hidden: input.hidden,
        projection: Projection { head: &input.shared.head, bias },
        labels: &labels,
        slots: input.slots,
        block_size: input.config.block_size,
    };
    weighted_loss(&input, &settings, options.tile, acceptance)
}

fn output(input: &HeadInput<'_>, loss: WeightedLoss, modules: Vec<(String, Tensor)>) -> Result<HeadOutput, ModelError> {
    let correct = Vec::<bool>::try_from(&loss.correct.f_to_device(Device::Cpu)?)?;
    let runs = runs::leading_runs(&input.slots.indices, &correct, &layout(input.config));
    let report = MicroReport {
        loss_numerator: loss.numerator,
        loss_denominator: loss.denominator,
        correct: correct.iter().filter(|&&right| right).count() as f64,
        supervised: input.slots.indices.len() as f64,
        run_tokens: runs.tokens as f64,
        run_blocks: runs.blocks as f64,
        ..MicroReport::default()
    };
    Ok(HeadOutput { report, d_hidden: loss.gradient, modules, correct })
}
