//! Loss of any sum of terms against a teacher, through a frozen head with a trainable low-rank bias.

use super::acceptance::block_loss;
use super::head_loss::{HeadLoss, Labels, Tile, head_loss};
use super::teacher::{Compared, Teacher};
use super::weighting::{Weighting, d_pace};
use super::{CeLabel, LossTerms};
use crate::model::ModelError;
use crate::model::drafter::anchors::Slots;
use crate::model::ops::{Span, wide};
use tch::{Kind, Tensor};

/// Map from a slot to its logits: `head . hidden + rows . codes`.
pub struct Projection<'a> {
    /// Frozen head of the target, `[vocab, hidden]`.
    pub head: &'a Tensor,
    pub bias: Option<LowRank<'a>>,
}

/// Trainable part of the logits.
pub struct LowRank<'a> {
    /// Factor of each slot, `[slots, rank]`.
    pub codes: &'a Tensor,
    /// Factor of each token, `[vocab, rank]`.
    pub rows: &'a Tensor,
}

/// Gradients of a low-rank bias, in at least fp32.
pub struct LowRankGradient {
    pub codes: Tensor,
    pub rows: Tensor,
}

/// Slots of a chunk of blocks, with their labels.
pub struct LossInput<'a> {
    /// Final hidden states of the slots, `[slots, hidden]`.
    pub hidden: &'a Tensor,
    pub projection: Projection<'a>,
    pub labels: &'a Labels,
    pub slots: &'a Slots,
    pub block_size: usize,
}

/// Choice of the loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossSettings {
    pub terms: LossTerms,
    pub ce_label: CeLabel,
    pub weighting: Weighting,
}

/// Weighted loss of all slots, and its gradients.
pub struct WeightedLoss {
    /// Gradient of the numerator by the hidden states, `[slots, hidden]` in at least fp32.
    pub gradient: Tensor,
    pub bias: Option<LowRankGradient>,
    pub numerator: f64,
    /// Sum of the decay weights; with D-PACE the number of slots, which is the same on all drafters; with a loss by block
    /// the number of blocks with a trained slot.
    pub denominator: f64,
    /// Weight of each slot, `[slots]`.
    pub weights: Tensor,
    /// Loss of each slot before its weight, without the term by block, `[slots]`.
    pub losses: Tensor,
    /// True if no token is more likely than the label, `[slots]`.
    pub correct: Tensor,
    /// Label of `ce_label`, `[slots]`.
    pub label: Tensor,
    /// Acceptance of each slot, `sum min(p, q)`, `[slots]`; `None` if neither a term nor the caller needs it.
    pub acceptance: Option<Tensor>,
}

/// Computes the loss. `acceptance` asks for the acceptance of each slot, whatever the terms are.
///
/// The divergence alone, without a bias, takes the tiled path of [`head_loss`]. All other terms need the normalised
/// probabilities of a slot before its gradient. They take whole blocks at a time, with all logits of these slots: their
/// number is limited by `tile`, so memory does not grow with the vocabulary. Grad mode must be off.
///
/// # Errors
/// Returns an error if libtorch fails.
pub fn weighted_loss(
    input: &LossInput<'_>,
    settings: &LossSettings,
    tile: Tile,
    acceptance: bool,
) -> Result<WeightedLoss, ModelError> {
    let divergence_alone = settings.terms == LossTerms::KL && settings.ce_label == CeLabel::Labels;
    if divergence_alone && input.projection.bias.is_none() && !acceptance {
        return tiled(input, settings.weighting, tile);
    }
    soft(input, settings, tile, acceptance)
}

fn tiled(input: &LossInput<'_>, weighting: Weighting, tile: Tile) -> Result<WeightedLoss, ModelError> {
    let HeadLoss { mut gradient, losses, cross_entropy, correct, label } =
        head_loss(input.hidden, input.projection.head, input.labels, tile)?;
    let (slots, device) = (input.slots, input.hidden.device());
    let weights = match weighting {
        Weighting::Decay(_) => Tensor::f_from_slice(&slots.weights)?.f_to(device)?,
        Weighting::DPace(alpha) => {
            let indices = Tensor::f_from_slice(&slots.indices)?.f_to(device)?;
            d_pace(&cross_entropy, &indices, input.block_size as i64, alpha)?
        }
    };
    Ok(WeightedLoss {
        gradient: gradient.f_mul_(&weights.f_unsqueeze(1)?)?,
        bias: None,
        numerator: sum(&losses.f_mul(&weights)?)?,
        denominator: slots.weights.iter().map(|&weight| f64::from(weight)).sum(),
        weights,
        losses,
        correct,
        label,
        acceptance: None,
    })
}

fn soft(
    input: &LossInput<'_>,
    settings: &LossSettings,
    tile: Tile,
    acceptance: bool,
) -> Result<WeightedLoss, ModelError> {
    let head = input.projection.head;
    let limit = tile.whole_rows(head.size()[0], TILES);
    let mut chunks = Vec::new();
    let mut rows_gradient = None::<Tensor>;
    for part in whole_blocks(&input.slots.indices, input.block_size, limit) {
        let (chunk, rows) = Chunk::new(input, part)?.loss(settings, acceptance)?;
        match (&mut rows_gradient, rows) {
            (Some(sum), Some(rows)) => drop(sum.f_add_(&rows)?),
            (sum, rows) => *sum = sum.take().or(rows),
        }
        chunks.push(chunk);
    }
    let all = |of: fn(&ChunkLoss) -> &Tensor| {
        Ok::<_, ModelError>(Tensor::f_cat(&chunks.iter().map(of).collect::<Vec<_>>(), 0)?)
    };
    let some = |of: fn(&ChunkLoss) -> Option<&Tensor>| {
        let parts: Option<Vec<_>> = chunks.iter().map(of).collect();
        parts.filter(|parts| !parts.is_empty()).map(|parts| Tensor::f_cat(&parts, 0)).transpose()
    };
    let slots = input.slots;
    let codes = some(|chunk| chunk.codes.as_ref())?;
    Ok(WeightedLoss {
        gradient: all(|chunk| &chunk.gradient)?,
        bias: codes.zip(rows_gradient).map(|(codes, rows)| LowRankGradient { codes, rows }),
        numerator: chunks.iter().map(|chunk| chunk.numerator).sum(),
        denominator: match settings.terms.by_block() {
            true => blocks_of(&slots.indices, input.block_size).len() as f64,
            false => slots.weights.iter().map(|&weight| f64::from(weight)).sum(),
        },
        weights: all(|chunk| &chunk.weights)?,
        losses: all(|chunk| &chunk.losses)?,
        correct: all(|chunk| &chunk.correct)?,
        label: all(|chunk| &chunk.label)?,
        acceptance: some(|chunk| chunk.acceptance.as_ref())?,
    })
}

/// Tiles of logits that are held at once.
const TILES: usize = 4;

/// Number of trained slots of each block that has any, in order.
fn blocks_of(indices: &[i64], block_size: usize) -> Vec<usize> {
    let same = |a: &i64, b: &i64| a / block_size as i64 == b / block_size as i64;
    indices.chunk_by(same).map(<[i64]>::len).collect()
}

/// Spans of at most `limit` slots that hold whole blocks; a larger block is a span by itself.
fn whole_blocks(indices: &[i64], block_size: usize, limit: usize) -> Vec<Span> {
    let (mut spans, mut start, mut len) = (Vec::new(), 0, 0);
    for count in blocks_of(indices, block_size) {
        if len > 0 && len + count > limit {
            spans.push(Span { start: start as i64, len: len as i64 });
            (start, len) = (start + len, 0);
        }
        len += count;
    }
    if len > 0 {
        spans.push(Span { start: start as i64, len: len as i64 });
    }
    spans
}

/// Slots of some whole blocks.
struct Chunk<'a> {
    head: &'a Tensor,
    rows: Option<&'a Tensor>,
    hidden: Tensor,
    codes: Option<Tensor>,
    labels: Labels,
    /// Data's tokens, `[slots, 1]`.
    tokens: Tensor,
    decay: Tensor,
    /// Index of each slot from the chunk's first block on.
    indices: Tensor,
    blocks: i64,
    block_size: i64,
}

struct ChunkLoss {
    gradient: Tensor,
    codes: Option<Tensor>,
    numerator: f64,
    weights: Tensor,
    losses: Tensor,
    correct: Tensor,
    label: Tensor,
    acceptance: Option<Tensor>,
}

impl<'a> Chunk<'a> {
    fn new(input: &LossInput<'a>, part: Span) -> Result<Chunk<'a>, ModelError> {
        let device = input.hidden.device();
        let range = part.start as usize..(part.start + part.len) as usize;
        let slots = &input.slots.indices[range.clone()];
        let size = input.block_size as i64;
        let first = slots.first().map_or(0, |slot| slot / size * size);
        let indices: Vec<i64> = slots.iter().map(|slot| slot - first).collect();
        let bias = input.projection.bias.as_ref();
        Ok(Chunk {
            head: input.projection.head,
            rows: bias.map(|bias| bias.rows),
            hidden: part.of(input.hidden, 0)?,
            codes: bias.map(|bias| part.of(bias.codes, 0)).transpose()?,
            labels: match input.labels {
                Labels::Tokens { ids, probabilities } => {
                    Labels::Tokens { ids: part.of(ids, 0)?, probabilities: part.of(probabilities, 0)? }
                }
                Labels::States { states, index } => {
                    Labels::States { states: states.shallow_clone(), index: part.of(index, 0)? }
                }
            },
            tokens: Tensor::f_from_slice(&input.slots.tokens[range.clone()])?.f_to(device)?.f_unsqueeze(1)?,
            decay: Tensor::f_from_slice(&input.slots.weights[range])?.f_to(device)?,
            blocks: indices.last().map_or(0, |last| last / size + 1),
            indices: Tensor::f_from_slice(&indices)?.f_to(device)?,
            block_size: size,
        })
    }

    /// Logits of the drafter, `[slots, vocab]` in at least fp32.
    fn logits(&self) -> Result<Tensor, ModelError> {
        let mut logits = self.hidden.f_mm(&self.head.f_transpose(0, 1)?)?;
        if let (Some(codes), Some(rows)) = (&self.codes, self.rows) {
            logits = logits.f_addmm_(codes, &rows.f_transpose(0, 1)?)?;
        }
        Ok(logits.f_to_kind(wide(logits.f_kind()?))?)
    }

    /// Loss and gradients; the last is that of the bias's rows.
    fn loss(&self, settings: &LossSettings, acceptance: bool) -> Result<(ChunkLoss, Option<Tensor>), ModelError> {
        let terms = &settings.terms;
        let logits = self.logits()?;
        let kind = logits.f_kind()?;
        let teacher = Teacher::new(&self.labels, self.head)?;
        let label = match settings.ce_label {
            CeLabel::Labels => teacher.first.shallow_clone(),
            CeLabel::Data => self.tokens.shallow_clone(),
        };
        let label_logit = logits.f_gather(1, &label, false)?;
        let reverse = (terms.reverse_kl > 0.0).then(|| teacher.reverse(&logits)).transpose()?;
        let Compared { q, max, log_sum, kl, alpha, under } = teacher.compare(logits)?;
        let correct = label_logit.f_ge_tensor(&max)?.f_squeeze_dim(1)?;
        let cross_entropy = log_sum.f_sub(&label_logit)?;
        let weights = match settings.weighting {
            Weighting::Decay(_) => self.decay.f_to_kind(kind)?,
            Weighting::DPace(alpha) => d_pace(&cross_entropy.f_squeeze_dim(1)?, &self.indices, self.block_size, alpha)?,
        };

        // Slopes of a slot's loss by the divergence and by the total variation. Lambda of LK is a constant.
        let lambda = alpha.f_mul_scalar(-terms.lk_eta)?.f_exp()?;
        let by_kl = lambda.f_mul_scalar(terms.lk)?.f_add_scalar(terms.kl)?;
        let by_tv = lambda.f_neg()?.f_add_scalar(1.0)?.f_mul_scalar(terms.lk)?.f_add_scalar(terms.tv)?;
        let tv = alpha.f_neg()?.f_add_scalar(1.0)?;
        let mut losses = cross_entropy.f_mul_scalar(terms.ce)?.f_add_(&by_tv.f_mul(&tv)?)?;
        if terms.needs_kl() {
            losses = losses.f_add_(&by_kl.f_mul(&kl)?)?;
        }
        let weight = weights.f_unsqueeze(1)?;
        let (by_ce, by_kl) = (weight.f_mul_scalar(terms.ce)?, by_kl.f_mul(&weight)?);
        let mut by_tv = by_tv.f_mul(&weight)?;
        let mut numerator = 0.0;
        if terms.e2e_tv > 0.0 {
            let of_blocks = block_loss(&alpha.f_squeeze_dim(1)?, &self.indices, self.blocks, self.block_size)?;
            let share = self.block_weights(terms, kind)?.f_mul_scalar(terms.e2e_tv)?;
            numerator += sum(&of_blocks.losses.f_mul(&share)?)?;
            let block = self.indices.f_floor_divide_scalar(self.block_size)?;
            let slopes = of_blocks.slopes.f_mul(&share.f_index_select(0, &block)?)?;
            by_tv = by_tv.f_add_(&slopes.f_unsqueeze(1)?)?;
        }

        // d ce = q - label, d kl = q - p, d tv = -q ([q < p] - sum q [q < p]), d reverse kl = q (ln q - ln p - reverse kl).
        let by_reverse = weight.f_mul_scalar(terms.reverse_kl)?;
        let more = match &reverse {
            Some((ratio, mean)) => {
                losses = losses.f_add_(&mean.f_mul_scalar(terms.reverse_kl)?)?;
                Some(ratio.f_sub(mean)?.f_mul_(&by_reverse)?.f_mul_(&q)?)
            }
            None => None,
        };
        let own = by_ce.f_add(&by_kl)?.f_add_(&by_tv.f_mul(&under)?)?;
        let mut gradient = teacher.slope(q, &own, &by_tv.f_contiguous()?, &by_kl.f_contiguous()?)?;
        if let Some(more) = more {
            gradient = gradient.f_add_(&more)?;
        }
        if terms.ce > 0.0 {
            gradient = gradient.f_scatter_add_(1, &label, &by_ce.f_neg()?)?;
        }

        let narrow = gradient.f_to_kind(self.hidden.f_kind()?)?;
        let codes = self.rows.map(|rows| narrow.f_mm(rows)).transpose()?;
        let rows = self.codes.as_ref().map(|codes| narrow.f_transpose(0, 1)?.f_mm(codes)).transpose()?;
        let losses = losses.f_squeeze_dim(1)?;
        numerator += sum(&losses.f_mul(&weights)?)?;
        let loss = ChunkLoss {
            gradient: narrow.f_mm(self.head)?.f_to_kind(kind)?,
            codes: codes.map(|codes| codes.f_to_kind(kind)).transpose()?,
            numerator,
            weights,
            losses,
            correct,
            label: label.f_squeeze_dim(1)?,
            acceptance: (acceptance || terms.e2e_tv > 0.0).then(|| alpha.f_squeeze_dim(1)).transpose()?,
        };
        Ok((loss, rows.map(|rows| rows.f_to_kind(kind)).transpose()?))
    }

    /// Weight of each block in the term by block: 1 if it is alone, else the decay weights of the block's slots.
    fn block_weights(&self, terms: &LossTerms, kind: Kind) -> Result<Tensor, ModelError> {
        let zeros = Tensor::f_zeros([self.blocks], (kind, self.hidden.device()))?;
        if terms.by_block() {
            return Ok(zeros.f_ones_like()?);
        }
        let mut zeros = zeros;
        let block = self.indices.f_floor_divide_scalar(self.block_size)?;
        Ok(zeros.f_index_add_(0, &block, &self.decay.f_to_kind(kind)?)?)
    }
}

fn sum(x: &Tensor) -> Result<f64, ModelError> {
    Ok(x.f_sum(Kind::Double)?.f_double_value(&[])?)
}

#[cfg(test)]
mod tests;
