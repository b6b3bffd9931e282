//! Values of templates: Python's, as far as JSON and Jinja2 have them.

use super::{
    Error,
    types::{Dict, Key, Object, Range, Value, View},
};
use std::{cmp::Ordering, rc::Rc, sync::Arc};

impl Range {
    pub fn len(self) -> i128 {
        let (low, high, step) =
            if self.step > 0 { (self.start, self.stop, self.step) } else { (self.stop, self.start, -self.step) };
        if low >= high { 0 } else { (high - low - 1) / step + 1 }
    }

    pub fn get(self, index: i128) -> i128 {
        self.start + index * self.step
    }

    pub fn values(self) -> impl Iterator<Item = Value> {
        (0..self.len()).map(move |index| Value::Int(self.get(index)))
    }

    pub fn position(self, value: &Value) -> Option<i128> {
        (0..self.len()).find(|&index| Value::Int(self.get(index)).equals(value))
    }
}

/// Limit of values inside of each other. JSON has at most 128.
const MAX_NESTED: usize = 200;
/// Limit of values inside of one that is assigned.
const MAX_PARTS: usize = 10_000_000;

impl Value {
    pub fn undefined(what: impl Into<Arc<str>>) -> Value {
        Value::Undefined(what.into())
    }

    pub fn text(text: impl Into<Arc<str>>) -> Value {
        Value::Str(text.into())
    }

    pub fn list(items: Vec<Value>) -> Value {
        Value::List(Rc::new(items))
    }

    pub fn tuple(items: Vec<Value>) -> Value {
        Value::Tuple(Rc::new(items))
    }

    pub fn object(object: Object) -> Value {
        Value::Object(Rc::new(object))
    }

    pub fn as_str(&self) -> Option<&str> {
        match self {
            Value::Str(text) | Value::Markup(text) => Some(text),
            _ => None,
        }
    }

    pub fn as_int(&self) -> Option<i128> {
        match self {
            Value::Int(value) => Some(*value),
            Value::Bool(value) => Some(i128::from(*value)),
            _ => None,
        }
    }

    pub fn as_float(&self) -> Option<f64> {
        match self {
            Value::Float(value) => Some(*value),
            #[expect(clippy::cast_precision_loss, reason = "Python rounds here as well")]
            other => other.as_int().map(|value| value as f64),
        }
    }

    /// Items of a list, a tuple or a group.
    pub fn as_items(&self) -> Option<&Rc<Vec<Value>>> {
        match self {
            Value::List(items) | Value::Tuple(items) => Some(items),
            Value::Object(object) => match &**object {
                Object::Group(items) => Some(items),
                _ => None,
            },
            _ => None,
        }
    }

    pub fn is_undefined(&self) -> bool {
        matches!(self, Value::Undefined(_))
    }

    /// Fails if the value is undefined.
    pub fn defined(&self) -> Result<&Value, Error> {
        match self {
            Value::Undefined(what) => Err(Error::new(&**what)),
            _ => Ok(self),
        }
    }

    /// Fails for a value that holds others too deeply, or too many of them, or `owner`: what walks through it recurses.
    pub fn limited(&self, owner: Option<&Rc<Object>>) -> Result<(), Error> {
        fn walk(value: &Value, owner: Option<&Rc<Object>>, depth: usize, left: &mut usize) -> Option<()> {
            *left = left.checked_sub(1)?;
            let depth = depth.checked_sub(1)?;
            let mut each = |value: &Value| walk(value, owner, depth, left);
            match value {
                Value::List(items) | Value::Tuple(items) => items.iter().try_for_each(each),
                Value::Dict(dict) => dict.values().try_for_each(each),
                Value::Object(object) if owner.is_some_and(|owner| Rc::ptr_eq(owner, object)) => None,
                Value::Object(object) => match &**object {
                    Object::Namespace(fields) => fields.borrow().values().try_for_each(each),
                    Object::Generator(generator) => generator.borrow().items.iter().try_for_each(each),
                    Object::View(_, dict) => dict.values().try_for_each(each),
                    Object::Group(items) => items.iter().try_for_each(each),
                    Object::Cycler { items, .. } => items.iter().try_for_each(each),
                    Object::Joiner { separator: of, .. } | Object::Method { of, .. } => each(of),
                    Object::Macro { .. } | Object::Loop(_) | Object::Function(_) => Some(()),
                },
                _ => Some(()),
            }
        }
        let walked = walk(self, owner, MAX_NESTED, &mut { MAX_PARTS });
        walked.ok_or_else(|| Error::new("a value holds too many others, or itself"))
    }

    /// Python's name of the type.
    pub fn kind(&self) -> &'static str {
        match self {
            Value::Undefined(_) => "Undefined",
            Value::None => "NoneType",
            Value::Bool(_) => "bool",
            Value::Int(_) => "int",
            Value::Float(_) => "float",
            Value::Str(_) => "str",
            Value::Markup(_) => "Markup",
            Value::List(_) => "list",
            Value::Tuple(_) => "tuple",
            Value::Dict(_) => "dict",
            Value::Range(_) => "range",
            Value::Object(object) => object.kind(),
        }
    }

    /// `bool(value)`.
    pub fn truth(&self) -> bool {
        match self {
            Value::Undefined(_) | Value::None => false,
            Value::Bool(value) => *value,
            Value::Int(value) => *value != 0,
            Value::Float(value) => *value != 0.0,
            Value::Str(text) | Value::Markup(text) => !text.is_empty(),
            Value::List(items) | Value::Tuple(items) => !items.is_empty(),
            Value::Dict(dict) => !dict.is_empty(),
            Value::Range(range) => range.len() > 0,
            Value::Object(object) => match &**object {
                Object::View(_, dict) => !dict.is_empty(),
                _ => true,
            },
        }
    }

    /// `len(value)`.
    pub fn len(&self) -> Result<usize, Error> {
        let found = match self {
            Value::Undefined(_) => Some(0),
            Value::Str(text) | Value::Markup(text) => Some(text.chars().count()),
            Value::Dict(dict) => Some(dict.len()),
            Value::Range(range) => usize::try_from(range.len()).ok(),
            Value::Object(object) => match &**object {
                Object::View(_, dict) => Some(dict.len()),
                Object::Group(items) => Some(items.len()),
                _ => None,
            },
            _ => self.as_items().map(|items| items.len()),
        };
        found.ok_or_else(|| Error::new(format!("a value of type {} has no length", self.kind())))
    }

    /// Items of an iterable value. Those of a generator are used up.
    pub fn items(&self) -> Result<Vec<Value>, Error> {
        let (items, error) = self.partial_items()?;
        match error {
            Some(error) => Err(error),
            None => Ok(items),
        }
    }

    /// Items of an iterable value up to the error of a generator, and that error.
    pub fn partial_items(&self) -> Result<(Vec<Value>, Option<Error>), Error> {
        let items = match self {
            Value::Undefined(_) => Vec::new(),
            Value::Str(text) | Value::Markup(text) => text.chars().map(|c| Value::text(c.to_string())).collect(),
            Value::Dict(dict) => dict.keys().cloned().collect(),
            Value::Range(range) => range.values().collect(),
            Value::Object(object) => match &**object {
                Object::Generator(generator) => {
                    let mut generator = generator.borrow_mut();
                    return Ok((generator.items.drain(..).collect(), generator.error.take()));
                }
                Object::View(view, dict) => view.items(dict),
                Object::Group(items) => items.to_vec(),
                _ => return Err(self.not_iterable()),
            },
            Value::List(items) | Value::Tuple(items) => items.to_vec(),
            _ => return Err(self.not_iterable()),
        };
        Ok((items, None))
    }

    fn not_iterable(&self) -> Error {
        Error::new(format!("a value of type {} has no items", self.kind()))
    }

    pub fn is_iterable(&self) -> bool {
        match self {
            Value::None | Value::Bool(_) | Value::Int(_) | Value::Float(_) => false,
            Value::Object(object) => {
                matches!(&**object, Object::Generator(_) | Object::View(..) | Object::Group(_) | Object::Loop(_))
            }
            _ => true,
        }
    }

    /// `self == other`.
    pub fn equals(&self, other: &Value) -> bool {
        if let (Some(a), Some(b)) = (self.as_str(), other.as_str()) {
            return a == b;
        }
        if let Some(order) = numbers(self, other) {
            return order == Some(Ordering::Equal);
        }
        let all = |a: &[Value], b: &[Value]| a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.equals(b));
        match (self, other) {
            (Value::Undefined(_), Value::Undefined(_)) | (Value::None, Value::None) => true,
            (Value::List(a), Value::List(b)) => all(a, b),
            (Value::List(_), _) | (_, Value::List(_)) => false,
            (Value::Dict(a), Value::Dict(b)) => {
                a.len() == b.len() && a.iter().all(|(key, a)| b.get(key).is_some_and(|b| a.equals(b)))
            }
            (Value::Range(a), Value::Range(b)) => {
                a.len() == b.len() && (a.len() == 0 || a.start == b.start && (a.len() == 1 || a.step == b.step))
            }
            (Value::Object(a), Value::Object(b)) if Rc::ptr_eq(a, b) || a.is_same_method(b) => true,
            (Value::Object(a), Value::Object(b)) if a.as_set().is_some() && b.as_set().is_some() => {
                let (a, b) = (a.as_set().unwrap_or_default(), b.as_set().unwrap_or_default());
                a.len() == b.len() && a.iter().all(|a| b.iter().any(|b| a.equals(b)))
            }
            _ => match (self.as_items(), other.as_items()) {
                (Some(a), Some(b)) => all(a, b),
                _ => false,
            },
        }
    }

    /// Order of two values; `None` for numbers that have none.
    ///
    /// # Errors
    /// Types that Python does not order.
    pub fn compare(&self, other: &Value) -> Result<Option<Ordering>, Error> {
        self.defined()?;
        other.defined()?;
        if let (Some(a), Some(b)) = (self.as_str(), other.as_str()) {
            return Ok(Some(a.cmp(b)));
        }
        if let Some(order) = numbers(self, other) {
            return Ok(order);
        }
        let is_list = |value: &Value| matches!(value, Value::List(_));
        if let (Some(a), Some(b)) = (self.as_items(), other.as_items())
            && is_list(self) == is_list(other)
        {
            let different = a.iter().zip(b.iter()).find(|(a, b)| !a.equals(b));
            return match different {
                Some((a, b)) => a.compare(b),
                None => Ok(Some(a.len().cmp(&b.len()))),
            };
        }
        Err(Error::new(format!("values of type {} and {} cannot be compared", self.kind(), other.kind())))
    }

    /// `item in self`.
    pub fn contains(&self, item: &Value) -> Result<bool, Error> {
        match self {
            Value::Str(text) | Value::Markup(text) => match item.as_str() {
                Some(part) => Ok(text.contains(part)),
                None => Err(Error::new(format!("a value of type {} cannot be searched in text", item.kind()))),
            },
            Value::Dict(dict) => Ok(dict.get(&Key::new(item.clone())?).is_some()),
            Value::Object(object) => match &**object {
                Object::Generator(generator) => {
                    let mut generator = generator.borrow_mut();
                    while let Some(next) = generator.items.pop_front() {
                        if next.equals(item) {
                            return Ok(true);
                        }
                    }
                    generator.error.take().map_or(Ok(false), Err)
                }
                Object::View(View::Keys, dict) => Ok(dict.get(&Key::new(item.clone())?).is_some()),
                _ => Ok(self.items()?.iter().any(|found| found.equals(item))),
            },
            _ => match self.as_items() {
                Some(items) => Ok(items.iter().any(|found| found.equals(item))),
                None => Ok(self.items()?.iter().any(|found| found.equals(item))),
            },
        }
    }
}

/// Order of two numbers, `Some(None)` with a NaN; `None` if one is no number.
fn numbers(a: &Value, b: &Value) -> Option<Option<Ordering>> {
    if let (Some(a), Some(b)) = (a.as_int(), b.as_int()) {
        return Some(Some(a.cmp(&b)));
    }
    let exact = |int: i128, float: f64| {
        if float.is_nan() {
            None
        } else if float >= 1.7e38 {
            Some(Ordering::Less)
        } else if float <= -1.7e38 {
            Some(Ordering::Greater)
        } else {
            let whole = float.floor();
            #[expect(clippy::cast_possible_truncation, reason = "the range is checked above")]
            let order = int.cmp(&(whole as i128));
            Some(order.then(if whole < float { Ordering::Less } else { Ordering::Equal }))
        }
    };
    match (a, b) {
        (Value::Float(a), Value::Float(b)) => Some(a.partial_cmp(b)),
        (Value::Float(a), b) => b.as_int().map(|b| exact(b, *a).map(Ordering::reverse)),
        (a, Value::Float(b)) => a.as_int().map(|a| exact(a, *b)),
        _ => None,
    }
}

impl From<&serde_json::Value> for Value {
    fn from(value: &serde_json::Value) -> Value {
        match value {
            serde_json::Value::Null => Value::None,
            serde_json::Value::Bool(value) => Value::Bool(*value),
            serde_json::Value::Number(number) => match (number.as_i64(), number.as_u64(), number.as_f64()) {
                (Some(value), ..) => Value::Int(value.into()),
                (_, Some(value), _) => Value::Int(value.into()),
                (_, _, value) => Value::Float(value.unwrap_or(f64::NAN)),
            },
            serde_json::Value::String(text) => Value::text(text.as_str()),
            serde_json::Value::Array(items) => Value::list(items.iter().map(Value::from).collect()),
            serde_json::Value::Object(items) => {
                let items = items.iter().map(|(key, value)| (key.as_str().into(), Value::from(value)));
                Value::Dict(Rc::new(Dict::from_texts(items)))
            }
        }
    }
}

/// Stable sort by a key; equal items keep their order, also if it is reversed.
///
/// # Errors
/// Keys that Python does not compare.
pub fn sort_by<T>(items: &mut [T], key: impl Fn(&T) -> &Value, reverse: bool) -> Result<(), Error> {
    let mut failed = None;
    items.sort_by(|a, b| {
        let order = key(a).compare(key(b)).unwrap_or_else(|error| {
            failed.get_or_insert(error);
            None
        });
        let order = order.unwrap_or(Ordering::Equal);
        if reverse { order.reverse() } else { order }
    });
    failed.map_or(Ok(()), Err)
}
