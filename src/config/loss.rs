//! `drafter.loss`: a word, or weights of several terms. Terms are distances between the teacher's distribution `p` and the
//! drafter's `q` (docs/dflash.md#loss).

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::str::FromStr;

/// Weights of the terms. The loss is their sum, not normalised.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossTerms {
    /// Cross-entropy of one token, `-ln q`.
    pub ce: f64,
    /// `KL(p || q)`.
    pub kl: f64,
    /// `KL(q || p)`, which needs a teacher with a probability for every token.
    pub reverse_kl: f64,
    /// Total variation `1 - alpha`, with the acceptance `alpha = sum min(p, q)`.
    pub tv: f64,
    /// `lambda KL(p || q) + (1 - lambda) TV` with the constant `lambda = exp(-lk_eta alpha)` (arXiv 2602.23881).
    pub lk: f64,
    /// Total variation from end to end, by block: one minus the mean of the products of `alpha` up to each slot.
    pub e2e_tv: f64,
    pub lk_eta: f64,
}

/// `lk_eta` of the paper.
pub const LK_ETA: f64 = 3.0;

impl LossTerms {
    const NONE: LossTerms =
        LossTerms { ce: 0.0, kl: 0.0, reverse_kl: 0.0, tv: 0.0, lk: 0.0, e2e_tv: 0.0, lk_eta: LK_ETA };

    /// `KL(p || q)` alone: with one label per slot, the cross-entropy.
    pub const KL: LossTerms = LossTerms { kl: 1.0, ..LossTerms::NONE };

    /// DSpark's recipe: 0.1 of the cross-entropy and 0.9 of `sum |p - q|`, which is twice the total variation.
    pub const DSPARK: LossTerms = LossTerms { ce: 0.1, tv: 1.8, ..LossTerms::NONE };

    /// Sum of the terms that `set` gives a weight.
    pub fn only(set: impl FnOnce(&mut LossTerms)) -> LossTerms {
        let mut terms = LossTerms::NONE;
        set(&mut terms);
        terms
    }

    /// True if the loss is a mean over blocks, not over slots.
    pub fn by_block(&self) -> bool {
        self.e2e_tv > 0.0 && !self.by_slot()
    }

    /// True if a term of single slots has a weight.
    pub fn by_slot(&self) -> bool {
        [self.ce, self.kl, self.reverse_kl, self.tv, self.lk].iter().any(|&weight| weight > 0.0)
    }

    /// True if a term needs the divergence of each slot.
    pub fn needs_kl(&self) -> bool {
        self.kl > 0.0 || self.lk > 0.0
    }

    /// Words and weights of all terms.
    pub fn weights(&self) -> [(&'static str, f64); 6] {
        [
            ("ce", self.ce),
            ("kl", self.kl),
            ("reverse-kl", self.reverse_kl),
            ("tv", self.tv),
            ("lk", self.lk),
            ("e2e-tv", self.e2e_tv),
        ]
    }

    fn set(&mut self, word: &str, weight: f64) -> Result<(), String> {
        let term = match word {
            "ce" => &mut self.ce,
            "kl" => &mut self.kl,
            "reverse-kl" => &mut self.reverse_kl,
            "tv" => &mut self.tv,
            "lk" => &mut self.lk,
            "e2e-tv" => &mut self.e2e_tv,
            _ => return Err(format!("{word:?} is none of: {}", self.weights().map(|(word, _)| word).join(", "))),
        };
        *term = weight;
        Ok(())
    }

    fn of_table(table: &toml::Table) -> Result<LossTerms, String> {
        let mut terms = LossTerms::NONE;
        for (word, value) in table {
            let weight = value.as_float().or(value.as_integer().map(|whole| whole as f64));
            let weight = weight.filter(|weight| weight.is_finite() && *weight >= 0.0);
            let weight =
                weight.ok_or_else(|| format!("the weight of {word:?} is {value}; write a number of at least 0"))?;
            terms.set(word, weight)?;
        }
        if terms.weights().iter().all(|(_, weight)| *weight == 0.0) {
            return Err("no term has a weight above 0".into());
        }
        Ok(terms)
    }
}

impl FromStr for LossTerms {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.trim_start().starts_with('{') {
            let table: toml::Table = format!("x = {text}").parse().map_err(|_| format!("{text:?} is no TOML table"))?;
            return match table.get("x").and_then(toml::Value::as_table) {
                Some(terms) => LossTerms::of_table(terms),
                None => Err(format!("{text:?} is no TOML table")),
            };
        }
        let mut terms = LossTerms::NONE;
        terms.set(text, 1.0)?;
        Ok(terms)
    }
}

impl fmt::Display for LossTerms {
    /// Writes the word of a single term with the weight 1, else an inline table.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let given: Vec<_> = self.weights().into_iter().filter(|(_, weight)| *weight > 0.0).collect();
        match given.as_slice() {
            [(word, 1.0)] => f.write_str(word),
            _ => {
                let terms: Vec<String> = given.iter().map(|(word, weight)| format!("{word} = {weight:?}")).collect();
                write!(f, "{{ {} }}", terms.join(", "))
            }
        }
    }
}

impl Serialize for LossTerms {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let text = self.to_string();
        if text.starts_with('{') {
            let given = self.weights().into_iter().filter(|(_, weight)| *weight > 0.0);
            return serializer.collect_map(given);
        }
        serializer.serialize_str(&text)
    }
}

impl<'de> Deserialize<'de> for LossTerms {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let read = match toml::Value::deserialize(deserializer)? {
            toml::Value::String(text) => text.parse(),
            toml::Value::Table(table) => LossTerms::of_table(&table),
            other => Err(format!("{other} is neither a word nor a table of weights, such as {{ kl = 1.0, tv = 0.5 }}")),
        };
        read.map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loss_is_a_word_or_a_table_of_weights() {
        assert_eq!("kl".parse(), Ok(LossTerms::KL));
        let mixed = LossTerms::only(|terms| (terms.ce, terms.tv) = (0.1, 1.8));
        assert_eq!(mixed, LossTerms::DSPARK);
        for terms in [LossTerms::KL, mixed, LossTerms::only(|terms| terms.e2e_tv = 2.0)] {
            assert_eq!(terms.to_string().parse(), Ok(terms));
            let table = toml::Table::from_iter([("x".to_owned(), toml::Value::try_from(terms).unwrap())]);
            let read: toml::Table = toml::to_string(&table).unwrap().parse().unwrap();
            assert_eq!(read["x"].clone().try_into::<LossTerms>().unwrap(), terms);
        }
    }

    #[test]
    fn a_wrong_term_or_weight_is_named() {
        for (text, part) in [
            ("huber", "\"huber\" is none of: ce, kl"),
            ("{ kl = -1.0 }", "the weight of \"kl\" is -1"),
            ("{ kl = nan }", "at least 0"),
            ("{ kl = \"1\" }", "at least 0"),
            ("{ mse = 1.0 }", "\"mse\" is none of"),
            ("{}", "no term has a weight"),
            ("{ kl = 0 }", "no term has a weight"),
            ("{ kl", "no TOML table"),
        ] {
            let refused = text.parse::<LossTerms>().unwrap_err();
            assert!(refused.contains(part), "{text}: {refused}");
        }
    }
}
