//! Queries and keys: norm of each head, rotation by its position, and the layout that attention works in.

use super::norm;
use crate::model::ModelError;
use crate::model::rope::Turn;
use tch::Tensor;

/// Turned heads, and what their gradient needs.
pub struct Heads {
    /// `[kv_heads, positions, heads of a group, head_dim]`, contiguous. Key heads form groups of one.
    pub turned: Tensor,
    scale: Tensor,
}

impl Heads {
    /// `raw` is `[positions, heads, head_dim]`; neighbouring heads form `kv_heads` groups.
    pub fn forward(raw: &Tensor, weight: &Tensor, eps: f64, turn: &Turn, kv_heads: i64) -> Result<Heads, ModelError> {
        let (normed, scale) = norm::forward(raw, weight, eps)?;
        let grouped = grouped(&normed, kv_heads)?;
        let size = grouped.size();
        let turned = Tensor::f_empty([size[1], size[0], size[2], size[3]], (raw.f_kind()?, raw.device()))?;
        turn.forward(&grouped, &turned.f_transpose(0, 1)?)?;
        Ok(Heads { turned, scale })
    }

    /// From the gradient of [`Heads::turned`]: writes that of `raw` to `d_raw`, and gives that of the norm's weight.
    pub fn backward(
        &self,
        d_turned: &Tensor,
        raw: &Tensor,
        d_raw: &Tensor,
        weight: &Tensor,
        turn: &Turn,
    ) -> Result<Tensor, ModelError> {
        let d_normed = Tensor::f_empty(raw.size(), (raw.f_kind()?, raw.device()))?;
        let d_turned = d_turned.f_view_as(&self.turned)?;
        turn.backward(&d_turned.f_transpose(0, 1)?, &grouped(&d_normed, d_turned.size()[0])?)?;
        norm::backward_to(d_raw, &d_normed, raw, &self.scale, weight)
    }
}

/// `[positions, heads, head_dim]` as `[positions, kv_heads, heads of a group, head_dim]`, a view.
fn grouped(x: &Tensor, kv_heads: i64) -> Result<Tensor, ModelError> {
    let size = x.size();
    Ok(x.f_view([size[0], kv_heads, size[1] / kv_heads, size[2]])?)
}
