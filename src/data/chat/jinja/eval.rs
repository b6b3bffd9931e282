//! Evaluation of expressions.

use super::{
    Error,
    ast::{Comparison, Const, Expr},
    attribute,
    dict::{Dict, Key},
    interpreter::Interpreter,
    operators, text,
    value::Value,
};
use std::{cmp::Ordering, rc::Rc};

impl Interpreter<'_> {
    /// Value of an expression.
    pub fn eval(&mut self, expr: &Expr, scope: &Rc<super::scope::Scope>) -> Result<Value, Error> {
        self.deeper(|this| this.eval_inner(expr, scope))
    }

    fn eval_all(&mut self, exprs: &[Expr], scope: &Rc<super::scope::Scope>) -> Result<Vec<Value>, Error> {
        exprs.iter().map(|expr| self.eval(expr, scope)).collect()
    }

    fn eval_inner(&mut self, expr: &Expr, scope: &Rc<super::scope::Scope>) -> Result<Value, Error> {
        Ok(match expr {
            Expr::Const(value) => constant(value),
            Expr::Name(name) => self.lookup(name, scope),
            Expr::Tuple(items) => Value::tuple(self.eval_all(items, scope)?),
            Expr::List(items) => Value::list(self.eval_all(items, scope)?),
            Expr::Dict(pairs) => {
                let mut dict = Dict::default();
                for (key, value) in pairs {
                    let key = self.eval(key, scope)?;
                    dict.insert(Key::new(key)?, self.eval(value, scope)?);
                }
                Value::Dict(Rc::new(dict))
            }
            Expr::Attribute(of, name) => {
                let of = self.eval(of, scope)?;
                attribute::attribute(&of, name, self)?
            }
            Expr::Item(of, key) => {
                let of = self.eval(of, scope)?;
                if let Expr::Slice(parts) = &**key {
                    let mut bounds = [Value::None, Value::None, Value::None];
                    for (bound, part) in bounds.iter_mut().zip(parts.iter()) {
                        if let Some(part) = part {
                            *bound = self.eval(part, scope)?;
                        }
                    }
                    attribute::slice(&of, &bounds)?
                } else {
                    let key = self.eval(key, scope)?;
                    attribute::item(&of, &key, self)?
                }
            }
            Expr::Slice(_) => return Err(Error::new("a slice stands outside of brackets")),
            Expr::Call(callee, arguments) => {
                let callee = self.eval(callee, scope)?;
                let args = self.arguments(arguments, scope)?;
                self.call(&callee, args)?
            }
            Expr::Filter(..) => self.filter(expr, None, scope)?,
            Expr::Test(of, name, arguments) => {
                let of = self.eval(of, scope)?;
                let args = self.arguments(arguments, scope)?;
                Value::Bool(super::checks::test(self, name, &of, args)?)
            }
            Expr::Not(inner) => Value::Bool(!self.eval(inner, scope)?.truth()),
            Expr::Negative(inner) => operators::negative(&self.eval(inner, scope)?)?,
            Expr::Positive(inner) => operators::positive(&self.eval(inner, scope)?)?,
            Expr::Binary(left, op, right) => {
                let left = self.eval(left, scope)?;
                let right = self.eval(right, scope)?;
                operators::binary(&left, *op, &right)?
            }
            Expr::And(left, right) => {
                let left = self.eval(left, scope)?;
                if left.truth() { self.eval(right, scope)? } else { left }
            }
            Expr::Or(left, right) => {
                let left = self.eval(left, scope)?;
                if left.truth() { left } else { self.eval(right, scope)? }
            }
            Expr::Compare(first, others) => {
                let mut left = self.eval(first, scope)?;
                for (comparison, right) in others {
                    let right = self.eval(right, scope)?;
                    if !compare(&left, *comparison, &right)? {
                        return Ok(Value::Bool(false));
                    }
                    left = right;
                }
                Value::Bool(true)
            }
            Expr::Concat(parts) => {
                let mut out = String::new();
                for part in parts {
                    out.push_str(&text::string(&self.eval(part, scope)?)?);
                }
                Value::text(out)
            }
            Expr::Condition { test, then, otherwise } => {
                if self.eval(test, scope)?.truth() {
                    self.eval(then, scope)?
                } else if let Some(otherwise) = otherwise {
                    self.eval(otherwise, scope)?
                } else {
                    Value::undefined("the condition of `if` is false, and there is no `else`")
                }
            }
        })
    }

    /// Value of a filter. `input` is the input of the first filter of a block.
    pub fn filter(
        &mut self,
        expr: &Expr,
        input: Option<Value>,
        scope: &Rc<super::scope::Scope>,
    ) -> Result<Value, Error> {
        let Expr::Filter(of, name, arguments) = expr else { return self.eval(expr, scope) };
        let of = match (of, input) {
            (Some(of), input) => self.deeper(|this| this.filter(of, input, scope))?,
            (None, Some(input)) => input,
            (None, None) => return Err(Error::new(format!("the filter `{name}` has no input"))),
        };
        let args = self.arguments(arguments, scope)?;
        super::filters::filter(self, name, &of, args)
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

/// Result of a comparison.
///
/// # Errors
/// Types that Python does not compare.
pub fn compare(left: &Value, comparison: Comparison, right: &Value) -> Result<bool, Error> {
    Ok(match comparison {
        Comparison::Eq => left.equals(right),
        Comparison::Ne => !left.equals(right),
        Comparison::In => right.contains(left)?,
        Comparison::NotIn => !right.contains(left)?,
        Comparison::Lt => left.compare(right)? == Some(Ordering::Less),
        Comparison::Le => left.compare(right)?.is_some_and(Ordering::is_le),
        Comparison::Gt => left.compare(right)? == Some(Ordering::Greater),
        Comparison::Ge => left.compare(right)?.is_some_and(Ordering::is_ge),
    })
}
