//! Interpreter of statements.

use super::{
    Error,
    args::Args,
    ast::{Arguments, Body, Expr, For, Macro, Statement, Target},
    call,
    eval::is_constant_slice,
    state::{Flow, Interpreter},
    text,
    types::{Dict, Loop, Object, Scope, Value},
};
use std::{rc::Rc, sync::Arc};

impl Interpreter<'_> {
    pub fn body(&mut self, body: &[Statement], scope: &Rc<Scope>) -> Result<Flow, Error> {
        for statement in body {
            let flow = self.statement(statement, scope)?;
            if flow != Flow::Next {
                return Ok(flow);
            }
        }
        Ok(Flow::Next)
    }

    /// Writes the result of a block, which Jinja2 does not convert to text.
    fn write_text(&mut self, value: &Value) -> Result<(), Error> {
        match value.as_str() {
            Some(text) => self.write(text),
            None => Err(Error::new(format!("a block results in a value of type {}, not in text", value.kind()))),
        }
    }

    // Each arm with variables is a separate function, so that frames of this one stay small.
    fn statement(&mut self, statement: &Statement, scope: &Rc<Scope>) -> Result<Flow, Error> {
        match statement {
            Statement::Data(text) => self.write(text)?,
            Statement::Print(expr) => self.print(expr, scope)?,
            Statement::For(block) => {
                let items = self.eval(&block.items, scope)?;
                self.deeper(|this| this.run_loop(block, scope, &items, 0))?;
            }
            Statement::If { branches, otherwise } => return self.condition(branches, otherwise, scope),
            Statement::Set(target, expr) => {
                let value = self.eval(expr, scope)?;
                self.assign(target, value, scope)?;
            }
            Statement::SetBlock { target, filter, body } => {
                return self.set_block(target, filter.as_ref(), body, scope);
            }
            Statement::With { targets, body } => return self.with(targets, body, scope),
            Statement::FilterBlock { filter, body } => return self.filter_block(filter, body, scope),
            Statement::Macro(definition) => scope.set(&definition.name, macro_value(definition, scope)),
            Statement::CallBlock { call, caller } => self.call_block(call, caller, scope)?,
            Statement::Scope(body) => {
                let inner = Scope::inside(scope);
                return self.deeper(|this| this.body(body, &inner));
            }
            Statement::NoEscape(expr) => {
                if self.eval(expr, scope)?.truth() {
                    return Err(Error::new("`autoescape` is not supported"));
                }
            }
            Statement::Break => return Ok(Flow::Break),
            Statement::Continue => return Ok(Flow::Continue),
            Statement::Other { name, template } => {
                self.eval(template, scope)?;
                return Err(Error::new(format!("`{name}` needs another template, and there is none")));
            }
        }
        Ok(Flow::Next)
    }

    fn print(&mut self, expr: &Expr, scope: &Rc<Scope>) -> Result<(), Error> {
        let value = match self.eval(expr, scope) {
            Err(_) if is_constant_slice(expr) => return Ok(()),
            value => value?,
        };
        match value.as_str() {
            Some(text) => self.write(text),
            None => self.write(&text::string(&value)?),
        }
    }

    fn condition(&mut self, branches: &[(Expr, Body)], otherwise: &Body, scope: &Rc<Scope>) -> Result<Flow, Error> {
        for (test, body) in branches {
            if self.eval(test, scope)?.truth() {
                return self.deeper(|this| this.body(body, scope));
            }
        }
        self.deeper(|this| this.body(otherwise, scope))
    }

    fn set_block(
        &mut self,
        target: &Target,
        filter: Option<&Expr>,
        body: &Body,
        scope: &Rc<Scope>,
    ) -> Result<Flow, Error> {
        let inner = Scope::inside(scope);
        let (text, flow) = self.captured(|this| this.body(body, &inner))?;
        if flow == Flow::Next {
            let mut value = Value::text(text);
            if let Some(filter) = filter {
                value = self.filter(filter, Some(value), &inner)?;
            }
            self.assign(target, value, scope)?;
        }
        Ok(flow)
    }

    fn with(&mut self, targets: &[(Target, Expr)], body: &Body, scope: &Rc<Scope>) -> Result<Flow, Error> {
        let inner = Scope::inside(scope);
        for (target, expr) in targets {
            let value = self.eval(expr, scope)?;
            self.assign(target, value, &inner)?;
        }
        self.deeper(|this| this.body(body, &inner))
    }

    fn filter_block(&mut self, filter: &Expr, body: &Body, scope: &Rc<Scope>) -> Result<Flow, Error> {
        let inner = Scope::inside(scope);
        let (text, flow) = self.captured(|this| this.body(body, &inner))?;
        if flow == Flow::Next {
            let value = self.filter(filter, Some(Value::text(text)), &inner)?;
            self.write_text(&value)?;
        }
        Ok(flow)
    }

    fn call_block(&mut self, call: &Expr, caller: &Arc<Macro>, scope: &Rc<Scope>) -> Result<(), Error> {
        let Expr::Call(callee, arguments) = call else { return Ok(()) };
        let callee = self.eval(callee, scope)?;
        let mut args = self.arguments(arguments, scope)?;
        args.named.push(("caller".into(), macro_value(caller, scope)));
        let value = self.deeper(|this| this.call(&callee, args))?;
        self.write_text(&value)
    }

    /// Runs a `for` block; `depth` counts its recursions.
    pub fn run_loop(
        &mut self,
        block: &Arc<For>,
        scope: &Rc<Scope>,
        items: &Value,
        depth: usize,
    ) -> Result<Flow, Error> {
        let state = Rc::new(Loop::new(block, scope, items, depth)?);
        let name = Arc::from("loop");
        // Jinja2 notes an iteration at the end of the body, which `break` and `continue` skip.
        let mut completed = false;
        while let Some(item) = state.next(self)? {
            let inner = Scope::inside(scope);
            inner.set(&name, Value::object(Object::Loop(state.clone())));
            self.assign(&block.target, item, &inner)?;
            match self.body(&block.body, &inner)? {
                Flow::Next => completed = true,
                Flow::Continue => {}
                Flow::Break => break,
            }
        }
        if !completed {
            return self.body(&block.otherwise, &Scope::inside(scope));
        }
        Ok(Flow::Next)
    }

    pub fn assign(&mut self, target: &Target, value: Value, scope: &Rc<Scope>) -> Result<(), Error> {
        value.limited(None)?;
        match target {
            Target::Name(name) => scope.set(name, value),
            Target::Attribute(name, attribute) => match self.lookup(name, scope) {
                Value::Object(object) if matches!(&*object, Object::Namespace(_)) => {
                    call::field_name(attribute)?;
                    value.limited(Some(&object))?;
                    if let Object::Namespace(fields) = &*object {
                        fields.borrow_mut().set(attribute, value);
                    }
                }
                _ => return Err(Error::new(format!("`{name}` is no namespace, so its attributes cannot be set"))),
            },
            Target::Tuple(targets) => {
                let items = value.items()?;
                if items.len() != targets.len() {
                    let counts = format!("{} values for {} names", items.len(), targets.len());
                    return Err(Error::new(format!("a list cannot be unpacked: {counts}")));
                }
                for (target, item) in targets.iter().zip(items) {
                    self.assign(target, item, scope)?;
                }
            }
        }
        Ok(())
    }

    pub fn lookup(&self, name: &str, scope: &Scope) -> Value {
        let found = scope.get(name).or_else(|| self.context.get(name)).or_else(|| call::global(name));
        found.unwrap_or_else(|| Value::undefined(format!("`{name}` is undefined")))
    }

    pub fn arguments(&mut self, arguments: &Arguments, scope: &Rc<Scope>) -> Result<Args, Error> {
        let mut args = Args::default();
        for expr in &arguments.positional {
            args.positional.push(self.eval(expr, scope)?);
        }
        for (name, expr) in &arguments.named {
            args.named.push((name.clone(), self.eval(expr, scope)?));
        }
        if let Some(list) = &arguments.list {
            args.positional.extend(self.eval(list, scope)?.items()?);
        }
        if let Some(dict) = &arguments.dict {
            let Value::Dict(dict) = self.eval(dict, scope)? else {
                return Err(Error::new("the value after `**` is no dictionary"));
            };
            for (key, value) in dict.pairs() {
                let Value::Str(key) = key else { return Err(Error::new("a key after `**` is no text")) };
                if args.named.iter().any(|(known, _)| known == key) {
                    return Err(Error::new(format!("the argument `{key}` is given twice")));
                }
                args.named.push((key.clone(), value.clone()));
            }
        }
        Ok(args)
    }

    /// Calls a macro.
    pub fn call_macro(&mut self, definition: &Macro, scope: &Rc<Scope>, mut args: Args) -> Result<Value, Error> {
        let inner = Scope::inside(scope);
        let count = definition.arguments.len();
        let mut given: Vec<Value> = args.positional.drain(..count.min(args.positional.len())).collect();
        let mut caller_given = given.len() == count && definition.arguments.iter().any(|name| **name == *"caller");
        let mut bound = Vec::with_capacity(count);
        let positional = given.len();
        bound.extend(given.drain(..).map(Some));
        for name in &definition.arguments[positional..] {
            let value = args.take(name);
            caller_given |= **name == *"caller";
            bound.push(value);
        }
        if definition.takes.caller && !caller_given {
            let caller = args.take("caller").filter(|caller| !matches!(caller, Value::None));
            inner.set(&"caller".into(), caller.unwrap_or_else(|| Value::undefined("no caller is defined")));
        }
        if definition.takes.kwargs {
            let rest = std::mem::take(&mut args.named);
            inner.set(&"kwargs".into(), Value::Dict(Rc::new(Dict::from_texts(rest))));
        } else if let Some((name, _)) = args.named.first() {
            return Err(Error::new(format!("the macro `{}` takes no argument `{name}`", definition.name)));
        }
        if definition.takes.varargs {
            inner.set(&"varargs".into(), Value::tuple(std::mem::take(&mut args.positional)));
        } else if !args.positional.is_empty() {
            return Err(Error::new(format!("the macro `{}` takes at most {count} arguments", definition.name)));
        }
        let optional = count - definition.defaults.len();
        for (index, (name, value)) in definition.arguments.iter().zip(bound).enumerate() {
            let value = match (value, index.checked_sub(optional).and_then(|at| definition.defaults.get(at))) {
                (Some(value), _) => value,
                (None, Some(default)) => self.eval(default, &inner)?,
                (None, None) => Value::undefined(format!("the argument `{name}` was not given")),
            };
            inner.set(name, value);
        }
        let (text, _) = self.captured(|this| this.body(&definition.body, &inner))?;
        Ok(Value::text(text))
    }
}

fn macro_value(definition: &Arc<Macro>, scope: &Rc<Scope>) -> Value {
    Value::object(Object::Macro { definition: definition.clone(), scope: Rc::downgrade(scope) })
}
