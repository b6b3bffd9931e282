//! Attention of all blocks over the context before their anchors and over themselves, with its gradient.
//!
//! The own blocks are one batched product. The context is taken group by group, each group only up to its last anchor, and
//! joined with the own block by the maximum and the sum of both. The backward pass makes the scores again from the
//! logarithm of the sums instead of keeping them, so memory stays linear in slots and context.

use super::super::ModelError;
use super::super::blocks::{Sight, View};
use super::super::ops::{Span, wide};
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

impl Inputs<'_> {
    pub fn forward(&self) -> Result<Output, ModelError> {
        let mut own = self.own_scores()?;
        let own_most = own.f_amax(&[-1i64][..], true)?;
        let (mut most, mut sums, mut parts) = (Vec::new(), Vec::new(), Vec::new());
        for view in self.sight.views {
            let rows = self.rows(view);
            let own_most = rows.of(&own_most, 1)?;
            let Some((keys, values)) = self.context.filter(|_| view.len > 0) else {
                parts.push(rows.of(&self.by_row(self.queries)?, 1)?.f_zeros_like()?);
                sums.push(own_most.f_zeros_like()?);
                most.push(own_most);
                continue;
            };
            let mut scores = self.context_scores(view, keys)?;
            let larger = scores.f_amax(&[-1i64][..], true)?.f_maximum(&own_most)?;
            let scores = scores.f_sub_(&larger)?.f_exp_()?;
            sums.push(scores.f_sum_dim_intlist(&[-1i64][..], true, scores.f_kind()?)?);
            parts.push(scores.f_to_kind(values.f_kind()?)?.f_bmm(&seen(values, view)?)?);
            most.push(larger);
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
        let weights = self.own_scores()?.f_sub_(&output.log_sum)?.f_exp_()?;
        let d_weights = self.own_scores_of(d_gathered, self.own.1)?.f_to_kind(exact)?;
        let d_scores = d_weights.f_sub(&delta)?.f_mul_(&weights)?;
        let d_own = (self.own_key_gradient(&d_scores, self.queries)?, self.own_key_gradient(&weights, d_gathered)?);
        let d_queries = self.own_product(&d_scores, self.own.0)?;

        let Some((keys, values)) = self.context else {
            return Ok(Gradients { queries: d_queries.f_view_as(self.queries)?, own: d_own, context: None });
        };
        let zeros = |x: &Tensor| Tensor::f_zeros(x.size(), (exact, x.device()));
        let (d_keys, d_values) = (zeros(keys)?, zeros(values)?);
        for view in self.sight.views.iter().filter(|view| view.len > 0) {
            let rows = self.rows(view);
            let (queries, d_gathered) = (rows.of(&self.by_row(self.queries)?, 1)?, rows.of(d_gathered, 1)?);
            let weights = self.context_scores(view, keys)?.f_sub_(&rows.of(&output.log_sum, 1)?)?.f_exp_()?;
            let d_weights = d_gathered.f_bmm(&seen(values, view)?.f_transpose(1, 2)?)?.f_to_kind(exact)?;
            let d_scores = d_weights.f_sub(&rows.of(&delta, 1)?)?.f_mul_(&weights)?.f_to_kind(self.kind()?)?;
            let weights = weights.f_to_kind(self.kind()?)?;
            let _ = seen(&d_values, view)?.f_add_(&weights.f_transpose(1, 2)?.f_bmm(&d_gathered)?)?;
            let _ = seen(&d_keys, view)?.f_add_(&d_scores.f_transpose(1, 2)?.f_bmm(&queries)?)?;
            let _ = rows.of(&d_queries, 1)?.f_add_(&d_scores.f_bmm(&seen(keys, view)?)?)?;
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

    /// Scores of the context that a group sees, `[kv_heads, rows, tokens]`, minus infinity where it is hidden.
    fn context_scores(&self, view: &View, keys: &Tensor) -> Result<Tensor, ModelError> {
        let queries = self.rows(view).of(&self.by_row(self.queries)?, 1)?;
        let scores = queries.f_bmm(&seen(keys, view)?.f_transpose(1, 2)?)?;
        let scores = scores.f_to_kind(wide(self.kind()?))?;
        if let Some(hidden) = &view.hidden {
            let (heads, group, from) = (scores.size()[0], self.queries.size()[2], hidden.from);
            let blocks = view.slots / self.block_size;
            let by_slot = scores.f_view([heads, blocks, self.block_size, group, view.len])?;
            let _ = by_slot.f_narrow(-1, from, view.len - from)?.f_masked_fill_(&hidden.mask, f64::NEG_INFINITY)?;
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

/// The context that a group sees.
fn seen(x: &Tensor, view: &View) -> Result<Tensor, ModelError> {
    Ok(x.f_narrow(1, view.start, view.len)?)
}
