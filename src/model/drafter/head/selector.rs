//! Selector of DFlash 2: a choice among the most likely tokens of a slot, given the token before (docs/heads.md#dflash-2).
//!
//! `score(v) = U(v) + sum_r A[previous, r] (H h)_r C[v, r]` for the candidates `v`, with the logits `U` of the target's head.

use super::runs::leading_runs;
use super::{Draw, HeadInput, HeadOutput, Proposal, draft_in_order, layout, output, terms_of, wide_tensor};
use crate::config::MissingLabel;
use crate::hf::head::{Dflash2Config, PREDECESSORS, SELECTOR_PROJECTION, SUCCESSORS};
use crate::model::ModelError;
use crate::model::drafter::Shared;
use crate::model::ops::{Span, linear, spans};
use crate::model::params::ParamSet;
use tch::{Device, Kind, Tensor};

/// Weights, in at least fp32. `r` is the rank, `D` the width of hidden states.
struct Selector {
    /// `A [vocab, r]`.
    predecessors: Tensor,
    /// `C [vocab, r]`.
    successors: Tensor,
    /// `H [r, D]`.
    projection: Tensor,
    top_k: i64,
}

/// Candidates of some slots, most likely first.
struct Candidates {
    /// `[slots, K]`.
    ids: Tensor,
    /// Logits of the head, `[slots, K]`.
    unary: Tensor,
    /// Factors of the score: `A[previous]` and `H h`, `[slots, r]`, and `C[ids]`, `[slots, K, r]`.
    before: Tensor,
    projected: Tensor,
    after: Tensor,
}

/// Gradients of the selector's tensors, and sums over the slots of a chunk.
struct SelectorLoss {
    numerator: f64,
    denominator: f64,
    hits: f64,
    d_hidden: Tensor,
    d_predecessors: Tensor,
    d_successors: Tensor,
    d_projection: Tensor,
    correct: Vec<bool>,
}

/// Loss of the configured terms, and of the selector with its weight and its own denominator.
///
/// The denominator of the selector is known after the forward only. Its mean is brought to the denominator of the terms
/// within the chunk of blocks, so that the gradient of one numerator holds both.
///
/// # Errors
/// Returns an error if a tensor is absent or libtorch fails.
pub fn loss(input: &HeadInput<'_>, config: &Dflash2Config) -> Result<HeadOutput, ModelError> {
    let selector = Selector::load(config, input.params)?;
    let mut base = terms_of(input, None, false)?;
    let unary = Vec::<bool>::try_from(&base.correct.f_to_device(Device::Cpu)?)?;
    let own = selector.loss(input, &base.weights, &base.label)?;
    let weight = input.options.loss.selector_weight;
    let factor = if own.denominator > 0.0 { weight * base.denominator / own.denominator } else { 0.0 };
    base.numerator += factor * own.numerator;
    base.gradient = base.gradient.f_add_(&own.d_hidden.f_mul_scalar(factor)?)?;
    let scaled = |x: Tensor| x.f_mul_scalar(factor);
    let modules = vec![
        (PREDECESSORS.to_owned(), scaled(own.d_predecessors)?),
        (SUCCESSORS.to_owned(), scaled(own.d_successors)?),
        (SELECTOR_PROJECTION.to_owned(), scaled(own.d_projection)?),
    ];
    base.correct = Tensor::f_from_slice(&own.correct)?;
    let mut output = output(input, base, modules)?;
    output.report.candidate_hits = own.hits;
    let layout = layout(input.config);
    output.report.unary_run_tokens = leading_runs(&input.slots.indices, &unary, &layout).tokens as f64;
    Ok(output)
}

/// Most likely token of each slot given the token before it, `hidden [slots, D]`.
///
/// # Errors
/// Returns an error if a tensor is absent or libtorch fails.
pub fn predict(
    config: &Dflash2Config,
    params: &ParamSet,
    shared: &Shared,
    hidden: &Tensor,
    previous: &[i64],
) -> Result<Vec<u32>, ModelError> {
    let selector = Selector::load(config, params)?;
    let logits = linear(hidden, &shared.head, None)?;
    let previous = Tensor::f_from_slice(previous)?.f_to(hidden.device())?;
    let candidates = selector.candidates(hidden, &logits, &previous)?;
    let best = candidates.scores()?.f_max_dim(1, true)?.1;
    let ids = candidates.ids.f_gather(1, &best, false)?.f_squeeze_dim(1)?;
    Ok(Vec::<i64>::try_from(ids.f_to_device(Device::Cpu)?)?.into_iter().map(|id| id as u32).collect())
}

/// Walks through the slots: each token is drawn from the scores of its candidates, given the token before.
///
/// # Errors
/// Returns the error of `draw`, or an error of libtorch.
pub fn propose(
    config: &Dflash2Config,
    params: &ParamSet,
    shared: &Shared,
    hidden: &Tensor,
    last: u32,
    draw: Draw<'_>,
) -> Result<Proposal, ModelError> {
    let selector = Selector::load(config, params)?;
    draft_in_order(shared, hidden, last, draw, |own, row, before| {
        let candidates = selector.candidates(own, &row, before)?;
        let scores = candidates.scores()?.f_to_kind(row.f_kind()?)?;
        Ok(row.f_full_like(f64::NEG_INFINITY)?.f_scatter_(1, &candidates.ids, &scores)?)
    })
}

impl Selector {
    fn load(config: &Dflash2Config, params: &ParamSet) -> Result<Selector, ModelError> {
        let get = |name| wide_tensor(params, name);
        Ok(Selector {
            predecessors: get(PREDECESSORS)?,
            successors: get(SUCCESSORS)?,
            projection: get(SELECTOR_PROJECTION)?,
            top_k: config.selector_top_k as i64,
        })
    }

    /// Candidates from the logits of the head, `[slots, vocab]`.
    fn candidates(&self, hidden: &Tensor, logits: &Tensor, previous: &Tensor) -> Result<Candidates, ModelError> {
        let kind = self.projection.f_kind()?;
        let (unary, ids) = logits.f_topk(self.top_k, -1, true, true)?;
        Ok(Candidates {
            unary: unary.f_to_kind(kind)?,
            before: self.predecessors.f_index_select(0, previous)?,
            projected: hidden.f_to_kind(kind)?.f_linear(&self.projection, None::<Tensor>)?,
            after: self.rows_of(&ids)?,
            ids,
        })
    }

    /// `C[ids]`, `[slots, K, r]`.
    fn rows_of(&self, ids: &Tensor) -> Result<Tensor, ModelError> {
        let rows = self.successors.f_index_select(0, &ids.f_flatten(0, 1)?)?;
        Ok(rows.f_view([ids.size()[0], ids.size()[1], self.successors.size()[1]])?)
    }

    /// Loss with the weight and the label of each slot, `[slots]`.
    fn loss(&self, input: &HeadInput<'_>, weights: &Tensor, labels: &Tensor) -> Result<SelectorLoss, ModelError> {
        let (hidden, head) = (input.hidden, &input.shared.head);
        let (device, kind) = (hidden.device(), self.projection.f_kind()?);
        let before = input.tokens_before()?;
        let weights = weights.f_to_kind(kind)?;
        let mut sums = SelectorLoss {
            numerator: 0.0,
            denominator: 0.0,
            hits: 0.0,
            d_hidden: Tensor::f_zeros(hidden.size(), (kind, device))?,
            d_predecessors: self.predecessors.f_zeros_like()?,
            d_successors: self.successors.f_zeros_like()?,
            d_projection: self.projection.f_zeros_like()?,
            correct: Vec::with_capacity(input.slots.indices.len()),
        };
        for part in spans(hidden.size()[0], input.options.tile.whole_rows(head.size()[0], 1)) {
            let logits = linear(&part.of(hidden, 0)?, head, None)?;
            let previous = part.of(&before, 0)?;
            let candidates = self.candidates(&part.of(hidden, 0)?, &logits, &previous)?;
            let labels = part.of(labels, 0)?;
            self.add(&mut sums, input, part, &logits, candidates, &previous, &labels, &weights)?;
        }
        Ok(sums)
    }

    /// Adds the loss and the gradients of some slots.
    #[allow(clippy::too_many_arguments, reason = "parts of one chunk")]
    fn add(
        &self,
        sums: &mut SelectorLoss,
        input: &HeadInput<'_>,
        part: Span,
        logits: &Tensor,
        mut candidates: Candidates,
        previous: &Tensor,
        labels: &Tensor,
        weights: &Tensor,
    ) -> Result<(), ModelError> {
        let kind = self.projection.f_kind()?;
        let label = labels.f_unsqueeze(1)?;
        let is_label = candidates.ids.f_eq_tensor(&label)?;
        let hit = is_label.f_any_dim(1, true)?;
        let mut scores = candidates.scores()?;
        let chosen = candidates.ids.f_gather(1, &scores.f_max_dim(1, true)?.1, false)?;
        let right = chosen.f_eq_tensor(&label)?.f_squeeze_dim(1)?.f_to_device(Device::Cpu)?;
        sums.correct.extend(Vec::<bool>::try_from(&right)?);
        sums.hits += hit.f_sum(Kind::Double)?.f_double_value(&[])?;

        let (is_label, trains) = match input.options.loss.selector_missing {
            MissingLabel::Skip => (is_label, hit.f_to_kind(kind)?),
            MissingLabel::Inject => {
                let own = logits.f_gather(1, &label, false)?.f_to_kind(kind)?;
                self.inject(&mut candidates, &label, &own, &hit)?;
                scores = candidates.scores()?;
                (candidates.ids.f_eq_tensor(&label)?, hit.f_ones_like()?.f_to_kind(kind)?)
            }
        };
        let gold = is_label.f_to_kind(kind)?;
        let weight = part.of(weights, 0)?.f_unsqueeze(1)?.f_mul(&trains)?;
        let log_q = scores.f_log_softmax(1, kind)?;
        let losses = log_q.f_mul(&gold)?.f_sum_dim_intlist(&[1i64][..], true, kind)?.f_neg()?;
        sums.numerator += losses.f_mul(&weight)?.f_sum(Kind::Double)?.f_double_value(&[])?;
        sums.denominator += weight.f_sum(Kind::Double)?.f_double_value(&[])?;

        let d_scores = log_q.f_exp()?.f_sub_(&gold)?.f_mul_(&weight)?;
        let factor = candidates.before.f_mul(&candidates.projected)?;
        let d_after = d_scores.f_unsqueeze(2)?.f_mul(&factor.f_unsqueeze(1)?)?.f_flatten(0, 1)?;
        let flat = candidates.ids.f_flatten(0, 1)?;
        let _ = sums.d_successors.f_index_add_(0, &flat, &d_after)?;
        let weighted = |rows: &Tensor| d_scores.f_unsqueeze(1)?.f_bmm(rows)?.f_squeeze_dim(1);
        let d_factor = weighted(&candidates.after)?;
        let d_before = d_factor.f_mul(&candidates.projected)?;
        let _ = sums.d_predecessors.f_index_add_(0, previous, &d_before)?;
        let d_projected = d_factor.f_mul(&candidates.before)?;
        let hidden = part.of(input.hidden, 0)?.f_to_kind(kind)?;
        let _ = sums.d_projection.f_add_(&d_projected.f_transpose(0, 1)?.f_mm(&hidden)?)?;
        let head = &input.shared.head;
        let rows = head.f_index_select(0, &flat)?.f_to_kind(kind)?;
        let rows = rows.f_view([candidates.ids.size()[0], self.top_k, head.size()[1]])?;
        let d_hidden = d_projected.f_mm(&self.projection)?.f_add_(&weighted(&rows)?)?;
        let _ = part.of(&sums.d_hidden, 0)?.f_add_(&d_hidden)?;
        Ok(())
    }

    /// Replaces the least likely candidate of a slot without its label by the label.
    fn inject(
        &self,
        candidates: &mut Candidates,
        label: &Tensor,
        logit: &Tensor,
        hit: &Tensor,
    ) -> Result<(), ModelError> {
        let last = self.top_k - 1;
        let replace = |x: &Tensor, value: &Tensor| -> Result<Tensor, ModelError> {
            let kept = x.f_narrow(1, last, 1)?.f_where_self(hit, value)?;
            Ok(Tensor::f_cat(&[x.f_narrow(1, 0, last)?, kept], 1)?)
        };
        candidates.ids = replace(&candidates.ids, label)?;
        candidates.unary = replace(&candidates.unary, logit)?;
        candidates.after = self.rows_of(&candidates.ids)?;
        Ok(())
    }
}

impl Candidates {
    /// Scores, `[slots, K]`.
    fn scores(&self) -> Result<Tensor, ModelError> {
        let factor = self.before.f_mul(&self.projected)?;
        Ok(self.after.f_bmm(&factor.f_unsqueeze(2)?)?.f_squeeze_dim(2)?.f_add_(&self.unary)?)
    }
}
