//! Date of templates that ask for today's.

/// `strftime_now` with a fixed time, so that a store does not depend on the day of its preparation: Friday 26 July 2024,
/// 00:00, the default date of Llama 3's template.
pub fn strftime(format: &str) -> String {
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
