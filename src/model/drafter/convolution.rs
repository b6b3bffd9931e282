//! Convolution of DFlash 2 over the slots of one block, before and after a sublayer (docs/heads.md#dflash-2).
//!
//! `y_i = sum_t (K_t + k_it) x_(i - t)` over the taps `t`, with a base kernel `K` per channel and a dynamic kernel `k` per
//! slot and group of channels. Slots before the block are zero. `k` is a projection of the sublayer's normed input, which
//! gives the kernels of both sides.

use crate::hf::draft::DraftConfig;
use crate::hf::head::{BASE_KERNEL, CONVOLUTIONS, KERNEL_PROJECTION, convolution_tensor};
use crate::model::ModelError;
use crate::model::ops::wide;
use crate::model::params::ParamSet;
use tch::{Kind, Tensor};

/// Side of a sublayer: its normed input, or its output before the residual stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Before = 0,
    After = 1,
}

/// Weights of the convolutions of one sublayer, or their gradients.
pub struct Convolution {
    /// `[2, taps, hidden]`.
    pub base: Tensor,
    /// `[2 * taps * groups, hidden]`.
    pub projection: Tensor,
}

/// Gradients of one side by its input and its kernels.
pub struct SideGradients {
    pub x: Tensor,
    /// `[taps, hidden]` in at least fp32.
    pub base: Tensor,
    /// `[slots, taps, groups]`.
    pub dynamic: Tensor,
}

impl Convolution {
    /// Loads the convolutions of `layer` around attention and MLP; `None` if the head has none.
    ///
    /// # Errors
    /// `ModelError::Input` if a tensor is absent.
    pub fn load(
        config: &DraftConfig,
        params: &ParamSet,
        layer: usize,
        kind: Kind,
    ) -> Result<Option<[Convolution; 2]>, ModelError> {
        if config.head.convolution().is_none() {
            return Ok(None);
        }
        let get = |name: &str, tensor: &str| -> Result<Tensor, ModelError> {
            Ok(params.need(&convolution_tensor(layer, name, tensor))?.f_to_kind(kind)?)
        };
        let one = |name: &str| -> Result<Convolution, ModelError> {
            Ok(Convolution { base: get(name, BASE_KERNEL)?, projection: get(name, KERNEL_PROJECTION)? })
        };
        Ok(Some([one(CONVOLUTIONS[0])?, one(CONVOLUTIONS[1])?]))
    }

    /// Dynamic kernels of both sides from the sublayer's normed input `[slots, hidden]`, `[slots, 2, taps, groups]`.
    ///
    /// # Errors
    /// Returns an error if libtorch fails.
    pub fn kernels(&self, normed: &Tensor) -> Result<Tensor, ModelError> {
        let (taps, rows) = (self.base.size()[1], self.projection.size()[0]);
        Ok(normed.f_linear(&self.projection, None::<Tensor>)?.f_view([-1, 2, taps, rows / 2 / taps])?)
    }

    /// Convolves `x [slots, hidden]`, block by block. Autograd differentiates through it.
    ///
    /// # Errors
    /// Returns an error if libtorch fails.
    pub fn apply(&self, side: Side, x: &Tensor, kernels: &Tensor, block_size: i64) -> Result<Tensor, ModelError> {
        let mut sum = x.f_mul(&self.weight(side, kernels, 0)?)?;
        for tap in 1..self.base.size()[1].min(block_size) {
            sum = sum.f_add(&shift(x, tap, block_size)?.f_mul(&self.weight(side, kernels, tap)?)?)?;
        }
        Ok(sum)
    }

    /// Gradients of [`Convolution::apply`] from that of its result.
    ///
    /// # Errors
    /// Returns an error if libtorch fails.
    pub fn backward(
        &self,
        side: Side,
        x: &Tensor,
        kernels: &Tensor,
        dy: &Tensor,
        block_size: i64,
    ) -> Result<SideGradients, ModelError> {
        let (taps, groups, exact) = (self.base.size()[1], kernels.size()[3], wide(x.f_kind()?));
        let width = x.size()[1];
        let mut dx = dy.f_mul(&self.weight(side, kernels, 0)?)?;
        let (mut base, mut dynamic) = (Vec::new(), Vec::new());
        for tap in 0..taps {
            let seen = if tap == 0 { x.shallow_clone() } else { shift(x, tap, block_size)? };
            let product = dy.f_mul(&seen)?;
            base.push(product.f_sum_dim_intlist(&[0i64][..], false, exact)?);
            let by_group = product.f_view([-1, groups, width / groups])?;
            dynamic.push(by_group.f_sum_dim_intlist(&[2i64][..], false, exact)?.f_to_kind(x.f_kind()?)?);
            if tap > 0 && tap < block_size {
                let weighted = dy.f_mul(&self.weight(side, kernels, tap)?)?;
                dx = dx.f_add_(&shift_back(&weighted, tap, block_size)?)?;
            }
        }
        Ok(SideGradients { x: dx, base: Tensor::f_stack(&base, 0)?, dynamic: Tensor::f_stack(&dynamic, 1)? })
    }

    /// Gradients by the normed input and by the weights, from those of both sides.
    ///
    /// # Errors
    /// Returns an error if libtorch fails.
    pub fn join(
        &self,
        normed: &Tensor,
        before: &SideGradients,
        after: &SideGradients,
    ) -> Result<(Tensor, Convolution), ModelError> {
        let dynamic = Tensor::f_stack(&[&before.dynamic, &after.dynamic], 1)?.f_flatten(1, -1)?;
        let d_normed = dynamic.f_mm(&self.projection)?.f_add_(&before.x)?;
        let projection = dynamic.f_transpose(0, 1)?.f_mm(normed)?;
        Ok((d_normed, Convolution { base: Tensor::f_stack(&[&before.base, &after.base], 0)?, projection }))
    }

    /// Kernel of one tap for every channel, `[slots, hidden]`.
    fn weight(&self, side: Side, kernels: &Tensor, tap: i64) -> Result<Tensor, ModelError> {
        let base = self.base.f_select(0, side as i64)?.f_select(0, tap)?;
        let dynamic = kernels.f_select(1, side as i64)?.f_select(1, tap)?;
        let (width, groups) = (base.size()[0], dynamic.size()[1]);
        Ok(dynamic.f_repeat_interleave_self_int(width / groups, 1, None)?.f_add(&base)?)
    }
}

/// Values of `tap` slots earlier; zero at the start of a block.
fn shift(x: &Tensor, tap: i64, block_size: i64) -> Result<Tensor, ModelError> {
    let blocks = x.f_view([-1, block_size, x.size()[1]])?;
    let moved = blocks.f_narrow(1, 0, (block_size - tap).max(0))?;
    Ok(moved.f_constant_pad_nd([0, 0, tap.min(block_size), 0])?.f_view(x.size().as_slice())?)
}

/// Gradient of [`shift`].
fn shift_back(x: &Tensor, tap: i64, block_size: i64) -> Result<Tensor, ModelError> {
    let blocks = x.f_view([-1, block_size, x.size()[1]])?;
    Ok(blocks.f_narrow(1, tap, block_size - tap)?.f_constant_pad_nd([0, 0, 0, tap])?.f_view(x.size().as_slice())?)
}
