//! Matrix products of the backward pass.

use crate::model::ModelError;
use tch::Tensor;

/// `dy^T x`: the gradient of `W` in `y = x W^T`.
pub fn product(dy: &Tensor, x: &Tensor) -> Result<Tensor, ModelError> {
    Ok(dy.f_transpose(0, 1)?.f_mm(x)?)
}
