//! Rows of token ids with their loss mask.

use super::{ParsedRow, kind};
use crate::data::reject::{Reason, Reject};
use serde_json::{Map, Value};

/// Parses `input_ids` and `loss_mask`.
///
/// # Errors
/// A reject with the key, and the value at its index.
pub fn parse(row: &Map<String, Value>) -> Result<ParsedRow, Reject> {
    let list = |key: &str| match row.get(key) {
        Some(Value::Array(list)) => Ok(list),
        None | Some(Value::Null) => {
            let labels = row.get("labels").is_some_and(Value::is_array);
            let remedy = if labels { "; write 0 where `labels` has -100, else 1" } else { "" };
            Err(Reason::MaskLength.because(format!("there is no `{key}`{remedy}")))
        }
        Some(other) => Err(Reason::BadTokens.because(format!("`{key}` is {}, not a list", kind(other)))),
    };
    let (ids, mask) = (list("input_ids")?, list("loss_mask")?);
    if ids.len() != mask.len() {
        return Err(Reason::MaskLength.because(format!("{} ids and {} mask values", ids.len(), mask.len())));
    }
    if ids.is_empty() {
        return Err(Reason::Empty.because("`input_ids` is empty"));
    }
    let bad = |key: &str, i: usize, value: &Value| {
        // A list instead of a number would fill the rejects file.
        let shown: String = value.to_string().chars().take(40).collect();
        Reason::BadTokens.because(format!("`{key}` has {shown} at index {i}"))
    };
    let id = |(i, value): (usize, &Value)| {
        let number = value.as_i64().ok_or_else(|| bad("input_ids", i, value))?;
        i32::try_from(number).map_err(|_| Reason::TokenRange.because(format!("id {number} at index {i}")))
    };
    let bit = |(i, value): (usize, &Value)| match (value.as_bool(), value.as_f64()) {
        (Some(false), _) | (_, Some(0.0)) => Ok(0),
        (Some(true), _) | (_, Some(1.0)) => Ok(1),
        _ => Err(bad("loss_mask", i, value)),
    };
    Ok(ParsedRow::Tokens {
        ids: ids.iter().enumerate().map(id).collect::<Result<_, _>>()?,
        mask: mask.iter().enumerate().map(bit).collect::<Result<_, _>>()?,
    })
}
