//! Rotary position embedding in the rotate-half layout, with tables in fp32.

use super::ModelError;
use crate::hf::config::RopeScaling;
use tch::{Device, Kind, Tensor};

/// Inverse frequencies of one model, `[head_dim / 2]`. They stay in fp32 whatever the model computes in: rounded to
/// bf16 they make training and serving drift apart.
pub struct Rope {
    inverse: Tensor,
}

/// Cosines and sines of some positions, `[positions, 1, head_dim]`, in the model's number type.
pub struct RopeTable {
    cos: Tensor,
    sin: Tensor,
}

/// What the training pass turns queries and keys with: each half of the tables, which are alike, times a factor, as
/// `[positions, 1, 1, head_dim / 2]`.
pub struct Turn {
    cos: Tensor,
    sin: Tensor,
    minus_sin: Tensor,
}

impl Rope {
    pub fn new(head_dim: usize, theta: f64, scaling: RopeScaling, device: Device) -> Result<Rope, ModelError> {
        let inverse = Tensor::f_from_slice(&inverse_frequencies(head_dim, theta, scaling))?.f_to_device(device)?;
        Ok(Rope { inverse })
    }

    /// The same frequencies, at no cost.
    pub fn share(&self) -> Rope {
        Rope { inverse: self.inverse.shallow_clone() }
    }

    /// The table for these absolute positions.
    pub fn table(&self, positions: &[i64], kind: Kind) -> Result<RopeTable, ModelError> {
        let _no_grad = tch::no_grad_guard();
        let positions = Tensor::f_from_slice(positions)?.f_to_device(self.inverse.device())?.f_to_kind(Kind::Float)?;
        let angles = positions.f_unsqueeze(1)?.f_mul(&self.inverse)?;
        let angles = Tensor::f_cat(&[&angles, &angles], 1)?.f_unsqueeze(1)?;
        Ok(RopeTable { cos: angles.f_cos()?.f_to_kind(kind)?, sin: angles.f_sin()?.f_to_kind(kind)? })
    }
}

impl RopeTable {
    /// Turns `[positions, heads, head_dim]`.
    pub fn apply(&self, x: &Tensor) -> Result<Tensor, ModelError> {
        let dim = self.cos.size()[2];
        let half = dim / 2;
        let turned = Tensor::f_cat(&[x.f_narrow(-1, half, half)?.f_neg()?, x.f_narrow(-1, 0, half)?], -1)?;
        Ok(x.f_mul(&self.cos)?.f_add(&turned.f_mul(&self.sin)?)?)
    }

    /// The same turn, and then a multiplication by `factor`.
    pub fn turn(&self, factor: f64) -> Result<Turn, ModelError> {
        let half = |table: &Tensor, factor: f64| -> Result<Tensor, ModelError> {
            Ok(table.f_narrow(2, 0, table.size()[2] / 2)?.f_unsqueeze(1)?.f_mul_scalar(factor)?)
        };
        Ok(Turn { cos: half(&self.cos, factor)?, sin: half(&self.sin, factor)?, minus_sin: half(&self.sin, -factor)? })
    }

    /// The rows `start..start + len` of the table, as a view.
    pub fn rows(&self, start: i64, len: i64) -> Result<RopeTable, ModelError> {
        Ok(RopeTable { cos: self.cos.f_narrow(0, start, len)?, sin: self.sin.f_narrow(0, start, len)? })
    }

    /// The table `times` times over: for batches whose rows share their positions.
    pub fn repeat(&self, times: i64) -> Result<RopeTable, ModelError> {
        Ok(RopeTable { cos: self.cos.f_repeat([times, 1, 1])?, sin: self.sin.f_repeat([times, 1, 1])? })
    }
}

impl Turn {
    /// Turns `from [positions, .., .., head_dim]` into `to`, whatever its strides.
    pub fn forward(&self, from: &Tensor, to: &Tensor) -> Result<(), ModelError> {
        self.apply(from, to, &self.minus_sin, &self.sin)
    }

    /// The gradient of [`Turn::forward`]: the turn back, times the same factor.
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

/// `theta^(-2i / head_dim)`, stretched as `scaling` says.
fn inverse_frequencies(head_dim: usize, theta: f64, scaling: RopeScaling) -> Vec<f32> {
    let plain = (0..head_dim / 2).map(|i| theta.powf(-(2.0 * i as f64) / head_dim as f64));
    match scaling {
        RopeScaling::None => plain.map(|x| x as f32).collect(),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } => {
            let stretch = |x: f64| {
                // How often this frequency turns within the context that the model was first trained on.
                let turns = original_max_position_embeddings as f64 * x / std::f64::consts::TAU;
                let keep = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
                (1.0 - keep) * x / factor + keep * x
            };
            plain.map(|x| stretch(x) as f32).collect()
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

    /// Automodel's draft_qwen3 (`reference/dflash.md` section 6, row 32): inverse frequencies rounded to bf16 drift.
    #[test]
    fn automodel_tables_for_bf16_models_come_from_fp32_frequencies() {
        let rope = Rope::new(64, 1e6, RopeScaling::None, Device::Cpu).unwrap();
        assert_eq!(rope.inverse.kind(), Kind::Float);
        let positions = [0, 1, 1000, 3001];
        let exact = rope.table(&positions, Kind::Float).unwrap();
        let rounded = rope.table(&positions, Kind::BFloat16).unwrap();
        let gap = (exact.cos - rounded.cos.to_kind(Kind::Float)).abs().max();
        // One rounding of a value within [-1, 1]; rounding the frequency instead is off by radians at position 3001.
        assert!(f64::try_from(&gap).unwrap() <= 1.0 / 256.0, "{gap:?}");
    }
}
