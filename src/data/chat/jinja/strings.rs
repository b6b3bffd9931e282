//! Methods of Python's `str`.

use super::{
    Error,
    args::Args,
    format, letters,
    state::Interpreter,
    text::{self, is_space},
    types::{Dict, Key, Value},
};
use std::{ops::Range, rc::Rc};

/// Calls a method of a text.
///
/// # Errors
/// Wrong arguments, or the error of the method.
pub fn call(interpreter: &mut Interpreter<'_>, of: &str, name: &str, args: Args) -> Result<Value, Error> {
    let plain = |text: String| Ok(Value::text(text));
    match name {
        "format" => return plain(format::format(interpreter, of, &args)?),
        "format_map" => {
            let [Some(Value::Dict(dict))] = args.bind(name, [""], 1)? else {
                return Err(Error::new("format_map takes a dictionary"));
            };
            let named = dict.pairs().filter_map(|(key, value)| match key {
                Value::Str(key) => Some((key.clone(), value.clone())),
                _ => None,
            });
            return plain(format::format(interpreter, of, &Args { positional: Vec::new(), named: named.collect() })?);
        }
        "split" | "rsplit" => {
            let [separator, limit] = args.bind(name, ["sep", "maxsplit"], 0)?;
            let limit = number(limit, -1)?;
            let limit = usize::try_from(limit).unwrap_or(usize::MAX);
            let parts = match optional_text(separator)? {
                None => split_space(of, limit, name == "rsplit"),
                Some(separator) if separator.is_empty() => return Err(Error::new("the separator of split is empty")),
                Some(separator) if name == "split" => {
                    of.splitn(limit.saturating_add(1), &*separator).map(String::from).collect()
                }
                Some(separator) => {
                    let mut parts: Vec<_> =
                        of.rsplitn(limit.saturating_add(1), &*separator).map(String::from).collect();
                    parts.reverse();
                    parts
                }
            };
            return Ok(texts(parts));
        }
        "splitlines" => {
            let [keep] = args.bind(name, ["keepends"], 0)?;
            return Ok(texts(lines(of, keep.is_some_and(|keep| keep.truth()))));
        }
        "expandtabs" => {
            let [size] = args.bind(name, ["tabsize"], 0)?;
            return plain(expanded(of, usize::try_from(number(size, 8)?.clamp(0, 1 << 20)).unwrap_or(0)));
        }
        "join" => {
            let [items] = args.bind(name, [""], 1)?;
            let items = items.unwrap_or(Value::None).items()?;
            let parts = items.iter().map(|item| {
                let wrong = || Error::new(format!("join takes texts, found a value of type {}", item.kind()));
                item.as_str().ok_or_else(wrong)
            });
            return plain(parts.collect::<Result<Vec<_>, _>>()?.join(of));
        }
        "replace" => {
            let [old, new, count] = args.bind(name, ["", "", ""], 2)?;
            let count = usize::try_from(number(count, -1)?).unwrap_or(usize::MAX);
            return plain(of.replacen(&*needed(old)?, &needed(new)?, count));
        }
        "strip" | "lstrip" | "rstrip" => {
            let [chars] = args.bind(name, [""], 0)?;
            let chars = optional_text(chars)?;
            return plain(text::strip(of, chars.as_deref(), name != "rstrip", name != "lstrip").into());
        }
        "partition" | "rpartition" => {
            let [separator] = args.bind(name, [""], 1)?;
            let separator = needed(separator)?;
            if separator.is_empty() {
                return Err(Error::new(format!("the separator of {name} is empty")));
            }
            let parts = match name {
                "partition" => of.split_once(&*separator).map_or([of, "", ""], |(a, b)| [a, &separator, b]),
                _ => of.rsplit_once(&*separator).map_or(["", "", of], |(a, b)| [a, &separator, b]),
            };
            return Ok(Value::tuple(parts.map(Value::text).to_vec()));
        }
        "removeprefix" | "removesuffix" => {
            let [part] = args.bind(name, [""], 1)?;
            let part = needed(part)?;
            let kept = if name == "removeprefix" { of.strip_prefix(&*part) } else { of.strip_suffix(&*part) };
            return plain(kept.unwrap_or(of).into());
        }
        "center" | "ljust" | "rjust" => {
            let [width, fill] = args.bind(name, ["", ""], 1)?;
            let fill = optional_text(fill)?.unwrap_or_else(|| " ".into());
            let mut chars = fill.chars();
            let (Some(fill), None) = (chars.next(), chars.next()) else {
                return Err(Error::new(format!("{name} fills with one character")));
            };
            return plain(padded(of, number(width, 0)?, fill, name)?);
        }
        "zfill" => {
            let [width] = args.bind(name, [""], 1)?;
            let sign = if of.starts_with(['+', '-']) { &of[..1] } else { "" };
            let width = number(width, 0)? - sign.len() as i128;
            return plain(sign.to_owned() + &padded(&of[sign.len()..], width, '0', "rjust")?);
        }
        "startswith" | "endswith" | "find" | "rfind" | "index" | "rindex" | "count" => return search(of, name, args),
        "translate" => {
            let [Some(Value::Dict(table))] = args.bind(name, [""], 1)? else {
                return Err(Error::new("translate takes a dictionary"));
            };
            return plain(translated(of, &table)?);
        }
        "maketrans" => return table(args),
        _ => {}
    }
    args.none(name)?;
    Ok(match name {
        "upper" => Value::text(of.to_uppercase()),
        "lower" => Value::text(of.to_lowercase()),
        "title" => Value::text(letters::title(of)),
        "capitalize" => Value::text(letters::capitalized(of)),
        "swapcase" => Value::text(letters::swapped(of)),
        "casefold" => Value::text(letters::folded(of)),
        "isascii" => Value::Bool(of.is_ascii()),
        _ => match letters::is(name, of) {
            Some(answer) => Value::Bool(answer),
            None => return Err(Error::new(format!("the method `{name}` of a text is not supported"))),
        },
    })
}

fn texts(parts: Vec<String>) -> Value {
    Value::list(parts.into_iter().map(Value::text).collect())
}

/// Text of an argument that may be missing or none.
fn optional_text(value: Option<Value>) -> Result<Option<String>, Error> {
    match value {
        None | Some(Value::None) => Ok(None),
        value => needed(value).map(Some),
    }
}

fn needed(value: Option<Value>) -> Result<String, Error> {
    let value = value.unwrap_or(Value::None);
    let wrong = || Error::new(format!("an argument must be text, found a value of type {}", value.kind()));
    value.as_str().map(String::from).ok_or_else(wrong)
}

fn number(value: Option<Value>, default: i128) -> Result<i128, Error> {
    let Some(value) = value else { return Ok(default) };
    let wrong = || Error::new(format!("an argument must be an integer, found a value of type {}", value.kind()));
    value.as_int().ok_or_else(wrong)
}

/// Indices from `start` to `end` of a list of this length, as of a slice.
///
/// # Errors
/// A bound that is no integer.
pub fn bounds(start: Option<&Value>, end: Option<&Value>, len: usize) -> Result<Range<usize>, Error> {
    let limit = len as i128;
    let bound = |value: Option<&Value>, default: i128| match value {
        None | Some(Value::None) => Ok(default),
        value => number(value.cloned(), default),
    };
    let index = |value: i128| usize::try_from(if value < 0 { (value + limit).max(0) } else { value }).unwrap_or(len);
    let start = index(bound(start, 0)?);
    Ok(start..index(bound(end, limit)?).min(len))
}

fn search(of: &str, name: &str, args: Args) -> Result<Value, Error> {
    let [part, start, end] = args.bind(name, ["", "", ""], 1)?;
    let part = part.unwrap_or(Value::None);
    let offsets: Vec<usize> = of.char_indices().map(|(at, _)| at).chain([of.len()]).collect();
    let range = bounds(start.as_ref(), end.as_ref(), offsets.len() - 1)?;
    // An empty part is not found behind the end either.
    let within =
        (range.start <= range.end).then(|| (&of[offsets[range.start]..offsets[range.end]], offsets[range.start]));
    if matches!(name, "startswith" | "endswith") {
        let parts = match &part {
            Value::Tuple(parts) => parts.to_vec(),
            _ => vec![part],
        };
        for part in parts {
            let part = needed(Some(part))?;
            let found = |(text, _): (&str, usize)| match name {
                "startswith" => text.starts_with(&part),
                _ => text.ends_with(&part),
            };
            if within.is_some_and(found) {
                return Ok(Value::Bool(true));
            }
        }
        return Ok(Value::Bool(false));
    }
    let part = needed(Some(part))?;
    if name == "count" {
        let count = within.map_or(0, |(text, _)| text.matches(&part).count());
        return Ok(Value::Int(count as i128));
    }
    let found = within.and_then(|(text, offset)| {
        let at = if name.starts_with('r') { text.rfind(&part) } else { text.find(&part) };
        Some(of[..offset + at?].chars().count() as i128)
    });
    match found {
        Some(at) => Ok(Value::Int(at)),
        None if name.ends_with("find") => Ok(Value::Int(-1)),
        None => Err(Error::new(format!("{part:?} is not in the text"))),
    }
}

fn split_space(text: &str, limit: usize, from_right: bool) -> Vec<String> {
    let mut parts = Vec::new();
    let mut rest = text;
    while parts.len() < limit {
        rest = if from_right { rest.trim_end_matches(is_space) } else { rest.trim_start_matches(is_space) };
        let cut = match from_right {
            true => rest.rfind(is_space).map(|at| at + rest[at..].chars().next().map_or(1, char::len_utf8)),
            false => rest.find(is_space),
        };
        let Some(cut) = cut else { break };
        let (before, after) = rest.split_at(cut);
        let (part, next) = if from_right { (after, before) } else { (before, after) };
        parts.push(part.to_owned());
        rest = next;
    }
    let last = if from_right { rest.trim_end_matches(is_space) } else { rest.trim_start_matches(is_space) };
    if !last.is_empty() {
        parts.push(last.to_owned());
    }
    if from_right {
        parts.reverse();
    }
    parts
}

/// `str.splitlines`.
pub fn lines(text: &str, keep: bool) -> Vec<String> {
    let mut out = Vec::new();
    let mut rest = text;
    let ends = ['\n', '\r', '\u{b}', '\u{c}', '\u{1c}', '\u{1d}', '\u{1e}', '\u{85}', '\u{2028}', '\u{2029}'];
    while let Some(at) = rest.find(ends) {
        let len = if rest[at..].starts_with("\r\n") { 2 } else { rest[at..].chars().next().map_or(1, char::len_utf8) };
        out.push(rest[..at + if keep { len } else { 0 }].to_owned());
        rest = &rest[at + len..];
    }
    if !rest.is_empty() {
        out.push(rest.to_owned());
    }
    out
}

fn expanded(text: &str, size: usize) -> String {
    let mut out = String::new();
    let mut column = 0;
    for c in text.chars() {
        if c == '\t' {
            let count = if size == 0 { 0 } else { size - column % size };
            out.push_str(&" ".repeat(count));
            column += count;
        } else {
            out.push(c);
            column = if c == '\n' || c == '\r' { 0 } else { column + 1 };
        }
    }
    out
}

/// `center`, `ljust` and `rjust`.
///
/// # Errors
/// A width that is too large.
pub fn padded(text: &str, width: i128, fill: char, name: &str) -> Result<String, Error> {
    let width = usize::try_from(width.max(0)).ok().filter(|width| *width < 1 << 24);
    let width = width.ok_or_else(|| Error::new(format!("the width of {name} is too large")))?;
    let count = width.saturating_sub(text.chars().count());
    let pad = |count: usize| fill.to_string().repeat(count);
    Ok(match name {
        "ljust" => format!("{text}{}", pad(count)),
        "rjust" => format!("{}{text}", pad(count)),
        _ => {
            let left = count / 2 + (count & width & 1);
            format!("{}{text}{}", pad(left), pad(count - left))
        }
    })
}

fn translated(text: &str, table: &Dict) -> Result<String, Error> {
    let mut out = String::new();
    for c in text.chars() {
        match table.get(&Key::new(Value::Int(u32::from(c).into()))?) {
            None => out.push(c),
            Some(Value::None) => {}
            Some(Value::Str(text)) => out.push_str(text),
            Some(value) => {
                let code = value.as_int().and_then(|code| u32::try_from(code).ok()).and_then(char::from_u32);
                out.push(code.ok_or_else(|| Error::new("a table of translate has a value that is no character"))?);
            }
        }
    }
    Ok(out)
}

fn table(args: Args) -> Result<Value, Error> {
    let wrong = || Error::new("maketrans takes a dictionary, or two texts of one length and a third one");
    let mut dict = Dict::default();
    let code = |c: char| Key::new(Value::Int(u32::from(c).into()));
    match args.bind("maketrans", ["", "", ""], 1)? {
        [Some(Value::Dict(pairs)), None, None] => {
            for (key, value) in pairs.pairs() {
                let mut chars = key.as_str().unwrap_or_default().chars();
                let key = match (key, chars.next(), chars.next()) {
                    (Value::Str(_), Some(c), None) => code(c)?,
                    (Value::Int(_), ..) => Key::new(key.clone())?,
                    _ => return Err(wrong()),
                };
                dict.insert(key, value.clone());
            }
        }
        [from, to @ Some(_), removed] => {
            let (from, to) = (needed(from)?, needed(to)?);
            if from.chars().count() != to.chars().count() {
                return Err(wrong());
            }
            for (from, to) in from.chars().zip(to.chars()) {
                dict.insert(code(from)?, Value::Int(u32::from(to).into()));
            }
            for c in removed.map(|removed| needed(Some(removed))).transpose()?.unwrap_or_default().chars() {
                dict.insert(code(c)?, Value::None);
            }
        }
        _ => return Err(wrong()),
    }
    Ok(Value::Dict(Rc::new(dict)))
}
