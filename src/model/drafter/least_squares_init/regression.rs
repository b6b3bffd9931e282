//! Ridge regressions in fp64 on the CPU, and the linear functionals that separate classes of vectors.

use crate::model::ModelError;
use tch::{Device, Kind, Tensor};

/// Ridge of a regression, relative to the mean square of an input.
const RIDGE: f64 = 0.02;

/// Sums of a regression from `x [rows, inputs]` to `y [rows, outputs]`.
pub struct Regression {
    /// Sum of the outer products of inputs, `[inputs, inputs]`.
    squares: Tensor,
    /// Sum of inputs times outputs, `[inputs, outputs]`.
    products: Tensor,
    /// Sum of the inputs, `[inputs]`.
    sum: Tensor,
    rows: usize,
    /// Input with the output 0, `[1, inputs]`.
    zero: Option<Tensor>,
}

/// Solution of a regression.
pub struct Fit {
    /// Map from inputs to outputs, `[outputs, inputs]`.
    pub map: Tensor,
    pub inputs: Moments,
}

/// Second moment `[D, D]` and mean `[D]` of one class of vectors.
pub struct Moments {
    pub square: Tensor,
    pub mean: Tensor,
}

impl Regression {
    /// # Errors
    /// Returns an error if libtorch fails.
    pub fn new(inputs: i64, outputs: i64) -> Result<Regression, ModelError> {
        let zeros = |size: &[i64]| Tensor::f_zeros(size, (Kind::Double, Device::Cpu));
        Ok(Regression {
            squares: zeros(&[inputs, inputs])?,
            products: zeros(&[inputs, outputs])?,
            sum: zeros(&[inputs])?,
            rows: 0,
            zero: None,
        })
    }

    /// Adds rows, with `x [rows, inputs]` and `y [rows, outputs]`.
    ///
    /// # Errors
    /// Returns an error if libtorch fails.
    pub fn add(&mut self, x: &Tensor, y: &Tensor) -> Result<(), ModelError> {
        let transposed = x.f_transpose(0, 1)?;
        let _ = self.squares.f_addmm_(&transposed, x)?;
        let _ = self.products.f_addmm_(&transposed, y)?;
        self.sum = self.sum.f_add(&x.f_sum_dim_intlist(&[0i64][..], false, Kind::Double)?)?;
        self.rows += x.size()[0] as usize;
        Ok(())
    }

    /// Fits 0 for the input `x [1, inputs]`, with the weight of all other rows together. The moments of the fit are those of
    /// the other rows.
    pub fn map_to_zero(&mut self, x: Tensor) {
        self.zero = Some(x);
    }

    /// Number of rows so far.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Solves the regression. It needs at least one row.
    ///
    /// # Errors
    /// Returns an error if libtorch fails.
    pub fn solve(&self) -> Result<Fit, ModelError> {
        let count = self.rows as f64;
        let square = self.squares.f_div_scalar(count)?;
        let mut penalised = square.copy();
        if let Some(x) = &self.zero {
            penalised = penalised.f_add(&x.f_transpose(0, 1)?.f_mm(x)?)?;
        }
        let map = ridge(&penalised, &self.products.f_div_scalar(count)?, RIDGE)?.f_transpose(0, 1)?;
        Ok(Fit { map, inputs: Moments { square, mean: self.sum.f_div_scalar(count)? } })
    }
}

impl Fit {
    /// Columns `from .. from + width` of the map, `[outputs, width]`, and the moments of those inputs.
    ///
    /// # Errors
    /// Returns an error if libtorch fails.
    pub fn part(&self, from: i64, width: i64) -> Result<(Tensor, Moments), ModelError> {
        let square = self.inputs.square.f_narrow(0, from, width)?.f_narrow(1, from, width)?;
        Ok((self.map.f_narrow(1, from, width)?, Moments { square, mean: self.inputs.mean.f_narrow(0, from, width)? }))
    }
}

impl Moments {
    /// Moments of the rows of `x [rows, D]`.
    ///
    /// # Errors
    /// Returns an error if libtorch fails.
    pub fn of(x: &Tensor) -> Result<Moments, ModelError> {
        let count = x.size()[0] as f64;
        Ok(Moments {
            square: x.f_transpose(0, 1)?.f_mm(x)?.f_div_scalar(count)?,
            mean: x.f_mean_dim(&[0i64][..], false, Kind::Double)?,
        })
    }
}

/// Linear functional `[D]` that is nearest to the value given with each class of vectors.
///
/// # Errors
/// Returns an error if libtorch fails.
pub fn functional(classes: &[(&Moments, f64)], relative: f64) -> Result<Tensor, ModelError> {
    let zero = Tensor::from(0.0).f_to_kind(Kind::Double)?;
    let (mut square, mut mean) = (zero.copy(), zero);
    for (class, value) in classes {
        square = square.f_add(&class.square)?;
        mean = mean.f_add(&class.mean.f_mul_scalar(*value)?)?;
    }
    Ok(ridge(&square, &mean.f_unsqueeze(1)?, relative)?.f_squeeze_dim(1)?)
}

/// The `count` orthonormal directions `[D, count]` in which `map x` varies most, if `x` has the second moment `square`.
///
/// # Errors
/// Returns an error if libtorch fails.
pub fn main_axes(map: &Tensor, square: &Tensor, count: i64) -> Result<Tensor, ModelError> {
    let spread = map.f_mm(square)?.f_mm(&map.f_transpose(0, 1)?)?;
    let (_, axes) = spread.f_linalg_eigh("L")?;
    Ok(axes.f_narrow(1, map.size()[0] - count, count)?)
}

/// Copy in fp64 on the CPU.
///
/// # Errors
/// Returns an error if libtorch fails.
pub fn to_f64(x: &Tensor) -> Result<Tensor, ModelError> {
    Ok(x.f_to_device(Device::Cpu)?.f_to_kind(Kind::Double)?)
}

/// `(square + ridge I)^-1 target`.
fn ridge(square: &Tensor, target: &Tensor, ridge: f64) -> Result<Tensor, ModelError> {
    let eye = Tensor::f_eye(square.size()[0], (Kind::Double, Device::Cpu))?;
    Ok(Tensor::f_linalg_solve(&square.f_add(&eye.f_mul_scalar(ridge)?)?, target, true)?)
}
