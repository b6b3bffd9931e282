//! A minijinja environment that renders Hugging Face chat templates as transformers does with Jinja2.

use super::python;
use minijinja::{Environment, Error, ErrorKind, State, Value, syntax::SyntaxConfig};
use minijinja_contrib::pycompat::unknown_method_callback;

/// Creates an environment without templates.
///
/// # Errors
/// An error of minijinja's syntax configuration.
pub fn environment() -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_unknown_method_callback(method);
    environment.set_formatter(|out, _, value| Ok(out.write_str(&python::text(value)?)?));
    environment.add_function("raise_exception", |text: String| -> Result<String, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, text))
    });
    environment.add_function("strftime_now", |format: String| strftime(&format));
    environment.add_filter("tojson", python::json);
    environment.add_filter("string", |value: Value| python::text(&value));
    environment.add_filter("trim", |text: String, chars: Option<String>| python::strip(&text, chars, true, true));
    Ok(environment)
}

/// Adds a template to the environment.
///
/// # Errors
/// A syntax error of the template.
pub fn add(environment: &mut Environment<'static>, name: &'static str, text: &str) -> Result<(), Error> {
    // Python reads each line end as one character.
    let text = text.replace("\r\n", "\n").replace('\r', "\n");
    environment.add_template_owned(name, without_generation(&text))
}

/// First line of a template's error.
pub fn sentence(error: &Error) -> String {
    let text = error.detail().map_or_else(|| error.to_string(), String::from);
    text.lines().next().unwrap_or_default().to_owned()
}

/// Replaces `{% generation %}` blocks, which mark supervised text, by `{% if true %}`: supervised ranges are found without
/// them. White-space control characters are kept.
fn without_generation(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some((before, tag)) = rest.split_once("{%") {
        let (tag, after) = tag.split_once("%}").unwrap_or((tag, ""));
        let word = tag.trim_matches(|c: char| c == '-' || c == '+' || c.is_whitespace());
        let tag = match word {
            "generation" => tag.replace(word, "if true"),
            "endgeneration" => tag.replace(word, "endif"),
            _ => {
                out.push_str(&rest[..before.len() + 2]);
                rest = &rest[before.len() + 2..];
                continue;
            }
        };
        out.extend([before, "{%", &tag, "%}"]);
        rest = after;
    }
    out + rest
}

/// Implements Python's methods of strings, lists and dicts.
fn method(state: &mut State<'_, '_>, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let ends = match name {
        "strip" => Some((true, true)),
        "lstrip" => Some((true, false)),
        "rstrip" => Some((false, true)),
        _ => None,
    };
    if let (Some((left, right)), Some(text)) = (ends, value.as_str()) {
        let (chars,): (Option<String>,) = minijinja::value::from_args(args)?;
        return Ok(python::strip(text, chars, left, right).into());
    }
    unknown_method_callback(state, value, name, args)
}

/// `strftime_now` with a fixed time, so that a store does not depend on the day of its preparation: Friday 26 July 2024,
/// 00:00, the default date of Llama 3's template.
fn strftime(format: &str) -> String {
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        match chars.next() {
            Some('-') => out.push_str(field(chars.next()).trim_start_matches('0')),
            letter => out.push_str(&field(letter)),
        }
    }
    out
}

fn field(letter: Option<char>) -> String {
    let text = match letter {
        Some('Y') => "2024",
        Some('y') => "24",
        Some('m') => "07",
        Some('d' | 'e') => "26",
        Some('B') => "July",
        Some('b' | 'h') => "Jul",
        Some('A') => "Friday",
        Some('a') => "Fri",
        Some('j') => "208",
        Some('F') => "2024-07-26",
        Some('H' | 'M' | 'S') => "00",
        Some('I') => "12",
        Some('p') => "AM",
        Some('T') => "00:00:00",
        Some('Z' | 'z') => "",
        Some('%') => "%",
        Some(other) => return format!("%{other}"),
        None => "%",
    };
    text.into()
}

#[cfg(test)]
mod tests {
    use super::strftime;

    #[test]
    fn the_day_of_a_template_is_always_the_same() {
        assert_eq!(strftime("%d %b %Y, %A %-m/%e at 100%% %q %"), "26 Jul 2024, Friday 7/26 at 100% %q %");
    }
}
