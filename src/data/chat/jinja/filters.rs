//! Filters: `value | name`. This file has those of lists; `text_filters.rs` has those of texts and numbers.

use super::{
    Error,
    args::Args,
    ast::Binary,
    attribute, checks, json,
    names::{is_filter, is_test},
    operators,
    state::Interpreter,
    text, text_filters,
    types::{Key, Object, Value},
    value::sort_by,
};
use std::{cmp::Ordering, collections::HashSet, rc::Rc, sync::Arc};

/// Value of a filter.
///
/// # Errors
/// An unknown filter, wrong arguments, or the error of the filter.
pub fn filter(interpreter: &mut Interpreter<'_>, name: &str, value: &Value, args: Args) -> Result<Value, Error> {
    Ok(match name {
        "default" | "d" => {
            let [default, boolean] = args.bind(name, ["default_value", "boolean"], 0)?;
            let replaced = value.is_undefined() || boolean.is_some_and(|flag| flag.truth()) && !value.truth();
            if replaced { default.unwrap_or_else(|| Value::text("")) } else { value.clone() }
        }
        "length" | "count" => {
            args.none(name)?;
            match value {
                Value::Object(object) => match &**object {
                    Object::Loop(state) => Value::Int(state.length(interpreter)? as i128),
                    _ => Value::Int(value.len()? as i128),
                },
                _ => Value::Int(value.len()? as i128),
            }
        }
        "list" => {
            args.none(name)?;
            Value::list(value.items()?)
        }
        "tojson" => json::dumps(value, args)?,
        "items" => {
            args.none(name)?;
            match value {
                Value::Undefined(_) => Object::generator([]),
                Value::Dict(dict) => {
                    let pairs = dict.pairs().map(|(key, value)| Value::tuple(vec![key.clone(), value.clone()]));
                    Object::generator(pairs.map(Ok))
                }
                _ => Object::generator([Err(Error::new(format!("a value of type {} has no items", value.kind())))]),
            }
        }
        "first" => {
            args.none(name)?;
            match value {
                Value::Object(object) if matches!(&**object, Object::Generator(_)) => first_of_generator(object)?,
                _ => value.items()?.into_iter().next(),
            }
            .unwrap_or_else(|| Value::undefined("the list has no first item"))
        }
        "last" => {
            args.none(name)?;
            reversed(value)?.into_iter().next().unwrap_or_else(|| Value::undefined("the list has no last item"))
        }
        "reverse" => {
            args.none(name)?;
            match value.as_str() {
                Some(text) => Value::text(text.chars().rev().collect::<String>()),
                None => match reversed(value) {
                    Ok(items) => Object::generator(items.into_iter().map(Ok)),
                    Err(_) => {
                        let mut items = value.items()?;
                        items.reverse();
                        Value::list(items)
                    }
                },
            }
        }
        "join" => {
            let [separator, attribute] = args.bind(name, ["d", "attribute"], 0)?;
            let separator = separator.map_or(Ok(String::new()), |separator| text::string(&separator))?;
            let mut parts = Vec::new();
            for item in value.items()? {
                let item = match &attribute {
                    Some(path) if !matches!(path, Value::None) => field(interpreter, &item, path, None)?,
                    _ => item,
                };
                parts.push(text::string(&item)?);
            }
            Value::text(parts.join(&separator))
        }
        "attr" => {
            let [key] = args.bind(name, ["name"], 1)?;
            let key: Arc<str> = text::string(&key.unwrap_or(Value::None))?.into();
            attribute::only_attribute(value, &key, interpreter)?
        }
        "map" => map(interpreter, value, args)?,
        "select" | "reject" | "selectattr" | "rejectattr" => select(interpreter, name, value, args)?,
        "sort" => {
            let [reverse, case, path] = args.bind(name, ["reverse", "case_sensitive", "attribute"], 0)?;
            let keep_case = case.is_some_and(|case| case.truth());
            let mut keyed = Vec::new();
            for item in value.items()? {
                let key = match path.as_ref().filter(|path| !matches!(path, Value::None)) {
                    None => folded(item.clone(), keep_case),
                    Some(paths) => {
                        let mut keys = Vec::new();
                        let texts = paths.as_str().map(|paths| paths.split(',').map(Value::text).collect());
                        for path in texts.unwrap_or_else(|| vec![paths.clone()]) {
                            keys.push(folded(field(interpreter, &item, &path, None)?, keep_case));
                        }
                        Value::list(keys)
                    }
                };
                keyed.push((key, item));
            }
            sort_by(&mut keyed, |(key, _)| key, reverse.is_some_and(|reverse| reverse.truth()))?;
            Value::list(keyed.into_iter().map(|(_, item)| item).collect())
        }
        "dictsort" => {
            let [case, by, reverse] = args.bind(name, ["case_sensitive", "by", "reverse"], 0)?;
            let keep_case = case.is_some_and(|case| case.truth());
            let at = match by.as_ref().map_or(Some("key"), Value::as_str) {
                Some("key") => 0,
                Some("value") => 1,
                _ => return Err(Error::new("dictsort sorts by `key` or `value`")),
            };
            let Value::Dict(dict) = value else { return Err(Error::new("dictsort takes a dictionary")) };
            let pairs = dict.pairs().map(|(key, value)| [key.clone(), value.clone()]);
            let mut keyed: Vec<_> = pairs.map(|pair| (folded(pair[at].clone(), keep_case), pair)).collect();
            sort_by(&mut keyed, |(key, _)| key, reverse.is_some_and(|reverse| reverse.truth()))?;
            Value::list(keyed.into_iter().map(|(_, pair)| Value::tuple(pair.to_vec())).collect())
        }
        "unique" => {
            let [case, path] = args.bind(name, ["case_sensitive", "attribute"], 0)?;
            let keep_case = case.is_some_and(|case| case.truth());
            #[expect(clippy::mutable_key_type, reason = "a key compares objects by identity")]
            let mut seen = HashSet::new();
            let mut kept = Vec::new();
            for item in value.items()? {
                let key = folded(by_path(interpreter, &item, path.as_ref())?, keep_case);
                if seen.insert(Key::new(key)?) {
                    kept.push(Ok(item));
                }
            }
            Object::generator(kept)
        }
        "min" | "max" => {
            let [case, path] = args.bind(name, ["case_sensitive", "attribute"], 0)?;
            let keep_case = case.is_some_and(|case| case.truth());
            let mut best: Option<(Value, Value)> = None;
            for item in value.items()? {
                let key = folded(by_path(interpreter, &item, path.as_ref())?, keep_case);
                let better = match &best {
                    None => true,
                    Some((known, _)) => {
                        key.compare(known)? == Some(if name == "min" { Ordering::Less } else { Ordering::Greater })
                    }
                };
                if better {
                    best = Some((key, item));
                }
            }
            best.map_or_else(|| Value::undefined("the list is empty"), |(_, item)| item)
        }
        "sum" => {
            let [path, start] = args.bind(name, ["attribute", "start"], 0)?;
            let mut total = start.unwrap_or(Value::Int(0));
            if total.as_str().is_some() {
                return Err(Error::new("sum does not take texts"));
            }
            for item in value.items()? {
                let item = by_path(interpreter, &item, path.as_ref())?;
                total = operators::binary(&total, Binary::Add, &item)?;
            }
            total
        }
        "groupby" => {
            let [path, default, case] = args.bind(name, ["attribute", "default", "case_sensitive"], 1)?;
            let keep_case = case.is_some_and(|case| case.truth());
            let path = path.unwrap_or(Value::None);
            let mut keyed = Vec::new();
            for item in value.items()? {
                let key = field(interpreter, &item, &path, default.as_ref())?;
                keyed.push((folded(key.clone(), keep_case), key, item));
            }
            sort_by(&mut keyed, |(key, ..)| key, false)?;
            let mut groups: Vec<(Value, Value, Vec<Value>)> = Vec::new();
            for (folded, key, item) in keyed {
                match groups.last_mut() {
                    Some((last, _, items)) if last.equals(&folded) => items.push(item),
                    _ => groups.push((folded, key, vec![item])),
                }
            }
            let group = |(_, key, items)| Value::object(Object::Group(Rc::new(vec![key, Value::list(items)])));
            Value::list(groups.into_iter().map(group).collect())
        }
        "batch" => {
            let [count, fill] = args.bind(name, ["linecount", "fill_with"], 1)?;
            let count = size(count)?;
            let mut rows: Vec<Vec<Value>> = Vec::new();
            for item in value.items()? {
                match rows.last_mut() {
                    Some(row) if row.len() < count => row.push(item),
                    _ => rows.push(vec![item]),
                }
            }
            if let (Some(row), Some(fill)) = (rows.last_mut(), fill.filter(|fill| !matches!(fill, Value::None)))
                && row.len() < count
            {
                row.resize(count, fill);
            }
            Object::generator(rows.into_iter().map(|row| Ok(Value::list(row))))
        }
        "slice" => {
            let [count, fill] = args.bind(name, ["slices", "fill_with"], 1)?;
            let count = size(count)?;
            let items = value.items()?;
            let (each, extra) = (items.len() / count, items.len() % count);
            let mut rest = items.into_iter();
            let mut rows = Vec::new();
            for at in 0..count {
                let mut row: Vec<_> = rest.by_ref().take(each + usize::from(at < extra)).collect();
                if at >= extra {
                    row.extend(fill.clone().filter(|fill| !matches!(fill, Value::None)));
                }
                rows.push(Ok(Value::list(row)));
            }
            Object::generator(rows)
        }
        _ => return text_filters::filter(name, value, args),
    })
}

fn first_of_generator(object: &Object) -> Result<Option<Value>, Error> {
    let Object::Generator(generator) = object else { return Ok(None) };
    let mut generator = generator.borrow_mut();
    match generator.items.pop_front() {
        Some(item) => Ok(Some(item)),
        None => generator.error.take().map_or(Ok(None), Err),
    }
}

fn reversed(value: &Value) -> Result<Vec<Value>, Error> {
    let generator = |object: &Object| matches!(object, Object::Generator(_));
    if matches!(value, Value::Object(object) if generator(object)) {
        return Err(Error::new("a generator cannot be reversed"));
    }
    let mut items = value.items()?;
    items.reverse();
    Ok(items)
}

fn size(value: Option<Value>) -> Result<usize, Error> {
    let count = value.and_then(|value| value.as_int()).and_then(|count| usize::try_from(count).ok());
    count.filter(|count| (1..1 << 20).contains(count)).ok_or_else(|| Error::new("a number of items must be positive"))
}

/// Key of a case-insensitive comparison.
fn folded(value: Value, keep_case: bool) -> Value {
    match value.as_str() {
        Some(text) if !keep_case => Value::text(text.to_lowercase()),
        _ => value,
    }
}

fn by_path(interpreter: &mut Interpreter<'_>, item: &Value, path: Option<&Value>) -> Result<Value, Error> {
    match path.filter(|path| !matches!(path, Value::None)) {
        Some(path) => field(interpreter, item, path, None),
        None => Ok(item.clone()),
    }
}

/// Attribute of an item by its path, such as `function.name`.
fn field(
    interpreter: &mut Interpreter<'_>,
    item: &Value,
    path: &Value,
    default: Option<&Value>,
) -> Result<Value, Error> {
    let parts: Vec<Value> = match path.as_str() {
        Some(path) => {
            let part = |part: &str| match part.bytes().all(|c| c.is_ascii_digit()) {
                true => part.parse().map_or_else(|_| Value::text(part), Value::Int),
                false => Value::text(part),
            };
            path.split('.').map(part).collect()
        }
        None => vec![path.clone()],
    };
    let mut found = item.clone();
    for part in parts {
        found = attribute::item(&found, &part, interpreter)?;
        if let Some(default) = default.filter(|default| found.is_undefined() && !matches!(default, Value::None)) {
            found = default.clone();
        }
    }
    Ok(found)
}

fn map(interpreter: &mut Interpreter<'_>, value: &Value, mut args: Args) -> Result<Value, Error> {
    if !value.truth() {
        return Ok(Object::generator([]));
    }
    let by_attribute = args.positional.is_empty() && args.named.iter().any(|(name, _)| **name == *"attribute");
    if by_attribute {
        let (path, default) = (args.take("attribute"), args.take("default"));
        if let Some((name, _)) = args.named.first() {
            return Ok(Object::generator([Err(Error::new(format!("`map` takes no argument `{name}`")))]));
        }
        let path = path.unwrap_or(Value::None);
        return each(value, |item| field(interpreter, &item, &path, default.as_ref()));
    }
    if args.positional.is_empty() {
        return Ok(Object::generator([Err(Error::new("`map` needs the name of a filter"))]));
    }
    let name = args.positional.remove(0);
    let name = name.as_str().filter(|name| is_filter(name)).map(String::from);
    let Some(name) = name else {
        return Ok(Object::generator([Err(Error::new("the filter of `map` is unknown"))]));
    };
    each(value, |item| interpreter.deeper(|this| filter(this, &name, &item, args.clone())))
}

/// Generator of the results of a function, up to its first error.
fn each(value: &Value, mut function: impl FnMut(Value) -> Result<Value, Error>) -> Result<Value, Error> {
    let (items, error) = match value.partial_items() {
        Ok(found) => found,
        Err(error) => (Vec::new(), Some(error)),
    };
    let mut found = Vec::new();
    for item in items {
        let result = function(item);
        let failed = result.is_err();
        found.push(result);
        if failed {
            break;
        }
    }
    found.extend(error.map(Err));
    Ok(Object::generator(found))
}

fn select(interpreter: &mut Interpreter<'_>, name: &str, value: &Value, mut args: Args) -> Result<Value, Error> {
    if !value.truth() {
        return Ok(Object::generator([]));
    }
    let failed = |what: &str| Ok(Object::generator([Err(Error::new(what))]));
    let path = match name.ends_with("attr") {
        true if args.positional.is_empty() => return failed("the name of an attribute is missing"),
        true => Some(args.positional.remove(0)),
        false => None,
    };
    let test = if args.positional.is_empty() { None } else { Some(args.positional.remove(0)) };
    if test.as_ref().is_some_and(|test| !test.as_str().is_some_and(is_test)) {
        return failed("the test of a selection is unknown");
    }
    let wanted = name.starts_with("select");
    let mut kept = Vec::new();
    let (items, error) = match value.partial_items() {
        Ok(found) => found,
        Err(error) => (Vec::new(), Some(error)),
    };
    let mut error = error;
    for item in items {
        let tested = match &path {
            Some(path) => field(interpreter, &item, path, None),
            None => Ok(item.clone()),
        };
        let answer = tested.and_then(|tested| match test.as_ref().and_then(Value::as_str) {
            Some(test) => checks::test(test, &tested, args.clone()),
            None => Ok(tested.truth()),
        });
        match answer {
            Ok(answer) if answer == wanted => kept.push(Ok(item)),
            Ok(_) => {}
            Err(failure) => {
                error = Some(failure);
                break;
            }
        }
    }
    kept.extend(error.map(Err));
    Ok(Object::generator(kept))
}
