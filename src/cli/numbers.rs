//! Numbers of the command line with a limited range.

/// Reads a sampling temperature.
///
/// # Errors
/// A sentence for any text but a number of at least 0.
pub fn temperature(text: &str) -> Result<f64, String> {
    let value: Option<f64> = text.parse().ok();
    value
        .filter(|value| value.is_finite() && *value >= 0.0)
        .ok_or_else(|| "write a number of at least 0, such as 0.7".into())
}

/// Reads a probability.
///
/// # Errors
/// A sentence for any text but a number from 0 to 1.
pub fn probability(text: &str) -> Result<f64, String> {
    let value: Option<f64> = text.parse().ok();
    value.filter(|value| (0.0..=1.0).contains(value)).ok_or_else(|| "write a number from 0 to 1, such as 0.5".into())
}
