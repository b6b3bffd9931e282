//! Variables of a template.

use super::value::Value;
use std::{cell::RefCell, rc::Rc, sync::Arc};

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
