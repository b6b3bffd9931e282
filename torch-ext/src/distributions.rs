//! Distributions over a vocabulary in f32 on the CPU, row by row: softmax, comparison with a teacher, and slope of a loss.
//!
//! Each function returns `None` or false if the tensors are not supported; the caller then uses plain operations.

use super::{Error, ffi};
use tch::{Device, Kind, Tensor};

/// Statistics of the softmax `q` of each row against a teacher's probabilities `p`, `[rows, 1]` each.
pub struct Comparison {
    /// Largest score.
    pub max: Tensor,
    /// `ln sum exp(score - max)`.
    pub log_total: Tensor,
    /// `sum p (score - max)`.
    pub cross: Tensor,
    /// `sum min(p, q)`.
    pub shared: Tensor,
    /// Sum of `q` over the tokens with `q < p`.
    pub under: Tensor,
}

/// Replaces `scores [rows, width]` by their softmax `p`, and returns `sum p ln p`, `[rows, 1]`.
///
/// # Errors
/// Returns an error if libtorch cannot allocate the result.
pub fn softmax_entropy(scores: &mut Tensor) -> Result<Option<Tensor>, Error> {
    let Some((rows, width)) = matrix(scores) else { return Ok(None) };
    let entropy = column(rows)?;
    // SAFETY: contiguous tensors of checked sizes; the scores are borrowed for writing.
    unsafe { ffi::draftmill_softmax_entropy(data(scores), rows, width, data(&entropy)) };
    Ok(Some(entropy))
}

/// Replaces `scores [rows, width]` by their softmax, and compares it with row `index[row]` of `teacher [_, width]`.
///
/// # Errors
/// Returns an error if libtorch cannot allocate the results.
pub fn compare(scores: &mut Tensor, teacher: &Tensor, index: &Tensor) -> Result<Option<Comparison>, Error> {
    let Some((rows, width)) = pair(scores, teacher, index)? else { return Ok(None) };
    let found = Comparison {
        max: column(rows)?,
        log_total: column(rows)?,
        cross: column(rows)?,
        shared: column(rows)?,
        under: column(rows)?,
    };
    // SAFETY: `pair` checks sizes and indices; the results are new.
    unsafe {
        ffi::draftmill_compare_rows(
            data(scores),
            data(teacher),
            index.data_ptr().cast(),
            rows,
            width,
            data(&found.max),
            data(&found.log_total),
            data(&found.cross),
            data(&found.shared),
            data(&found.under),
        );
    }
    Ok(Some(found))
}

/// Replaces `q [rows, width]` by `q (own - [q < p] below) - against p`, with `p` as in [`compare`] and `[rows, 1]` numbers.
///
/// # Errors
/// Returns an error if libtorch fails.
pub fn slope(
    q: &mut Tensor,
    teacher: &Tensor,
    index: &Tensor,
    own: &Tensor,
    below: &Tensor,
    against: &Tensor,
) -> Result<bool, Error> {
    let Some((rows, width)) = pair(q, teacher, index)? else { return Ok(false) };
    if [own, below, against].iter().any(|x| !is_supported(x) || !x.is_contiguous() || x.numel() as i64 != rows) {
        return Ok(false);
    }
    // SAFETY: `pair` checks sizes and indices; `q` is borrowed for writing.
    unsafe {
        let index = index.data_ptr().cast();
        ffi::draftmill_slope_rows(data(q), data(teacher), index, rows, width, data(own), data(below), data(against));
    }
    Ok(true)
}

/// Rows and width of scores whose index names a row of the teacher for each.
fn pair(scores: &Tensor, teacher: &Tensor, index: &Tensor) -> Result<Option<(i64, i64)>, Error> {
    let (Some((rows, width)), Some((known, teacher_width))) = (matrix(scores), matrix(teacher)) else {
        return Ok(None);
    };
    let fits = width == teacher_width
        && index.device() == Device::Cpu
        && index.f_kind()? == Kind::Int64
        && index.is_contiguous()
        && index.size() == [rows];
    if !fits || rows == 0 {
        return Ok(None);
    }
    let (least, most) = (index.f_min()?.f_int64_value(&[])?, index.f_max()?.f_int64_value(&[])?);
    Ok((least >= 0 && most < known).then_some((rows, width)))
}

/// Rows and width of a contiguous matrix with at least one column.
fn matrix(x: &Tensor) -> Option<(i64, i64)> {
    match x.size()[..] {
        [rows, width] if width > 0 && is_supported(x) && x.is_contiguous() => Some((rows, width)),
        _ => None,
    }
}

fn is_supported(x: &Tensor) -> bool {
    x.defined() && x.device() == Device::Cpu && x.f_kind().is_ok_and(|kind| kind == Kind::Float)
}

fn data(x: &Tensor) -> *mut f32 {
    x.data_ptr().cast()
}

fn column(rows: i64) -> Result<Tensor, Error> {
    Ok(Tensor::f_empty([rows, 1], (Kind::Float, Device::Cpu))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(seed: f64, size: &[i64]) -> Tensor {
        let count: i64 = size.iter().product();
        ((Tensor::arange(count, (Kind::Double, Device::Cpu)) * 0.731 + seed).sin() * 4.0).reshape(size)
    }

    fn close(what: &str, got: &Tensor, want: &Tensor) {
        assert_eq!(got.size(), want.size(), "{what}");
        let gap = f64::try_from((got.to_kind(Kind::Double) - want.to_kind(Kind::Double)).abs().max()).unwrap();
        assert!(gap < 2e-6, "{what}: {gap:e}");
    }

    fn total(x: &Tensor) -> Tensor {
        x.sum_dim_intlist([1i64].as_slice(), true, Kind::Double)
    }

    /// Matches plain operations in f64, also with zero probabilities and huge scores.
    #[test]
    fn comparison_and_slope_match_plain_operations() {
        for width in [1i64, 5, 83] {
            let states = values(2.0, &[3, width]);
            let mut teacher = states.to_kind(Kind::Float);
            let entropy = softmax_entropy(&mut teacher).unwrap().unwrap();
            let p = states.softmax(1, Kind::Double);
            close("teacher", &teacher, &p);
            close("entropy", &entropy, &total(&p.xlogy(&p)));
            // One teacher is certain.
            let _ = teacher.get(1).fill_(0.0);
            let _ = teacher.get(1).narrow(0, 0, 1).fill_(1.0);
            let index = Tensor::from_slice(&[0i64, 2, 1, 1, 0, 2]);
            let p = teacher.to_kind(Kind::Double).index_select(0, &index);

            let logits = values(9.0, &[6, width]) * Tensor::from_slice(&[1.0, 3.0, 0.0, 9.0, 1e3, 0.1]).unsqueeze(1);
            let mut scores = logits.to_kind(Kind::Float);
            let exact = scores.to_kind(Kind::Double);
            let found = compare(&mut scores, &teacher, &index).unwrap().unwrap();
            let (q, max) = (exact.softmax(1, Kind::Double), exact.amax([1i64].as_slice(), true));
            close("q", &scores, &q);
            close("max", &(&found.max / 1e3), &(&max / 1e3));
            close(
                "total",
                &found.log_total,
                &((&exact - &max).exp().sum_dim_intlist([1i64].as_slice(), true, Kind::Double).log()),
            );
            close("cross", &(&found.cross / 1e3), &(total(&(&p * (&exact - &max))) / 1e3));
            close("shared", &found.shared, &total(&p.minimum(&q)));
            let less = q.lt_tensor(&p).to_kind(Kind::Double);
            close("under", &found.under, &total(&(&q * &less)));

            let numbers = |seed: f64| values(seed, &[6, 1]).to_kind(Kind::Float);
            let (own, below, against) = (numbers(1.0), numbers(5.0), numbers(8.0));
            assert!(slope(&mut scores, &teacher, &index, &own, &below, &against).unwrap());
            close("slope", &scores, &(&q * (&own - &less * &below) - &p * &against));
        }
    }

    #[test]
    fn other_tensors_are_left_to_plain_operations() {
        let (teacher, index) = (Tensor::zeros([2, 4], (Kind::Float, Device::Cpu)), Tensor::from_slice(&[0i64, 2]));
        let mut scores = Tensor::zeros([2, 4], (Kind::Float, Device::Cpu));
        // Row 2 does not exist.
        assert!(compare(&mut scores, &teacher, &index).unwrap().is_none());
        assert!(compare(&mut scores, &teacher, &Tensor::from_slice(&[0i64])).unwrap().is_none());
        assert!(softmax_entropy(&mut scores.to_kind(Kind::Double)).unwrap().is_none());
        assert!(compare(&mut scores.transpose(0, 1), &teacher, &Tensor::from_slice(&[0i64; 4])).unwrap().is_none());
    }
}
