//! Tests: `value is name`.

use super::{
    Error,
    args::Args,
    ast::{Binary, Comparison},
    letters,
    names::{is_filter, is_test},
    operators::binary,
    text,
    types::{Key, Object, Value},
};
use std::{cmp::Ordering, rc::Rc};

/// Answer of a test.
///
/// # Errors
/// An unknown test, wrong arguments, or types that Python does not compare.
pub fn test(name: &str, value: &Value, args: Args) -> Result<bool, Error> {
    let comparison = match name {
        "==" | "eq" | "equalto" => Some(Comparison::Eq),
        "!=" | "ne" => Some(Comparison::Ne),
        "<" | "lt" | "lessthan" => Some(Comparison::Lt),
        "<=" | "le" => Some(Comparison::Le),
        ">" | "gt" | "greaterthan" => Some(Comparison::Gt),
        ">=" | "ge" => Some(Comparison::Ge),
        "in" => Some(Comparison::In),
        _ => None,
    };
    if let Some(comparison) = comparison {
        let [other] = args.bind(name, [""], 1)?;
        return compare(value, comparison, &other.unwrap_or(Value::None));
    }
    let rest = |divisor: Value| binary(value, Binary::Mod, &divisor);
    match name {
        "divisibleby" => {
            let [divisor] = args.bind(name, ["num"], 1)?;
            return Ok(rest(divisor.unwrap_or(Value::None))?.equals(&Value::Int(0)));
        }
        "sameas" => {
            let [other] = args.bind(name, ["other"], 1)?;
            return Ok(is_same(value, &other.unwrap_or(Value::None)));
        }
        _ => args.none(name)?,
    }
    Ok(match name {
        "boolean" => matches!(value, Value::Bool(_)),
        "callable" => match value {
            Value::Undefined(_) => true,
            Value::Object(object) => object.is_callable(),
            _ => false,
        },
        "defined" => !value.is_undefined(),
        "undefined" => value.is_undefined(),
        "escaped" => matches!(value, Value::Markup(_)),
        "even" => rest(Value::Int(2))?.equals(&Value::Int(0)),
        "odd" => rest(Value::Int(2))?.equals(&Value::Int(1)),
        "true" => matches!(value, Value::Bool(true)),
        "false" => matches!(value, Value::Bool(false)),
        "filter" | "test" => {
            // Python looks the value up, so it must be a possible key.
            Key::new(value.clone())?;
            value.as_str().is_some_and(if name == "test" { is_test } else { is_filter })
        }
        "float" => matches!(value, Value::Float(_)),
        "integer" => matches!(value, Value::Int(_)),
        "number" => matches!(value, Value::Int(_) | Value::Float(_) | Value::Bool(_)),
        "iterable" => value.is_iterable(),
        "mapping" => matches!(value, Value::Dict(_)),
        "none" => matches!(value, Value::None),
        "string" => value.as_str().is_some(),
        "sequence" => match value {
            Value::Object(object) => matches!(&**object, Object::Group(_)),
            _ => value.is_iterable(),
        },
        "lower" => letters::is("islower", &text::string(value)?).unwrap_or(false),
        "upper" => letters::is("isupper", &text::string(value)?).unwrap_or(false),
        _ => return Err(Error::new(format!("the test `{name}` is unknown"))),
    })
}

/// Result of a comparison.
///
/// # Errors
/// Types that Python does not compare.
pub fn compare(left: &Value, comparison: Comparison, right: &Value) -> Result<bool, Error> {
    Ok(match comparison {
        Comparison::Eq => left.equals(right),
        Comparison::Ne => !left.equals(right),
        Comparison::In => right.contains(left)?,
        Comparison::NotIn => !right.contains(left)?,
        Comparison::Lt => left.compare(right)? == Some(Ordering::Less),
        Comparison::Le => left.compare(right)?.is_some_and(Ordering::is_le),
        Comparison::Gt => left.compare(right)? == Some(Ordering::Greater),
        Comparison::Ge => left.compare(right)?.is_some_and(Ordering::is_ge),
    })
}

/// `a is b`: constants of one value are one object.
fn is_same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::None, Value::None) => true,
        (Value::Bool(a), Value::Bool(b)) => a == b,
        (Value::Int(a), Value::Int(b)) => a == b,
        (Value::Float(a), Value::Float(b)) => a == b,
        (Value::Str(a), Value::Str(b)) => a == b,
        (Value::List(a), Value::List(b)) => Rc::ptr_eq(a, b),
        (Value::Tuple(a), Value::Tuple(b)) => Rc::ptr_eq(a, b) || (a.is_empty() && b.is_empty()),
        (Value::Dict(a), Value::Dict(b)) => Rc::ptr_eq(a, b),
        (Value::Object(a), Value::Object(b)) => Rc::ptr_eq(a, b),
        _ => false,
    }
}
