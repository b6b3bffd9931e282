//! Attention of all blocks over the context before their anchors and over themselves, with its gradient.
//!
//! The own blocks are one batched product. The context is processed group by group, up to the last anchor of each
//! group. The unmasked span of a group goes through libtorch's attention kernel, which stores no scores. Masked spans,
//! and all spans with [`AttentionBackend::Plain`], use plain products.
//!
//! The partial results are merged by their log-sums: a kernel's output counts as one more value, with its log-sum as
//! the score. The backward pass recomputes scores from the merged log-sum, as does the kernel, which receives the
//! merged output. Memory is therefore linear in slots and context, and the gradients are exact.

use crate::model::ModelError;
use crate::model::drafter::AttentionBackend;
use crate::model::drafter::blocks::{AttentionWindow, LayerAttention};
use crate::model::ops::{Span, online_softmax, softmax_backward, wide};
use draftmill_torch_ext::{attend, attend_backward, has_kernel};
use tch::{Kind, Tensor};

/// Queries, keys and values of one layer. Queries include the factor `1 / sqrt(head_dim)`. A `row` is one query head of
/// one slot; the rows of a key/value head are ordered by slot.
pub struct Inputs<'a> {
    /// `[kv_heads, slots, heads of a group, head_dim]`
    pub queries: &'a Tensor,
    /// Keys and values of the slots, each `[kv_heads, slots, head_dim]`, contiguous.
    pub own: (&'a Tensor, &'a Tensor),
    /// Keys and values of the context, each `[kv_heads, tokens, head_dim]`; `None` if no block sees any.
    pub context: Option<(&'a Tensor, &'a Tensor)>,
    pub attention: LayerAttention<'a>,
    pub block_size: i64,
    pub by: AttentionBackend,
}

/// Attention output `[kv_heads, rows, head_dim]`, and the log-sum of each row's weights, `[kv_heads, rows, 1]`.
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

/// Span of the context that a group sees.
struct ContextSpan<'a> {
    /// Position in the packed context.
    span: Span,
    keys: Tensor,
    values: Tensor,
    /// Masked spans, relative to this span.
    masked: Vec<(Span, &'a Tensor)>,
}

impl Inputs<'_> {
    /// Attention output of all rows.
    pub fn forward(&self) -> Result<Output, ModelError> {
        let mut own = self.own_scores()?;
        let own_max = own.f_amax(&[-1i64][..], true)?;
        let (mut max, mut sums, mut parts) = (Vec::new(), Vec::new(), Vec::new());
        for window in self.attention.windows {
            let [larger, sum, part] = self.over_context(window, self.rows(window).of(&own_max, 1)?)?;
            max.push(larger);
            sums.push(sum);
            parts.push(part);
        }
        let max = Tensor::f_cat(&max, 1)?;
        let own = own.f_sub_(&max)?.f_exp_()?;
        let mut sum = Tensor::f_cat(&sums, 1)?.f_add_(&own.f_sum_dim_intlist(&[-1i64][..], true, own.f_kind()?)?)?;
        let gathered = self.own_product(&own, self.own.1)?.f_add_(&Tensor::f_cat(&parts, 1)?)?;
        let gathered = gathered.f_to_kind(sum.f_kind()?)?.f_div_(&sum)?.f_to_kind(self.kind()?)?;
        Ok(Output { gathered, log_sum: sum.f_log_()?.f_add_(&max)? })
    }

    /// Gradients from that of [`Output::gathered`]. With weights `p` and their gradient `dp`, the gradient of a score
    /// is `p (dp - sum(p dp))`, and the sum equals `gathered . d_gathered` (FlashAttention, arXiv:2205.14135).
    pub fn backward(&self, output: &Output, d_gathered: &Tensor) -> Result<Gradients, ModelError> {
        let exact = output.log_sum.f_kind()?;
        let delta = output.gathered.f_mul(d_gathered)?.f_sum_dim_intlist(&[-1i64][..], true, exact)?;
        let (mut weights, mut d_scores) =
            (self.own_scores()?, self.own_scores_of(d_gathered, self.own.1)?.f_to_kind(exact)?);
        softmax_backward(&mut weights, &mut d_scores, &output.log_sum, &delta)?;
        let d_own = (self.own_key_gradient(&d_scores, self.queries)?, self.own_key_gradient(&weights, d_gathered)?);
        let d_queries = self.own_product(&d_scores, self.own.0)?;

        let Some((keys, values)) = self.context else {
            return Ok(Gradients { queries: d_queries.f_view_as(self.queries)?, own: d_own, context: None });
        };
        let zeros = |x: &Tensor| Tensor::f_zeros(x.size(), (exact, x.device()));
        let (d_keys, d_values) = (zeros(keys)?, zeros(values)?);
        for window in self.attention.windows {
            let rows = self.rows(window);
            let (queries, d_gathered) = (rows.of(&self.by_row(self.queries)?, 1)?, rows.of(d_gathered, 1)?);
            let (log_sum, delta) = (rows.of(&output.log_sum, 1)?.f_contiguous()?, rows.of(&delta, 1)?.f_contiguous()?);
            let add = |span: &ContextSpan<'_>, [d_q, d_k, d_v]: [Tensor; 3]| -> Result<(), ModelError> {
                let _ = rows.of(&d_queries, 1)?.f_add_(&d_q)?;
                let _ = span.span.of(&d_keys, 1)?.f_add_(&d_k)?;
                let _ = span.span.of(&d_values, 1)?.f_add_(&d_v)?;
                Ok(())
            };
            if let Some(span) = self.attended(window)? {
                let (gathered, log_sum) = (rows.of(&output.gathered, 1)?, log_sum.f_squeeze_dim(-1)?);
                let inputs = [&queries, &span.keys, &span.values];
                add(&span, attend_backward(&d_gathered, inputs, &gathered, &log_sum, 1.0)?)?;
            }
            for span in self.scored(window)? {
                let mut weights = self.scores(window, &span)?;
                let mut d_scores = d_gathered.f_bmm(&span.values.f_transpose(1, 2)?)?.f_to_kind(exact)?;
                softmax_backward(&mut weights, &mut d_scores, &log_sum, &delta)?;
                let (weights, d_scores) = (weights.f_to_kind(self.kind()?)?, d_scores.f_to_kind(self.kind()?)?);
                let d_keys = d_scores.f_transpose(1, 2)?.f_bmm(&queries)?;
                let d_values = weights.f_transpose(1, 2)?.f_bmm(&d_gathered)?;
                add(&span, [d_scores.f_bmm(&span.keys)?, d_keys, d_values])?;
            }
        }
        Ok(Gradients { queries: d_queries.f_view_as(self.queries)?, own: d_own, context: Some((d_keys, d_values)) })
    }

    fn kind(&self) -> Result<Kind, ModelError> {
        Ok(self.queries.f_kind()?)
    }

    /// Rows of a window, along the second dimension.
    fn rows(&self, window: &AttentionWindow) -> Span {
        let group = self.queries.size()[2];
        Span { start: window.slot * group, len: window.slots * group }
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

    /// Attention of a group over its context, unnormalised: the largest score, including own blocks; then the sum of
    /// the weights and the weighted values, both relative to that score. `[kv_heads, rows, 1 or head_dim]` each.
    fn over_context(&self, window: &AttentionWindow, own_max: Tensor) -> Result<[Tensor; 3], ModelError> {
        let mut max = own_max.f_to_device_(own_max.device(), own_max.f_kind()?, false, true)?;
        let mut sum = max.f_zeros_like()?;
        let mut gathered: Option<Tensor> = None;
        for span in self.scored(window)? {
            let mut scores = self.scores(window, &span)?;
            let rescale = online_softmax(&mut scores, &mut max, &mut sum)?;
            let added = scores.f_to_kind(self.kind()?)?.f_bmm(&span.values)?;
            gathered = Some(match gathered {
                None => added,
                Some(before) => before.f_mul(&rescale)?.f_add_(&added)?,
            });
        }
        if let Some(span) = self.attended(window)? {
            let queries = self.rows(window).of(&self.by_row(self.queries)?, 1)?;
            let (added, log_sum) = attend(&queries, &span.keys, &span.values, 1.0)?;
            // The kernel's output counts as the value of one more score.
            let mut weight = log_sum.f_unsqueeze(-1)?.f_contiguous()?;
            let rescale = online_softmax(&mut weight, &mut max, &mut sum)?;
            let mut added = added.f_mul(&weight)?;
            gathered = Some(match gathered {
                None => added,
                Some(before) => added.f_add_(&before.f_mul(&rescale)?)?,
            });
        }
        let gathered = match gathered {
            Some(gathered) => gathered.f_to_kind(self.kind()?)?,
            None => self.rows(window).of(&self.by_row(self.queries)?, 1)?.f_zeros_like()?,
        };
        Ok([max, sum, gathered])
    }

    /// Span of a group's context for the kernel.
    fn attended(&self, window: &AttentionWindow) -> Result<Option<ContextSpan<'static>>, ModelError> {
        if !self.use_kernel()? || window.unmasked.len == 0 {
            return Ok(None);
        }
        self.span(window, window.unmasked, Vec::new())
    }

    /// Spans of a group's context for plain products.
    fn scored<'a>(&self, window: &'a AttentionWindow) -> Result<Vec<ContextSpan<'a>>, ModelError> {
        let mut spans = Vec::new();
        if self.use_kernel()? {
            for masked in &window.masked {
                let all = Span { start: 0, len: masked.span.len };
                spans.extend(self.span(window, masked.span, vec![(all, &masked.mask)])?);
            }
        } else if window.len > 0 {
            let masked = window.masked.iter().map(|masked| (masked.span, &masked.mask)).collect();
            spans.extend(self.span(window, Span { start: 0, len: window.len }, masked)?);
        }
        Ok(spans)
    }

    fn span<'a>(
        &self,
        window: &AttentionWindow,
        of_window: Span,
        masked: Vec<(Span, &'a Tensor)>,
    ) -> Result<Option<ContextSpan<'a>>, ModelError> {
        let Some((keys, values)) = self.context else { return Ok(None) };
        let span = Span { start: window.start + of_window.start, len: of_window.len };
        Ok(Some(ContextSpan { span, keys: span.of(keys, 1)?, values: span.of(values, 1)?, masked }))
    }

    fn use_kernel(&self) -> Result<bool, ModelError> {
        let head_dim = self.queries.size()[3];
        Ok(self.by == AttentionBackend::Kernel && has_kernel(self.queries.device(), self.kind()?, head_dim))
    }

    /// Scores of a context span, `[kv_heads, rows, tokens]`; minus infinity if masked.
    fn scores(&self, window: &AttentionWindow, span: &ContextSpan<'_>) -> Result<Tensor, ModelError> {
        let queries = self.rows(window).of(&self.by_row(self.queries)?, 1)?;
        let scores = queries.f_bmm(&span.keys.f_transpose(1, 2)?)?.f_to_kind(wide(self.kind()?))?;
        let (heads, group, len) = (scores.size()[0], self.queries.size()[2], span.span.len);
        for (masked, mask) in &span.masked {
            let by_slot = scores.f_view([heads, window.slots / self.block_size, self.block_size, group, len])?;
            let _ = masked.of(&by_slot, -1)?.f_masked_fill_(mask, f64::NEG_INFINITY)?;
        }
        Ok(scores)
    }

    /// Scores within the own block, `[kv_heads, rows, block_size]`.
    fn own_scores(&self) -> Result<Tensor, ModelError> {
        let scores = self.own_scores_of(self.queries, self.own.0)?.f_to_kind(wide(self.kind()?))?;
        if let Some(mask) = self.attention.own_mask {
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

    /// Transposed scores times rows: the gradient of own keys or values, `[kv_heads, slots, head_dim]`.
    fn own_key_gradient(&self, scores: &Tensor, rows: &Tensor) -> Result<Tensor, ModelError> {
        let transposed = self.by_block(scores)?.f_transpose(1, 2)?.f_to_kind(self.kind()?)?;
        Ok(transposed.f_bmm(&self.by_block(rows)?)?.f_view_as(self.own.0)?)
    }
}
