//! Python's conversions of values to text.

use super::{
    Error,
    types::{Object, Value, View},
};

/// `str(value)`; an undefined value is empty, as in Jinja2.
///
/// # Errors
/// A value whose text holds its address in memory, such as a function.
pub fn string(value: &Value) -> Result<String, Error> {
    match value {
        Value::Undefined(_) => Ok(String::new()),
        Value::Str(text) | Value::Markup(text) => Ok(text.to_string()),
        _ => repr(value),
    }
}

/// `repr(value)`.
///
/// # Errors
/// A value whose text holds its address in memory, such as a function.
pub fn repr(value: &Value) -> Result<String, Error> {
    Ok(match value {
        Value::Undefined(_) => "Undefined".into(),
        Value::None => "None".into(),
        Value::Bool(value) => if *value { "True" } else { "False" }.into(),
        Value::Int(value) => value.to_string(),
        Value::Float(value) => float(*value),
        Value::Str(text) => quoted(text),
        Value::Markup(text) => format!("Markup({})", quoted(text)),
        Value::List(items) => format!("[{}]", list(items)?),
        Value::Tuple(items) if items.len() == 1 => format!("({},)", list(items)?),
        Value::Tuple(items) => format!("({})", list(items)?),
        Value::Dict(dict) => map(dict.pairs())?,
        Value::Range(range) if range.step == 1 => format!("range({}, {})", range.start, range.stop),
        Value::Range(range) => format!("range({}, {}, {})", range.start, range.stop, range.step),
        Value::Object(object) => match &**object {
            Object::Namespace(fields) => format!("<Namespace {}>", map(fields.borrow().pairs())?),
            Object::View(view, dict) => {
                let name = match view {
                    View::Keys => "dict_keys",
                    View::Values => "dict_values",
                    View::Items => "dict_items",
                };
                format!("{name}([{}])", list(&view.items(dict))?)
            }
            Object::Group(items) => format!("({})", list(items)?),
            Object::Macro { definition, .. } => format!("<Macro {}>", quoted(&definition.name)),
            other => return Err(Error::new(format!("a value of type {} has no text", other.kind()))),
        },
    })
}

fn list(items: &[Value]) -> Result<String, Error> {
    Ok(items.iter().map(repr).collect::<Result<Vec<_>, _>>()?.join(", "))
}

fn map<'a>(pairs: impl Iterator<Item = (&'a Value, &'a Value)>) -> Result<String, Error> {
    let pair = |(key, value)| Ok(format!("{}: {}", repr(key)?, repr(value)?));
    Ok(format!("{{{}}}", pairs.map(pair).collect::<Result<Vec<_>, Error>>()?.join(", ")))
}

/// `repr(str)`.
pub fn quoted(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut out = String::from(quote);
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote || c == '\\' => out.extend(['\\', c]),
            c if is_printable(c) => out.push(c),
            c => out.push_str(&code(c)),
        }
    }
    out.push(quote);
    out
}

/// `ascii(value)`.
///
/// # Errors
/// As of [`repr`].
pub fn ascii(value: &Value) -> Result<String, Error> {
    let mut out = String::new();
    for c in repr(value)?.chars() {
        if c.is_ascii() { out.push(c) } else { out.push_str(&code(c)) }
    }
    Ok(out)
}

fn code(c: char) -> String {
    let code = u32::from(c);
    if code <= 0xff {
        format!("\\x{code:02x}")
    } else if code <= 0xffff {
        format!("\\u{code:04x}")
    } else {
        format!("\\U{code:08x}")
    }
}

/// `str.isprintable` of a character.
pub fn is_printable(c: char) -> bool {
    // Rust escapes the same characters, apart from these; a character after another is not escaped for combining.
    matches!(c, '\\' | '\'' | '"') || format!("a{c}").escape_debug().nth(1) == Some(c)
}

/// `str.isspace`: Unicode white space and four separators.
pub fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// `str.strip` and its one-sided forms: white space, or any of `chars`.
pub fn strip<'a>(text: &'a str, chars: Option<&str>, left: bool, right: bool) -> &'a str {
    let out = |c: char| match chars {
        Some(chars) => chars.contains(c),
        None => is_space(c),
    };
    let text = if left { text.trim_start_matches(out) } else { text };
    if right { text.trim_end_matches(out) } else { text }
}

/// Text with the characters escaped that have a meaning in HTML.
pub fn escaped(text: &str) -> String {
    let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    text.replace('\'', "&#39;").replace('"', "&#34;")
}

/// `repr(float)`: shortest digits that round-trip, with an exponent below 1e-4 and from 1e16 on.
pub fn float(value: f64) -> String {
    if value == 0.0 || (1e-4..1e16).contains(&value.abs()) {
        return format!("{value:?}");
    }
    exponent(&format!("{value:e}"))
}

/// Rust's form of an exponent in Python's: a sign and at least two digits.
pub fn exponent(text: &str) -> String {
    match text.split_once('e') {
        Some((digits, exponent)) => {
            let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |rest| ('-', rest));
            format!("{digits}e{sign}{exponent:0>2}")
        }
        None => text.to_lowercase(),
    }
}
