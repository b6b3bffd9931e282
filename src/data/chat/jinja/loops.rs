//! Variable `loop` of a `for` block.

use super::{
    Error,
    ast::For,
    state::Interpreter,
    types::{Loop, Scope, Value},
};
use std::{
    cell::{Cell, RefCell},
    collections::VecDeque,
    rc::Rc,
    sync::Arc,
};

impl Loop {
    pub fn new(block: &Arc<For>, scope: &Rc<Scope>, items: &Value, depth: usize) -> Result<Loop, Error> {
        let (items, error) = items.partial_items()?;
        Ok(Loop {
            block: block.clone(),
            scope: scope.clone(),
            depth,
            waiting: RefCell::new(items.into()),
            error: RefCell::new(error),
            filtered: Cell::new(block.test.is_some()),
            after: RefCell::default(),
            before: RefCell::default(),
            current: RefCell::default(),
            index: Cell::new(0),
            changed: RefCell::default(),
        })
    }

    /// Begins the next item.
    pub fn next(&self, interpreter: &mut Interpreter<'_>) -> Result<Option<Value>, Error> {
        let looked_at = self.after.take();
        let next = match looked_at {
            Some(item) => Some(item),
            None => self.pull(interpreter)?,
        };
        if let Some(item) = &next {
            self.index.set(self.index.get() + 1);
            *self.before.borrow_mut() = self.current.replace(Some(item.clone()));
        }
        Ok(next)
    }

    fn pull(&self, interpreter: &mut Interpreter<'_>) -> Result<Option<Value>, Error> {
        loop {
            let next = self.waiting.borrow_mut().pop_front();
            let Some(item) = next else { return self.error.take().map_or(Ok(None), Err) };
            let Some(test) = self.block.test.as_ref().filter(|_| self.filtered.get()) else { return Ok(Some(item)) };
            let inner = Scope::inside(&self.scope);
            interpreter.assign(&self.block.target, item.clone(), &inner)?;
            if interpreter.eval(test, &inner)?.truth() {
                return Ok(Some(item));
            }
        }
    }

    fn peek(&self, interpreter: &mut Interpreter<'_>) -> Result<Option<Value>, Error> {
        if self.after.borrow().is_none() {
            *self.after.borrow_mut() = self.pull(interpreter)?;
        }
        Ok(self.after.borrow().clone())
    }

    pub fn length(&self, interpreter: &mut Interpreter<'_>) -> Result<usize, Error> {
        if self.filtered.get() || self.error.borrow().is_some() {
            let mut rest = VecDeque::new();
            while let Some(item) = self.pull(interpreter)? {
                rest.push_back(item);
            }
            *self.waiting.borrow_mut() = rest;
            self.filtered.set(false);
        }
        Ok(self.index.get() + self.waiting.borrow().len() + usize::from(self.after.borrow().is_some()))
    }

    /// Attribute of `loop`; `None` if there is none of this name.
    pub fn attribute(&self, name: &str, interpreter: &mut Interpreter<'_>) -> Result<Option<Value>, Error> {
        let int = |value: usize| Value::Int(value as i128);
        let index = self.index.get();
        Ok(Some(match name {
            "index" => int(index),
            "index0" => Value::Int(index as i128 - 1),
            "first" => Value::Bool(index <= 1),
            "last" => Value::Bool(self.peek(interpreter)?.is_none()),
            "length" => int(self.length(interpreter)?),
            "revindex" => Value::Int(self.length(interpreter)? as i128 - index as i128 + 1),
            "revindex0" => Value::Int(self.length(interpreter)? as i128 - index as i128),
            "depth" => int(self.depth + 1),
            "depth0" => int(self.depth),
            "previtem" => {
                let before = self.before.borrow().clone();
                before.unwrap_or_else(|| Value::undefined("there is no previous item"))
            }
            "nextitem" => self.peek(interpreter)?.unwrap_or_else(|| Value::undefined("there is no next item")),
            _ => return Ok(None),
        }))
    }

    pub fn cycle(&self, items: &[Value]) -> Result<Value, Error> {
        let index = self.index.get().saturating_sub(1);
        items.get(index % items.len().max(1)).cloned().ok_or_else(|| Error::new("loop.cycle needs an item"))
    }

    pub fn changed(&self, values: &[Value]) -> bool {
        let mut last = self.changed.borrow_mut();
        let same = last
            .as_ref()
            .is_some_and(|last| last.len() == values.len() && last.iter().zip(values).all(|(a, b)| a.equals(b)));
        *last = Some(values.to_vec());
        !same
    }
}
