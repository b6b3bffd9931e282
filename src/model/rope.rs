//! Rotary position embedding in the rotate-half layout, with tables in fp32.

use super::ModelError;
use crate::hf::config::RopeScaling;
use tch::{Device, Kind, Tensor};

/// Inverse frequencies of one model, `[head_dim / 2]`, always in fp32: rounded to bf16 they would make training and
/// serving differ.
pub struct Rope {
    inverse: Tensor,
}

/// Cosines and sines of some positions, `[positions, 1, head_dim]`, in the model's dtype.
pub struct RopeTable {
    cos: Tensor,
    sin: Tensor,
}

/// Rotation of queries and keys in training: one half of each table (the halves are equal) times a factor, `[positions,
/// 1, 1, head_dim / 2]`.
pub struct Rotation {
    cos: Tensor,
    sin: Tensor,
    minus_sin: Tensor,
}

impl Rope {
    /// Frequencies of a model with this head size, base and scaling.
    ///
    /// # Errors
    /// Returns an error if libtorch fails.
    pub fn new(head_dim: usize, theta: f64, scaling: RopeScaling, device: Device) -> Result<Rope, ModelError> {
        let inverse = Tensor::f_from_slice(&inverse_frequencies(head_dim, theta, scaling))?.f_to_device(device)?;
        Ok(Rope { inverse })
    }

    /// Returns a handle to the same frequencies, without a copy.
    pub fn shallow_clone(&self) -> Rope {
        Rope { inverse: self.inverse.shallow_clone() }
    }

    /// Table for these absolute positions.
    ///
    /// # Errors
    /// Returns an error if libtorch fails.
    pub fn table(&self, positions: &[i64], kind: Kind) -> Result<RopeTable, ModelError> {
        let _no_grad = tch::no_grad_guard();
        let positions = Tensor::f_from_slice(positions)?.f_to_device(self.inverse.device())?.f_to_kind(Kind::Float)?;
        let angles = positions.f_unsqueeze(1)?.f_mul(&self.inverse)?;
        let angles = Tensor::f_cat(&[&angles, &angles], 1)?.f_unsqueeze(1)?;
        Ok(RopeTable { cos: angles.f_cos()?.f_to_kind(kind)?, sin: angles.f_sin()?.f_to_kind(kind)? })
    }
}

impl RopeTable {
    /// Rotates `[positions, heads, head_dim]`.
    ///
    /// # Errors
    /// Returns an error if libtorch fails.
    pub fn apply(&self, x: &Tensor) -> Result<Tensor, ModelError> {
        let dim = self.cos.size()[2];
        let half = dim / 2;
        let rotated = Tensor::f_cat(&[x.f_narrow(-1, half, half)?.f_neg()?, x.f_narrow(-1, 0, half)?], -1)?;
        Ok(x.f_mul(&self.cos)?.f_add(&rotated.f_mul(&self.sin)?)?)
    }

    /// Rotation that also multiplies by `factor`.
    ///
    /// # Errors
    /// Returns an error if libtorch fails.
    pub fn rotation(&self, factor: f64) -> Result<Rotation, ModelError> {
        let half = |table: &Tensor, factor: f64| -> Result<Tensor, ModelError> {
            Ok(table.f_narrow(2, 0, table.size()[2] / 2)?.f_unsqueeze(1)?.f_mul_scalar(factor)?)
        };
        Ok(Rotation {
            cos: half(&self.cos, factor)?,
            sin: half(&self.sin, factor)?,
            minus_sin: half(&self.sin, -factor)?,
        })
    }

    /// Rows `start..start + len` of the table, as a view.
    ///
    /// # Errors
    /// Returns an error if the range is out of bounds.
    pub fn rows(&self, start: i64, len: i64) -> Result<RopeTable, ModelError> {
        Ok(RopeTable { cos: self.cos.f_narrow(0, start, len)?, sin: self.sin.f_narrow(0, start, len)? })
    }

    /// Repeats the table `times` times, for batches whose rows have the same positions.
    ///
    /// # Errors
    /// Returns an error if libtorch fails.
    pub fn repeat(&self, times: i64) -> Result<RopeTable, ModelError> {
        Ok(RopeTable { cos: self.cos.f_repeat([times, 1, 1])?, sin: self.sin.f_repeat([times, 1, 1])? })
    }
}

impl Rotation {
    /// Rotates `from [positions, .., .., head_dim]` into `to`, which may have any strides.
    ///
    /// # Errors
    /// Returns an error if libtorch fails.
    pub fn forward(&self, from: &Tensor, to: &Tensor) -> Result<(), ModelError> {
        self.apply(from, to, &self.minus_sin, &self.sin)
    }

    /// Gradient of [`Rotation::forward`]: the inverse rotation times the same factor.
    ///
    /// # Errors
    /// Returns an error if libtorch fails.
    pub fn backward(&self, from: &Tensor, to: &Tensor) -> Result<(), ModelError> {
        self.apply(from, to, &self.sin, &self.minus_sin)
    }

    fn apply(&self, from: &Tensor, to: &Tensor, first: &Tensor, second: &Tensor) -> Result<(), ModelError> {
        let half = self.cos.size()[3];
        let (low, high) = (from.f_narrow(-1, 0, half)?, from.f_narrow(-1, half, half)?);
        let _ = low.f_mul_out(&to.f_narrow(-1, 0, half)?, &self.cos)?.f_addcmul_(&high, first)?;
        let _ = high.f_mul_out(&to.f_narrow(-1, half, half)?, &self.cos)?.f_addcmul_(&low, second)?;
        Ok(())
    }
}

/// `theta^(-2i / head_dim)`, scaled by `scaling`.
fn inverse_frequencies(head_dim: usize, theta: f64, scaling: RopeScaling) -> Vec<f32> {
    let plain = (0..head_dim / 2).map(|i| theta.powf(-(2.0 * i as f64) / head_dim as f64));
    match scaling {
        RopeScaling::None => plain.map(|x| x as f32).collect(),
        RopeScaling::Linear { factor } => plain.map(|x| (x / factor) as f32).collect(),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } => {
            let scale = |x: f64| {
                // Rotations of this frequency within the original context length.
                let turns = original_max_position_embeddings as f64 * x / std::f64::consts::TAU;
                let keep = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
                (1.0 - keep) * x / factor + keep * x
            };
            plain.map(|x| scale(x) as f32).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llama3_keeps_short_waves_and_divides_long_ones() {
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8192,
        };
        let plain = inverse_frequencies(128, 500_000.0, RopeScaling::None);
        let scaled = inverse_frequencies(128, 500_000.0, scaling);
        assert_eq!(plain[0], scaled[0]);
        assert!((plain[63] / scaled[63] - 8.0).abs() < 1e-5);
        assert!(plain.iter().zip(&scaled).all(|(p, s)| s <= p && *s >= p / 8.001));
        assert!(plain.iter().zip(&scaled).any(|(p, s)| *s < 0.9 * p && *s > 0.2 * p), "a middle is interpolated");
    }

    /// Automodel's draft_qwen3 (`docs/dflash.md#known-mistakes`): inverse frequencies rounded to bf16 drift.
    #[test]
    fn automodel_bf16_tables_come_from_fp32_frequencies() {
        let rope = Rope::new(64, 1e6, RopeScaling::None, Device::Cpu).unwrap();
        assert_eq!(rope.inverse.kind(), Kind::Float);
        let positions = [0, 1, 1000, 3001];
        let exact = rope.table(&positions, Kind::Float).unwrap();
        let rounded = rope.table(&positions, Kind::BFloat16).unwrap();
        let gap = (exact.cos - rounded.cos.to_kind(Kind::Float)).abs().max();
        // One rounding of a value in [-1, 1]; rounding the frequency instead is off by radians at position 3001.
        assert!(f64::try_from(&gap).unwrap() <= 1.0 / 256.0, "{gap:?}");
    }
}
