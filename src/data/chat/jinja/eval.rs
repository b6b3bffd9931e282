//! Evaluation of expressions.

use super::{
    Error,
    ast::{Comparison, Const, Expr},
    attribute,
    checks::{self, compare},
    filters, operators,
    state::{Interpreter, MAX_TEXT},
    text,
    types::{Dict, Key, Scope, Value},
};
use std::rc::Rc;

impl Interpreter<'_> {
    /// Value of an expression.
    pub fn eval(&mut self, expr: &Expr, scope: &Rc<Scope>) -> Result<Value, Error> {
        self.deeper(|this| this.eval_inner(expr, scope))
    }

    fn eval_all(&mut self, exprs: &[Expr], scope: &Rc<Scope>) -> Result<Vec<Value>, Error> {
        exprs.iter().map(|expr| self.eval(expr, scope)).collect()
    }

    // Each arm with variables is a separate function, so that frames of this one stay small.
    fn eval_inner(&mut self, expr: &Expr, scope: &Rc<Scope>) -> Result<Value, Error> {
        match expr {
            Expr::Const(value) => Ok(constant(value)),
            Expr::Name(name) => Ok(self.lookup(name, scope)),
            Expr::Tuple(items) => self.eval_all(items, scope).map(Value::tuple),
            Expr::List(items) => self.eval_all(items, scope).map(Value::list),
            Expr::Dict(pairs) => self.dict(pairs, scope),
            Expr::Attribute(of, name) => {
                let of = self.eval(of, scope)?;
                attribute::attribute(&of, name, self)
            }
            Expr::Item(of, key) => self.item(of, key, scope),
            Expr::Slice(_) => Err(Error::new("a slice stands outside of brackets")),
            Expr::Call(callee, arguments) => {
                let callee = self.eval(callee, scope)?;
                let args = self.arguments(arguments, scope)?;
                self.call(&callee, args)
            }
            Expr::Filter(..) => self.filter(expr, None, scope),
            Expr::Test(of, name, arguments) => {
                let of = self.eval(of, scope)?;
                let args = self.arguments(arguments, scope)?;
                checks::test(name, &of, args).map(Value::Bool)
            }
            Expr::Not(inner) => Ok(Value::Bool(!self.eval(inner, scope)?.truth())),
            Expr::Negative(inner) => operators::negative(&self.eval(inner, scope)?),
            Expr::Positive(inner) => operators::positive(&self.eval(inner, scope)?),
            Expr::Binary(left, op, right) => {
                let left = self.eval(left, scope)?;
                operators::binary(&left, *op, &self.eval(right, scope)?)
            }
            Expr::And(left, right) => {
                let left = self.eval(left, scope)?;
                if left.truth() { self.eval(right, scope) } else { Ok(left) }
            }
            Expr::Or(left, right) => {
                let left = self.eval(left, scope)?;
                if left.truth() { Ok(left) } else { self.eval(right, scope) }
            }
            Expr::Compare(first, others) => self.comparison(first, others, scope),
            Expr::Concat(parts) => self.concat(parts, scope),
            Expr::Condition { test, then, otherwise } => match (self.eval(test, scope)?.truth(), otherwise) {
                (true, _) => self.eval(then, scope),
                (false, Some(otherwise)) => self.eval(otherwise, scope),
                (false, None) => Ok(Value::undefined("the condition of `if` is false, and there is no `else`")),
            },
        }
    }

    fn dict(&mut self, pairs: &[(Expr, Expr)], scope: &Rc<Scope>) -> Result<Value, Error> {
        let mut dict = Dict::default();
        for (key, value) in pairs {
            let key = self.eval(key, scope)?;
            dict.insert(Key::new(key)?, self.eval(value, scope)?);
        }
        Ok(Value::Dict(Rc::new(dict)))
    }

    fn item(&mut self, of: &Expr, key: &Expr, scope: &Rc<Scope>) -> Result<Value, Error> {
        let of = self.eval(of, scope)?;
        let Expr::Slice(parts) = key else {
            let key = self.eval(key, scope)?;
            return attribute::item(&of, &key, self);
        };
        let mut bounds = [Value::None, Value::None, Value::None];
        for (bound, part) in bounds.iter_mut().zip(parts.iter()) {
            if let Some(part) = part {
                *bound = self.eval(part, scope)?;
            }
        }
        attribute::slice(&of, &bounds)
    }

    fn comparison(&mut self, first: &Expr, others: &[(Comparison, Expr)], scope: &Rc<Scope>) -> Result<Value, Error> {
        let mut left = self.eval(first, scope)?;
        for (comparison, right) in others {
            let right = self.eval(right, scope)?;
            if !compare(&left, *comparison, &right)? {
                return Ok(Value::Bool(false));
            }
            left = right;
        }
        Ok(Value::Bool(true))
    }

    fn concat(&mut self, parts: &[Expr], scope: &Rc<Scope>) -> Result<Value, Error> {
        let mut out = String::new();
        for part in parts {
            out.push_str(&text::string(&self.eval(part, scope)?)?);
            if out.len() > MAX_TEXT {
                return Err(Error::new("a text is too long"));
            }
        }
        Ok(Value::text(out))
    }

    /// Value of a filter. `input` is the input of the first filter of a block.
    pub fn filter(&mut self, expr: &Expr, input: Option<Value>, scope: &Rc<Scope>) -> Result<Value, Error> {
        let Expr::Filter(of, name, arguments) = expr else { return self.eval(expr, scope) };
        let of = match (of, input) {
            (Some(of), input) => self.deeper(|this| this.filter(of, input, scope))?,
            (None, Some(input)) => input,
            (None, None) => return Err(Error::new(format!("the filter `{name}` has no input"))),
        };
        let args = self.arguments(arguments, scope)?;
        filters::filter(self, name, &of, args)
    }
}

/// True if the expression is a slice of a constant. Jinja2 computes one that is printed before it runs the template, and there
/// a slice that fails is an undefined value.
pub fn is_constant_slice(expr: &Expr) -> bool {
    match expr {
        Expr::Item(of, key) => matches!(**key, Expr::Slice(_)) && is_constant(of) && is_constant(key),
        _ => false,
    }
}

fn is_constant(expr: &Expr) -> bool {
    match expr {
        Expr::Const(_) => true,
        Expr::Tuple(items) | Expr::List(items) => items.iter().all(is_constant),
        Expr::Dict(pairs) => pairs.iter().all(|(key, value)| is_constant(key) && is_constant(value)),
        Expr::Slice(parts) => parts.iter().flatten().all(is_constant),
        Expr::Negative(inner) | Expr::Positive(inner) => is_constant(inner),
        _ => false,
    }
}

fn constant(value: &Const) -> Value {
    match value {
        Const::None => Value::None,
        Const::Bool(value) => Value::Bool(*value),
        Const::Int(value) => Value::Int(*value),
        Const::Float(value) => Value::Float(*value),
        Const::Text(text) => Value::Str(text.clone()),
    }
}
