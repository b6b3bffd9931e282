//! Query and key heads: norm, rotation, and the layout for attention.

use super::norm;
use crate::model::ModelError;
use crate::model::rope::Rotation;
use tch::Tensor;

/// Rotated heads, and what their gradient needs.
pub struct Heads {
    /// `[kv_heads, positions, heads of a group, head_dim]`, contiguous. Key heads form groups of one.
    pub rotated: Tensor,
    scale: Tensor,
}

impl Heads {
    /// Normalises and rotates `raw [positions, heads, head_dim]`; neighbouring heads form `kv_heads` groups.
    pub fn forward(
        raw: &Tensor,
        weight: &Tensor,
        eps: f64,
        rotation: &Rotation,
        kv_heads: i64,
    ) -> Result<Heads, ModelError> {
        let (normed, scale) = norm::forward(raw, weight, eps)?;
        let grouped = grouped(&normed, kv_heads)?;
        let size = grouped.size();
        let rotated = Tensor::f_empty([size[1], size[0], size[2], size[3]], (raw.f_kind()?, raw.device()))?;
        rotation.forward(&grouped, &rotated.f_transpose(0, 1)?)?;
        Ok(Heads { rotated, scale })
    }

    /// Writes the gradient of `raw` to `d_raw` and returns that of the norm weight, from that of [`Heads::rotated`].
    pub fn backward(
        &self,
        d_rotated: &Tensor,
        raw: &Tensor,
        d_raw: &Tensor,
        weight: &Tensor,
        rotation: &Rotation,
    ) -> Result<Tensor, ModelError> {
        let d_normed = Tensor::f_empty(raw.size(), (raw.f_kind()?, raw.device()))?;
        let d_rotated = d_rotated.f_view_as(&self.rotated)?;
        rotation.backward(&d_rotated.f_transpose(0, 1)?, &grouped(&d_normed, d_rotated.size()[0])?)?;
        norm::backward_to(d_raw, &d_normed, raw, &self.scale, weight)
    }
}

/// `[positions, heads, head_dim]` as `[positions, kv_heads, heads of a group, head_dim]`, a view.
fn grouped(x: &Tensor, kv_heads: i64) -> Result<Tensor, ModelError> {
    let size = x.size();
    Ok(x.f_view([size[0], kv_heads, size[1] / kv_heads, size[2]])?)
}
