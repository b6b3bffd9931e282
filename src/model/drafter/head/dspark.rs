//! DSpark: a block drafted from left to right through a Markov head, with a predicted acceptance (docs/heads.md#dspark).

use super::markov::{Markov, MarkovGradients};
use super::{Draw, HeadInput, HeadOutput, Proposal, draft_in_order, output, terms_of, wide_tensor};
use crate::hf::head::{CONFIDENCE, CONFIDENCE_BIAS, ConfidenceInput, DsparkConfig};
use crate::model::ModelError;
use crate::model::drafter::Shared;
use crate::model::loss::soft_loss::{LowRank, LowRankGradient};
use crate::model::params::ParamSet;
use tch::{Kind, Tensor};

/// Confidence head: `w . [h ; e] + b` or `w . h + b`, whose sigmoid predicts the acceptance of a slot.
struct Confidence {
    weight: Tensor,
    bias: Tensor,
    input: ConfidenceInput,
}

/// Loss of the terms and of the confidence head, with the same slot weights and one denominator.
///
/// # Errors
/// Returns an error if a tensor is absent or libtorch fails.
pub fn loss(input: &HeadInput<'_>, config: &DsparkConfig) -> Result<HeadOutput, ModelError> {
    let (hidden, slots) = (input.hidden, input.slots);
    let previous = input.tokens_before()?;
    let markov = Markov::load(config, input.params)?;
    let codes = match &markov {
        Some(markov) => Some(markov.forward(hidden, &previous, &slots.indices, input.config.block_size)?),
        None => None,
    };
    let confidence = Confidence::load(config, input.params)?;

    let kind = hidden.f_kind()?;
    let factors = match (&markov, &codes) {
        (Some(markov), Some(codes)) => Some((codes.codes.f_to_kind(kind)?, markov.rows().f_to_kind(kind)?)),
        _ => None,
    };
    let bias = factors.as_ref().map(|(codes, rows)| LowRank { codes, rows });
    let mut loss = terms_of(input, bias, confidence.is_some())?;
    let mut modules = Vec::new();
    let mut d_embeddings = None;
    if let (Some(confidence), Some(acceptance)) = (&confidence, &loss.acceptance) {
        let embeddings = codes.as_ref().map(|codes| &codes.embeddings);
        let features = confidence.features(hidden, embeddings)?;
        let logits = confidence.logits(&features)?;
        let weights = loss.weights.f_mul_scalar(input.options.loss.confidence_weight)?;
        let losses = logits
            .f_clamp_min(0.0)?
            .f_sub(&logits.f_mul(acceptance)?)?
            .f_add_(&logits.f_abs()?.f_neg()?.f_exp()?.f_log1p()?)?;
        loss.numerator += losses.f_mul(&weights)?.f_sum(Kind::Double)?.f_double_value(&[])?;
        let d_logits = logits.f_sigmoid()?.f_sub_(acceptance)?.f_mul_(&weights)?.f_unsqueeze(1)?;
        modules.push((CONFIDENCE.to_owned(), d_logits.f_transpose(0, 1)?.f_mm(&features)?));
        modules.push((CONFIDENCE_BIAS.to_owned(), d_logits.f_sum_dim_intlist(&[0i64][..], false, d_logits.f_kind()?)?));
        let d_features = d_logits.f_mm(&confidence.weight)?;
        let width = hidden.size()[1];
        loss.gradient = loss.gradient.f_add_(&d_features.f_narrow(1, 0, width)?)?;
        let rest = d_features.size()[1] - width;
        d_embeddings = (rest > 0).then(|| d_features.f_narrow(1, width, rest)).transpose()?;
    }
    if let (Some(markov), Some(codes), Some(LowRankGradient { codes: d_codes, rows })) =
        (&markov, &codes, loss.bias.take())
    {
        let MarkovGradients { hidden, weights } = markov.backward(codes, &d_codes, d_embeddings, rows)?;
        if let Some(hidden) = hidden {
            loss.gradient = loss.gradient.f_add_(&hidden)?;
        }
        modules.extend(weights);
    }
    output(input, loss, modules)
}

/// Codes and rows of the bias for every slot of every block in the dtype of `hidden`; `None` for rank 0.
///
/// # Errors
/// Returns an error if a tensor is absent or libtorch fails.
pub fn codes_of(
    config: &DsparkConfig,
    params: &ParamSet,
    hidden: &Tensor,
    previous: &[i64],
    block_size: usize,
) -> Result<Option<(Tensor, Tensor)>, ModelError> {
    let Some(markov) = Markov::load(config, params)? else { return Ok(None) };
    let indices: Vec<i64> = (0..previous.len() as i64).collect();
    let previous = Tensor::f_from_slice(previous)?.f_to(hidden.device())?;
    let codes = markov.forward(hidden, &previous, &indices, block_size)?.codes;
    let kind = hidden.f_kind()?;
    Ok(Some((codes.f_to_kind(kind)?, markov.rows().f_to_kind(kind)?)))
}

/// Drafts one token after the other: each is drawn from the logits of its slot with the bias of the token before.
///
/// # Errors
/// Returns the error of `draw`, or an error of libtorch.
pub fn propose(
    config: &DsparkConfig,
    params: &ParamSet,
    shared: &Shared,
    hidden: &Tensor,
    last: u32,
    draw: Draw<'_>,
) -> Result<Proposal, ModelError> {
    let (markov, confidence) = (Markov::load(config, params)?, Confidence::load(config, params)?);
    let mut predicted = Vec::new();
    let mut state = markov.as_ref().map(Markov::begin);
    let proposal = draft_in_order(shared, hidden, last, draw, |own, mut row, before| {
        let mut embedding = None;
        if let (Some(markov), Some(state)) = (&markov, &mut state) {
            let known = markov.embed(before)?;
            let codes = markov.next(state, own, &known)?;
            row = row.f_add(&codes.f_mm(&markov.rows().f_transpose(0, 1)?)?.f_to_kind(row.f_kind()?)?)?;
            embedding = Some(known);
        }
        if let Some(confidence) = &confidence {
            let logit = confidence.logits(&confidence.features(own, embedding.as_ref())?)?;
            predicted.push(logit.f_sigmoid()?.f_double_value(&[0])?);
        }
        Ok(row)
    })?;
    Ok(Proposal { confidence: confidence.map(|_| predicted), ..proposal })
}

impl Confidence {
    fn load(config: &DsparkConfig, params: &ParamSet) -> Result<Option<Confidence>, ModelError> {
        let Some(input) = config.confidence else { return Ok(None) };
        let get = |name| wide_tensor(params, name);
        Ok(Some(Confidence { weight: get(CONFIDENCE)?, bias: get(CONFIDENCE_BIAS)?, input }))
    }

    fn features(&self, hidden: &Tensor, embeddings: Option<&Tensor>) -> Result<Tensor, ModelError> {
        let hidden = hidden.f_to_kind(self.weight.f_kind()?)?;
        match (self.input, embeddings) {
            (ConfidenceInput::HiddenAndMarkov, Some(embeddings)) => Ok(Tensor::f_cat(&[&hidden, embeddings], 1)?),
            _ => Ok(hidden),
        }
    }

    /// Logits of `features [slots, width]`, `[slots]`.
    fn logits(&self, features: &Tensor) -> Result<Tensor, ModelError> {
        Ok(features.f_linear(&self.weight, Some(&self.bias))?.f_squeeze_dim(1)?)
    }
}
