//! Types of the engine's values, which hold each other. Their behaviour is in the files next to this one.

use super::{
    Error,
    ast::{For, Macro},
};
use indexmap::{Equivalent, IndexMap};
use std::{
    cell::{Cell, RefCell},
    collections::VecDeque,
    hash::{Hash, Hasher},
    rc::{Rc, Weak},
    sync::Arc,
};

/// A value of a template.
#[derive(Clone, Debug)]
pub enum Value {
    /// A value that does not exist; the text says which.
    Undefined(Arc<str>),
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Str(Arc<str>),
    /// Text that is safe in HTML.
    Markup(Arc<str>),
    List(Rc<Vec<Value>>),
    Tuple(Rc<Vec<Value>>),
    Dict(Rc<Dict>),
    Range(Range),
    Object(Rc<Object>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    pub start: i128,
    pub stop: i128,
    pub step: i128,
}

/// Value that is neither JSON nor one of Python's plain types.
#[derive(Debug)]
pub enum Object {
    Namespace(RefCell<Dict>),
    /// Items that can be read once, as filters such as `map` return them.
    Generator(RefCell<Generator>),
    View(View, Rc<Dict>),
    /// Named tuple of `groupby`: the common value and the list.
    Group(Rc<Vec<Value>>),
    Macro {
        definition: Arc<Macro>,
        scope: Weak<Scope>,
    },
    Loop(Rc<Loop>),
    Cycler {
        items: Vec<Value>,
        at: Cell<usize>,
    },
    Joiner {
        separator: Value,
        used: Cell<bool>,
    },
    /// A function of the environment.
    Function(&'static str),
    /// Method of a value, not called.
    Method {
        of: Value,
        name: Arc<str>,
    },
}

#[derive(Debug, Default)]
pub struct Generator {
    pub items: VecDeque<Value>,
    /// Error that follows the items.
    pub error: Option<Error>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum View {
    Keys,
    Values,
    Items,
}

/// Variables of a block. Those of the blocks around it are visible, and are not changed by an assignment inside.
#[derive(Debug, Default)]
pub struct Scope {
    variables: RefCell<Vec<(Arc<str>, Value)>>,
    parent: Option<Rc<Scope>>,
}

impl Scope {
    pub fn inside(parent: &Rc<Scope>) -> Rc<Scope> {
        Rc::new(Scope { variables: RefCell::default(), parent: Some(parent.clone()) })
    }

    pub fn set(&self, name: &Arc<str>, value: Value) {
        let mut variables = self.variables.borrow_mut();
        match variables.iter_mut().find(|(known, _)| known == name) {
            Some((_, known)) => *known = value,
            None => variables.push((name.clone(), value)),
        }
    }

    pub fn get(&self, name: &str) -> Option<Value> {
        let found = self.variables.borrow().iter().find(|(known, _)| **known == *name).map(|(_, value)| value.clone());
        found.or_else(|| self.parent.as_ref()?.get(name))
    }
}

/// State of a loop.
#[derive(Debug)]
pub struct Loop {
    pub block: Arc<For>,
    /// Variables around the loop.
    pub scope: Rc<Scope>,
    pub depth: usize,
    pub waiting: RefCell<VecDeque<Value>>,
    /// Error that follows the waiting items.
    pub error: RefCell<Option<Error>>,
    /// True if the waiting items have to pass the test of the block.
    pub filtered: Cell<bool>,
    /// The next item, if it was looked at.
    pub after: RefCell<Option<Value>>,
    pub before: RefCell<Option<Value>>,
    pub current: RefCell<Option<Value>>,
    /// Number of items begun.
    pub index: Cell<usize>,
    pub changed: RefCell<Option<Vec<Value>>>,
}

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
