//! Finds the metrics that a PromQL expression reads, with a small part of the grammar.

/// Words that are no metric if no bracket follows them.
const WORDS: &[&str] = &["and", "or", "unless", "bool", "offset", "atan2", "inf", "nan"];
/// Words that a list of labels in brackets follows.
const LABELS: &[&str] = &["by", "without", "on", "ignoring", "group_left", "group_right"];

/// Returns every metric name in order, with repetitions.
pub fn metrics(expr: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut rest = expr;
    while let Some(first) = rest.chars().next() {
        let (token, after) = rest.split_at(rest.find(|c: char| !is_word(c)).unwrap_or(rest.len()));
        if token.is_empty() {
            rest = match first {
                '{' => after_close(rest, '}'),
                '[' => after_close(rest, ']'),
                '"' | '\'' => after_quote(rest, first),
                _ => &rest[first.len_utf8()..],
            };
            continue;
        }
        rest = after;
        let next = after.trim_start();
        let lower = token.to_lowercase();
        if LABELS.contains(&lower.as_str()) {
            rest = if next.starts_with('(') { after_close(next, ')') } else { next };
        } else if !first.is_ascii_digit() && !next.starts_with('(') && !WORDS.contains(&lower.as_str()) {
            // An aggregation may have its labels before its operand.
            if !next.starts_with("by") && !next.starts_with("without") {
                found.push(token.to_owned());
            }
        }
    }
    found
}

fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_' || c == ':' || c == '.'
}

fn after_close(text: &str, close: char) -> &str {
    let mut quoted = None;
    for (at, c) in text.char_indices() {
        match quoted {
            Some(quote) if c == quote => quoted = None,
            Some(_) => {}
            None if c == '"' || c == '\'' => quoted = Some(c),
            None if c == close => return &text[at + c.len_utf8()..],
            None => {}
        }
    }
    ""
}

fn after_quote(text: &str, quote: char) -> &str {
    text[1..].find(quote).map_or("", |at| &text[at + 2..])
}

#[test]
fn names_are_found_and_nothing_else_is() {
    for (expr, names) in [
        ("up", &["up"][..]),
        (r#"sum by (le, x) (rate(a_bucket{run="b c} d", e=~"f"}[5m])) > 0.5"#, &["a_bucket"]),
        ("sum(a) by (b) / on (c) group_left (d) e offset 5m", &["a", "e"]),
        ("(a == bool 0) * on (i, run) (time() - b > bool 600) or c and d unless e", &["a", "b", "c", "d", "e"]),
        (r#"histogram_quantile(0.95, rule:a:rate5m{x="y"}) + 1e3 + +Inf"#, &["rule:a:rate5m"]),
        (r#"label_replace(a, "b", "$1", "c", "(.*)")"#, &["a"]),
    ] {
        assert_eq!(metrics(expr), names, "{expr}");
    }
}
