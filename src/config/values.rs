//! Value types of the configuration: numbers with a unit, closed sets of words, and their TOML forms.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::DeserializeOwned};
use std::{fmt, net::SocketAddr, str::FromStr, time::Duration};

/// Number of bytes, written with its unit ("2 GiB") or as a plain integer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByteSize(pub u64);

/// Duration, written with its unit: "30s", "500ms", "2m".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct TimeSpan(pub Duration);

/// Setting that is either given or derived ("auto").
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Auto<T> {
    #[default]
    Auto,
    Set(T),
}

/// Number of the target's most likely tokens that are labels at each position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TopK {
    /// The given number of most likely tokens, written as a number.
    Tokens(u32),
    /// The whole vocabulary, written "all".
    All,
}

/// Address to listen on, or "off".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listen(pub Option<SocketAddr>);

/// Declares an enum with one TOML word per variant.
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

mod drafter;
pub use drafter::*;

words! {
    /// Dtype of a tensor.
    Dtype { F32 = "f32", Bf16 = "bf16", F16 = "f16" }
}
words! {
    /// Engine that does the work of targets and drafters.
    Engine {
        /// libtorch, on CPU or CUDA.
        Torch = "torch",
        /// Cost model that sleeps: the whole pipeline without a model.
        Simulated = "simulated",
    }
}
words! {
    /// Treatment of a sample that is longer than `data.max_length`.
    Overlong {
        /// Removes the end of the sample.
        Cut = "cut",
        /// Removes the sample and counts it.
        Drop = "drop",
    }
}
words! {
    /// Treatment of a turn with a role that the chat template does not know.
    UnknownRole {
        /// Rejects the row and reports the role.
        Reject = "reject",
        /// Removes the turn.
        Skip = "skip",
    }
}
words! {
    /// Treatment of a field of a turn that the chat template does not show.
    HiddenFields {
        /// Rejects the row and reports the field.
        Reject = "reject",
        /// Keeps the row without the field and counts it.
        Keep = "keep",
    }
}
words! {
    /// Treatment of assistant turns before the first user turn.
    LeadingAssistant {
        /// Removes the turns and counts the row.
        Drop = "drop",
        /// Rejects the row.
        Reject = "reject",
    }
}
words! {
    /// Source of the sample lengths of `draftmill simulate`.
    Lengths {
        /// Lognormal distribution.
        Lognormal = "lognormal",
        /// Prepared store.
        Store = "store",
    }
}
words! {
    /// Source of the drafter's labels.
    Labels {
        /// Tokens of the data.
        Data = "data",
        /// Predictions of the target.
        Target = "target",
    }
}
words! {
    /// Method of gradient sums and weight distribution between the optimizer and several drafters.
    Collectives {
        /// One copy per gradient and per set of weights.
        Copy = "copy",
        /// NCCL reduce and broadcast.
        Nccl = "nccl",
    }
}
words! {
    /// Method of weight initialisation.
    InitMethod {
        /// Random weights.
        Random = "random",
        /// Least-squares fit to the target's hidden states.
        LeastSquares = "least-squares",
    }
}
words! {
    /// Optimizer.
    OptimizerKind {
        Adamw = "adamw",
        /// Muon for matrices, AdamW for the rest.
        Muon = "muon",
    }
}
words! {
    /// Size of Muon's update.
    MuonScale {
        /// Root mean square as of an update of AdamW: `0.2 sqrt(max(rows, columns))`.
        MatchRmsAdamw = "match-rms-adamw",
        /// `sqrt(max(1, rows / columns))`.
        Original = "original",
    }
}
words! {
    /// Learning rate after the warm-up.
    Schedule { Cosine = "cosine", Constant = "constant" }
}
words! {
    /// Treatment of the pool's batches after SIGINT or SIGTERM.
    PoolAtShutdown {
        /// The next start extracts their jobs again.
        Reopen = "reopen",
        /// Drafters train them before the last checkpoint.
        Train = "train",
    }
}
words! {
    /// Format of log lines.
    LogFormat {
        /// Human-readable if stderr is a terminal, else JSON.
        Auto = "auto",
        Human = "human",
        Json = "json",
    }
}

impl Dtype {
    /// Returns the bytes of one value.
    pub fn bytes(self) -> u64 {
        match self {
            Dtype::F32 => 4,
            Dtype::Bf16 | Dtype::F16 => 2,
        }
    }
}

impl<T> Auto<T> {
    /// Returns the given value; `None` for "auto".
    pub fn given(&self) -> Option<&T> {
        match self {
            Auto::Auto => None,
            Auto::Set(value) => Some(value),
        }
    }

    /// Returns the given value, or the value of `rule` for "auto".
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

/// Parses "2 GiB" as number and unit, and returns their product, rounded to an integer.
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
    /// Writes the largest binary unit that divides the value exactly.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let binary = BYTE_UNITS.iter().filter(|(name, _)| name.ends_with("iB"));
        match binary.into_iter().find(|(_, scale)| self.0 >= *scale && self.0.is_multiple_of(*scale)) {
            Some((name, scale)) => write!(f, "{} {name}", self.0 / scale),
            None => write!(f, "{} B", self.0),
        }
    }
}

impl ByteSize {
    /// Returns three digits and a binary unit, rounded ("1.36 GiB").
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
    /// Writes the largest unit that divides the value exactly.
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
            _ => text.parse().map(TopK::Tokens).map_err(|_| format!("{text:?} is neither a number nor \"all\"")),
        }
    }
}

impl fmt::Display for TopK {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TopK::Tokens(tokens) => tokens.fmt(f),
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
                .map_err(|_| format!("{text:?} is not an address; write for example \"127.0.0.1:9464\", or \"off\"")),
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

/// Implements serde via the text form.
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
            TopK::Tokens(tokens) => tokens.serialize(serializer),
            TopK::All => serializer.collect_str(self),
        }
    }
}

/// Returns a string unchanged, and any other value in TOML syntax for the parser.
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
mod tests;
