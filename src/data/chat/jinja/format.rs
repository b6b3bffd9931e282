//! Python's `str.format`.

use super::{
    Error,
    args::Args,
    attribute,
    percent::{float_text, general, integer},
    state::Interpreter,
    text,
    types::Value,
};
use std::sync::Arc;

/// `format.format(...)`.
///
/// # Errors
/// A format that Python does not know, or values of another number or type.
pub fn format(interpreter: &mut Interpreter<'_>, format: &str, args: &Args) -> Result<String, Error> {
    Formatter { interpreter, args, next: Some(0) }.format(format, 2)
}

struct Formatter<'a, 'b> {
    interpreter: &'a mut Interpreter<'b>,
    args: &'a Args,
    /// Index of the next field without a number; `None` after a field with one.
    next: Option<usize>,
}

impl Formatter<'_, '_> {
    fn format(&mut self, format: &str, depth: usize) -> Result<String, Error> {
        let mut out = String::new();
        let mut rest = format;
        while let Some(at) = rest.find(['{', '}']) {
            out.push_str(&rest[..at]);
            let brace = &rest[at..=at];
            rest = &rest[at + 1..];
            if let Some(after) = rest.strip_prefix(brace) {
                out.push_str(brace);
                rest = after;
                continue;
            }
            let mut open = 1;
            let end = rest.char_indices().find(|(_, c)| {
                open += i32::from(*c == '{') - i32::from(*c == '}');
                open == 0
            });
            let Some((end, _)) = end.filter(|_| brace == "{" && depth > 0) else {
                return Err(Error::new("a format has a brace without its pair"));
            };
            let field = self.field(&rest[..end], depth)?;
            out.push_str(&field);
            rest = &rest[end + 1..];
        }
        out.push_str(rest);
        Ok(out)
    }

    fn field(&mut self, field: &str, depth: usize) -> Result<String, Error> {
        let bracket = field.find('[').map_or(0, |at| field[at..].find(']').map_or(0, |end| at + end));
        let (name, spec) = match field[bracket..].find(':') {
            Some(at) => (&field[..bracket + at], &field[bracket + at + 1..]),
            None => (field, ""),
        };
        let (name, conversion) = match name[bracket.min(name.len())..].find('!') {
            Some(at) => (&name[..bracket + at], Some(&name[bracket + at + 1..])),
            None => (name, None),
        };
        let value = self.value(name)?;
        let value = match conversion {
            None => value,
            Some("s") => Value::text(text::string(&value)?),
            Some("r") => Value::text(text::repr(&value)?),
            Some("a") => Value::text(text::ascii(&value)?),
            Some(other) => return Err(Error::new(format!("the conversion `!{other}` is unknown"))),
        };
        let spec = self.format(spec, depth - 1)?;
        formatted(&value, &spec)
    }

    fn value(&mut self, name: &str) -> Result<Value, Error> {
        let end = name.find(['.', '[']).unwrap_or(name.len());
        let (first, mut rest) = name.split_at(end);
        let mut value = match (first.parse::<usize>(), first.is_empty()) {
            (_, true) => {
                let next = self.next.ok_or_else(|| Error::new("a format numbers some of its fields only"))?;
                self.next = Some(next + 1);
                self.args.positional.get(next).cloned()
            }
            (Ok(index), _) => {
                if self.next.is_some_and(|next| next > 0) {
                    return Err(Error::new("a format numbers some of its fields only"));
                }
                self.next = None;
                self.args.positional.get(index).cloned()
            }
            (Err(_), _) => self.args.named.iter().find(|(known, _)| **known == *first).map(|(_, value)| value.clone()),
        }
        .ok_or_else(|| Error::new(format!("a format has the field `{first}`, the arguments have not")))?;
        while !rest.is_empty() {
            if let Some(after) = rest.strip_prefix('[') {
                let Some((key, after)) = after.split_once(']') else { return Err(Error::new("a field has no `]`")) };
                let key = key.parse().map_or_else(|_| Value::text(key), Value::Int);
                value = attribute::item(&value, &key, self.interpreter)?;
                rest = after;
            } else {
                let after = rest.strip_prefix('.').ok_or_else(|| Error::new("a field has text after `]`"))?;
                let end = after.find(['.', '[']).unwrap_or(after.len());
                value = attribute::attribute(&value, &Arc::from(&after[..end]), self.interpreter)?;
                rest = &after[end..];
            }
        }
        Ok(value)
    }
}

/// Parts of a format specification.
#[derive(Debug, Default)]
struct Spec {
    fill: Option<char>,
    align: Option<char>,
    sign: Option<char>,
    alternate: bool,
    width: usize,
    group: Option<char>,
    precision: Option<usize>,
    kind: Option<char>,
}

fn parsed(text: &str) -> Option<Spec> {
    let mut spec = Spec::default();
    let chars: Vec<char> = text.chars().collect();
    let is_align = |c: Option<&char>| c.copied().filter(|c| "<>=^".contains(*c));
    let mut at = 0;
    if let Some(align) = is_align(chars.get(1)) {
        (spec.fill, spec.align, at) = (Some(chars[0]), Some(align), 2);
    } else if let Some(align) = is_align(chars.first()) {
        (spec.align, at) = (Some(align), 1);
    }
    let mut take = |allowed: &str| {
        let found = chars.get(at).copied().filter(|c| allowed.contains(*c));
        at += usize::from(found.is_some());
        found
    };
    spec.sign = take("+- ");
    spec.alternate = take("#").is_some();
    if take("0").is_some() {
        spec.fill = spec.fill.or(Some('0'));
        spec.align = spec.align.or(Some('0'));
    }
    let number = |take: &mut dyn FnMut(&str) -> Option<char>| {
        let mut digits = String::new();
        while let Some(digit) = take("0123456789") {
            digits.push(digit);
        }
        if digits.is_empty() { Some(None) } else { digits.parse().ok().filter(|n| *n < 1 << 20).map(Some) }
    };
    spec.width = number(&mut take)?.unwrap_or(0);
    spec.group = take(",_");
    if take(".").is_some() {
        spec.precision = Some(number(&mut take)??);
    }
    spec.kind = take("bcdeEfFgGnosxX%");
    (at == chars.len()).then_some(spec)
}

/// `format(value, spec)`.
fn formatted(value: &Value, spec: &str) -> Result<String, Error> {
    if spec.is_empty() {
        return text::string(value);
    }
    let wrong = || Error::new(format!("the format `{spec}` does not take a value of type {}", value.kind()));
    let parts = parsed(spec).ok_or_else(|| Error::new(format!("the format `{spec}` is unknown")))?;
    if let Some(text) = value.as_str() {
        let plain = parts.sign.is_none() && !parts.alternate && parts.group.is_none() && parts.align != Some('=');
        if !plain || !matches!(parts.kind, None | Some('s')) {
            return Err(wrong());
        }
        let text: String = text.chars().take(parts.precision.unwrap_or(usize::MAX)).collect();
        return Ok(parts.padded("", &text, '<'));
    }
    let (negative, prefix, digits) = match (value.as_int(), parts.kind, value.as_float()) {
        (Some(int), None | Some('b' | 'd' | 'n' | 'o' | 'x' | 'X'), _) => {
            if parts.precision.is_some() {
                return Err(wrong());
            }
            let kind = parts.kind.unwrap_or('d');
            let prefix = if parts.alternate && !"dn".contains(kind) { format!("0{kind}") } else { String::new() };
            (int < 0, prefix, integer(int, kind))
        }
        (Some(int), Some('c'), _) => {
            let c = u32::try_from(int).ok().and_then(char::from_u32).ok_or_else(wrong)?;
            return Ok(parts.padded("", &c.to_string(), '>'));
        }
        (_, Some('%'), Some(float)) => {
            let text = float_text(float * 100.0, 'f', parts.precision.unwrap_or(6), parts.alternate) + "%";
            (float.is_sign_negative(), String::new(), text)
        }
        (_, Some(kind @ ('e' | 'E' | 'f' | 'F' | 'g' | 'G')), Some(float)) => {
            let text = float_text(float, kind, parts.precision.unwrap_or(6), parts.alternate);
            (float.is_sign_negative() && !float.is_nan(), String::new(), text)
        }
        (None, None | Some('n'), Some(float)) => {
            let text = match (parts.kind, parts.precision) {
                (Some(_), precision) => float_text(float, 'g', precision.unwrap_or(6), parts.alternate),
                (None, None) => text::float(float.abs()),
                (None, Some(_)) if !float.is_finite() => text::float(float.abs()),
                (None, Some(precision)) => {
                    let text = general(float.abs(), precision, parts.alternate, 1);
                    if text.contains(['.', 'e']) { text } else { text + ".0" }
                }
            };
            (float.is_sign_negative() && !float.is_nan(), String::new(), text)
        }
        _ => return Err(wrong()),
    };
    let sign = if negative { Some('-') } else { parts.sign.filter(|sign| *sign != '-') };
    let prefix = sign.map(String::from).unwrap_or_default() + &prefix;
    let digits = match parts.group {
        Some(_) if matches!(parts.align, Some('0' | '=')) && parts.fill == Some('0') && parts.width > 0 => {
            return Err(Error::new(format!("the format `{spec}` is not supported")));
        }
        Some(mark) => grouped(&digits, mark, if matches!(parts.kind, Some('b' | 'o' | 'x' | 'X')) { 4 } else { 3 }),
        None => digits,
    };
    Ok(parts.padded(&prefix, &digits, '>'))
}

fn grouped(digits: &str, mark: char, size: usize) -> String {
    let end = digits.find(|c: char| !c.is_ascii_hexdigit()).unwrap_or(digits.len());
    let end = if size == 3 { digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len()) } else { end };
    let mut out = String::new();
    for (at, c) in digits[..end].chars().enumerate() {
        if at > 0 && (end - at) % size == 0 {
            out.push(mark);
        }
        out.push(c);
    }
    out + &digits[end..]
}

impl Spec {
    fn padded(&self, prefix: &str, text: &str, default: char) -> String {
        let fill = self.fill.unwrap_or(' ');
        let count = self.width.saturating_sub(prefix.chars().count() + text.chars().count());
        let pad = |count: usize| fill.to_string().repeat(count);
        // A zero before the width pads numbers after the sign, and texts at the end.
        let align = match self.align {
            Some('0') if default == '>' => '=',
            Some('0') | None => default,
            Some(align) => align,
        };
        match align {
            '<' => format!("{prefix}{text}{}", pad(count)),
            '^' => format!("{}{prefix}{text}{}", pad(count / 2), pad(count - count / 2)),
            '=' => format!("{prefix}{}{text}", pad(count)),
            _ => format!("{}{prefix}{text}", pad(count)),
        }
    }
}
