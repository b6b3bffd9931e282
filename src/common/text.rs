//! Numbers for people, in one format in the whole program: `1,234,567`, `21.3 %`, `3 jobs`. Words for a shell.

/// A whole number with a comma between thousands: 1234567 as `1,234,567`.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Text without control characters, which a terminal would obey: each is written as an escape, `\\u{1b}`.
pub fn printable(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        match c.is_control() && !matches!(c, '\n' | '\t') {
            true => shown.extend(c.escape_default()),
            false => shown.push(c),
        }
    }
    shown
}

/// A share of 1 in percent, with one decimal: 0.213 as `21.3 %`.
pub fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

/// A count with its noun: `1 job`, `2 jobs`, `3 batches`.
pub fn counted(count: u64, noun: &str) -> String {
    let ending = match count {
        1 => "",
        _ if ["tch", "s", "x"].iter().any(|end| noun.ends_with(end)) => "es",
        _ => "s",
    };
    format!("{} {noun}{ending}", grouped(count))
}

/// One word of a shell's command line, quoted if it has to be. Control characters are written as `$'\033'`, which bash, zsh and
/// POSIX 2024 read.
pub fn shell_word(text: &str) -> String {
    let plain = |c: char| c.is_alphanumeric() || "-_./:=@%+,".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        return text.to_owned();
    }
    if !text.chars().any(char::is_control) {
        return format!("'{}'", text.replace('\'', r"'\''"));
    }
    let mut quoted = String::from("$'");
    for c in text.chars() {
        match c {
            '\'' | '\\' => quoted.extend(['\\', c]),
            c if c.is_control() => {
                let mut bytes = [0; 4];
                c.encode_utf8(&mut bytes).bytes().for_each(|byte| quoted += &format!("\\{byte:03o}"));
            }
            c => quoted.push(c),
        }
    }
    quoted + "'"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_quoted_for_a_shell_if_they_must_be() {
        assert_eq!(shell_word("runs/a-1_b.c"), "runs/a-1_b.c");
        assert_eq!(shell_word(""), "''");
        assert_eq!(shell_word("a b$"), "'a b$'");
        assert_eq!(shell_word("it's"), r"'it'\''s'");
        assert_eq!(shell_word("\u{1b}it's"), r"$'\033it\'s'");
    }

    #[test]
    fn numbers_have_one_format() {
        assert_eq!([0, 999, 1000, 1_234_567].map(grouped), ["0", "999", "1,000", "1,234,567"]);
        assert_eq!([0.0, 0.2134, 1.0].map(percent), ["0.0 %", "21.3 %", "100.0 %"]);
        assert_eq!(counted(1, "job"), "1 job");
        assert_eq!(
            [counted(0, "job"), counted(2, "batch"), counted(3, "epoch"), counted(1000, "start")],
            ["0 jobs", "2 batches", "3 epochs", "1,000 starts"]
        );
    }
}
