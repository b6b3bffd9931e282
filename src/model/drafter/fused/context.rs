//! The context feature that all layers share, from tapped hidden states: made once for a micro-batch, whoever computes its blocks.

use super::norm;
use super::products::product;
use super::weights::{ContextGradients, Weights};
use crate::model::ModelError;
use crate::model::batch::Packed;
use crate::model::drafter::anchors::Anchors;
use tch::Tensor;

/// Of the tokens before the largest anchor of each row, which is all that its blocks see.
pub struct Context {
    /// Tokens of each row.
    cuts: Vec<i64>,
    /// `[tokens, taps * hidden]`
    hidden: Tensor,
    /// `[tokens, hidden]`, before the norm and after it.
    mixed: Tensor,
    scale: Tensor,
    feature: Tensor,
    /// Of all layers, `[tokens, layers * 2 * kv_heads * head_dim]`.
    keys_values: Tensor,
}

impl Context {
    /// `None` where no block sees any.
    pub fn new(
        batch: &Packed<'_>,
        anchors: &Anchors,
        weights: &Weights,
        eps: f64,
    ) -> Result<Option<Context>, ModelError> {
        let cuts = anchors.cuts();
        let starts = batch.offsets().into_iter().map(|start| start as i64);
        let seen = starts.zip(&cuts).filter(|(_, cut)| **cut > 0);
        let rows = seen.map(|(start, &cut)| batch.hidden.f_narrow(0, start, cut)).collect::<Result<Vec<_>, _>>()?;
        if rows.is_empty() {
            return Ok(None);
        }
        let hidden = Tensor::f_cat(&rows, 0)?.f_to_kind(weights.fc.f_kind()?)?;
        let mixed = hidden.f_linear(&weights.fc, None::<Tensor>)?;
        let (feature, scale) = norm::forward(&mixed, &weights.hidden_norm, eps)?;
        let keys_values = feature.f_linear(&weights.context, None::<Tensor>)?;
        Ok(Some(Context { cuts, hidden, mixed, scale, feature, keys_values }))
    }

    /// Keys and values of what some of the blocks see, laid out as [`Context::new`] would for these alone.
    pub fn seen_by(&self, anchors: &Anchors) -> Result<Option<Tensor>, ModelError> {
        let cuts = anchors.cuts();
        if cuts == self.cuts {
            return Ok(Some(self.keys_values.shallow_clone()));
        }
        let parts = self.parts(&self.keys_values, &cuts)?;
        Ok(if parts.is_empty() { None } else { Some(Tensor::f_cat(&parts, 0)?) })
    }

    /// Adds the gradient of what some of the blocks see to that of all keys and values.
    pub fn add(&self, sum: &mut Option<Tensor>, anchors: &Anchors, part: Tensor) -> Result<(), ModelError> {
        let cuts = anchors.cuts();
        if sum.is_none() && cuts == self.cuts {
            *sum = Some(part);
            return Ok(());
        }
        let sum = match sum {
            Some(sum) => sum,
            None => sum.insert(self.keys_values.f_zeros_like()?),
        };
        let mut start = 0;
        for mut place in self.parts(sum, &cuts)? {
            let len = place.size()[0];
            let _ = place.f_add_(&part.f_narrow(0, start, len)?)?;
            start += len;
        }
        Ok(())
    }

    pub fn backward(&self, d_keys_values: &Tensor, weights: &Weights) -> Result<ContextGradients, ModelError> {
        let d_feature = d_keys_values.f_mm(&weights.context)?;
        let (d_mixed, hidden_norm) = norm::backward(&d_feature, &self.mixed, &self.scale, &weights.hidden_norm)?;
        Ok(ContextGradients {
            fc: product(&d_mixed.f_to_kind(self.hidden.f_kind()?)?, &self.hidden)?,
            hidden_norm,
            keys_values: product(d_keys_values, &self.feature)?,
        })
    }

    /// The first tokens of each row, so many as `cuts` says, as views.
    fn parts(&self, x: &Tensor, cuts: &[i64]) -> Result<Vec<Tensor>, ModelError> {
        let mut start = 0;
        let rows = self.cuts.iter().zip(cuts).map(|(&all, &cut)| {
            start += all;
            (start - all, cut)
        });
        Ok(rows.filter(|(_, cut)| *cut > 0).map(|(start, cut)| x.f_narrow(0, start, cut)).collect::<Result<_, _>>()?)
    }
}
