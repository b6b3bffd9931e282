//! Convolutions around one sublayer in the fused path; without them each function returns its input.

use crate::model::ModelError;
use crate::model::drafter::convolution::{Convolution, Side, SideGradients};
use tch::Tensor;

/// Convolution of a sublayer with its dynamic kernels, if the draft head has it.
pub struct Around<'a> {
    pub convolution: Option<(&'a Convolution, Tensor)>,
    pub block_size: i64,
}

impl Around<'_> {
    /// Input of the sublayer from its normed input, `[slots, hidden]`.
    pub fn before(&self, normed: &Tensor) -> Result<Tensor, ModelError> {
        self.apply(Side::Before, normed)
    }

    /// Output for the residual stream from that of the sublayer, `[slots, hidden]`.
    pub fn after(&self, output: &Tensor) -> Result<Tensor, ModelError> {
        self.apply(Side::After, output)
    }

    /// Gradient by the sublayer's `output` from that of [`Around::after`]'s result, and those of the kernels.
    pub fn after_backward(
        &self,
        output: Option<&Tensor>,
        dy: &Tensor,
    ) -> Result<(Tensor, Option<SideGradients>), ModelError> {
        match (&self.convolution, output) {
            (Some((convolution, kernels)), Some(output)) => {
                let gradients = convolution.backward(Side::After, output, kernels, dy, self.block_size)?;
                Ok((gradients.x.shallow_clone(), Some(gradients)))
            }
            _ => Ok((dy.shallow_clone(), None)),
        }
    }

    /// Gradients by the normed input and the weights, from that of [`Around::before`]'s result and those of the other side.
    pub fn before_backward(
        &self,
        normed: &Tensor,
        dy: &Tensor,
        after: Option<SideGradients>,
    ) -> Result<(Tensor, Option<Convolution>), ModelError> {
        match (&self.convolution, after) {
            (Some((convolution, kernels)), Some(after)) => {
                let before = convolution.backward(Side::Before, normed, kernels, dy, self.block_size)?;
                let (d_normed, weights) = convolution.join(normed, &before, &after)?;
                Ok((d_normed, Some(weights)))
            }
            _ => Ok((dy.shallow_clone(), None)),
        }
    }

    fn apply(&self, side: Side, x: &Tensor) -> Result<Tensor, ModelError> {
        match &self.convolution {
            Some((convolution, kernels)) => convolution.apply(side, x, kernels, self.block_size),
            None => Ok(x.shallow_clone()),
        }
    }
}
