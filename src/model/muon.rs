//! Muon: momentum whose update is made orthogonal, for matrices (Jordan et al. 2024; as torch.optim.Muon).

use super::ModelError;
use crate::config::MuonScale;
use tch::{Kind, Tensor};

/// Hyperparameters of Muon except the learning rate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Muon {
    /// Decay rate of the momentum.
    pub momentum: f64,
    /// Decoupled weight decay of matrices.
    pub weight_decay: f64,
    /// Iterations of Newton-Schulz.
    pub iterations: u32,
    /// Learning rate of matrices as a multiple of that of AdamW.
    pub rate: f64,
    pub scale: MuonScale,
}

/// Coefficients of an iteration `X <- a X + (b A + c A A) X` with `A = X X^T`.
const COEFFICIENTS: [f64; 3] = [3.4445, -4.7750, 2.0315];
/// Smallest norm that a momentum is divided by.
const EPS: f64 = 1e-7;
/// Names of matrices that AdamW updates: tables whose rows belong to tokens.
const TABLES: [&str; 5] = ["embed_tokens", "lm_head", "codebook", "markov_w1", "markov_w2"];

/// True if Muon updates the tensor `name`: a matrix with both sides above 1 that is not a table of tokens.
pub fn is_matrix(name: &str, size: &[i64]) -> bool {
    matches!(size, [rows, columns] if *rows > 1 && *columns > 1) && !TABLES.iter().any(|table| name.contains(table))
}

impl Muon {
    /// Updates `weight` and its momentum from the mean gradient, which is already clipped. `learning_rate` is AdamW's.
    ///
    /// # Errors
    /// Returns an error if libtorch fails.
    pub fn update(
        &self,
        weight: &mut Tensor,
        momentum: &mut Tensor,
        gradient: &Tensor,
        learning_rate: f64,
    ) -> Result<(), ModelError> {
        let _ = momentum.f_lerp_(gradient, 1.0 - self.momentum)?;
        let nesterov = gradient.f_lerp(momentum, self.momentum)?;
        let direction = orthogonal(&nesterov, self.iterations)?;
        let rate = learning_rate * self.rate;
        let (rows, columns) = (weight.size()[0] as f64, weight.size()[1] as f64);
        let factor = match self.scale {
            MuonScale::MatchRmsAdamw => 0.2 * rows.max(columns).sqrt(),
            MuonScale::Original => (rows / columns).max(1.0).sqrt(),
        };
        let _ = weight.f_mul_scalar_(1.0 - rate * self.weight_decay)?;
        let _ = weight.f_sub_(&direction.f_to_kind(weight.f_kind()?)?.f_mul_scalar_(rate * factor)?)?;
        Ok(())
    }
}

/// Nearly orthogonal matrix of the same row and column spaces, by Newton-Schulz in bf16, in the order of torch's operations.
///
/// # Errors
/// Returns an error if libtorch fails.
pub fn orthogonal(matrix: &Tensor, iterations: u32) -> Result<Tensor, ModelError> {
    let [a, b, c] = COEFFICIENTS;
    let tall = matrix.size()[0] > matrix.size()[1];
    let mut x = matrix.f_to_kind(Kind::BFloat16)?;
    if tall {
        x = x.f_transpose(0, 1)?;
    }
    let norm = x.f_norm()?.f_clamp_min(EPS)?;
    let mut x = x.f_div(&norm)?.f_unsqueeze(0)?;
    for _ in 0..iterations {
        let gram = x.f_bmm(&x.f_transpose(1, 2)?)?;
        let update = gram.f_baddbmm(&gram, &gram, b, c)?;
        x = x.f_baddbmm(&update, &x, a, 1.0)?;
    }
    let x = x.f_squeeze_dim(0)?;
    Ok(if tall { x.f_transpose(0, 1)? } else { x })
}
