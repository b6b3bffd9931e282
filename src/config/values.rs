//! Values with a unit or a closed set of words: what a person writes in TOML and what the code computes with.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::DeserializeOwned};
use std::{fmt, net::SocketAddr, str::FromStr, time::Duration};

/// A number of bytes, written with its unit ("2 GiB") or as a plain integer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByteSize(pub u64);

/// A length of time, written with its unit: "30s", "500ms", "2m".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct TimeSpan(pub Duration);

/// A setting that is either given or derived ("auto") by the rule in its comment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Auto<T> {
    #[default]
    Auto,
    Set(T),
}

/// How many of the target's tokens are learned at each place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TopK {
    /// So many of the likeliest ones, written as a number.
    Likeliest(u32),
    /// Its whole vocabulary, written "all".
    All,
}

/// An address to listen on, or "off".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listen(pub Option<SocketAddr>);

/// Declares an enum whose variants are written as one word each.
macro_rules! words {
    ($(#[$meta:meta])* $name:ident { $($(#[$variant_meta:meta])* $variant:ident = $word:literal),* $(,)? }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
        pub enum $name { $($(#[$variant_meta])* #[serde(rename = $word)] $variant),* }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self { $($name::$variant => $word),* })
            }
        }

        impl FromStr for $name {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                match text {
                    $($word => Ok($name::$variant),)*
                    _ => Err(format!("{text:?} is none of: {}", [$($word),*].join(", "))),
                }
            }
        }
    };
}

words! {
    /// Number type of a tensor.
    Dtype { F32 = "f32", Bf16 = "bf16", F16 = "f16" }
}
words! {
    /// What does the work of targets and drafters.
    Engine {
        /// libtorch, on CPU or CUDA.
        Torch = "torch",
        /// A cost model that sleeps: the whole pipeline without a model.
        Simulated = "simulated",
    }
}
words! {
    /// What becomes of a sample that is longer than `data.max_length`.
    Overlong {
        /// Its end is cut off.
        Cut = "cut",
        /// It is left out and counted.
        Drop = "drop",
    }
}
words! {
    /// What becomes of a turn whose role the chat template does not know.
    UnknownRole {
        /// The whole row is rejected, with the role named.
        Reject = "reject",
        /// The turn is left out, the rest of the row stays.
        Skip = "skip",
    }
}
words! {
    /// Where `draftmill simulate` has the lengths of its samples from.
    Lengths {
        /// A distribution.
        Lognormal = "lognormal",
        /// The prepared store.
        Store = "store",
    }
}
words! {
    /// What the drafter learns to say.
    Labels {
        /// The tokens of the data.
        Data = "data",
        /// What the target itself would say at each place.
        Target = "target",
    }
}
words! {
    /// How gradients and weights travel between the optimizer and several drafters.
    Collectives {
        /// Each by a copy of its own.
        Copy = "copy",
        /// By NCCL's reduce and broadcast.
        Nccl = "nccl",
    }
}
words! {
    /// What new weights are.
    InitMethod {
        /// Random.
        Random = "random",
        /// Fitted to what is linear in the target.
        LeastSquares = "least-squares",
    }
}
words! {
    /// How much each slot of a block counts in the loss.
    SlotWeights {
        /// Less with its distance from the anchor.
        Decay = "decay",
        /// By what it is worth to the tokens accepted, as the drafter stands.
        DPace = "d-pace",
    }
}
words! {
    /// How the learning rate runs after the warm-up.
    Schedule { Cosine = "cosine", Constant = "constant" }
}
words! {
    /// What becomes of the batches in the pool when a signal asks for the end.
    Ending {
        /// Their jobs are open again at the next start.
        Reopen = "reopen",
        /// They are trained before the last checkpoint.
        Train = "train",
    }
}
words! {
    /// How log lines look.
    LogFormat {
        /// For people where stderr is a terminal, JSON otherwise.
        Auto = "auto",
        Human = "human",
        Json = "json",
    }
}

impl Dtype {
    /// Bytes of one value.
    pub fn bytes(self) -> u64 {
        match self {
            Dtype::F32 => 4,
            Dtype::Bf16 | Dtype::F16 => 2,
        }
    }
}

impl<T> Auto<T> {
    /// What was given, if anything.
    pub fn given(&self) -> Option<&T> {
        match self {
            Auto::Auto => None,
            Auto::Set(value) => Some(value),
        }
    }

    /// What was given, or else what the rule says.
    pub fn or(&self, rule: impl FnOnce() -> T) -> T
    where
        T: Clone,
    {
        self.given().cloned().unwrap_or_else(rule)
    }
}

// === text forms ===

const BYTE_UNITS: [(&str, u64); 9] = [
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("TB", 1_000_000_000_000),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("kB", 1_000),
    ("B", 1),
];

const TIME_UNITS: [(&str, u64); 6] = [
    ("h", 3_600_000_000_000),
    ("m", 60_000_000_000),
    ("s", 1_000_000_000),
    ("ms", 1_000_000),
    ("us", 1_000),
    ("ns", 1),
];

/// Splits "2 GiB" into its number and its unit and gives their product, rounded to a whole number.
fn number_with_unit(text: &str, units: &[(&str, u64)]) -> Result<u64, String> {
    let text = text.trim();
    let split = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
    let (number, unit) = (text[..split].trim(), text[split..].trim());
    let names = || units.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
    let scale = units
        .iter()
        .find(|(name, _)| name.eq_ignore_ascii_case(unit))
        .map(|(_, scale)| *scale)
        .ok_or_else(|| format!("{text:?} needs a number and one of the units {}", names()))?;
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(scale).ok_or_else(|| format!("{text:?} is too large"));
    }
    let number: f64 =
        number.parse().map_err(|_| format!("{text:?} needs a number and one of the units {}", names()))?;
    let product = number * scale as f64;
    if !(0.0..=u64::MAX as f64 / 2.0).contains(&product) {
        return Err(format!("{text:?} is negative or too large"));
    }
    Ok(product.round() as u64)
}

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            Ok(bytes) => Ok(ByteSize(bytes)),
            Err(_) => number_with_unit(text, &BYTE_UNITS).map(ByteSize),
        }
    }
}

impl fmt::Display for ByteSize {
    /// The largest binary unit that divides it exactly, so that nothing is lost.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let binary = BYTE_UNITS.iter().filter(|(name, _)| name.ends_with("iB"));
        match binary.into_iter().find(|(_, scale)| self.0 >= *scale && self.0.is_multiple_of(*scale)) {
            Some((name, scale)) => write!(f, "{} {name}", self.0 / scale),
            None => write!(f, "{} B", self.0),
        }
    }
}

impl ByteSize {
    /// For people: three digits and a binary unit, rounded ("1.36 GiB").
    pub fn rounded(self) -> String {
        match BYTE_UNITS.iter().take(4).find(|(_, scale)| self.0 >= *scale) {
            Some((name, scale)) => {
                let value = self.0 as f64 / *scale as f64;
                let decimals = if value < 10.0 { 2 } else { usize::from(value < 100.0) };
                format!("{value:.decimals$} {name}")
            }
            None => format!("{} B", self.0),
        }
    }
}

impl FromStr for TimeSpan {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        number_with_unit(text, &TIME_UNITS).map(|nanos| TimeSpan(Duration::from_nanos(nanos)))
    }
}

impl fmt::Display for TimeSpan {
    /// The largest unit that divides it exactly, so that nothing is lost.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let nanos = self.0.as_nanos();
        match TIME_UNITS.iter().find(|(_, scale)| nanos > 0 && nanos.is_multiple_of(u128::from(*scale))) {
            Some((name, scale)) => write!(f, "{}{name}", nanos / u128::from(*scale)),
            None => f.write_str("0s"),
        }
    }
}

impl FromStr for TopK {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "all" => Ok(TopK::All),
            _ => text.parse().map(TopK::Likeliest).map_err(|_| format!("{text:?} is neither a number nor \"all\"")),
        }
    }
}

impl fmt::Display for TopK {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TopK::Likeliest(tokens) => tokens.fmt(f),
            TopK::All => f.write_str("all"),
        }
    }
}

impl FromStr for Listen {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "off" => Ok(Listen(None)),
            _ => text
                .parse()
                .map(|address| Listen(Some(address)))
                .map_err(|_| format!("{text:?} is no address; write for example \"127.0.0.1:9464\", or \"off\"")),
        }
    }
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(address) => address.fmt(f),
            None => f.write_str("off"),
        }
    }
}

/// Serde through the text form.
macro_rules! as_text {
    ($($type:ident),*) => { $(
        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }
        from_text!($type);
    )* };
}

macro_rules! from_text {
    ($type:ident) => {
        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                text_of(toml::Value::deserialize(deserializer)?).parse().map_err(serde::de::Error::custom)
            }
        }
    };
}
as_text!(ByteSize, TimeSpan, Listen);
from_text!(TopK);

impl Serialize for TopK {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            TopK::Likeliest(tokens) => tokens.serialize(serializer),
            TopK::All => serializer.collect_str(self),
        }
    }
}

/// A string as it is; anything else as TOML writes it, for the parser to judge.
fn text_of(value: toml::Value) -> String {
    match value {
        toml::Value::String(text) => text,
        other => other.to_string(),
    }
}

impl<T: Serialize> Serialize for Auto<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Auto::Auto => serializer.serialize_str("auto"),
            Auto::Set(value) => value.serialize(serializer),
        }
    }
}

impl<'de, T: DeserializeOwned> Deserialize<'de> for Auto<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = toml::Value::deserialize(deserializer)?;
        if value.as_str() == Some("auto") {
            return Ok(Auto::Auto);
        }
        T::deserialize(value)
            .map(Auto::Set)
            .map_err(|error: toml::de::Error| serde::de::Error::custom(format!("{} (or \"auto\")", error.message())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn bytes_are_read_in_both_kinds_of_unit() {
        for (text, bytes) in
            [("2 GiB", 2 << 30), ("1.5KiB", 1536), ("3 mb", 3_000_000), ("0 B", 0), ("7B", 7), ("12", 12)]
        {
            assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
        }
    }

    #[test]
    fn bytes_without_sense_are_refused() {
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
        for (text, value) in [("\"all\"", TopK::All), ("16", TopK::Likeliest(16))] {
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
}
