//! Context feature that all layers share, computed from tapped hidden states once per micro-batch.

use super::norm;
use super::products::product;
use super::weights::{ContextGradients, Weights};
use crate::model::ModelError;
use crate::model::batch::Packed;
use crate::model::drafter::anchors::Anchors;
use tch::Tensor;

/// Context feature of the tokens before the largest anchor of each row, which is all that its blocks see.
pub struct Context {
    /// Context tokens of each row.
    lengths: Vec<i64>,
    /// `[tokens, taps * hidden]`
    hidden: Tensor,
    /// `[tokens, hidden]`, before and after the norm.
    mixed: Tensor,
    scale: Tensor,
    feature: Tensor,
    /// Keys and values of all layers, `[tokens, layers * 2 * kv_heads * head_dim]`.
    keys_values: Tensor,
}

impl Context {
    /// Computes the feature; `None` if no block sees any context.
    pub fn new(
        batch: &Packed<'_>,
        anchors: &Anchors,
        weights: &Weights,
        eps: f64,
    ) -> Result<Option<Context>, ModelError> {
        let lengths = anchors.context_lengths();
        let starts = batch.offsets().into_iter().map(|start| start as i64);
        let seen = starts.zip(&lengths).filter(|(_, len)| **len > 0);
        let rows = seen.map(|(start, &len)| batch.hidden.f_narrow(0, start, len)).collect::<Result<Vec<_>, _>>()?;
        if rows.is_empty() {
            return Ok(None);
        }
        let hidden = Tensor::f_cat(&rows, 0)?.f_to_kind(weights.fc.f_kind()?)?;
        let mixed = hidden.f_linear(&weights.fc, None::<Tensor>)?;
        let (feature, scale) = norm::forward(&mixed, &weights.hidden_norm, eps)?;
        let keys_values = feature.f_linear(&weights.context, None::<Tensor>)?;
        Ok(Some(Context { lengths, hidden, mixed, scale, feature, keys_values }))
    }

    /// Keys and values of the context of a chunk of blocks, laid out as [`Context::new`] would for the chunk alone.
    pub fn of_chunk(&self, anchors: &Anchors) -> Result<Option<Tensor>, ModelError> {
        let lengths = anchors.context_lengths();
        if lengths == self.lengths {
            return Ok(Some(self.keys_values.shallow_clone()));
        }
        let rows = self.first_tokens(&self.keys_values, &lengths)?;
        Ok(if rows.is_empty() { None } else { Some(Tensor::f_cat(&rows, 0)?) })
    }

    /// Adds the gradient of a chunk's keys and values to the sum over all chunks.
    pub fn add(&self, sum: &mut Option<Tensor>, anchors: &Anchors, part: Tensor) -> Result<(), ModelError> {
        let lengths = anchors.context_lengths();
        if sum.is_none() && lengths == self.lengths {
            *sum = Some(part);
            return Ok(());
        }
        let sum = match sum {
            Some(sum) => sum,
            None => sum.insert(self.keys_values.f_zeros_like()?),
        };
        let mut start = 0;
        for mut rows in self.first_tokens(sum, &lengths)? {
            let len = rows.size()[0];
            let _ = rows.f_add_(&part.f_narrow(0, start, len)?)?;
            start += len;
        }
        Ok(())
    }

    /// Gradients of the weights from that of the keys and values.
    pub fn backward(&self, d_keys_values: &Tensor, weights: &Weights) -> Result<ContextGradients, ModelError> {
        let d_feature = d_keys_values.f_mm(&weights.context)?;
        let (d_mixed, hidden_norm) = norm::backward(&d_feature, &self.mixed, &self.scale, &weights.hidden_norm)?;
        Ok(ContextGradients {
            fc: product(&d_mixed.f_to_kind(self.hidden.f_kind()?)?, &self.hidden)?,
            hidden_norm,
            keys_values: product(d_keys_values, &self.feature)?,
        })
    }

    /// First tokens of each row, as many as `lengths` gives, as views.
    fn first_tokens(&self, x: &Tensor, lengths: &[i64]) -> Result<Vec<Tensor>, ModelError> {
        let mut start = 0;
        let rows = self.lengths.iter().zip(lengths).map(|(&all, &len)| {
            start += all;
            (start - all, len)
        });
        Ok(rows.filter(|(_, len)| *len > 0).map(|(start, len)| x.f_narrow(0, start, len)).collect::<Result<_, _>>()?)
    }
}
