//! Python's formats of numbers, and the operator `%` of texts.

use super::{
    Error, text,
    types::{Key, Value},
};

/// `format % values`.
///
/// # Errors
/// A format that Python does not know, or values of another number or type.
pub fn format(format: &str, values: &Value) -> Result<String, Error> {
    let single = [values.clone()];
    let items = match values {
        Value::Tuple(items) => items.as_slice(),
        _ => &single,
    };
    let mut state = Values { all: values, items: items.iter(), by_key: false };
    let mut out = String::new();
    let mut chars = format.chars().peekable();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut value = None;
        if chars.next_if_eq(&'(').is_some() {
            let mut key = String::new();
            let mut open = 1;
            loop {
                match chars.next() {
                    Some(')') if open == 1 => break,
                    Some(c) => {
                        open += i32::from(c == '(') - i32::from(c == ')');
                        key.push(c);
                    }
                    None => return Err(Error::new("a format has no end")),
                }
            }
            value = Some(state.key(&key)?);
        }
        let mut spec = Spec::default();
        while let Some(flag) = chars.next_if(|c| "#0- +".contains(*c)) {
            match flag {
                '#' => spec.alternate = true,
                '0' => spec.zero = true,
                '-' => spec.left = true,
                '+' => spec.sign = Some('+'),
                _ => spec.sign = spec.sign.or(Some(' ')),
            }
        }
        spec.width = state.number(&mut chars, &mut spec.left)?.unwrap_or(0);
        if chars.next_if_eq(&'.').is_some() {
            spec.precision = Some(state.number(&mut chars, &mut false)?.unwrap_or(0));
        }
        while chars.next_if(|c| "hlL".contains(*c)).is_some() {}
        let Some(kind) = chars.next() else { return Err(Error::new("a format is incomplete")) };
        if kind == '%' {
            out.push('%');
            continue;
        }
        let value = match value {
            Some(value) => value,
            None => state.next()?,
        };
        out.push_str(&spec.converted(kind, &value)?);
    }
    state.finish()?;
    Ok(out)
}

/// Values of a format.
struct Values<'a> {
    all: &'a Value,
    items: std::slice::Iter<'a, Value>,
    by_key: bool,
}

impl Values<'_> {
    fn next(&mut self) -> Result<Value, Error> {
        if self.by_key {
            return Ok(self.all.clone());
        }
        self.items.next().cloned().ok_or_else(|| Error::new("a format has more fields than values"))
    }

    fn key(&mut self, key: &str) -> Result<Value, Error> {
        self.by_key = true;
        match self.all {
            Value::Dict(dict) => dict.get(&Key::new(Value::text(key))?).cloned(),
            _ => None,
        }
        .ok_or_else(|| Error::new(format!("a format has the field `{key}`, the values have not")))
    }

    /// Width or precision.
    fn number(
        &mut self,
        chars: &mut std::iter::Peekable<std::str::Chars<'_>>,
        left: &mut bool,
    ) -> Result<Option<usize>, Error> {
        let too_large = || Error::new("the width of a format is too large");
        if chars.next_if_eq(&'*').is_some() {
            let value = self.next()?.as_int().ok_or_else(|| Error::new("the width of a format is no integer"))?;
            *left |= value < 0;
            return usize::try_from(value.unsigned_abs()).map(Some).map_err(|_| too_large());
        }
        let mut digits = String::new();
        while let Some(digit) = chars.next_if(char::is_ascii_digit) {
            digits.push(digit);
        }
        match digits.is_empty() {
            true => Ok(None),
            false => digits.parse().ok().filter(|width| *width < 1 << 20).map(Some).ok_or_else(too_large),
        }
    }

    fn finish(mut self) -> Result<(), Error> {
        // Python takes whatever has items for a mapping.
        let unused = self.items.next().is_some() && !self.by_key;
        let mapping = matches!(self.all, Value::Dict(_) | Value::List(_) | Value::Range(_) | Value::Undefined(_));
        if unused && !mapping { Err(Error::new("a format has fewer fields than values")) } else { Ok(()) }
    }
}

/// Flags, width and precision of a field.
#[derive(Debug, Default)]
struct Spec {
    alternate: bool,
    zero: bool,
    left: bool,
    sign: Option<char>,
    width: usize,
    precision: Option<usize>,
}

impl Spec {
    fn converted(&self, kind: char, value: &Value) -> Result<String, Error> {
        let wrong = || Error::new(format!("the format `%{kind}` does not take a value of type {}", value.kind()));
        let cut = |text: String| match self.precision {
            Some(limit) => text.chars().take(limit).collect(),
            None => text,
        };
        let (sign, digits) = match kind {
            's' => return Ok(self.padded("", &cut(text::string(value)?), false)),
            'r' => return Ok(self.padded("", &cut(text::repr(value)?), false)),
            'a' => return Ok(self.padded("", &cut(text::ascii(value)?), false)),
            'c' => {
                let c = match (value.as_str(), value.as_int()) {
                    (Some(text), _) if text.chars().count() == 1 => text.to_owned(),
                    (_, Some(code)) => {
                        let c = u32::try_from(code).ok().and_then(char::from_u32);
                        c.ok_or_else(wrong)?.to_string()
                    }
                    _ => return Err(wrong()),
                };
                return Ok(self.padded("", &c, false));
            }
            'd' | 'i' | 'u' => {
                let int = match value {
                    Value::Float(value) => truncated(*value)?,
                    _ => value.as_int().ok_or_else(wrong)?,
                };
                (int < 0, integer(int, 'd'))
            }
            'x' | 'X' | 'o' => {
                let int = value.as_int().ok_or_else(wrong)?;
                (int < 0, integer(int, kind))
            }
            'e' | 'E' | 'f' | 'F' | 'g' | 'G' => {
                let float = value.as_float().ok_or_else(wrong)?;
                let text = float_text(float, kind, self.precision.unwrap_or(6), self.alternate);
                (float.is_sign_negative() && !float.is_nan(), text)
            }
            _ => return Err(Error::new(format!("the format `%{kind}` is unknown"))),
        };
        let digits = match (kind, self.precision) {
            ('d' | 'i' | 'u' | 'x' | 'X' | 'o', Some(least)) => format!("{digits:0>least$}"),
            _ => digits,
        };
        let prefix = match kind {
            'x' | 'X' | 'o' if self.alternate => format!("0{kind}"),
            _ => String::new(),
        };
        let sign = if sign { "-".into() } else { self.sign.map(String::from).unwrap_or_default() };
        Ok(self.padded(&(sign + &prefix), &digits, true))
    }

    fn padded(&self, prefix: &str, text: &str, number: bool) -> String {
        let fill = self.width.saturating_sub(prefix.chars().count() + text.chars().count());
        if self.left {
            format!("{prefix}{text}{}", " ".repeat(fill))
        } else if self.zero && number {
            format!("{prefix}{}{text}", "0".repeat(fill))
        } else {
            format!("{}{prefix}{text}", " ".repeat(fill))
        }
    }
}

/// `int(value)`.
///
/// # Errors
/// A number that is not finite, or too large.
pub fn truncated(value: f64) -> Result<i128, Error> {
    if value.abs() < 1e38 {
        #[expect(clippy::cast_possible_truncation, reason = "the range is checked above")]
        return Ok(value as i128);
    }
    Err(Error::new("a number is out of range"))
}

/// Digits of an integer without its sign.
pub fn integer(value: i128, kind: char) -> String {
    let value = value.unsigned_abs();
    match kind {
        'x' => format!("{value:x}"),
        'X' => format!("{value:X}"),
        'o' => format!("{value:o}"),
        'b' => format!("{value:b}"),
        _ => value.to_string(),
    }
}

/// Digits of a number without its sign, in one of the formats `efg`.
pub fn float_text(value: f64, kind: char, precision: usize, alternate: bool) -> String {
    let value = value.abs();
    let text = match kind.to_ascii_lowercase() {
        _ if !value.is_finite() => if value.is_nan() { "nan" } else { "inf" }.to_owned(),
        'e' => text::exponent(&format!("{value:.precision$e}")),
        'f' => format!("{value:.precision$}"),
        _ => general(value, precision, alternate, 0),
    };
    let text = if alternate && precision == 0 && kind.eq_ignore_ascii_case(&'f') { text + "." } else { text };
    if kind.is_ascii_uppercase() { text.to_uppercase() } else { text }
}

/// Format `g`: `precision` digits, with an exponent if it is small or from `precision - reserve` on.
pub fn general(value: f64, precision: usize, alternate: bool, reserve: i32) -> String {
    let precision = precision.max(1);
    let scientific = format!("{value:.*e}", precision - 1);
    let exponent = scientific.split_once('e').and_then(|(_, exponent)| exponent.parse::<i32>().ok()).unwrap_or(0);
    let limit = i32::try_from(precision).unwrap_or(i32::MAX) - reserve;
    let trim = |digits: &str| match digits.contains('.') && !alternate {
        true => digits.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => digits.to_owned(),
    };
    if (-4..limit).contains(&exponent) {
        let decimals = usize::try_from(i32::try_from(precision).unwrap_or(i32::MAX) - 1 - exponent).unwrap_or(0);
        return trim(&format!("{value:.decimals$}"));
    }
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    text::exponent(&format!("{}e{exponent}", trim(digits)))
}
