//! Generators, views, and properties of objects.

use super::{
    Error,
    types::{Dict, Generator, Object, Value, View},
};
use std::cell::RefCell;

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
        matches!(
            self,
            Object::Macro { .. }
                | Object::Loop(_)
                | Object::Joiner { .. }
                | Object::Function(_)
                | Object::Method { .. }
        )
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
