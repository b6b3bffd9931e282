//! Calls: functions of the environment, and values that can be called.

use super::{
    Error,
    args::Args,
    date, methods,
    state::Interpreter,
    text,
    types::{Dict, Key, Object, Range, Value},
};
use std::{
    cell::{Cell, RefCell},
    rc::Rc,
};

/// Limit of `range`, as in Jinja2's sandbox.
const MAX_RANGE: i128 = 100_000;

/// Function of the environment by its name.
pub fn global(name: &str) -> Option<Value> {
    const NAMES: [&str; 8] =
        ["range", "dict", "lipsum", "cycler", "joiner", "namespace", "raise_exception", "strftime_now"];
    NAMES.iter().find(|known| **known == name).map(|name| Value::object(Object::Function(name)))
}

impl Interpreter<'_> {
    /// Calls a value.
    ///
    /// # Errors
    /// A value that cannot be called, wrong arguments, or the error of the function.
    pub fn call(&mut self, callee: &Value, args: Args) -> Result<Value, Error> {
        callee.defined()?;
        let not_callable = || Error::new(format!("a value of type {} cannot be called", callee.kind()));
        let Value::Object(object) = callee else { return Err(not_callable()) };
        match &**object {
            Object::Function(name) => function(name, args),
            Object::Macro { definition, scope } => match scope.upgrade() {
                Some(scope) => self.deeper(|this| this.call_macro(definition, &scope, args)),
                None => Err(Error::new(format!("the macro `{}` is called outside of its block", definition.name))),
            },
            Object::Loop(state) => {
                let [items] = args.bind("loop", ["iterable"], 1)?;
                if !state.block.recursive {
                    return Err(Error::new("the loop is called, but not marked as recursive"));
                }
                let items = items.unwrap_or(Value::None);
                let run = |this: &mut Self| this.run_loop(&state.block, &state.scope, &items, state.depth + 1);
                self.captured(run).map(|(text, _)| Value::text(text))
            }
            Object::Joiner { separator, used } => {
                args.none("joiner")?;
                Ok(if used.replace(true) { separator.clone() } else { Value::text("") })
            }
            Object::Method { of, name } => match of {
                Value::Object(inner) => self.object_method(inner, name, args),
                _ => methods::call(self, of, name, args),
            },
            _ => Err(not_callable()),
        }
    }

    fn object_method(&mut self, object: &Object, name: &str, args: Args) -> Result<Value, Error> {
        match (object, name) {
            (Object::Loop(state), "cycle") => state.cycle(&args.positional),
            (Object::Loop(state), "changed") => Ok(Value::Bool(state.changed(&args.positional))),
            (Object::Cycler { items, at }, "next") => {
                args.none(name)?;
                let current = items[at.get()].clone();
                at.set((at.get() + 1) % items.len());
                Ok(current)
            }
            (Object::Cycler { at, .. }, "reset") => {
                args.none(name)?;
                at.set(0);
                Ok(Value::None)
            }
            (Object::Group(items), _) => methods::sequence(items, name, args),
            (Object::Function(_), "fromkeys") => methods::from_keys(args),
            _ => Err(Error::new(format!("the method `{name}` of a {} is not supported", object.kind()))),
        }
    }
}

/// # Errors
/// A name that transformers does not allow for a field of a namespace.
pub fn field_name(name: &str) -> Result<(), Error> {
    match name.starts_with('_') {
        true => Err(Error::new(format!("a namespace takes no name with an underscore at its begin, such as `{name}`"))),
        false => Ok(()),
    }
}

fn function(name: &str, args: Args) -> Result<Value, Error> {
    match name {
        "range" => range(args),
        "dict" => dict(args).map(|dict| Value::Dict(Rc::new(dict))),
        "namespace" => {
            let fields = dict(args)?;
            fields.keys().filter_map(Value::as_str).try_for_each(field_name)?;
            Ok(Value::object(Object::Namespace(RefCell::new(fields))))
        }
        "cycler" if args.positional.is_empty() || !args.named.is_empty() => {
            Err(Error::new("cycler takes items, at least one"))
        }
        "cycler" => Ok(Value::object(Object::Cycler { items: args.positional, at: Cell::new(0) })),
        "joiner" => {
            let [separator] = args.bind(name, ["sep"], 0)?;
            let separator = separator.unwrap_or_else(|| Value::text(", "));
            Ok(Value::object(Object::Joiner { separator, used: Cell::new(false) }))
        }
        "raise_exception" => {
            let [message] = args.bind(name, ["message"], 1)?;
            Err(Error::new(text::string(&message.unwrap_or(Value::None))?))
        }
        "strftime_now" => {
            let [format] = args.bind(name, ["format"], 1)?;
            match format.as_ref().and_then(Value::as_str) {
                Some(format) => Ok(Value::text(date::strftime(format))),
                None => Err(Error::new("strftime_now takes a text")),
            }
        }
        _ => Err(Error::new(format!("the function `{name}` is not supported"))),
    }
}

fn range(args: Args) -> Result<Value, Error> {
    let bounds = args.bind("range", ["", "", ""], 1)?;
    let bounds = bounds.into_iter().flatten().map(|bound| bound.as_int());
    let bounds = bounds.collect::<Option<Vec<_>>>().ok_or_else(|| Error::new("range takes integers"))?;
    let range = match bounds[..] {
        [stop] => Range { start: 0, stop, step: 1 },
        [start, stop] => Range { start, stop, step: 1 },
        [start, stop, step] => Range { start, stop, step },
        _ => return Err(Error::new("range takes one to three integers")),
    };
    let small = |value: i128| value.unsigned_abs() < 1 << 64;
    if range.step == 0 || !(small(range.start) && small(range.stop) && small(range.step)) {
        return Err(Error::new("the step of a range is 0, or a bound is out of range"));
    }
    if range.len() > MAX_RANGE {
        return Err(Error::new(format!("a range is longer than {MAX_RANGE}")));
    }
    Ok(Value::Range(range))
}

fn dict(args: Args) -> Result<Dict, Error> {
    if args.positional.len() > 1 {
        return Err(Error::new("dict takes at most one argument without a name"));
    }
    let mut dict = Dict::default();
    match args.positional.first() {
        None => {}
        Some(Value::Dict(other)) => dict = (**other).clone(),
        Some(pairs) => {
            for pair in pairs.defined()?.items()? {
                match pair.items()?.as_slice() {
                    [key, value] => dict.insert(Key::new(key.clone())?, value.clone()),
                    _ => return Err(Error::new("dict takes pairs of a key and a value")),
                }
            }
        }
    }
    for (name, value) in args.named {
        dict.set(&name, value);
    }
    Ok(dict)
}
