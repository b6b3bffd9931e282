//! A minijinja environment that renders Hugging Face chat templates as transformers does with Jinja2.

use minijinja::{Environment, Error, ErrorKind, Value, syntax::SyntaxConfig, value::Kwargs};
use serde::Serialize;
use std::io;

/// The environment with one template in it.
pub fn environment(name: &'static str, text: &str) -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_function("raise_exception", |text: String| -> Result<String, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, text))
    });
    environment.add_function("strftime_now", strftime_now);
    environment.add_filter("tojson", tojson);
    // Marks of what is supervised: found without them, so they are only kept from being an error.
    let text = text.replace("{% generation %}", "").replace("{% endgeneration %}", "");
    environment.add_template_owned(name, text)?;
    Ok(environment)
}

/// What a template said, in one line.
pub fn sentence(error: &Error) -> String {
    let text = error.detail().map_or_else(|| error.to_string(), String::from);
    text.lines().next().unwrap_or_default().to_owned()
}

/// Templates write the date of the day. A store must not depend on the day it was prepared, so the day is fixed.
fn strftime_now(format: String) -> String {
    format.replace("%d", "26").replace("%b", "Jul").replace("%B", "July").replace("%m", "07").replace("%Y", "2024")
}

/// As transformers calls `json.dumps`: no escapes of non-ASCII or HTML, a blank after each comma and colon.
fn tojson(value: Value, kwargs: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = kwargs.get("indent")?;
    kwargs.assert_all_used()?;
    let mut bytes = Vec::new();
    let written = match indent {
        Some(n) => {
            let blanks = vec![b' '; n];
            let formatter = serde_json::ser::PrettyFormatter::with_indent(&blanks);
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut bytes, formatter))
        }
        None => value.serialize(&mut serde_json::Serializer::with_formatter(&mut bytes, Blanks)),
    };
    written.map_err(|e| Error::new(ErrorKind::InvalidOperation, e.to_string()))?;
    let text = String::from_utf8(bytes).map_err(|e| Error::new(ErrorKind::InvalidOperation, e.to_string()))?;
    Ok(Value::from_safe_string(text))
}

/// Python's default separators.
struct Blanks;

impl serde_json::ser::Formatter for Blanks {
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        out.write_all(b": ")
    }
}
