//! Arithmetic operators.

use super::{Error, ast::Binary, percent, state::MAX_TEXT, text, types::Value};

/// Result of a binary operator.
///
/// # Errors
/// Types that Python does not take, a division by zero, or a number out of range.
pub fn binary(left: &Value, op: Binary, right: &Value) -> Result<Value, Error> {
    left.defined()?;
    if op == Binary::Mod
        && let Some(format) = left.as_str()
    {
        let formatted = percent::format(format, right)?;
        return match left {
            Value::Markup(_) => Err(Error::new("`%` of text that is marked as safe is not supported")),
            _ => Ok(Value::text(formatted)),
        };
    }
    right.defined()?;
    if let (Some(a), Some(b)) = (left.as_int(), right.as_int()) {
        return integers(a, op, b);
    }
    if let (Some(a), Some(b)) = (left.as_float(), right.as_float()) {
        return floats(a, op, b);
    }
    match op {
        Binary::Add => add(left, right),
        Binary::Mul => match (left.as_int(), right.as_int()) {
            (_, Some(count)) => repeat(left, count),
            (Some(count), _) => repeat(right, count),
            _ => Err(impossible(left, op, right)),
        },
        _ => Err(impossible(left, op, right)),
    }
}

pub fn negative(value: &Value) -> Result<Value, Error> {
    value.defined()?;
    match (value, value.as_int()) {
        (_, Some(value)) => value.checked_neg().map(Value::Int).ok_or_else(out_of_range),
        (Value::Float(value), _) => Ok(Value::Float(-value)),
        _ => Err(Error::new(format!("`-` does not take a value of type {}", value.kind()))),
    }
}

pub fn positive(value: &Value) -> Result<Value, Error> {
    value.defined()?;
    match (value, value.as_int()) {
        (_, Some(value)) => Ok(Value::Int(value)),
        (Value::Float(value), _) => Ok(Value::Float(*value)),
        _ => Err(Error::new(format!("`+` does not take a value of type {}", value.kind()))),
    }
}

fn add(left: &Value, right: &Value) -> Result<Value, Error> {
    let joined = |a: &[Value], b: &[Value]| [a, b].concat();
    match (left, right) {
        (Value::Str(a), Value::Str(b)) => Ok(Value::text([&**a, &**b].concat())),
        (Value::Markup(a), Value::Markup(b)) => Ok(Value::Markup([&**a, &**b].concat().into())),
        // Adding plain text to safe text escapes it.
        (Value::Markup(a), Value::Str(b)) => Ok(Value::Markup([&**a, &text::escaped(b)].concat().into())),
        (Value::Str(a), Value::Markup(b)) => Ok(Value::Markup([&text::escaped(a), &**b].concat().into())),
        (Value::List(a), Value::List(b)) => Ok(Value::list(joined(a, b))),
        (Value::List(_), _) | (_, Value::List(_)) => Err(impossible(left, Binary::Add, right)),
        _ => match (left.as_items(), right.as_items()) {
            (Some(a), Some(b)) => Ok(Value::tuple(joined(a, b))),
            _ => Err(impossible(left, Binary::Add, right)),
        },
    }
}

fn repeat(value: &Value, count: i128) -> Result<Value, Error> {
    let count = usize::try_from(count.max(0)).unwrap_or(usize::MAX);
    let size = match (value.as_str(), value.as_items()) {
        (Some(text), _) => text.len(),
        (_, Some(items)) => items.len(),
        _ => return Err(Error::new(format!("a value of type {} cannot be repeated", value.kind()))),
    };
    if size.checked_mul(count).is_none_or(|size| size > MAX_TEXT) {
        return Err(Error::new("a repeated value is too long"));
    }
    let repeated = |items: &[Value]| std::iter::repeat_n(items, count).flatten().cloned().collect();
    Ok(match value {
        Value::Str(text) => Value::text(text.repeat(count)),
        Value::Markup(text) => Value::Markup(text.repeat(count).into()),
        Value::List(items) => Value::list(repeated(items)),
        _ => Value::tuple(value.as_items().map(|items| repeated(items)).unwrap_or_default()),
    })
}

fn integers(a: i128, op: Binary, b: i128) -> Result<Value, Error> {
    #[expect(clippy::cast_precision_loss, reason = "only numbers that floats hold exactly are divided")]
    let quotient = || {
        let exact = |value: i128| value.unsigned_abs() <= 1 << 53;
        if b == 0 {
            return Err(Error::new("division by zero"));
        }
        if exact(a) && exact(b) { Ok(Value::Float(a as f64 / b as f64)) } else { Err(out_of_range()) }
    };
    let checked = |value: Option<i128>| value.map(Value::Int).ok_or_else(out_of_range);
    match op {
        Binary::Add => checked(a.checked_add(b)),
        Binary::Sub => checked(a.checked_sub(b)),
        Binary::Mul => checked(a.checked_mul(b)),
        Binary::Div => quotient(),
        Binary::FloorDiv | Binary::Mod if b == 0 => Err(Error::new("division by zero")),
        Binary::FloorDiv => checked(floor_div(a, b)),
        Binary::Mod => {
            checked(a.checked_rem(b).map(|rest| if rest != 0 && (rest < 0) != (b < 0) { rest + b } else { rest }))
        }
        Binary::Pow if b >= 0 => checked(u32::try_from(b).ok().and_then(|b| a.checked_pow(b))),
        #[expect(clippy::cast_precision_loss, reason = "Python rounds here as well")]
        Binary::Pow => floats(a as f64, op, b as f64),
    }
}

fn floor_div(a: i128, b: i128) -> Option<i128> {
    let quotient = a.checked_div(b)?;
    Some(if a % b != 0 && (a < 0) != (b < 0) { quotient - 1 } else { quotient })
}

fn floats(a: f64, op: Binary, b: f64) -> Result<Value, Error> {
    let by_zero = || Error::new("division by zero");
    Ok(Value::Float(match op {
        Binary::Add => a + b,
        Binary::Sub => a - b,
        Binary::Mul => a * b,
        Binary::Div | Binary::FloorDiv | Binary::Mod if b == 0.0 => return Err(by_zero()),
        Binary::Div => a / b,
        Binary::FloorDiv => div_mod(a, b).0,
        Binary::Mod => div_mod(a, b).1,
        Binary::Pow if a == 0.0 && b < 0.0 => return Err(by_zero()),
        Binary::Pow => {
            let value = a.powf(b);
            if (value.is_infinite() && a.is_finite() && b.is_finite()) || (value.is_nan() && a < 0.0) {
                return Err(out_of_range());
            }
            value
        }
    }))
}

/// `divmod(a, b)` of CPython.
fn div_mod(a: f64, b: f64) -> (f64, f64) {
    let mut rest = a % b;
    let mut quotient = (a - rest) / b;
    if rest == 0.0 {
        rest = 0.0_f64.copysign(b);
    } else if (rest < 0.0) != (b < 0.0) {
        rest += b;
        quotient -= 1.0;
    }
    let floor = quotient.floor();
    let whole = if quotient == 0.0 {
        0.0_f64.copysign(a / b)
    } else if quotient - floor > 0.5 {
        floor + 1.0
    } else {
        floor
    };
    (whole, rest)
}

fn out_of_range() -> Error {
    Error::new("a number is out of range")
}

fn impossible(left: &Value, op: Binary, right: &Value) -> Error {
    let sign = match op {
        Binary::Add => "+",
        Binary::Sub => "-",
        Binary::Mul => "*",
        Binary::Div => "/",
        Binary::FloorDiv => "//",
        Binary::Mod => "%",
        Binary::Pow => "**",
    };
    Error::new(format!("`{sign}` does not take values of type {} and {}", left.kind(), right.kind()))
}
