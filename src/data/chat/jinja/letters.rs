//! Letter case and kinds of characters, as Python's `str` has them.

use super::text::{is_printable, is_space};

/// Code points of the digit 0 in other scripts than ASCII's.
const ZEROS: [u32; 36] = [
    0x660, 0x6f0, 0x7c0, 0x966, 0x9e6, 0xa66, 0xae6, 0xb66, 0xbe6, 0xc66, 0xce6, 0xd66, 0xde6, 0xe50, 0xed0, 0xf20,
    0x1040, 0x1090, 0x17e0, 0x1810, 0x1946, 0x19d0, 0x1a80, 0x1a90, 0x1b50, 0x1bb0, 0x1c40, 0x1c50, 0xa620, 0xa8d0,
    0xa900, 0xa9d0, 0xa9f0, 0xaa50, 0xabf0, 0xff10,
];

/// Value of a decimal digit of any script.
pub fn decimal(c: char) -> Option<u32> {
    c.to_digit(10).or_else(|| {
        let code = u32::from(c);
        ZEROS.iter().find(|zero| (**zero..**zero + 10).contains(&code)).map(|zero| code - zero)
    })
}

/// Titlecase of a character.
fn title_char(c: char, out: &mut String) {
    match c {
        'ǆ' | 'ǅ' | 'Ǆ' => out.push('ǅ'),
        'ǉ' | 'ǈ' | 'Ǉ' => out.push('ǈ'),
        'ǌ' | 'ǋ' | 'Ǌ' => out.push('ǋ'),
        'ǳ' | 'ǲ' | 'Ǳ' => out.push('ǲ'),
        c => {
            let mut upper = c.to_uppercase();
            out.extend(upper.next());
            let rest: String = upper.collect();
            // A letter that becomes several, such as ß, is followed by small ones.
            out.push_str(&if rest.chars().all(char::is_alphabetic) { rest.to_lowercase() } else { rest });
        }
    }
}

fn is_cased(c: char) -> bool {
    c.is_uppercase() || c.is_lowercase() || is_title(c)
}

fn is_title(c: char) -> bool {
    matches!(c, 'ǅ' | 'ǈ' | 'ǋ' | 'ǲ')
}

/// `str.title`.
pub fn title(text: &str) -> String {
    let lower = text.to_lowercase();
    // Lower case may have another length, so the original decides only where words begin.
    let mut out = String::new();
    let mut inside = false;
    for c in lower.chars() {
        if inside {
            out.push(c)
        } else {
            title_char(c, &mut out)
        }
        inside = is_cased(c);
    }
    out
}

/// `str.capitalize`.
pub fn capitalized(text: &str) -> String {
    let mut out = String::new();
    let mut chars = text.chars();
    if let Some(first) = chars.next() {
        title_char(first, &mut out);
        // The whole text decides the form of a final sigma.
        let lower = text.to_lowercase();
        let skipped = first.to_lowercase().count();
        out.extend(lower.chars().skip(skipped));
    }
    out
}

/// `str.swapcase`.
pub fn swapped(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        if c.is_uppercase() {
            out.extend(c.to_lowercase());
        } else if c.is_lowercase() {
            out.extend(c.to_uppercase());
        } else {
            out.push(c);
        }
    }
    out
}

/// `str.casefold`.
pub fn folded(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        if c.is_ascii() || c == 'ı' {
            out.push(c.to_ascii_lowercase());
        } else {
            out.extend(c.to_uppercase().flat_map(char::to_lowercase));
        }
    }
    out
}

/// Answer of a method such as `isdigit`; `None` for another name.
pub fn is(method: &str, text: &str) -> Option<bool> {
    let all = |test: fn(char) -> bool| !text.is_empty() && text.chars().all(test);
    let cased = |lower: bool| {
        let wrong = if lower { char::is_uppercase } else { char::is_lowercase };
        text.chars().any(is_cased) && !text.chars().any(|c| wrong(c) || is_title(c))
    };
    Some(match method {
        "isalpha" => all(is_letter),
        "isalnum" => all(|c| is_letter(c) || is_numeric(c)),
        "isdecimal" => all(|c| decimal(c).is_some()),
        "isdigit" => all(is_digit),
        "isnumeric" => all(is_numeric),
        "isspace" => all(is_space),
        "isprintable" => text.chars().all(is_printable),
        "islower" => cased(true),
        "isupper" => cased(false),
        "istitle" => is_titled(text),
        "isidentifier" => {
            let first = |c: char| c == '_' || is_letter(c);
            text.chars().next().is_some_and(first) && text.chars().all(|c| first(c) || decimal(c).is_some())
        }
        _ => return None,
    })
}

fn is_letter(c: char) -> bool {
    // Letter numbers and combining vowel signs are alphabetic for Rust, and no letters for Python.
    c.is_alphabetic() && !is_numeric(c) && !matches!(u32::from(c), 0x345 | 0x24b6..=0x24e9 | 0x1f130..=0x1f189)
}

fn is_digit(c: char) -> bool {
    let code = u32::from(c);
    decimal(c).is_some()
        || matches!(code, 0xb2 | 0xb3 | 0xb9 | 0x2070 | 0x2074..=0x2079 | 0x2080..=0x2089)
        || matches!(code, 0x2460..=0x2468 | 0x2474..=0x247c | 0x2488..=0x2490 | 0x24ea | 0x24f5..=0x24fd | 0x24ff)
        || matches!(code, 0x2776..=0x277e | 0x2780..=0x2788 | 0x278a..=0x2792)
}

fn is_numeric(c: char) -> bool {
    c.is_numeric() || "〇一二三四五六七八九十百千万億兆零壹贰叁肆伍陆柒捌玖拾".contains(c)
}

fn is_titled(text: &str) -> bool {
    let (mut inside, mut found) = (false, false);
    for c in text.chars() {
        if c.is_uppercase() || is_title(c) {
            if inside {
                return false;
            }
            (inside, found) = (true, true);
        } else if c.is_lowercase() {
            if !inside {
                return false;
            }
            found = true;
        } else {
            inside = false;
        }
    }
    found
}
