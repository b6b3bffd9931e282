//! Attributes, items and slices of values, by the rules of Jinja2's sandbox.

use super::{
    Error,
    names::{has_changing_method, has_method},
    state::Interpreter,
    text,
    types::{Key, Object, Range, Value},
};
use std::sync::Arc;

/// `value.name`: an attribute of the Python object, or its item.
///
/// # Errors
/// An undefined value.
pub fn attribute(value: &Value, name: &Arc<str>, interpreter: &mut Interpreter<'_>) -> Result<Value, Error> {
    value.defined()?;
    if let Some(found) = own(value, name, interpreter)? {
        return Ok(found);
    }
    let found = subscript(value, &Value::Str(name.clone()))?;
    Ok(found.unwrap_or_else(|| missing(value, name)))
}

/// `value[key]`: an item, or an attribute of this name.
///
/// # Errors
/// An undefined value.
pub fn item(value: &Value, key: &Value, interpreter: &mut Interpreter<'_>) -> Result<Value, Error> {
    value.defined()?;
    if let Some(found) = subscript(value, key)? {
        return Ok(found);
    }
    let found = match key {
        Value::Str(name) | Value::Markup(name) => own(value, name, interpreter)?,
        _ => None,
    };
    Ok(found.unwrap_or_else(|| missing(value, &text::repr(key).unwrap_or_default())))
}

/// Only an attribute of the object, as the filter `attr` returns it.
pub fn only_attribute(value: &Value, name: &Arc<str>, interpreter: &mut Interpreter<'_>) -> Result<Value, Error> {
    value.defined()?;
    Ok(own(value, name, interpreter)?.unwrap_or_else(|| missing(value, name)))
}

fn missing(value: &Value, name: &str) -> Value {
    Value::undefined(format!("a value of type {} has no attribute `{}`", value.kind(), name.trim_matches('\'')))
}

/// Attribute of the Python object.
fn own(value: &Value, name: &Arc<str>, interpreter: &mut Interpreter<'_>) -> Result<Option<Value>, Error> {
    if name.starts_with('_') {
        // The sandbox hides names of this form, whether they exist or not.
        return Ok(None);
    }
    let number = |value: i128| Ok(Some(Value::Int(value)));
    match (value, &**name) {
        (Value::Int(_) | Value::Bool(_), "real" | "numerator") => return number(value.as_int().unwrap_or_default()),
        (Value::Int(_) | Value::Bool(_), "imag") => return number(0),
        (Value::Int(_) | Value::Bool(_), "denominator") => return number(1),
        (Value::Float(value), "real") => return Ok(Some(Value::Float(*value))),
        (Value::Float(_), "imag") => return Ok(Some(Value::Float(0.0))),
        (Value::Range(range), "start") => return number(range.start),
        (Value::Range(range), "stop") => return number(range.stop),
        (Value::Range(range), "step") => return number(range.step),
        (Value::Object(object), field) => match &**object {
            Object::Namespace(fields) => return Ok(fields.borrow().text(field).cloned()),
            Object::Loop(state) => {
                if let Some(found) = state.attribute(field, interpreter)? {
                    return Ok(Some(found));
                }
            }
            Object::Group(items) => match field {
                "grouper" => return Ok(items.first().cloned()),
                "list" => return Ok(items.get(1).cloned()),
                _ => {}
            },
            Object::Cycler { items, at } => match field {
                "current" => return Ok(items.get(at.get()).cloned()),
                "pos" => return number(at.get() as i128),
                "items" => return Ok(Some(Value::tuple(items.clone()))),
                _ => {}
            },
            Object::Joiner { separator, used } => match field {
                "sep" => return Ok(Some(separator.clone())),
                "used" => return Ok(Some(Value::Bool(used.get()))),
                _ => {}
            },
            Object::Macro { definition, .. } => match field {
                "name" => return Ok(Some(Value::Str(definition.name.clone()))),
                "arguments" => {
                    return Ok(Some(Value::tuple(definition.arguments.iter().cloned().map(Value::Str).collect())));
                }
                "caller" => return Ok(Some(Value::Bool(definition.takes.caller))),
                "catch_kwargs" => return Ok(Some(Value::Bool(definition.takes.kwargs))),
                "catch_varargs" => return Ok(Some(Value::Bool(definition.takes.varargs))),
                _ => {}
            },
            _ => {}
        },
        _ => {}
    }
    if has_changing_method(value, name) {
        return Ok(Some(Value::undefined(format!("the method `{name}` changes a {}: that is refused", value.kind()))));
    }
    let method = || Value::object(Object::Method { of: value.clone(), name: name.clone() });
    Ok(has_method(value, name).then(method))
}

/// `value[key]` without attributes; `None` if there is none.
fn subscript(value: &Value, key: &Value) -> Result<Option<Value>, Error> {
    let at = |len: usize| {
        let index = key.as_int()?;
        let index = if index < 0 { index + len as i128 } else { index };
        usize::try_from(index).ok().filter(|index| *index < len)
    };
    Ok(match value {
        Value::Dict(dict) => Key::new(key.clone()).ok().and_then(|key| dict.get(&key).cloned()),
        Value::Str(text) | Value::Markup(text) => {
            let Some(index) = key.as_int() else { return Ok(None) };
            let found = match usize::try_from(index) {
                Ok(index) => text.chars().nth(index),
                Err(_) => usize::try_from(-1 - index).ok().and_then(|index| text.chars().rev().nth(index)),
            };
            let found = found.map(|c| c.to_string().into());
            found.map(if matches!(value, Value::Markup(_)) { Value::Markup } else { Value::Str })
        }
        Value::Range(range) => {
            at(usize::try_from(range.len()).unwrap_or(usize::MAX)).map(|index| Value::Int(range.get(index as i128)))
        }
        _ => value.as_items().and_then(|items| Some(items[at(items.len())?].clone())),
    })
}

/// `value[start:stop:step]`.
///
/// # Errors
/// Bounds that are no numbers, or an undefined value.
pub fn slice(value: &Value, bounds: &[Value; 3]) -> Result<Value, Error> {
    value.defined()?;
    let no_slices = || Err(Error::new(format!("a value of type {} has no slices", value.kind())));
    let pick = |indices: Vec<usize>, items: &[Value]| indices.into_iter().map(|at| items[at].clone()).collect();
    Ok(match value {
        Value::Str(text) | Value::Markup(text) => {
            let chars: Vec<char> = text.chars().collect();
            let (start, step, count, _) = bounded(bounds, chars.len())?;
            let part: String = indices(start, step, count).into_iter().map(|at| chars[at]).collect();
            if matches!(value, Value::Markup(_)) { Value::Markup(part.into()) } else { Value::text(part) }
        }
        Value::List(items) => {
            let (start, step, count, _) = bounded(bounds, items.len())?;
            Value::list(pick(indices(start, step, count), items))
        }
        Value::Range(range) => {
            let len = usize::try_from(range.len()).unwrap_or(usize::MAX);
            let (start, step, _, stop) = bounded(bounds, len)?;
            Value::Range(Range { start: range.get(start), stop: range.get(stop), step: range.step * step })
        }
        _ => match value.as_items() {
            Some(items) => {
                let (start, step, count, _) = bounded(bounds, items.len())?;
                Value::tuple(pick(indices(start, step, count), items))
            }
            None => return no_slices(),
        },
    })
}

fn indices(start: i128, step: i128, count: i128) -> Vec<usize> {
    (0..count).filter_map(|n| usize::try_from(start + n * step).ok()).collect()
}

/// First index, step, number of items and index behind the last item of a slice.
fn bounded(bounds: &[Value; 3], len: usize) -> Result<(i128, i128, i128, i128), Error> {
    let len = len as i128;
    let mut given = [None; 3];
    for (bound, value) in given.iter_mut().zip(bounds) {
        *bound = match value {
            Value::None => None,
            value => match value.as_int() {
                Some(value) => Some(value.clamp(i64::MIN.into(), i64::MAX.into())),
                None => return Err(Error::new("a bound of a slice is no integer")),
            },
        };
    }
    let step = given[2].unwrap_or(1);
    if step == 0 {
        return Err(Error::new("the step of a slice is 0"));
    }
    let (low, high) = if step > 0 { (0, len) } else { (-1, len - 1) };
    let clamp = |bound: i128| if bound < 0 { (bound + len).max(low) } else { bound.min(high) };
    let (start, stop) = if step > 0 {
        (given[0].map_or(0, clamp), given[1].map_or(len, clamp))
    } else {
        (given[0].map_or(len - 1, clamp), given[1].map_or(-1, clamp))
    };
    let count = if step > 0 { (stop - start + step - 1) / step } else { (start - stop - step - 1) / -step };
    Ok((start, step, count.max(0), stop))
}
