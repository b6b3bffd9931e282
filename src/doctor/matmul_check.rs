//! Matrix product of a device, checked against f64 arithmetic in plain loops.

use crate::model::ModelError;
use draftmill_actors::runtime::random::stream_seed;
use rand::RngExt;
use rand_chacha::{ChaCha8Rng, rand_core::SeedableRng};
use tch::{Device, Kind, Tensor};

/// Rows, inner dimension and columns of the product.
const SHAPE: [usize; 3] = [96, 160, 64];

/// Relative error of a product of random matrices on `device` in `kind`: `max |product - exact| / max |exact|`, with `exact` in f64.
///
/// NaN if the device returns a value that is not finite.
///
/// # Errors
/// A libtorch failure.
pub fn product_error(device: Device, kind: Kind) -> Result<f64, ModelError> {
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
    let (mut error, mut largest) = (0.0_f64, 0.0_f64);
    for (index, found) in product.into_iter().enumerate() {
        let (row, column) = (index / columns, index % columns);
        let want: f64 = (0..inner).map(|k| a_exact[row * inner + k] * b_exact[k * columns + column]).sum();
        if !found.is_finite() {
            return Ok(f64::NAN);
        }
        error = error.max((found - want).abs());
        largest = largest.max(want.abs());
    }
    Ok(error / largest)
}

/// True if rounding in `kind` explains this relative error.
pub fn is_rounding(error: f64, kind: Kind) -> bool {
    let tolerance = if kind == Kind::Float { 1e-5 } else { 1e-2 };
    error <= tolerance
}

fn numbers(tensor: &Tensor) -> Result<Vec<f64>, ModelError> {
    let flat = tensor.f_to_device(Device::Cpu)?.f_to_kind(Kind::Double)?.f_reshape([-1])?;
    Ok(Vec::<f64>::try_from(flat)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_products_are_exact_up_to_rounding() {
        let errors = [Kind::Float, Kind::BFloat16].map(|kind| (kind, product_error(Device::Cpu, kind).unwrap()));
        for (kind, error) in errors {
            assert!(is_rounding(error, kind), "{kind:?}: {error:e}");
        }
        // A bf16 mantissa has 8 bits, so its error is visible only against an exact reference.
        assert!(errors[0].1 > 1e-9 && errors[1].1 > 1e-4 && !is_rounding(errors[1].1, Kind::Float), "{errors:?}");
        assert!(!is_rounding(f64::NAN, Kind::Float));
    }
}
