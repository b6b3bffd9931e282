//! What a device computes, held to plain arithmetic.

use crate::model::ModelError;
use draftmill_actors::runtime::random::stream_seed;
use rand::RngExt;
use rand_chacha::{ChaCha8Rng, rand_core::SeedableRng};
use tch::{Device, Kind, Tensor};

/// Rows, inner length and columns of the product that is tried.
const SHAPE: [usize; 3] = [96, 160, 64];

/// How far a product of random matrices on `device` in `kind` is from the same one in f64 by plain loops: the largest difference over
/// the largest value. NaN where the device gives one.
pub fn product_gap(device: Device, kind: Kind) -> Result<f64, ModelError> {
    let [rows, inner, columns] = SHAPE;
    let mut rng = ChaCha8Rng::from_seed(stream_seed(0, "product", &[]));
    let mut matrix = |rows: usize, columns: usize| -> Result<(Tensor, Vec<f64>), ModelError> {
        let values: Vec<f32> = (0..rows * columns).map(|_| rng.random_range(-1.0..1.0)).collect();
        let tensor = Tensor::f_from_slice(&values)?.f_reshape([rows as i64, columns as i64])?.f_to_kind(kind)?;
        let exact = numbers(&tensor)?;
        Ok((tensor.f_to_device(device)?, exact))
    };
    let ((a, a_exact), (b, b_exact)) = (matrix(rows, inner)?, matrix(inner, columns)?);
    let product = numbers(&a.f_mm(&b)?)?;
    let (mut gap, mut largest) = (0.0_f64, 0.0_f64);
    for (at, found) in product.into_iter().enumerate() {
        let (row, column) = (at / columns, at % columns);
        let want: f64 = (0..inner).map(|k| a_exact[row * inner + k] * b_exact[k * columns + column]).sum();
        if !found.is_finite() {
            return Ok(f64::NAN);
        }
        gap = gap.max((found - want).abs());
        largest = largest.max(want.abs());
    }
    Ok(gap / largest)
}

/// A gap that rounding explains.
pub fn is_rounding(gap: f64, kind: Kind) -> bool {
    let most = if kind == Kind::Float { 1e-5 } else { 1e-2 };
    gap <= most
}

fn numbers(tensor: &Tensor) -> Result<Vec<f64>, ModelError> {
    let flat = tensor.f_to_device(Device::Cpu)?.f_to_kind(Kind::Double)?.f_reshape([-1])?;
    Ok(Vec::<f64>::try_from(flat)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_on_the_cpu_are_right_up_to_rounding_which_both_kinds_show() {
        let gaps = [Kind::Float, Kind::BFloat16].map(|kind| (kind, product_gap(Device::Cpu, kind).unwrap()));
        for (kind, gap) in gaps {
            assert!(is_rounding(gap, kind), "{kind:?}: {gap:e}");
        }
        // bf16 keeps 8 bits: a comparison of it with itself would show nothing.
        assert!(gaps[0].1 > 1e-9 && gaps[1].1 > 1e-4 && !is_rounding(gaps[1].1, Kind::Float), "{gaps:?}");
        assert!(!is_rounding(f64::NAN, Kind::Float));
    }
}
