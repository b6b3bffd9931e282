//! Python's string conversions and `strip`, as far as chat templates use them.

use minijinja::{
    Error, ErrorKind, Value,
    value::{Kwargs, Rest, ValueKind},
};
use serde_json::Value as Json;

/// `str(value)`; an undefined value is empty, as in Jinja2.
///
/// # Errors
/// A value that cannot be iterated or converted.
pub fn text(value: &Value) -> Result<String, Error> {
    match value.kind() {
        ValueKind::Undefined => Ok(String::new()),
        ValueKind::String => Ok(value.as_str().unwrap_or_default().into()),
        _ => repr(value),
    }
}

/// `str.isspace`: Unicode white space and four separators.
pub fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// `str.strip` and its one-sided forms: white space, or any of `chars`.
pub fn strip(text: &str, chars: Option<String>, left: bool, right: bool) -> String {
    let out = |c: char| match &chars {
        Some(chars) => chars.contains(c),
        None => is_space(c),
    };
    let text = if left { text.trim_start_matches(out) } else { text };
    let text = if right { text.trim_end_matches(out) } else { text };
    text.into()
}

/// Filter `tojson` as in transformers: `json.dumps` with `ensure_ascii=False`.
///
/// # Errors
/// An undefined value, positional arguments or unknown options.
pub fn json(value: Value, positional: Rest<Value>, options: Kwargs) -> Result<String, Error> {
    let invalid = |text: String| Error::new(ErrorKind::InvalidOperation, text);
    if value.is_undefined() || !positional.is_empty() {
        return Err(invalid("tojson takes one defined value, and its options by name".into()));
    }
    let indent: Option<usize> = options.get("indent")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    let (ascii, sorted) = (options.get::<Option<bool>>("ensure_ascii")?, options.get::<Option<bool>>("sort_keys")?);
    options.assert_all_used()?;
    let (item, key) = match separators.as_deref() {
        None => (if indent.is_some() { "," } else { ", " }.into(), ": ".into()),
        Some([item, key]) => (item.clone(), key.clone()),
        Some(_) => return Err(invalid("tojson takes two separators".into())),
    };
    let mut tree = serde_json::to_value(&value).map_err(|e| invalid(e.to_string()))?;
    if sorted == Some(true) {
        tree.sort_all_objects();
    }
    let mut out = String::new();
    Dumps { indent, item, key, ascii: ascii == Some(true) }.write(&tree, 0, &mut out);
    Ok(out)
}

/// `repr(value)` of a JSON value.
fn repr(value: &Value) -> Result<String, Error> {
    Ok(match value.kind() {
        ValueKind::None => "None".into(),
        ValueKind::Bool => if value.is_true() { "True" } else { "False" }.into(),
        ValueKind::Number if !value.is_integer() => float(f64::try_from(value.clone())?),
        ValueKind::String => quoted(value.as_str().unwrap_or_default()),
        ValueKind::Seq => {
            let items = value.try_iter()?.map(|item| repr(&item)).collect::<Result<Vec<_>, _>>()?;
            format!("[{}]", items.join(", "))
        }
        ValueKind::Map => {
            let pair = |key: Value| Ok(format!("{}: {}", repr(&key)?, repr(&value.get_item(&key)?)?));
            let items = value.try_iter()?.map(pair).collect::<Result<Vec<_>, Error>>()?;
            format!("{{{}}}", items.join(", "))
        }
        _ => value.to_string(),
    })
}

/// `repr(str)`.
fn quoted(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut out = String::from(quote);
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote || c == '\\' => out.extend(['\\', c]),
            c if c.is_control() || c == '\u{a0}' || c == '\u{ad}' => out.push_str(&format!("\\x{:02x}", u32::from(c))),
            c => out.push(c),
        }
    }
    out.push(quote);
    out
}

/// `repr(float)`: shortest digits that round-trip, with an exponent below 1e-4 and from 1e16 on.
fn float(value: f64) -> String {
    if value == 0.0 || (1e-4..1e16).contains(&value.abs()) {
        return format!("{value:?}");
    }
    let text = format!("{value:e}");
    match text.split_once('e') {
        Some((digits, exponent)) => {
            let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |rest| ('-', rest));
            format!("{digits}e{sign}{exponent:0>2}")
        }
        None => text.to_lowercase(),
    }
}

/// Options of `json.dumps`.
struct Dumps {
    indent: Option<usize>,
    item: String,
    key: String,
    ascii: bool,
}

impl Dumps {
    fn write(&self, value: &Json, depth: usize, out: &mut String) {
        match value {
            Json::Null => out.push_str("null"),
            Json::Bool(flag) => out.push_str(if *flag { "true" } else { "false" }),
            Json::Number(number) => match number.as_f64() {
                Some(value) if number.is_f64() => out.push_str(&float(value)),
                _ => out.push_str(&number.to_string()),
            },
            Json::String(text) => self.write_text(text, out),
            Json::Array(items) => self.write_all(['[', ']'], items, depth, out, |item, out| {
                self.write(item, depth + 1, out);
            }),
            Json::Object(items) => self.write_all(['{', '}'], items, depth, out, |(key, item), out| {
                self.write_text(key, out);
                out.push_str(&self.key);
                self.write(item, depth + 1, out);
            }),
        }
    }

    fn write_all<T>(
        &self,
        [open, close]: [char; 2],
        items: impl IntoIterator<Item = T, IntoIter: ExactSizeIterator>,
        depth: usize,
        out: &mut String,
        write: impl Fn(T, &mut String),
    ) {
        let line = |depth: usize, out: &mut String| {
            if let Some(indent) = self.indent {
                out.push('\n');
                out.push_str(&" ".repeat(indent * depth));
            }
        };
        let items = items.into_iter();
        let empty = items.len() == 0;
        out.push(open);
        for (at, item) in items.enumerate() {
            if at > 0 {
                out.push_str(&self.item);
            }
            line(depth + 1, out);
            write(item, out);
        }
        if !empty {
            line(depth, out);
        }
        out.push(close);
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

#[cfg(test)]
mod tests {
    use minijinja::context;
    use serde_json::json;

    /// Rendering of `template` with the variable `v`.
    fn shown(template: &str, v: serde_json::Value) -> String {
        let mut environment = super::super::jinja::environment().unwrap();
        super::super::jinja::add(&mut environment, "t", template).unwrap();
        let v = minijinja::Value::from(minijinja::value::Serde(v));
        environment.get_template("t").unwrap().render(context! { v }).unwrap_or_else(|e| e.to_string())
    }

    #[test]
    fn values_are_written_as_python_writes_them() {
        let value = json!({"b": [true, null, 1, 1.0, 1e20, 1.5e-7], "a'": "it's\n", "c": "\"'\\", "é": {}});
        let expected = r#"{'b': [True, None, 1, 1.0, 1e+20, 1.5e-07], "a'": "it's\n", 'c': '"\'\\', 'é': {}}"#;
        assert_eq!(shown("{{ v }}", value.clone()), expected);
        assert_eq!(shown("{{ v | string | trim('{') | trim }}{{ undefined }}", value), expected[1..]);
        assert_eq!(
            shown("{{ v.strip() }}|{{ v.lstrip('x\n') }}|{{ v | trim }}", json!("\u{1c}\nx ")),
            "x|\u{1c}\nx |x"
        );
    }

    #[test]
    fn json_is_written_as_json_dumps_writes_it() {
        let value = json!({"b": [1e-5, 7.0], "a": "é\u{7f}\u{1}😀/<"});
        let plain = "{\"b\": [1e-05, 7.0], \"a\": \"é\u{7f}\\u0001😀/<\"}";
        assert_eq!(shown("{{ v | tojson }}", value.clone()), plain);
        let dense = r#"{"a":"\u00e9\u007f\u0001\ud83d\ude00/<","b":[1e-05,7.0]}"#;
        let options = "{{ v | tojson(ensure_ascii=true, sort_keys=true, separators=(',', ':')) }}";
        assert_eq!(shown(options, value), dense);
        assert!(shown("{{ nothing | tojson }}", json!(1)).contains("one defined value"));
    }
}
