//! Filters of texts and numbers.

use super::{
    Error,
    args::Args,
    letters, percent,
    strings::{lines, padded},
    text::{self, is_space},
    types::{Dict, Key, Value},
    value::sort_by,
};
use std::{cmp::Ordering, rc::Rc};

/// Value of a filter that takes a text or a number.
///
/// # Errors
/// An unknown filter, wrong arguments, or the error of the filter.
pub fn filter(name: &str, value: &Value, args: Args) -> Result<Value, Error> {
    let plain = |text: String| Ok(Value::text(text));
    match name {
        "trim" => {
            let [chars] = args.bind(name, ["chars"], 0)?;
            let chars = chars.filter(|chars| !matches!(chars, Value::None)).map(|chars| text_of(&chars)).transpose()?;
            return plain(text::strip(&text::string(value)?, chars.as_deref(), true, true).into());
        }
        "center" => {
            let [width] = args.bind(name, ["width"], 0)?;
            return plain(padded(&text::string(value)?, int_or(width, 80)?, ' ', name)?);
        }
        "replace" => {
            let [old, new, count] = args.bind(name, ["old", "new", "count"], 2)?;
            let count = match count {
                None | Some(Value::None) => -1,
                count => int_or(count, -1)?,
            };
            let part = |value: Option<Value>| text::string(&value.unwrap_or(Value::None));
            let count = usize::try_from(count).unwrap_or(usize::MAX);
            return plain(text::string(value)?.replacen(&part(old)?, &part(new)?, count));
        }
        "truncate" => return truncate(value, args),
        "indent" => return indent(value, args),
        "wordwrap" => return Err(Error::new("the filter `wordwrap` is not supported")),
        "format" => {
            if !args.positional.is_empty() && !args.named.is_empty() {
                return Err(Error::new("format takes values by position or by name, not both"));
            }
            let values = match args.named.is_empty() {
                true => Value::tuple(args.positional),
                false => Value::Dict(Rc::new(Dict::from_texts(args.named))),
            };
            return plain(percent::format(&text::string(value)?, &values)?);
        }
        "round" => return round(value, args),
        "int" => {
            let [default, base] = args.bind(name, ["default", "base"], 0)?;
            let base = int_or(base, 10)?;
            return Ok(to_int(value, base)?.unwrap_or_else(|| default.unwrap_or(Value::Int(0))));
        }
        "float" => {
            let [default] = args.bind(name, ["default"], 0)?;
            let found = match value {
                Value::Undefined(what) => return Err(Error::new(&**what)),
                _ => value.as_float().or_else(|| parsed_float(value.as_str()?)),
            };
            return Ok(found.map_or_else(|| default.unwrap_or(Value::Float(0.0)), Value::Float));
        }
        "filesizeformat" => {
            let [binary] = args.bind(name, ["binary"], 0)?;
            let size = value.as_float().or_else(|| parsed_float(value.as_str()?));
            let size = size.ok_or_else(|| Error::new("filesizeformat takes a number"))?;
            return plain(file_size(size, binary.is_some_and(|binary| binary.truth())));
        }
        "urlencode" => {
            args.none(name)?;
            return plain(urlencoded(value)?);
        }
        "xmlattr" => {
            let [space] = args.bind(name, ["autospace"], 0)?;
            return plain(attributes(value, space.is_none_or(|space| space.truth()))?);
        }
        _ => args.none(name)?,
    }
    Ok(match name {
        "abs" => match (value, value.as_int()) {
            (_, Some(value)) => Value::Int(value.checked_abs().ok_or_else(|| Error::new("a number is out of range"))?),
            (Value::Float(value), _) => Value::Float(value.abs()),
            _ => return Err(Error::new(format!("abs does not take a value of type {}", value.kind()))),
        },
        "string" => match value {
            Value::Markup(_) => value.clone(),
            _ => Value::text(text::string(value)?),
        },
        "upper" => Value::text(text::string(value)?.to_uppercase()),
        "lower" => Value::text(text::string(value)?.to_lowercase()),
        "capitalize" => Value::text(letters::capitalized(&text::string(value)?)),
        "title" => Value::text(title(&text::string(value)?)),
        "wordcount" => {
            let text = text::string(value)?;
            let words = text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty());
            Value::Int(words.count() as i128)
        }
        "e" | "escape" => match value {
            Value::Markup(_) => value.clone(),
            _ => Value::Markup(text::escaped(&text::string(value)?).into()),
        },
        "forceescape" => Value::Markup(text::escaped(&text::string(value)?).into()),
        "safe" => Value::Markup(text::string(value)?.into()),
        "striptags" => Value::text(without_tags(&text::string(value)?)?),
        "pprint" => {
            let shown = text::repr(&sorted(value)?)?;
            if shown.chars().count() > 80 {
                return Err(Error::new("the filter `pprint` is supported for short values only"));
            }
            Value::text(shown)
        }
        _ => return Err(Error::new(format!("the filter `{name}` is not supported"))),
    })
}

/// Value with the keys of its dictionaries in order, as `pprint` writes it.
fn sorted(value: &Value) -> Result<Value, Error> {
    Ok(match value {
        Value::Dict(dict) => {
            let mut pairs: Vec<_> = dict.pairs().collect();
            sort_by(&mut pairs, |(key, _)| key, false)?;
            let mut made = Dict::default();
            for (key, value) in pairs {
                made.insert(Key::new(key.clone())?, sorted(value)?);
            }
            Value::Dict(Rc::new(made))
        }
        Value::List(items) => Value::list(items.iter().map(sorted).collect::<Result<_, _>>()?),
        Value::Tuple(items) => Value::tuple(items.iter().map(sorted).collect::<Result<_, _>>()?),
        _ => value.clone(),
    })
}

fn text_of(value: &Value) -> Result<String, Error> {
    let wrong = || Error::new(format!("an argument must be text, found a value of type {}", value.kind()));
    value.as_str().map(String::from).ok_or_else(wrong)
}

fn int_or(value: Option<Value>, default: i128) -> Result<i128, Error> {
    let Some(value) = value else { return Ok(default) };
    let wrong = || Error::new(format!("an argument must be an integer, found a value of type {}", value.kind()));
    value.as_int().ok_or_else(wrong)
}

fn truncate(value: &Value, args: Args) -> Result<Value, Error> {
    let [length, kill, end, leeway] = args.bind("truncate", ["length", "killwords", "end", "leeway"], 0)?;
    let end = end.map_or(Ok("...".into()), |end| text_of(&end))?;
    let (length, end_length) = (int_or(length, 255)?, end.chars().count() as i128);
    let leeway = int_or(leeway.filter(|leeway| !matches!(leeway, Value::None)), 5)?;
    if length < end_length || leeway < 0 {
        return Err(Error::new("truncate takes a length of at least the end's, and a positive leeway"));
    }
    if value.len()? as i128 <= length + leeway {
        return Ok(value.clone());
    }
    let text = text_of(value)?;
    let kept: String = text.chars().take(usize::try_from(length - end_length).unwrap_or(0)).collect();
    let kept = match kill.is_some_and(|kill| kill.truth()) {
        true => kept,
        false => kept.rsplit_once(' ').map_or(kept.clone(), |(before, _)| before.to_owned()),
    };
    Ok(Value::text(kept + &end))
}

fn indent(value: &Value, args: Args) -> Result<Value, Error> {
    let [width, first, blank] = args.bind("indent", ["width", "first", "blank"], 0)?;
    let indent = match width {
        Some(Value::Str(text)) => text.to_string(),
        width => " ".repeat(usize::try_from(int_or(width, 4)?.clamp(0, 1 << 16)).unwrap_or(0)),
    };
    let flag = |flag: Option<Value>| flag.is_some_and(|flag| flag.truth());
    let (first, blank) = (flag(first), flag(blank));
    let lines = lines(&(text_of(value)? + "\n"), false);
    let mut out = if first { indent.clone() } else { String::new() };
    for (at, line) in lines.iter().enumerate() {
        if at > 0 {
            out.push('\n');
            if blank || !line.is_empty() {
                out.push_str(&indent);
            }
        }
        out.push_str(line);
    }
    Ok(Value::text(out))
}

/// Title case of the filter, which differs from `str.title`.
fn title(text: &str) -> String {
    let mut out = String::new();
    let mut begins = true;
    let mut word = String::new();
    let flush = |word: &mut String, out: &mut String| {
        let mut chars = word.chars();
        if let Some(c) = chars.next() {
            out.extend(c.to_uppercase());
            out.push_str(&chars.as_str().to_lowercase());
        }
        word.clear();
    };
    for c in text.chars() {
        let separates = is_space(c) || "-({[<".contains(c);
        if separates != begins {
            flush(&mut word, &mut out);
            begins = separates;
        }
        word.push(c);
    }
    flush(&mut word, &mut out);
    out
}

fn parsed_float(text: &str) -> Option<f64> {
    let text = text.trim_matches(is_space);
    let digits = text.trim_start_matches(['+', '-']);
    let named = ["inf", "infinity", "nan"].iter().any(|name| digits.eq_ignore_ascii_case(name));
    // Python allows `_` between digits, and no other names than these.
    let plain = digits.starts_with(|c: char| c.is_ascii_digit() || c == '.') && text.len() - digits.len() <= 1;
    let spaced = text.contains("__") || text.starts_with('_') || text.ends_with('_');
    if !(named || plain) || spaced { None } else { text.replace('_', "").parse().ok() }
}

/// `int(value)`, or `int(float(value))`; `None` if it is no number.
fn to_int(value: &Value, base: i128) -> Result<Option<Value>, Error> {
    if let Value::Undefined(what) = value {
        return Err(Error::new(&**what));
    }
    if let Some(value) = value.as_int() {
        return Ok(Some(Value::Int(value)));
    }
    let float = match value {
        Value::Float(value) => Some(*value),
        _ => {
            let Some(text) = value.as_str() else { return Ok(None) };
            if let Some(found) = parsed_int(text, base) {
                return found.map(Value::Int).map(Some);
            }
            parsed_float(text)
        }
    };
    match float.filter(|float| float.is_finite()) {
        Some(float) => percent::truncated(float).map(|value| Some(Value::Int(value))),
        None => Ok(None),
    }
}

/// `int(text, base)`; `None` if it is no integer.
fn parsed_int(text: &str, base: i128) -> Option<Result<i128, Error>> {
    let text = text.trim_matches(is_space);
    let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
    let lower = digits.to_ascii_lowercase();
    let prefixed = [("0x", 16), ("0o", 8), ("0b", 2)].into_iter().find(|(prefix, _)| lower.starts_with(prefix));
    let (digits, base) = match (prefixed, base) {
        (Some((_, radix)), 0) => (digits[2..].strip_prefix('_').unwrap_or(&digits[2..]), radix),
        (Some((_, radix)), base) if base == i128::from(radix) => {
            (digits[2..].strip_prefix('_').unwrap_or(&digits[2..]), radix)
        }
        (None, 0) if digits.len() > 1 && digits.starts_with('0') && digits.contains(|c| c != '0' && c != '_') => {
            return None;
        }
        (_, 0) => (digits, 10),
        (_, base) => (digits, u32::try_from(base).ok().filter(|base| (2..=36).contains(base))?),
    };
    let ascii: String =
        digits.chars().map(|c| letters::decimal(c).and_then(|d| char::from_digit(d, 10)).unwrap_or(c)).collect();
    let spaced = ascii.contains("__") || ascii.starts_with('_') || ascii.ends_with('_');
    let ascii = ascii.replace('_', "");
    if spaced || ascii.is_empty() || !ascii.chars().all(|c| c.is_digit(base)) {
        return None;
    }
    let value = i128::from_str_radix(&ascii, base).map_err(|_| Error::new("a number is out of range"));
    Some(value.map(|value| if text.starts_with('-') { -value } else { value }))
}

fn round(value: &Value, args: Args) -> Result<Value, Error> {
    let [precision, method] = args.bind("round", ["precision", "method"], 0)?;
    let precision = int_or(precision, 0)?;
    let method = method.map_or(Ok("common".into()), |method| text_of(&method))?;
    let wrong = || Error::new(format!("round does not take a value of type {}", value.kind()));
    let power = i32::try_from(precision).ok().filter(|power| power.abs() < 300).ok_or_else(wrong)?;
    match (&*method, value) {
        ("common", _) if value.as_int().is_some() => {
            let int = value.as_int().unwrap_or_default();
            if power >= 0 {
                return Ok(Value::Int(int));
            }
            let unit = 10_i128.checked_pow(power.unsigned_abs()).ok_or_else(wrong)?;
            let (whole, rest) = (int.div_euclid(unit), int.rem_euclid(unit));
            let up = rest * 2 > unit || rest * 2 == unit && whole % 2 != 0;
            Ok(Value::Int((whole + i128::from(up)) * unit))
        }
        ("common", Value::Float(float)) if power < 0 && float.abs() < 1e30 => {
            let unit = 10_i128.checked_pow(power.unsigned_abs()).ok_or_else(wrong)?;
            let int = percent::truncated(float.abs())?;
            let (whole, rest) = (int / unit, int % unit);
            let half =
                (rest * 2).cmp(&unit).then(if float.fract() == 0.0 { Ordering::Equal } else { Ordering::Greater });
            let up = half.is_gt() || half.is_eq() && whole % 2 != 0;
            #[expect(clippy::cast_precision_loss, reason = "Python rounds here as well")]
            let rounded = ((whole + i128::from(up)) * unit) as f64;
            Ok(Value::Float(rounded.copysign(*float)))
        }
        ("common", Value::Float(float)) if power >= 0 => {
            if !float.is_finite() {
                return Ok(value.clone());
            }
            // Rust rounds the exact value of the number, ties to even, as Python does.
            let text = format!("{float:.*}", power.unsigned_abs() as usize);
            text.parse().map(Value::Float).map_err(|_| wrong())
        }
        ("ceil" | "floor", _) => {
            let float = value.as_float().ok_or_else(wrong)?;
            let scaled = match value.as_int() {
                Some(_) if power == 0 => float,
                _ => float * 10_f64.powi(power),
            };
            let whole = if method == "ceil" { scaled.ceil() } else { scaled.floor() };
            Ok(Value::Float((whole + 0.0) / 10_f64.powi(power)))
        }
        _ => Err(wrong()),
    }
}

fn file_size(size: f64, binary: bool) -> String {
    let base = if binary { 1024.0 } else { 1000.0 };
    if size == 1.0 {
        return "1 Byte".into();
    }
    if size < base {
        return format!("{} Bytes", size.trunc() + 0.0);
    }
    let mut unit = base;
    let mut letters = "kMGTPEZY".chars().peekable();
    while let Some(letter) = letters.next() {
        unit *= base;
        if size < unit || letters.peek().is_none() {
            let letter = if binary { letter.to_ascii_uppercase() } else { letter };
            let rest = if binary { "iB" } else { "B" };
            return format!("{:.1} {letter}{rest}", base * size / unit);
        }
    }
    String::new()
}

fn quoted(text: &str, safe: &str) -> String {
    let mut out = String::new();
    for byte in text.bytes() {
        let c = char::from(byte);
        if c.is_ascii_alphanumeric() || "_.-~".contains(c) || safe.contains(c) {
            out.push(c);
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}

fn urlencoded(value: &Value) -> Result<String, Error> {
    let scalar = value.as_str().is_some() || !value.is_iterable();
    if scalar {
        return Ok(quoted(&text::string(value)?, "/"));
    }
    let pairs = match value {
        Value::Dict(dict) => dict.pairs().map(|(key, value)| vec![key.clone(), value.clone()]).collect(),
        _ => value.items()?.iter().map(Value::items).collect::<Result<Vec<_>, _>>()?,
    };
    let mut parts = Vec::new();
    for pair in pairs {
        let [key, value] = pair.as_slice() else { return Err(Error::new("urlencode takes pairs")) };
        let part = |value: &Value| Ok::<_, Error>(quoted(&text::string(value)?, "").replace("%20", "+"));
        parts.push(format!("{}={}", part(key)?, part(value)?));
    }
    Ok(parts.join("&"))
}

fn attributes(value: &Value, space: bool) -> Result<String, Error> {
    let Value::Dict(dict) = value else { return Err(Error::new("xmlattr takes a dictionary")) };
    let mut parts = Vec::new();
    for (key, value) in dict.pairs() {
        if matches!(value, Value::None | Value::Undefined(_)) {
            continue;
        }
        let key = text_of(key)?;
        if key.contains(|c: char| is_space(c) || "/>=".contains(c)) {
            return Err(Error::new(format!("{key:?} is no name of an attribute")));
        }
        parts.push(format!("{}=\"{}\"", text::escaped(&key), text::escaped(&text::string(value)?)));
    }
    let text = parts.join(" ");
    Ok(if space && !text.is_empty() { format!(" {text}") } else { text })
}

fn without_tags(text: &str) -> Result<String, Error> {
    let mut text = text.to_owned();
    for (begin, end) in [("<!--", "-->"), ("<", ">")] {
        while let Some(at) = text.find(begin) {
            let Some(len) = text[at..].find(end) else { break };
            text.replace_range(at..at + len + end.len(), "");
        }
    }
    if text.contains('&') {
        return Err(Error::new("striptags of a text with entities is not supported"));
    }
    Ok(text.split(is_space).filter(|word| !word.is_empty()).collect::<Vec<_>>().join(" "))
}
