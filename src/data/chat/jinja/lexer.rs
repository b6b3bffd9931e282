//! Lexer of Jinja2, with `trim_blocks` and `lstrip_blocks` as transformers sets them.

use super::{Error, text::is_space};
use std::sync::Arc;

/// A token and its line.
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    pub kind: Kind,
    pub line: usize,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Kind {
    Data(Arc<str>),
    BlockBegin,
    BlockEnd,
    VariableBegin,
    VariableEnd,
    Name(Arc<str>),
    Text(String),
    Int(i128),
    Float(f64),
    Op(&'static str),
    End,
}

/// Operators, the longer ones first.
const OPERATORS: [&str; 26] = [
    "//", "**", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[", "]", "(", ")", "{", "}", ">", "<", "=", ".",
    ":", "|", ",", ";",
];

/// Cuts a template into tokens; the last one is [`Kind::End`].
///
/// # Errors
/// The line and the text that begins no token, or a tag without an end.
pub fn tokens(source: &str) -> Result<Vec<Token>, Error> {
    // Jinja2 drops one line end at the end of a template.
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let source = source.strip_suffix('\n').unwrap_or(&source);
    let mut lexer = Lexer { source, at: 0, line: 1, line_starts: true, found: Vec::new() };
    while lexer.at < source.len() {
        lexer.root()?;
    }
    lexer.push(Kind::End);
    Ok(lexer.found)
}

struct Lexer<'a> {
    source: &'a str,
    at: usize,
    line: usize,
    /// True if the last match ended with a line end, or nothing was read yet.
    line_starts: bool,
    found: Vec<Token>,
}

impl<'a> Lexer<'a> {
    fn rest(&self) -> &'a str {
        &self.source[self.at..]
    }

    fn push(&mut self, kind: Kind) {
        self.found.push(Token { kind, line: self.line });
    }

    fn error(&self, what: impl std::fmt::Display) -> Error {
        Error::new(format!("line {}: {what}", self.line))
    }

    fn advance(&mut self, bytes: usize) {
        let passed = &self.rest()[..bytes];
        self.line += passed.matches('\n').count();
        self.line_starts = passed.ends_with('\n');
        self.at += bytes;
    }

    /// Text up to the next tag, and the tag.
    fn root(&mut self) -> Result<(), Error> {
        let rest = self.rest();
        let Some(begin) = ["{%", "{{", "{#"].iter().filter_map(|tag| rest.find(tag)).min() else {
            self.push(Kind::Data(rest.into()));
            self.advance(rest.len());
            return Ok(());
        };
        let tag = &rest[begin..begin + 2];
        let sign = sign(&rest[begin + 2..]);
        let text = self.stripped(&rest[..begin], sign, tag != "{{");
        if !text.is_empty() {
            self.push(Kind::Data(text.into()));
        }
        let raw = (tag == "{%").then(|| raw_begin(&rest[begin..])).flatten();
        self.advance(begin + raw.unwrap_or(2 + sign.len()));
        match (tag, raw) {
            (_, Some(_)) => self.raw(),
            ("{#", _) => self.comment(),
            ("{{", _) => self.inside(Kind::VariableBegin),
            _ => self.inside(Kind::BlockBegin),
        }
    }

    /// Text before a tag without the white space that the tag removes.
    fn stripped(&self, text: &'a str, sign: &str, is_block: bool) -> &'a str {
        match sign {
            "-" => text.trim_end_matches(is_space),
            "" if is_block => {
                let line = text.rfind('\n').map_or(0, |at| at + 1);
                let blank = text[line..].chars().all(is_space) && (line > 0 || self.line_starts);
                if blank { &text[..line] } else { text }
            }
            _ => text,
        }
    }

    fn comment(&mut self) -> Result<(), Error> {
        let rest = self.rest();
        let end = rest.find("#}").ok_or_else(|| self.error("a comment has no end `#}`"))?;
        let sign = rest[..end].chars().next_back().filter(|c| "+-".contains(*c));
        self.advance(end + 2 + after_end(&rest[end + 2..], sign));
        Ok(())
    }

    fn raw(&mut self) -> Result<(), Error> {
        let rest = self.rest();
        for (begin, _) in rest.match_indices("{%") {
            let sign = sign(&rest[begin + 2..]);
            let inner = rest[begin + 2 + sign.len()..].trim_start_matches(is_space);
            let Some(inner) = inner.strip_prefix("endraw") else { continue };
            let inner = inner.trim_start_matches(is_space);
            let close = inner.chars().next().filter(|c| "+-".contains(*c));
            let Some(after) = inner[close.map_or(0, char::len_utf8)..].strip_prefix("%}") else { continue };
            let text = self.stripped(&rest[..begin], sign, true);
            if !text.is_empty() {
                self.push(Kind::Data(text.into()));
            }
            self.advance(rest.len() - after.len() + after_end(after, close));
            return Ok(());
        }
        Err(self.error("a raw block has no end"))
    }

    /// Tokens inside a tag, with its begin and end.
    fn inside(&mut self, begin: Kind) -> Result<(), Error> {
        let is_block = begin == Kind::BlockBegin;
        self.push(begin);
        let mut open = Vec::new();
        loop {
            let rest = self.rest();
            if open.is_empty()
                && let Some(len) = tag_end(rest, is_block)
            {
                self.push(if is_block { Kind::BlockEnd } else { Kind::VariableEnd });
                self.advance(len);
                return Ok(());
            }
            let Some(c) = rest.chars().next() else { return Err(self.error("a tag has no end")) };
            if is_space(c) {
                self.advance(c.len_utf8());
            } else if c.is_ascii_digit() {
                self.number()?;
            } else if is_name(c) {
                let name = &rest[..rest.find(|c| !is_name(c)).unwrap_or(rest.len())];
                self.push(Kind::Name(name.into()));
                self.advance(name.len());
            } else if c == '"' || c == '\'' {
                self.text(c)?;
            } else {
                self.operator(&mut open)?;
            }
        }
    }

    fn operator(&mut self, open: &mut Vec<&'static str>) -> Result<(), Error> {
        let Some(op) = OPERATORS.iter().find(|op| self.rest().starts_with(**op)) else {
            let shown: String = self.rest().chars().take(1).collect();
            return Err(self.error(format!("unexpected {shown:?}")));
        };
        match *op {
            "{" => open.push("}"),
            "(" => open.push(")"),
            "[" => open.push("]"),
            "}" | ")" | "]" if open.pop() != Some(op) => return Err(self.error(format!("unexpected `{op}`"))),
            _ => {}
        }
        self.push(Kind::Op(op));
        self.advance(op.len());
        Ok(())
    }

    fn number(&mut self) -> Result<(), Error> {
        let rest = self.rest();
        let after_dot = self.source[..self.at].ends_with('.');
        if !after_dot && let Some(len) = float_len(rest) {
            let value = rest[..len].replace('_', "").parse();
            self.push(Kind::Float(value.map_err(|_| self.error("a number cannot be read"))?));
            self.advance(len);
            return Ok(());
        }
        let radix = match rest.as_bytes() {
            [b'0', b'b' | b'B', ..] => 2,
            [b'0', b'o' | b'O', ..] => 8,
            [b'0', b'x' | b'X', ..] => 16,
            _ => 10,
        };
        let prefix = if radix == 10 { 0 } else { 2 };
        let digits = rest[prefix..].find(|c: char| c != '_' && !c.is_digit(radix)).unwrap_or(rest.len() - prefix);
        let mut text = &rest[..prefix + digits];
        if radix == 10 && text.starts_with('0') {
            text = &text[..text.find(|c| c != '0' && c != '_').unwrap_or(text.len())];
        }
        let text = text.trim_end_matches('_');
        let value = i128::from_str_radix(&text[prefix..].replace('_', ""), radix);
        self.push(Kind::Int(value.map_err(|_| self.error(format!("the number {text} is out of range")))?));
        self.advance(text.len());
        Ok(())
    }

    fn text(&mut self, quote: char) -> Result<(), Error> {
        let rest = self.rest();
        let mut escaped = false;
        let end = rest.char_indices().skip(1).find(|&(_, c)| {
            let ends = c == quote && !escaped;
            escaped = c == '\\' && !escaped;
            ends
        });
        let (end, _) = end.ok_or_else(|| self.error("a string has no end"))?;
        let value = unescaped(&rest[1..end]).map_err(|what| self.error(what))?;
        self.push(Kind::Text(value));
        self.advance(end + 1);
        Ok(())
    }
}

/// White-space control after the begin of a tag.
fn sign(text: &str) -> &str {
    if text.starts_with(['-', '+']) { &text[..1] } else { "" }
}

/// Bytes that are removed after a tag.
fn after_end(text: &str, sign: Option<char>) -> usize {
    match sign {
        Some('-') => text.len() - text.trim_start_matches(is_space).len(),
        Some(_) => 0,
        None => usize::from(text.starts_with('\n')),
    }
}

/// Bytes of the end of a tag at the start of `text`.
fn tag_end(text: &str, is_block: bool) -> Option<usize> {
    let close = if is_block { "%}" } else { "}}" };
    let sign = text.chars().next().filter(|c| *c == '-' || (*c == '+' && is_block));
    let len = sign.map_or(0, char::len_utf8);
    let after = text[len..].strip_prefix(close)?;
    // Only blocks take the line end after them.
    let removed = if is_block || sign.is_some() { after_end(after, sign) } else { 0 };
    Some(len + 2 + removed)
}

/// Bytes of a `{% raw %}` tag.
fn raw_begin(text: &str) -> Option<usize> {
    let inner = text[2..].strip_prefix(['-', '+']).unwrap_or(&text[2..]);
    let inner = inner.trim_start_matches(is_space).strip_prefix("raw")?.trim_start_matches(is_space);
    let after = match inner.strip_prefix("-%}") {
        Some(after) => after.trim_start_matches(is_space),
        None => inner.strip_prefix("%}")?,
    };
    Some(text.len() - after.len())
}

fn is_name(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Bytes of `digits[_digits]` at the start of `text`.
fn digits(text: &str) -> usize {
    let len = text.find(|c: char| c != '_' && !c.is_ascii_digit()).unwrap_or(text.len());
    if text.starts_with('_') { 0 } else { text[..len].trim_end_matches('_').len() }
}

fn float_len(text: &str) -> Option<usize> {
    let mut len = digits(text);
    let fraction = text[len..].strip_prefix('.').map_or(0, digits);
    if fraction > 0 {
        len += 1 + fraction;
    }
    let exponent = text[len..].strip_prefix(['e', 'E']).and_then(|rest| {
        let signed = rest.strip_prefix(['+', '-']).unwrap_or(rest);
        let len = digits(signed);
        (len > 0).then(|| 1 + rest.len() - signed.len() + len)
    });
    (fraction > 0 || exponent.is_some()).then_some(len + exponent.unwrap_or(0))
}

/// A string with Python's escapes resolved.
fn unescaped(text: &str) -> Result<String, String> {
    let mut out = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('\\') {
        out.push_str(before);
        let Some(c) = after.chars().next() else { return Err("a string ends with a backslash".into()) };
        rest = &after[c.len_utf8()..];
        let width = match c {
            'x' => 2,
            'u' => 4,
            'U' => 8,
            _ => 0,
        };
        match c {
            '\n' => {}
            '\\' | '\'' | '"' => out.push(c),
            'a' => out.push('\u{7}'),
            'b' => out.push('\u{8}'),
            'f' => out.push('\u{c}'),
            'n' => out.push('\n'),
            'r' => out.push('\r'),
            't' => out.push('\t'),
            'v' => out.push('\u{b}'),
            'x' | 'u' | 'U' => {
                let value = rest.get(..width).and_then(|digits| u32::from_str_radix(digits, 16).ok());
                out.push(value.and_then(char::from_u32).ok_or("an escape of a string is no character")?);
                rest = &rest[width..];
            }
            '0'..='7' => {
                let len = after.chars().take(3).take_while(|c| c.is_digit(8)).count();
                let value = u32::from_str_radix(&after[..len], 8).ok().and_then(char::from_u32);
                out.push(value.ok_or("an escape of a string is no character")?);
                rest = &after[len..];
            }
            'N' => return Err("a string has a character by its name (`\\N`); write the character itself".into()),
            // Python reads other characters as escapes of themselves, and loses the backslash's meaning.
            c if !c.is_ascii() => {
                let code = u32::from(c);
                out.push('\\');
                out.push_str(&if code <= 0xff {
                    format!("x{code:02x}")
                } else if code <= 0xffff {
                    format!("u{code:04x}")
                } else {
                    format!("U{code:08x}")
                });
            }
            c => out.extend(['\\', c]),
        }
    }
    out.push_str(rest);
    Ok(out)
}
