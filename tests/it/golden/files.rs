//! Golden folder: its files, and comparisons whose failures report the difference and its index.

use draftmill::hf::tensors::TensorFiles;
use draftmill::model::load;
use draftmill::model::params::Gradient;
use serde_json::Value;
use std::path::PathBuf;
use tch::{Kind, Tensor};

/// Limits for float32 from the README.
pub const LOSS: f64 = 2e-6;
pub const OUTPUT: f64 = 2e-5;
pub const GRADIENT: f64 = 2e-5;

pub fn path(name: &str) -> PathBuf {
    folder("DRAFTMILL_GOLDEN", "tests/golden").join(name)
}

/// Folder that `variable` names, or `default` of the repository.
pub fn folder(variable: &str, default: &str) -> PathBuf {
    std::env::var_os(variable).map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(default), PathBuf::from)
}

pub fn open(name: &str) -> TensorFiles {
    TensorFiles::open_file(&path(name)).unwrap()
}

pub fn json(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(path(name)).unwrap()).unwrap()
}

pub fn tensor(files: &TensorFiles, name: &str) -> Tensor {
    load::tensor(files, name).unwrap()
}

pub fn ints(files: &TensorFiles, name: &str) -> Vec<i64> {
    Vec::try_from(tensor(files, name).to_kind(Kind::Int64).flatten(0, -1)).unwrap()
}

/// Returns the largest absolute difference. Fails if shapes differ or a value is NaN.
pub fn gap(what: &str, got: &Tensor, want: &Tensor) -> f64 {
    assert_eq!(got.size(), want.size(), "{what}: shape");
    assert!(want.numel() > 0, "{what}: there is nothing to compare");
    let gap = (got.to_kind(Kind::Double) - want.to_kind(Kind::Double)).abs().max();
    let gap = f64::try_from(gap).unwrap();
    assert!(gap.is_finite(), "{what}: not every value is a number");
    gap
}

pub fn largest(x: &Tensor) -> f64 {
    f64::try_from(x.to_kind(Kind::Double).abs().max()).unwrap()
}

/// Checks that each value differs by at most `limit`.
pub fn close(what: &str, got: &Tensor, want: &Tensor, limit: f64) {
    let gap = gap(what, got, want);
    println!("{what}: off by {gap:.1e}");
    assert!(gap <= limit, "{what}: off by {gap:e}, and {limit:e} is allowed");
}

/// Checks that each value differs by at most `limit` relative to the tensor's largest entry.
pub fn close_to_largest(what: &str, got: &Tensor, want: &Tensor, limit: f64) {
    let share = gap(what, got, want) / largest(want);
    println!("{what}: off by {share:.1e} of the largest entry");
    assert!(share <= limit, "{what}: off by {share:e} of the largest entry, and {limit:e} is allowed");
}

/// Checks that all values are equal.
pub fn same(what: &str, got: &Tensor, want: &Tensor) {
    assert_eq!(gap(what, got, want), 0.0, "{what}");
}

pub fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is not a number"))
}

/// Checks that two numbers differ by at most `limit`.
pub fn near(what: &str, got: f64, want: f64, limit: f64) {
    println!("{what}: {got} against {want}, off by {:.1e}", (got - want).abs());
    assert!((got - want).abs() <= limit, "{what}: {got} against {want}, and {limit:e} is allowed");
}

/// Compares the norm of the whole gradient of a mean.
pub fn check_norm(what: &str, gradient: &Gradient, denominator: f64, want: &Value, limit: f64) {
    let square = |x: &Tensor| f64::try_from((x / denominator).square().sum(Kind::Double)).unwrap();
    let norm = gradient.tensors().iter().map(square).sum::<f64>().sqrt();
    near(&format!("{what} gradient norm"), norm / number(want), 1.0, limit);
}

/// Compares every gradient of a mean whose name begins with `prefix`, and returns their number.
pub fn check_gradients(
    what: &str,
    files: &TensorFiles,
    prefix: &str,
    gradient: &Gradient,
    denominator: f64,
    limit: f64,
) -> usize {
    let names: Vec<&str> = files.names().filter_map(|name| name.strip_prefix(prefix)).collect();
    assert!(!names.is_empty(), "{what}: the folder has no gradient");
    for name in &names {
        let want = tensor(files, &format!("{prefix}{name}"));
        let got = gradient.get(name).unwrap_or_else(|| panic!("{what}: no gradient of {name}")) / denominator;
        close_to_largest(&format!("{what} {name}"), &got, &want, limit);
    }
    names.len()
}
