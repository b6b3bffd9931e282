//! Filter `tojson` as in transformers: `json.dumps` with `ensure_ascii=False`.

use super::{Error, args::Args, text, types::Value, value::sort_by};

/// JSON text of a value.
///
/// # Errors
/// A value that JSON does not have, or options of a wrong type.
pub fn dumps(value: &Value, args: Args) -> Result<Value, Error> {
    let [ascii, indent, separators, sort] =
        args.bind("tojson", ["ensure_ascii", "indent", "separators", "sort_keys"], 0)?;
    let indent = match indent {
        None | Some(Value::None) => None,
        Some(Value::Str(indent)) => Some(indent.to_string()),
        Some(value) => {
            let width = value.as_int().ok_or_else(|| Error::new("the indent of tojson is no number"))?;
            Some(" ".repeat(usize::try_from(width.clamp(0, 1000)).unwrap_or_default()))
        }
    };
    let (item, key) = match separators {
        None | Some(Value::None) => (if indent.is_some() { "," } else { ", " }.into(), ": ".into()),
        Some(value) => match value.items()?.as_slice() {
            [Value::Str(item), Value::Str(key)] => (item.to_string(), key.to_string()),
            _ => return Err(Error::new("tojson takes two separators")),
        },
    };
    let flag = |value: Option<Value>| value.is_some_and(|value| value.truth());
    let dumps = Dumps { indent, item, key, ascii: flag(ascii), sorted: flag(sort) };
    let mut out = String::new();
    dumps.write(value, 0, &mut out)?;
    Ok(Value::text(out))
}

/// Options of `json.dumps`.
struct Dumps {
    indent: Option<String>,
    item: String,
    key: String,
    ascii: bool,
    sorted: bool,
}

impl Dumps {
    fn write(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        match value {
            Value::Dict(dict) => {
                let mut pairs: Vec<_> = dict.pairs().collect();
                if self.sorted {
                    sort_by(&mut pairs, |(key, _)| key, false)?;
                }
                self.write_all(['{', '}'], &pairs, depth, out, |(key, item), out| {
                    let key = match key {
                        Value::Str(key) | Value::Markup(key) => key.to_string(),
                        Value::None | Value::Bool(_) | Value::Int(_) | Value::Float(_) => plain(key),
                        _ => return Err(Error::new(format!("a key of type {} is not JSON", key.kind()))),
                    };
                    self.write_text(&key, out);
                    out.push_str(&self.key);
                    self.write(item, depth + 1, out)
                })?;
            }
            Value::Str(text) | Value::Markup(text) => self.write_text(text, out),
            Value::None | Value::Bool(_) | Value::Int(_) | Value::Float(_) => out.push_str(&plain(value)),
            _ => match value.as_items() {
                Some(items) => {
                    self.write_all(['[', ']'], items, depth, out, |item, out| self.write(item, depth + 1, out))?;
                }
                None => return Err(Error::new(format!("a value of type {} is not JSON", value.kind()))),
            },
        }
        Ok(())
    }

    fn write_all<T>(
        &self,
        [open, close]: [char; 2],
        items: &[T],
        depth: usize,
        out: &mut String,
        write: impl Fn(&T, &mut String) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let line = |depth: usize, out: &mut String| {
            if let Some(indent) = &self.indent {
                out.push('\n');
                out.push_str(&indent.repeat(depth));
            }
        };
        out.push(open);
        for (at, item) in items.iter().enumerate() {
            if at > 0 {
                out.push_str(&self.item);
            }
            line(depth + 1, out);
            write(item, out)?;
        }
        if !items.is_empty() {
            line(depth, out);
        }
        out.push(close);
        Ok(())
    }

    fn write_text(&self, text: &str, out: &mut String) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' | '\\' => out.extend(['\\', c]),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if c < ' ' || (self.ascii && c > '~') => {
                    out.extend(c.encode_utf16(&mut [0; 2]).iter().map(|unit| format!("\\u{unit:04x}")));
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

/// JSON of a value without parts, other than text.
fn plain(value: &Value) -> String {
    match value {
        Value::Bool(value) => value.to_string(),
        Value::Int(value) => value.to_string(),
        Value::Float(value) if value.is_nan() => "NaN".into(),
        Value::Float(value) if value.is_infinite() => if *value > 0.0 { "Infinity" } else { "-Infinity" }.into(),
        Value::Float(value) => text::float(*value),
        _ => "null".into(),
    }
}
