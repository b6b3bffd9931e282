//! Row operations in one memory pass, where plain operations of libtorch need three to seven.
//!
//! They support f32 on the CPU with contiguous rows and return `None` for other tensors, for which the caller uses
//! plain operations. Each runs on the calling thread. Grad mode must be off: nothing is recorded.

use crate::{Error, ffi};
use tch::{Device, Kind, Tensor};

/// RMS norm of `x [.., width]` with two or three dimensions: `y = x r w`, `r = 1 / sqrt(mean(x^2) + eps)`. Returns `y`,
/// contiguous, and `r [.., 1]`.
///
/// # Errors
/// Returns an error if libtorch cannot allocate the results.
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Option<(Tensor, Tensor)>, Error> {
    let (Some((rows, width)), Some(weight)) = (rows(x), row(weight)) else { return Ok(None) };
    let (y, scale) = (like(x)?, scales(x)?);
    // SAFETY: `rows` describes `x`, `y` has as many values, and `scale` has one per row; all are alive.
    unsafe { ffi::draftmill_rms_norm(&rows, weight, width, eps, data(&y), data(&scale)) };
    Ok(Some((y, scale)))
}

/// Computes `y` from `r`.
///
/// # Errors
/// Returns an error if libtorch cannot allocate the result.
pub fn rms_norm_from_scale(x: &Tensor, scale: &Tensor, weight: &Tensor) -> Result<Option<Tensor>, Error> {
    let (Some((rows, width)), Some(scale), Some(weight)) = (rows(x), row(scale), row(weight)) else { return Ok(None) };
    let y = like(x)?;
    // SAFETY: as above.
    unsafe { ffi::draftmill_rms_norm_from_scale(&rows, scale, weight, width, data(&y)) };
    Ok(Some(y))
}

/// Writes the gradient of `x` to `dx`, which may have other strides, and returns that of the weight, from the gradient
/// of `y`.
///
/// # Errors
/// Returns an error if libtorch cannot allocate the result.
pub fn rms_norm_backward(
    dy: &Tensor,
    x: &Tensor,
    scale: &Tensor,
    weight: &Tensor,
    dx: &Tensor,
) -> Result<Option<Tensor>, Error> {
    let (Some((given, width)), Some((out, _))) = (rows(x), rows(dx)) else { return Ok(None) };
    let (Some(dy_data), Some(scale), Some(weight)) = (row(dy), row(scale), row(weight)) else { return Ok(None) };
    if dy.size() != x.size() || dx.size() != x.size() {
        return Ok(None);
    }
    let d_weight = Tensor::f_empty([width], (Kind::Float, Device::Cpu))?;
    // SAFETY: three tensors of one size and a scale per row; only `dx` is written.
    unsafe { ffi::draftmill_rms_norm_backward(dy_data, &given, scale, weight, width, &out, data(&d_weight)) };
    Ok(Some(d_weight))
}

/// `silu(gate) up [rows, width]` of `gate_up [rows, 2 * width]`.
///
/// # Errors
/// Returns an error if libtorch cannot allocate the result.
pub fn swiglu(gate_up: &Tensor) -> Result<Option<Tensor>, Error> {
    let Some((rows, both)) = rows(gate_up).filter(|(rows, _)| rows.inner == 1) else { return Ok(None) };
    let out = Tensor::f_empty([rows.outer, both / 2], (Kind::Float, Device::Cpu))?;
    // SAFETY: `out` has half as many values as `gate_up`.
    unsafe { ffi::draftmill_swiglu(&rows, both / 2, data(&out)) };
    Ok(Some(out))
}

/// Recomputes `silu(gate) up`, and returns the gradient of `gate_up` as well.
///
/// # Errors
/// Returns an error if libtorch cannot allocate the results.
pub fn swiglu_backward(d_out: &Tensor, gate_up: &Tensor) -> Result<Option<(Tensor, Tensor)>, Error> {
    let Some((rows, both)) = rows(gate_up).filter(|(rows, _)| rows.inner == 1) else { return Ok(None) };
    let Some(d_data) = row(d_out).filter(|_| d_out.size() == [rows.outer, both / 2]) else { return Ok(None) };
    let (out, d_gate_up) = (like(d_out)?, like(gate_up)?);
    // SAFETY: sizes are checked; both results are new.
    unsafe { ffi::draftmill_swiglu_backward(d_data, &rows, both / 2, data(&out), data(&d_gate_up)) };
    Ok(Some((out, d_gate_up)))
}

/// Online softmax step over `scores [.., width]`, in place: `max [.., 1]` grows to the largest score so far, scores
/// become `exp(score - max)`, and `sum [.., 1]` is rescaled and adds them. Returns the factor for earlier sums, `[..,
/// 1]`.
///
/// # Errors
/// Returns an error if libtorch cannot allocate the result.
pub fn online_softmax(scores: &mut Tensor, max: &mut Tensor, sum: &mut Tensor) -> Result<Option<Tensor>, Error> {
    let Some((count, width)) = softmax_rows(scores, max, sum) else { return Ok(None) };
    let rescale = like(max)?;
    // SAFETY: contiguous tensors of checked sizes, borrowed for writing.
    unsafe { ffi::draftmill_online_softmax(data(scores), count, width, data(max), data(sum), data(&rescale)) };
    Ok(Some(rescale))
}

/// Softmax backward from known log-sums `[.., 1]`, in place. `delta [.., 1]` is the sum of a row's weights times their
/// gradients. `scores [.., width]` become weights `exp(score - log_sum)`, and `d_weights` become gradients of scores,
/// `weight (d_weight - delta)`. Returns false if the tensors are not supported.
pub fn softmax_backward(
    scores: &mut Tensor,
    d_weights: &mut Tensor,
    log_sum: &Tensor,
    delta: &Tensor,
) -> Result<bool, Error> {
    let Some((count, width)) = softmax_rows(scores, log_sum, delta).filter(|_| row(d_weights).is_some()) else {
        return Ok(false);
    };
    if d_weights.size() != scores.size() {
        return Ok(false);
    }
    // SAFETY: as above; the last two are only read.
    unsafe {
        ffi::draftmill_softmax_backward(data(scores), data(d_weights), count, width, data(log_sum), data(delta));
    }
    Ok(true)
}

/// Number of rows of scores, each with one value in both other tensors, and their width.
fn softmax_rows(scores: &Tensor, one: &Tensor, two: &Tensor) -> Option<(i64, i64)> {
    let (Some(_), Some(_), Some(_)) = (row(scores), row(one), row(two)) else { return None };
    let size = scores.size();
    let (&width, outer) = size.split_last()?;
    let count: i64 = outer.iter().product();
    (one.numel() == count as usize && two.numel() == count as usize).then_some((count, width))
}

fn is_supported(x: &Tensor) -> bool {
    x.defined() && x.device() == Device::Cpu && x.f_kind().is_ok_and(|kind| kind == Kind::Float)
}

/// Rows of a tensor with two or three dimensions, and their width.
fn rows(x: &Tensor) -> Option<(ffi::Rows, i64)> {
    if !is_supported(x) {
        return None;
    }
    let (size, stride) = (x.size(), x.stride());
    let (outer, inner, width) = match size[..] {
        [outer, width] => (outer, 1, width),
        [outer, inner, width] => (outer, inner, width),
        _ => return None,
    };
    let inner_stride = if size.len() == 3 { stride[1] } else { 0 };
    (stride[size.len() - 1] == 1 || width < 2)
        .then(|| (ffi::Rows { data: data(x), outer, inner, outer_stride: stride[0], inner_stride }, width))
}

/// Address of a contiguous tensor.
fn row(x: &Tensor) -> Option<*const f32> {
    (is_supported(x) && x.is_contiguous()).then(|| data(x).cast_const())
}

fn data(x: &Tensor) -> *mut f32 {
    x.data_ptr().cast()
}

/// New contiguous tensor of the size of `x`.
fn like(x: &Tensor) -> Result<Tensor, Error> {
    Ok(Tensor::f_empty(x.size(), (Kind::Float, Device::Cpu))?)
}

fn scales(x: &Tensor) -> Result<Tensor, Error> {
    let mut size = x.size();
    if let Some(last) = size.last_mut() {
        *last = 1;
    }
    Ok(Tensor::f_empty(size, (Kind::Float, Device::Cpu))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(seed: f64, size: &[i64], kind: Kind) -> Tensor {
        let count: i64 = size.iter().product();
        ((Tensor::arange(count, (Kind::Double, Device::Cpu)) * 0.7310 + seed).sin() * 2.0).reshape(size).to_kind(kind)
    }

    fn close(what: &str, got: &Tensor, want: &Tensor) {
        close_for(what, got, want, want.abs().max().double_value(&[]).max(1.0));
    }

    /// Compares within the rounding of values, or sums of terms, of magnitude `size`.
    fn close_for(what: &str, got: &Tensor, want: &Tensor, size: f64) {
        let gap = (got.to_kind(Kind::Double) - want).abs().max().double_value(&[]);
        assert!(gap <= 1e-6 * size, "{what}: off by {gap:e}, magnitude {size:e}");
    }

    /// Widths around the register widths, contiguous rows and rows of a wider matrix, against the formula and autograd
    /// in f64.
    #[test]
    fn rms_norm_and_gradient_match_the_formula() {
        for width in [7, 8, 15, 16, 17, 31, 64, 130] {
            for (size, taken) in [([5, 1], 1), ([3, 4], 4), ([150, 5], 3)] {
                // Part of a wider matrix unless all of its inner rows are taken.
                let whole = values(1.0, &[size[0], size[1], width], Kind::Float);
                let x = whole.narrow(1, size[1] - taken, taken);
                let weight = values(2.0, &[width], Kind::Float);
                let dy = values(3.0, &[size[0], taken, width], Kind::Float);
                let (exact_x, exact_w) = (x.to_kind(Kind::Double).copy(), weight.to_kind(Kind::Double).copy());
                let (exact_x, exact_w) = (exact_x.set_requires_grad(true), exact_w.set_requires_grad(true));
                let mean = (&exact_x * &exact_x).mean_dim([-1i64].as_slice(), true, Kind::Double);
                let scale = (mean + 1e-5).rsqrt();
                let want = &exact_x * &scale * &exact_w;
                (&want * dy.to_kind(Kind::Double)).sum(Kind::Double).backward();
                let _guard = tch::no_grad_guard();
                let (y, r) = rms_norm(&x, &weight, 1e-5).unwrap().unwrap();
                assert!(y.is_contiguous());
                close("y", &y, &want.detach());
                close("r", &r, &scale.detach());
                assert_eq!(rms_norm_from_scale(&x, &r, &weight).unwrap().unwrap(), y);
                let buffer = Tensor::full_like(&whole, 7.0);
                let dx = buffer.narrow(1, size[1] - taken, taken);
                let dw = rms_norm_backward(&dy, &x, &r, &weight, &dx).unwrap().unwrap();
                close("dx", &dx, &exact_x.grad());
                let terms = (dy.to_kind(Kind::Double) * &exact_x.detach() * &scale.detach()).abs();
                let terms = terms.sum_dim_intlist([0i64, 1].as_slice(), false, Kind::Double).max().double_value(&[]);
                close_for("dw", &dw, &exact_w.grad(), terms);
                let outside = buffer.narrow(1, 0, size[1] - taken);
                assert_eq!(outside, Tensor::full_like(&outside, 7.0), "written outside its rows");
            }
        }
    }

    #[test]
    fn swiglu_and_gradient_match_the_formula() {
        for width in [1, 3, 16, 33, 100] {
            let wider = values(4.0, &[9, 2 * width + 5], Kind::Float) * 20.0;
            let gate_up = wider.narrow(1, 2, 2 * width);
            let d_out = values(5.0, &[9, width], Kind::Float);
            let exact = gate_up.to_kind(Kind::Double).copy().set_requires_grad(true);
            let want = exact.narrow(1, 0, width).silu() * exact.narrow(1, width, width);
            (&want * d_out.to_kind(Kind::Double)).sum(Kind::Double).backward();
            let _guard = tch::no_grad_guard();
            let out = swiglu(&gate_up).unwrap().unwrap();
            close("out", &out, &want.detach());
            let (again, gradient) = swiglu_backward(&d_out, &gate_up).unwrap().unwrap();
            assert_eq!(again, out);
            close("gradient", &gradient, &exact.grad());
        }
    }

    /// The parts give the softmax of the whole; nothing overflows, and NaN stays NaN.
    #[test]
    fn online_softmax_parts_add_up() {
        let scores = values(6.0, &[7, 83], Kind::Float)
            * Tensor::from_slice(&[1f32, 30.0, 4e4, 0.0, 1e-3, 5.0, 200.0]).unsqueeze(1);
        let exact = scores.to_kind(Kind::Double);
        let weights = values(7.0, &[83], Kind::Double);
        let options = (Kind::Float, Device::Cpu);
        let (mut max, mut sum) = (Tensor::full([7, 1], f64::NEG_INFINITY, options), Tensor::zeros([7, 1], options));
        let mut product = Tensor::zeros([7, 1], (Kind::Double, Device::Cpu));
        for (start, len) in [(0, 1), (1, 40), (41, 17), (58, 25)] {
            let mut part = scores.narrow(1, start, len).contiguous();
            let rescale = online_softmax(&mut part, &mut max, &mut sum).unwrap().unwrap();
            product = product * rescale.to_kind(Kind::Double)
                + part.to_kind(Kind::Double).matmul(&weights.narrow(0, start, len)).unsqueeze(1);
        }
        close("max", &max, &exact.amax([1i64].as_slice(), true));
        let log_sum = sum.to_kind(Kind::Double).log() + max.to_kind(Kind::Double);
        close("log-sum", &log_sum, &exact.logsumexp([1i64].as_slice(), true));
        let want = exact.softmax(1, Kind::Double).matmul(&weights).unsqueeze(1);
        close("output", &(product / sum.to_kind(Kind::Double)), &want);
        let mut bad = Tensor::from_slice(&[0f32, f32::NAN, 1.0]).unsqueeze(0);
        let (mut max, mut sum) = (Tensor::zeros([1, 1], options), Tensor::zeros([1, 1], options));
        assert!(online_softmax(&mut bad, &mut max, &mut sum).unwrap().is_some());
        assert!(sum.double_value(&[0, 0]).is_nan());
    }

    #[test]
    fn softmax_backward_matches_autograd() {
        let size = [2, 3, 37];
        let scores = values(1.0, &size, Kind::Float) * 5.0;
        let _ = scores.narrow(2, 30, 7).narrow(1, 0, 1).fill_(f64::NEG_INFINITY);
        let exact = scores.to_kind(Kind::Double).set_requires_grad(true);
        let weights = exact.softmax(-1, Kind::Double);
        let d_weights = values(2.0, &size, Kind::Double);
        (&weights * &d_weights).sum(Kind::Double).backward();
        let log_sum = exact.detach().logsumexp([-1i64].as_slice(), true).to_kind(Kind::Float);
        let delta = (&weights * &d_weights).detach().sum_dim_intlist([-1i64].as_slice(), true, Kind::Double);
        let (mut got, mut gradient) = (scores.copy(), d_weights.to_kind(Kind::Float));
        assert!(softmax_backward(&mut got, &mut gradient, &log_sum, &delta.to_kind(Kind::Float)).unwrap());
        close("weights", &got, &weights.detach());
        close_for("gradient", &gradient, &exact.grad(), 4.0);
    }

    /// Tensors that an operation would misread are left to plain operations.
    #[test]
    fn unsupported_tensors_return_none() {
        let (x, weight) = (values(1.0, &[4, 6], Kind::Float), values(2.0, &[6], Kind::Float));
        assert!(rms_norm(&x, &weight, 1e-5).unwrap().is_some());
        for other in [x.to_kind(Kind::Double), x.to_kind(Kind::BFloat16), x.transpose(0, 1), x.get(0)] {
            assert!(rms_norm(&other, &weight, 1e-5).unwrap().is_none(), "{other:?}");
        }
        let (_, scale) = rms_norm(&x, &weight, 1e-5).unwrap().unwrap();
        let backward = |dy: &Tensor, dx: &Tensor| rms_norm_backward(dy, &x, &scale, &weight, dx).unwrap().is_some();
        assert!(backward(&x, &x.empty_like()));
        assert!(!backward(&x.narrow(0, 0, 3), &x.empty_like()) && !backward(&x, &x.narrow(0, 0, 3).copy()));
        assert!(swiglu(&x.get(0)).unwrap().is_none());
        assert!(swiglu_backward(&x, &x).unwrap().is_none());
        let mut max = Tensor::zeros([3, 1], (Kind::Float, Device::Cpu));
        let mut sum = max.copy();
        assert!(online_softmax(&mut x.copy(), &mut max, &mut sum).unwrap().is_none());
        let (log_sum, delta) = (Tensor::zeros([4, 1], (Kind::Float, Device::Cpu)), scale);
        let wrong =
            [(x.to_kind(Kind::Double), x.copy()), (x.copy(), x.transpose(0, 1)), (x.copy(), x.narrow(1, 0, 5).copy())];
        for (mut scores, mut d_weights) in wrong {
            assert!(!softmax_backward(&mut scores, &mut d_weights, &log_sum, &delta).unwrap());
        }
        assert!(!softmax_backward(&mut x.copy(), &mut x.copy(), &max, &delta).unwrap());
    }
}
