//! Methods of Python's plain values.

use super::{
    Error,
    args::Args,
    state::Interpreter,
    strings, text,
    types::{Dict, Key, Object, Value, View},
};
use std::rc::Rc;

/// Calls a method.
///
/// # Errors
/// Wrong arguments, or the error of the method.
pub fn call(interpreter: &mut Interpreter<'_>, of: &Value, name: &str, args: Args) -> Result<Value, Error> {
    match of {
        Value::Str(text) => strings::call(interpreter, text, name, args),
        Value::Dict(dict) => dict_method(dict, name, args),
        Value::List(items) if name == "copy" => {
            args.none(name)?;
            Ok(Value::List(items.clone()))
        }
        Value::List(items) | Value::Tuple(items) => sequence(items, name, args),
        Value::Markup(text) => markup_method(interpreter, text, name, args),
        Value::Range(range) => {
            let [value] = args.bind(name, [""], 1)?;
            let found = range.position(&value.unwrap_or(Value::None));
            match name {
                "count" => Ok(Value::Int(found.is_some().into())),
                _ => found.map(Value::Int).ok_or_else(|| Error::new("the value is not in the range")),
            }
        }
        _ => number(of, name, args),
    }
}

/// Method of safe text, whose result is safe as well.
fn markup_method(interpreter: &mut Interpreter<'_>, text: &str, name: &str, args: Args) -> Result<Value, Error> {
    let values = args.positional.iter().chain(args.named.iter().map(|(_, value)| value));
    let plain = |value: &Value| match value {
        Value::Str(text) => *text::escaped(text) == **text,
        Value::List(_) | Value::Tuple(_) | Value::Dict(_) | Value::Object(_) => false,
        _ => true,
    };
    if !values.into_iter().all(plain) {
        return Err(Error::new(format!("the method `{name}` of safe text takes plain text only")));
    }
    let safe = |value: Value| match value {
        Value::Str(text) => Value::Markup(text),
        other => other,
    };
    Ok(match strings::call(interpreter, text, name, args)? {
        Value::List(items) => Value::list(items.iter().cloned().map(safe).collect()),
        Value::Tuple(items) => Value::tuple(items.iter().cloned().map(safe).collect()),
        other => safe(other),
    })
}

/// Methods of lists and tuples.
///
/// # Errors
/// Wrong arguments, or a value that `index` does not find.
pub fn sequence(items: &[Value], name: &str, args: Args) -> Result<Value, Error> {
    if name == "count" {
        let [value] = args.bind(name, [""], 1)?;
        let value = value.unwrap_or(Value::None);
        return Ok(Value::Int(items.iter().filter(|item| item.equals(&value)).count() as i128));
    }
    let [value, start, end] = args.bind(name, ["", "", ""], 1)?;
    let value = value.unwrap_or(Value::None);
    let range = strings::bounds(start.as_ref(), end.as_ref(), items.len())?;
    let found = range.clone().find(|&at| items[at].equals(&value));
    found.map(|at| Value::Int(at as i128)).ok_or_else(|| Error::new("the value is not in the list"))
}

/// `dict.fromkeys`.
///
/// # Errors
/// Wrong arguments, or items that cannot be keys.
pub fn from_keys(args: Args) -> Result<Value, Error> {
    let [keys, value] = args.bind("fromkeys", ["", ""], 1)?;
    let mut made = Dict::default();
    for key in keys.unwrap_or(Value::None).items()? {
        made.insert(Key::new(key)?, value.clone().unwrap_or(Value::None));
    }
    Ok(Value::Dict(Rc::new(made)))
}

fn dict_method(dict: &Rc<Dict>, name: &str, args: Args) -> Result<Value, Error> {
    let view = match name {
        "keys" => View::Keys,
        "values" => View::Values,
        "items" => View::Items,
        "get" => {
            let [key, default] = args.bind(name, ["", ""], 1)?;
            let key = Key::new(key.unwrap_or(Value::None))?;
            return Ok(dict.get(&key).cloned().or(default).unwrap_or(Value::None));
        }
        "fromkeys" => return from_keys(args),
        _ => {
            args.none(name)?;
            return Ok(Value::Dict(dict.clone()));
        }
    };
    args.none(name)?;
    Ok(Value::object(Object::View(view, dict.clone())))
}

fn number(of: &Value, name: &str, args: Args) -> Result<Value, Error> {
    let unsupported = || Error::new(format!("the method `{name}` of a {} is not supported", of.kind()));
    match (of, of.as_int(), name) {
        (_, Some(value), "bit_length") => {
            args.none(name)?;
            Ok(Value::Int((128 - value.unsigned_abs().leading_zeros()).into()))
        }
        (_, Some(value), "bit_count") => {
            args.none(name)?;
            Ok(Value::Int(value.unsigned_abs().count_ones().into()))
        }
        (_, Some(value), "conjugate") => {
            args.none(name)?;
            Ok(Value::Int(value))
        }
        (_, Some(value), "as_integer_ratio") => {
            args.none(name)?;
            Ok(Value::tuple(vec![Value::Int(value), Value::Int(1)]))
        }
        (Value::Float(value), _, "conjugate") => {
            args.none(name)?;
            Ok(Value::Float(*value))
        }
        (Value::Float(value), _, "is_integer") => {
            args.none(name)?;
            Ok(Value::Bool(value.is_finite() && value.fract() == 0.0))
        }
        _ => Err(unsupported()),
    }
}
