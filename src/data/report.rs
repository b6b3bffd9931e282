//! What `prepare` tells: how far it is, and the closing table.

use super::reject::Reason;
use crate::common::text::grouped;
use serde::Serialize;
use std::{collections::BTreeMap, fmt, path::PathBuf};

/// How far it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Bytes of the inputs as they lie on disk.
    pub bytes_total: u64,
    pub bytes_read: u64,
    pub rows: u64,
    pub samples: u64,
    /// Rows that became no sample, for whatever reason.
    pub lost: u64,
    pub tokens: u64,
}

/// What was found and what was made of it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct PrepareReport {
    pub store: PathBuf,
    /// Fingerprint of the store; none where none was written.
    pub fingerprint: Option<String>,
    /// Every row that became no sample, with its place, reason and detail; none where there is no such row.
    pub rejects_file: Option<PathBuf>,
    pub files: u64,
    pub bytes: u64,
    pub rows: u64,
    pub train_samples: u64,
    pub validation_samples: u64,
    pub tokens: u64,
    pub supervised_tokens: u64,
    /// Samples whose end was cut off.
    pub cut: u64,
    pub longest: u64,
    /// Bad rows by reason.
    pub rejected: BTreeMap<Reason, u64>,
    /// Sound rows that a setting leaves out.
    pub left_out: BTreeMap<Reason, u64>,
    /// Turns by the role's name.
    pub roles: BTreeMap<String, u64>,
    /// Turns whose role is not known, by its name.
    pub unknown_roles: BTreeMap<String, u64>,
    pub seconds: f64,
    pub tokens_per_second: f64,
}

impl PrepareReport {
    pub fn samples(&self) -> u64 {
        self.train_samples + self.validation_samples
    }

    /// Bad rows of all reasons.
    pub fn rejected_rows(&self) -> u64 {
        self.rejected.values().sum()
    }

    /// Rows that settings leave out.
    pub fn left_out_rows(&self) -> u64 {
        self.left_out.values().sum()
    }

    pub fn reject_fraction(&self) -> f64 {
        self.rejected_rows() as f64 / self.rows.max(1) as f64
    }

    /// The most frequent reasons in one line, bad rows first.
    pub fn reasons(&self) -> String {
        let mut reasons: Vec<_> = self.rejected.iter().chain(&self.left_out).collect();
        reasons.sort_by_key(|(reason, count)| (reason.by_policy(), std::cmp::Reverse(**count)));
        let texts = reasons.iter().take(3).map(|(reason, count)| format!("{count} x {reason}"));
        texts.collect::<Vec<_>>().join(", ")
    }
}

impl fmt::Display for PrepareReport {
    /// The closing table.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let share = |part: u64, whole: u64| format!("{:.1}%", 100.0 * part as f64 / whole.max(1) as f64);
        let mut line = |name: &str, count: u64, note: String| {
            writeln!(f, "{}", format!("{name:<22}{:>14}  {note}", grouped(count)).trim_end())
        };
        line(
            "rows",
            self.rows,
            format!(
                "in {} file{}, {}",
                self.files,
                if self.files == 1 { "" } else { "s" },
                crate::config::ByteSize(self.bytes).rounded()
            ),
        )?;
        line("rejected", self.rejected_rows(), share(self.rejected_rows(), self.rows))?;
        for (reason, &count) in &self.rejected {
            line(&format!("  {}", reason.word()), count, reason.to_string())?;
        }
        line("left out", self.left_out_rows(), share(self.left_out_rows(), self.rows))?;
        for (reason, &count) in &self.left_out {
            line(&format!("  {}", reason.word()), count, reason.to_string())?;
        }
        line("samples", self.samples(), share(self.samples(), self.rows))?;
        line("  to train", self.train_samples, String::new())?;
        line("  to validate", self.validation_samples, String::new())?;
        line("  cut", self.cut, "longer than data.max_length, end cut off".into())?;
        let mean = self.tokens / self.samples().max(1);
        line("tokens", self.tokens, format!("{mean} a sample, at most {}", grouped(self.longest)))?;
        line("  supervised", self.supervised_tokens, share(self.supervised_tokens, self.tokens))?;
        for (title, roles) in [("turns", &self.roles), ("turns of unknown role", &self.unknown_roles)] {
            let total = roles.values().sum();
            if total > 0 {
                let counts = roles.iter().map(|(name, &count)| format!("{name} {}", grouped(count)));
                line(title, total, counts.collect::<Vec<_>>().join(", "))?;
            }
        }
        line("tokens per second", self.tokens_per_second as u64, format!("{:.1} s in all", self.seconds))?;
        match (&self.fingerprint, &self.rejects_file) {
            (Some(_), None) => writeln!(f, "store: {}", self.store.display()),
            (Some(_), Some(rejects)) => {
                writeln!(f, "store: {}\nevery row that is not in it: {}", self.store.display(), rejects.display())
            }
            (None, Some(rejects)) => writeln!(f, "no store was written; every row that failed: {}", rejects.display()),
            (None, None) => writeln!(f, "no store was written"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_grouped_by_thousands() {
        for (number, text) in [(0, "0"), (999, "999"), (1000, "1,000"), (1_234_567, "1,234,567")] {
            assert_eq!(grouped(number), text);
        }
    }

    #[test]
    fn the_table_has_every_reason_and_says_where_the_rest_lies() {
        let report = PrepareReport {
            rows: 10,
            rejected: BTreeMap::from([(Reason::Empty, 2), (Reason::InvalidJson, 1)]),
            left_out: BTreeMap::from([(Reason::FewSupervised, 3)]),
            rejects_file: Some("x.rejects.jsonl".into()),
            ..PrepareReport::default()
        };
        let table = report.to_string();
        for word in ["empty", "invalid_json", "few_supervised", "30.0%", "x.rejects.jsonl", "no store was written"] {
            assert!(table.contains(word), "{word} in\n{table}");
        }
        assert!(report.reasons().starts_with("2 x no turns"), "{}", report.reasons());
    }
}
