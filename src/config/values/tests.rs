//! Text forms of values.

use super::*;
use proptest::prelude::*;

#[test]
fn bytes_are_parsed_in_binary_and_decimal_units() {
    for (text, bytes) in [("2 GiB", 2 << 30), ("1.5KiB", 1536), ("3 mb", 3_000_000), ("0 B", 0), ("7B", 7), ("12", 12)]
    {
        assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
    }
}

#[test]
fn malformed_bytes_are_refused() {
    for text in ["", "GiB", "2.5", "-2", "2 parsecs", "-1 GiB", "99999999999 TiB", "nan B", "1e400 B"] {
        assert!(text.parse::<ByteSize>().is_err(), "{text}");
    }
}

#[test]
fn times_need_a_unit() {
    assert_eq!("90s".parse(), Ok(TimeSpan(Duration::from_secs(90))));
    assert_eq!("1.5ms".parse(), Ok(TimeSpan(Duration::from_micros(1500))));
    assert!("90".parse::<TimeSpan>().is_err());
    assert_eq!(TimeSpan(Duration::from_secs(120)).to_string(), "2m");
}

#[test]
fn top_k_is_a_number_or_all() {
    for (text, value) in [("\"all\"", TopK::All), ("16", TopK::Tokens(16))] {
        let written: toml::Table = format!("x = {text}").parse().unwrap();
        let read: TopK = written["x"].clone().try_into().unwrap();
        assert_eq!((read, toml::Value::try_from(read).unwrap()), (value, written["x"].clone()));
    }
    for text in ["", "full", "-1", "1.5", "4294967296"] {
        assert!(text.parse::<TopK>().unwrap_err().contains("neither a number nor \"all\""), "{text}");
    }
}

#[test]
fn rounded_bytes_have_three_digits() {
    assert_eq!(ByteSize(1_460_288_880).rounded(), "1.36 GiB");
    assert_eq!(ByteSize(128 << 20).rounded(), "128 MiB");
    assert_eq!(ByteSize(12).rounded(), "12 B");
}

proptest! {
    #[test]
    fn text_forms_lose_nothing(bytes in 0..=u64::MAX / 2, nanos in 0..u64::MAX / 2) {
        prop_assert_eq!(ByteSize(bytes).to_string().parse(), Ok(ByteSize(bytes)));
        let span = TimeSpan(Duration::from_nanos(nanos));
        prop_assert_eq!(span.to_string().parse(), Ok(span));
    }
}
