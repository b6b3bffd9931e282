//! Values that are neither JSON nor Python's plain types: generators, views, macros, loops.

use super::{Error, ast::Macro, dict::Dict, loops::Loop, scope::Scope, value::Value};
use std::{
    cell::{Cell, RefCell},
    collections::VecDeque,
    rc::{Rc, Weak},
    sync::Arc,
};

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

impl View {
    pub fn items(self, dict: &Dict) -> Vec<Value> {
        match self {
            View::Keys => dict.keys().cloned().collect(),
            View::Values => dict.values().cloned().collect(),
            View::Items => dict.pairs().map(|(key, value)| Value::tuple(vec![key.clone(), value.clone()])).collect(),
        }
    }
}

impl Object {
    /// Generator of the items; an error follows those before it.
    pub fn generator(items: impl IntoIterator<Item = Result<Value, Error>>) -> Value {
        let mut generator = Generator::default();
        for item in items {
            match item {
                Ok(item) => generator.items.push_back(item),
                Err(error) => {
                    generator.error = Some(error);
                    break;
                }
            }
        }
        Value::object(Object::Generator(RefCell::new(generator)))
    }

    /// Items of a view that Python compares as a set.
    pub fn as_set(&self) -> Option<Vec<Value>> {
        match self {
            Object::View(view @ (View::Keys | View::Items), dict) => Some(view.items(dict)),
            _ => None,
        }
    }

    /// True for one method of equal values.
    pub fn is_same_method(&self, other: &Object) -> bool {
        match (self, other) {
            (Object::Method { of: a, name }, Object::Method { of: b, name: other }) => name == other && a.equals(b),
            (Object::Function(a), Object::Function(b)) => a == b,
            _ => false,
        }
    }

    pub fn is_callable(&self) -> bool {
        match self {
            Object::Macro { .. } | Object::Loop(_) | Object::Joiner { .. } | Object::Function(_) => true,
            Object::Method { .. } => true,
            _ => false,
        }
    }

    pub fn kind(&self) -> &'static str {
        match self {
            Object::Namespace(_) => "Namespace",
            Object::Generator(_) => "generator",
            Object::View(View::Keys, _) => "dict_keys",
            Object::View(View::Values, _) => "dict_values",
            Object::View(View::Items, _) => "dict_items",
            Object::Group(_) => "_GroupTuple",
            Object::Macro { .. } => "Macro",
            Object::Loop(_) => "LoopContext",
            Object::Cycler { .. } => "Cycler",
            Object::Joiner { .. } => "Joiner",
            Object::Function(_) => "function",
            Object::Method { .. } => "builtin_function_or_method",
        }
    }
}
