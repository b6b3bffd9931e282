//! Attention of all blocks over the context before their anchors and over themselves, with its gradient.
//!
//! The own blocks are one batched product. The context is taken group by group, each group only up to its last anchor.
//! What all slots of a group see of it goes through libtorch's attention kernel, which stores no score; the rest, and all
//! of it where [`AttentionBy::Plain`] is asked for, is plain products. The parts are joined by the logarithms of their sums:
//! what a kernel gathered counts as one more value, with its logarithm as the score. The backward pass makes the scores
//! again from the logarithm of the joined sums instead of keeping them, and so does the kernel's, which is given what was
//! joined: so memory stays linear in slots and context, and the gradients are exact.

use crate::model::ModelError;
use crate::model::drafter::AttentionBy;
use crate::model::drafter::blocks::{Sight, View};
use crate::model::ops::{Span, soften, soften_backward, wide};
use draftmill_torch_ext::{attend, attend_backward, attends};
use tch::{Kind, Tensor};

/// One layer's queries, keys and values. Queries carry the factor `1 / sqrt(head_dim)`; a `row` is one query of one
/// slot, and the rows of a key/value head are ordered by slot.
pub struct Inputs<'a> {
    /// `[kv_heads, slots, heads of a group, head_dim]`
    pub queries: &'a Tensor,
    /// Of the slots, each `[kv_heads, slots, head_dim]`, contiguous.
    pub own: (&'a Tensor, &'a Tensor),
    /// Of the context, each `[kv_heads, tokens, head_dim]`; `None` when no block sees any.
    pub context: Option<(&'a Tensor, &'a Tensor)>,
    pub sight: Sight<'a>,
    pub block_size: i64,
    pub by: AttentionBy,
}

/// What was gathered, `[kv_heads, rows, head_dim]`, and the logarithm of each row's sum, `[kv_heads, rows, 1]`.
pub struct Output {
    pub gathered: Tensor,
    log_sum: Tensor,
}

/// Gradients in the shapes of the inputs.
pub struct Gradients {
    pub queries: Tensor,
    pub own: (Tensor, Tensor),
    pub context: Option<(Tensor, Tensor)>,
}

/// Some of the context that a group sees.
struct Part<'a> {
    /// Its places in the context.
    span: Span,
    keys: Tensor,
    values: Tensor,
    /// What of it is hidden from some slots, as places in this part.
    hidden: Vec<(Span, &'a Tensor)>,
}

impl Inputs<'_> {
    pub fn forward(&self) -> Result<Output, ModelError> {
        let mut own = self.own_scores()?;
        let own_most = own.f_amax(&[-1i64][..], true)?;
        let (mut most, mut sums, mut parts) = (Vec::new(), Vec::new(), Vec::new());
        for view in self.sight.views {
            let [larger, sum, part] = self.over_context(view, self.rows(view).of(&own_most, 1)?)?;
            most.push(larger);
            sums.push(sum);
            parts.push(part);
        }
        let most = Tensor::f_cat(&most, 1)?;
        let own = own.f_sub_(&most)?.f_exp_()?;
        let mut sum = Tensor::f_cat(&sums, 1)?.f_add_(&own.f_sum_dim_intlist(&[-1i64][..], true, own.f_kind()?)?)?;
        let gathered = self.own_product(&own, self.own.1)?.f_add_(&Tensor::f_cat(&parts, 1)?)?;
        let gathered = gathered.f_to_kind(sum.f_kind()?)?.f_div_(&sum)?.f_to_kind(self.kind()?)?;
        Ok(Output { gathered, log_sum: sum.f_log_()?.f_add_(&most)? })
    }

    /// Gradients from that of [`Output::gathered`]. With `p` the weights and `dp` their gradient, a score's is
    /// `p (dp - sum(p dp))`, and the sum equals `gathered . d_gathered` (FlashAttention, arXiv:2205.14135).
    pub fn backward(&self, output: &Output, d_gathered: &Tensor) -> Result<Gradients, ModelError> {
        let exact = output.log_sum.f_kind()?;
        let delta = output.gathered.f_mul(d_gathered)?.f_sum_dim_intlist(&[-1i64][..], true, exact)?;
        let (mut weights, mut d_scores) =
            (self.own_scores()?, self.own_scores_of(d_gathered, self.own.1)?.f_to_kind(exact)?);
        soften_backward(&mut weights, &mut d_scores, &output.log_sum, &delta)?;
        let d_own = (self.own_key_gradient(&d_scores, self.queries)?, self.own_key_gradient(&weights, d_gathered)?);
        let d_queries = self.own_product(&d_scores, self.own.0)?;

        let Some((keys, values)) = self.context else {
            return Ok(Gradients { queries: d_queries.f_view_as(self.queries)?, own: d_own, context: None });
        };
        let zeros = |x: &Tensor| Tensor::f_zeros(x.size(), (exact, x.device()));
        let (d_keys, d_values) = (zeros(keys)?, zeros(values)?);
        for view in self.sight.views {
            let rows = self.rows(view);
            let (queries, d_gathered) = (rows.of(&self.by_row(self.queries)?, 1)?, rows.of(d_gathered, 1)?);
            let (log_sum, delta) = (rows.of(&output.log_sum, 1)?.f_contiguous()?, rows.of(&delta, 1)?.f_contiguous()?);
            let add = |part: &Part<'_>, [d_q, d_k, d_v]: [Tensor; 3]| -> Result<(), ModelError> {
                let _ = rows.of(&d_queries, 1)?.f_add_(&d_q)?;
                let _ = part.span.of(&d_keys, 1)?.f_add_(&d_k)?;
                let _ = part.span.of(&d_values, 1)?.f_add_(&d_v)?;
                Ok(())
            };
            if let Some(part) = self.attended(view)? {
                let (gathered, log_sum) = (rows.of(&output.gathered, 1)?, log_sum.f_squeeze_dim(-1)?);
                let inputs = [&queries, &part.keys, &part.values];
                add(&part, attend_backward(&d_gathered, inputs, &gathered, &log_sum, 1.0)?)?;
            }
            for part in self.scored(view)? {
                let mut weights = self.scores(view, &part)?;
                let mut d_scores = d_gathered.f_bmm(&part.values.f_transpose(1, 2)?)?.f_to_kind(exact)?;
                soften_backward(&mut weights, &mut d_scores, &log_sum, &delta)?;
                let (weights, d_scores) = (weights.f_to_kind(self.kind()?)?, d_scores.f_to_kind(self.kind()?)?);
                let d_keys = d_scores.f_transpose(1, 2)?.f_bmm(&queries)?;
                let d_values = weights.f_transpose(1, 2)?.f_bmm(&d_gathered)?;
                add(&part, [d_scores.f_bmm(&part.keys)?, d_keys, d_values])?;
            }
        }
        Ok(Gradients { queries: d_queries.f_view_as(self.queries)?, own: d_own, context: Some((d_keys, d_values)) })
    }

    fn kind(&self) -> Result<Kind, ModelError> {
        Ok(self.queries.f_kind()?)
    }

    /// Its rows, along the second dimension.
    fn rows(&self, view: &View) -> Span {
        let group = self.queries.size()[2];
        Span { start: view.slot * group, len: view.slots * group }
    }

    /// `[kv_heads, slots, heads of a group, head_dim]` as `[kv_heads, rows, head_dim]`.
    fn by_row(&self, x: &Tensor) -> Result<Tensor, ModelError> {
        let size = self.queries.size();
        Ok(x.f_view([size[0], size[1] * size[2], -1])?)
    }

    /// By block: `[kv_heads * blocks, rows or slots of a block, width]`.
    fn by_block(&self, x: &Tensor) -> Result<Tensor, ModelError> {
        let blocks = self.queries.size()[0] * self.queries.size()[1] / self.block_size;
        let width = x.size().last().copied().unwrap_or(1);
        Ok(x.f_view([blocks, -1, width])?)
    }

    /// What a group gathers from its context, not yet divided: the largest score, that of the own blocks included; the
    /// sum of the weights, and what they gather, both over its exponential. `[kv_heads, rows, 1 or head_dim]` each.
    fn over_context(&self, view: &View, own_most: Tensor) -> Result<[Tensor; 3], ModelError> {
        let mut most = own_most.f_to_device_(own_most.device(), own_most.f_kind()?, false, true)?;
        let mut sum = most.f_zeros_like()?;
        let mut gathered: Option<Tensor> = None;
        for part in self.scored(view)? {
            let mut scores = self.scores(view, &part)?;
            let shrink = soften(&mut scores, &mut most, &mut sum)?;
            let more = scores.f_to_kind(self.kind()?)?.f_bmm(&part.values)?;
            gathered = Some(match gathered {
                None => more,
                Some(before) => before.f_mul(&shrink)?.f_add_(&more)?,
            });
        }
        if let Some(part) = self.attended(view)? {
            let queries = self.rows(view).of(&self.by_row(self.queries)?, 1)?;
            let (more, log_sum) = attend(&queries, &part.keys, &part.values, 1.0)?;
            // One more score, whose value is what the kernel gathered.
            let mut weight = log_sum.f_unsqueeze(-1)?.f_contiguous()?;
            let shrink = soften(&mut weight, &mut most, &mut sum)?;
            let mut more = more.f_mul(&weight)?;
            gathered = Some(match gathered {
                None => more,
                Some(before) => more.f_add_(&before.f_mul(&shrink)?)?,
            });
        }
        let gathered = match gathered {
            Some(gathered) => gathered.f_to_kind(self.kind()?)?,
            None => self.rows(view).of(&self.by_row(self.queries)?, 1)?.f_zeros_like()?,
        };
        Ok([most, sum, gathered])
    }

    /// The part of a group's context that a kernel takes.
    fn attended(&self, view: &View) -> Result<Option<Part<'static>>, ModelError> {
        if !self.by_kernel()? || view.clear.len == 0 {
            return Ok(None);
        }
        self.part(view, view.clear, Vec::new())
    }

    /// The parts that are plain products.
    fn scored<'a>(&self, view: &'a View) -> Result<Vec<Part<'a>>, ModelError> {
        let mut parts = Vec::new();
        if self.by_kernel()? {
            for hidden in &view.hidden {
                let all = Span { start: 0, len: hidden.span.len };
                parts.extend(self.part(view, hidden.span, vec![(all, &hidden.mask)])?);
            }
        } else if view.len > 0 {
            let hidden = view.hidden.iter().map(|hidden| (hidden.span, &hidden.mask)).collect();
            parts.extend(self.part(view, Span { start: 0, len: view.len }, hidden)?);
        }
        Ok(parts)
    }

    fn part<'a>(
        &self,
        view: &View,
        of_view: Span,
        hidden: Vec<(Span, &'a Tensor)>,
    ) -> Result<Option<Part<'a>>, ModelError> {
        let Some((keys, values)) = self.context else { return Ok(None) };
        let span = Span { start: view.start + of_view.start, len: of_view.len };
        Ok(Some(Part { span, keys: span.of(keys, 1)?, values: span.of(values, 1)?, hidden }))
    }

    fn by_kernel(&self) -> Result<bool, ModelError> {
        let head_dim = self.queries.size()[3];
        Ok(self.by == AttentionBy::Kernel && attends(self.queries.device(), self.kind()?, head_dim))
    }

    /// Scores of a part of the context that a group sees, `[kv_heads, rows, tokens]`, minus infinity where it is hidden.
    fn scores(&self, view: &View, part: &Part<'_>) -> Result<Tensor, ModelError> {
        let queries = self.rows(view).of(&self.by_row(self.queries)?, 1)?;
        let scores = queries.f_bmm(&part.keys.f_transpose(1, 2)?)?.f_to_kind(wide(self.kind()?))?;
        let (heads, group, len) = (scores.size()[0], self.queries.size()[2], part.span.len);
        for (span, mask) in &part.hidden {
            let by_slot = scores.f_view([heads, view.slots / self.block_size, self.block_size, group, len])?;
            let _ = span.of(&by_slot, -1)?.f_masked_fill_(mask, f64::NEG_INFINITY)?;
        }
        Ok(scores)
    }

    /// Scores within the own block, `[kv_heads, rows, block_size]`.
    fn own_scores(&self) -> Result<Tensor, ModelError> {
        let scores = self.own_scores_of(self.queries, self.own.0)?.f_to_kind(wide(self.kind()?))?;
        if let Some(mask) = self.sight.own_mask {
            let (size, group) = (self.block_size, self.queries.size()[2]);
            let _ = scores.f_view([-1, size, group, size])?.f_masked_fill_(mask, f64::NEG_INFINITY)?;
        }
        Ok(scores)
    }

    /// Products of rows with the keys or values of their own block, `[kv_heads, rows, block_size]`.
    fn own_scores_of(&self, rows: &Tensor, own: &Tensor) -> Result<Tensor, ModelError> {
        self.by_row(&self.by_block(rows)?.f_bmm(&self.by_block(own)?.f_transpose(1, 2)?)?)
    }

    /// `scores [kv_heads, rows, block_size]` times the own keys or values, `[kv_heads, rows, head_dim]`.
    fn own_product(&self, scores: &Tensor, own: &Tensor) -> Result<Tensor, ModelError> {
        self.by_row(&self.by_block(scores)?.f_to_kind(self.kind()?)?.f_bmm(&self.by_block(own)?)?)
    }

    /// The same scores turned, times rows: what the own keys or values receive, `[kv_heads, slots, head_dim]`.
    fn own_key_gradient(&self, scores: &Tensor, rows: &Tensor) -> Result<Tensor, ModelError> {
        let turned = self.by_block(scores)?.f_transpose(1, 2)?.f_to_kind(self.kind()?)?;
        Ok(turned.f_bmm(&self.by_block(rows)?)?.f_view_as(self.own.0)?)
    }
}
