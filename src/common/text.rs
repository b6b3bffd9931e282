//! Numbers for people, in one format in the whole program: `1,234,567`, `21.3 %`, `3 jobs`.

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

#[cfg(test)]
mod tests {
    use super::*;

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
