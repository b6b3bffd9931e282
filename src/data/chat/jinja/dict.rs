//! Dictionaries with the order and the equality of keys of Python.

use super::{Error, object::Object, value::Value};
use indexmap::{Equivalent, IndexMap};
use std::{
    hash::{Hash, Hasher},
    sync::Arc,
};

/// A value that has a hash in Python.
#[derive(Clone, Debug)]
pub struct Key(Value);

impl Key {
    /// # Errors
    /// A list or a dictionary, which have no hash.
    pub fn new(value: Value) -> Result<Key, Error> {
        let unhashable = match &value {
            Value::List(_) | Value::Dict(_) => true,
            Value::Tuple(items) => {
                items.iter().try_for_each(|item| Key::new(item.clone()).map(drop))?;
                false
            }
            Value::Object(object) => matches!(&**object, Object::View(..)),
            _ => false,
        };
        if unhashable {
            return Err(Error::new(format!("a value of type {} cannot be a key", value.kind())));
        }
        Ok(Key(value))
    }
}

impl PartialEq for Key {
    fn eq(&self, other: &Key) -> bool {
        self.0.equals(&other.0)
    }
}

impl Eq for Key {}

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        match &self.0 {
            Value::Str(text) | Value::Markup(text) => text.hash(state),
            Value::Float(value) if value.fract() == 0.0 && value.abs() < 1e30 => {
                #[expect(clippy::cast_possible_truncation, reason = "the range is checked above")]
                (*value as i128).hash(state);
            }
            Value::Float(value) => value.to_bits().hash(state),
            Value::Tuple(items) => items.iter().for_each(|item| Key(item.clone()).hash(state)),
            other => match other.as_int() {
                Some(value) => value.hash(state),
                None => other.kind().hash(state),
            },
        }
    }
}

impl Equivalent<Key> for str {
    fn equivalent(&self, key: &Key) -> bool {
        key.0.as_str() == Some(self)
    }
}

#[derive(Clone, Debug, Default)]
pub struct Dict(IndexMap<Key, Value>);

impl Dict {
    pub fn from_texts(items: impl IntoIterator<Item = (Arc<str>, Value)>) -> Dict {
        Dict(items.into_iter().map(|(key, value)| (Key(Value::Str(key)), value)).collect())
    }

    pub fn insert(&mut self, key: Key, value: Value) {
        self.0.insert(key, value);
    }

    pub fn set(&mut self, key: &str, value: Value) {
        self.0.insert(Key(Value::text(key)), value);
    }

    pub fn get(&self, key: &Key) -> Option<&Value> {
        self.0.get(key)
    }

    pub fn text(&self, key: &str) -> Option<&Value> {
        self.0.get(key)
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn keys(&self) -> impl DoubleEndedIterator<Item = &Value> {
        self.0.keys().map(|key| &key.0)
    }

    pub fn values(&self) -> impl DoubleEndedIterator<Item = &Value> {
        self.0.values()
    }

    pub fn iter(&self) -> impl Iterator<Item = (&Key, &Value)> {
        self.0.iter()
    }

    pub fn pairs(&self) -> impl DoubleEndedIterator<Item = (&Value, &Value)> {
        self.0.iter().map(|(key, value)| (&key.0, value))
    }
}
