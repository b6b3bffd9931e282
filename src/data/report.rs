//! Progress and final report of `prepare`.

use super::{change::Change, reject::Reason};
use crate::common::text::{counted, grouped, percent};
use serde::Serialize;
use std::{collections::BTreeMap, fmt, path::PathBuf};

/// Progress of `prepare`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Bytes of the inputs on disk.
    pub bytes_total: u64,
    pub bytes_read: u64,
    pub rows: u64,
    pub samples: u64,
    /// Rows without a sample, for any reason.
    pub lost: u64,
    pub tokens: u64,
}

/// Counts of `prepare`. The field names are keys of its JSON output.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct PrepareReport {
    pub store: PathBuf,
    /// Fingerprint of the store; `None` if no store was written.
    pub fingerprint: Option<String>,
    /// File that lists the rows without a sample with position, reason and detail; `None` if there is no such row.
    pub rejects_file: Option<PathBuf>,
    pub files: u64,
    pub bytes: u64,
    pub rows: u64,
    pub train_samples: u64,
    pub validation_samples: u64,
    pub tokens: u64,
    pub supervised_tokens: u64,
    /// Samples truncated to `data.max_length`.
    pub cut: u64,
    pub longest: u64,
    /// Bad rows by reason.
    pub rejected: BTreeMap<Reason, u64>,
    /// Sound rows that a setting excludes, by reason.
    pub left_out: BTreeMap<Reason, u64>,
    /// Rows of samples that were changed, by change.
    pub changed: BTreeMap<Change, u64>,
    /// Rows of samples with metadata that the chat template does not show, by the name of the field.
    pub unseen_fields: BTreeMap<String, u64>,
    /// Input files that are cut; `data.allow_truncated` let them pass.
    pub truncated_files: u64,
    /// First bad row: file, line and detail.
    pub first_reject: Option<String>,
    /// Turns by role name.
    pub roles: BTreeMap<String, u64>,
    /// Turns of unknown roles, by role name.
    pub unknown_roles: BTreeMap<String, u64>,
    pub seconds: f64,
    pub tokens_per_second: f64,
}

impl PrepareReport {
    pub fn samples(&self) -> u64 {
        self.train_samples + self.validation_samples
    }

    /// Number of bad rows.
    pub fn rejected_rows(&self) -> u64 {
        self.rejected.values().sum()
    }

    /// Number of rows that settings exclude.
    pub fn left_out_rows(&self) -> u64 {
        self.left_out.values().sum()
    }

    pub fn reject_fraction(&self) -> f64 {
        self.rejected_rows() as f64 / self.rows.max(1) as f64
    }

    /// Most frequent reasons in one line, bad rows first.
    pub fn reasons(&self) -> String {
        let mut reasons: Vec<_> = self.rejected.iter().chain(&self.left_out).collect();
        reasons.sort_by_key(|(reason, count)| (reason.by_policy(), std::cmp::Reverse(**count)));
        let texts = reasons.iter().take(3).map(|(reason, count)| format!("{count} x {reason}"));
        texts.collect::<Vec<_>>().join(", ")
    }
}

impl fmt::Display for PrepareReport {
    /// Writes the final table.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let share = |part: u64, whole: u64| percent(part as f64 / whole.max(1) as f64);
        let mut line = |name: &str, count: u64, note: String| {
            writeln!(f, "{}", format!("{name:<22}{:>14}  {note}", grouped(count)).trim_end())
        };
        line(
            "rows",
            self.rows,
            format!("in {}, {}", counted(self.files, "file"), crate::config::ByteSize(self.bytes).rounded()),
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
        line("  cut", self.cut, "truncated to data.max_length".into())?;
        for (change, &count) in &self.changed {
            line(&format!("  {}", change.word()), count, change.text().into())?;
        }
        for (name, &count) in &self.unseen_fields {
            line("  field not shown", count, format!("`{name}`, which the chat template does not read"))?;
        }
        if self.truncated_files > 0 {
            line("truncated files", self.truncated_files, "read up to their cut: data.allow_truncated".into())?;
        }
        let mean = self.tokens / self.samples().max(1);
        line("tokens", self.tokens, format!("mean {} per sample, longest {}", grouped(mean), grouped(self.longest)))?;
        line("  supervised", self.supervised_tokens, share(self.supervised_tokens, self.tokens))?;
        for (title, roles) in [("turns", &self.roles), ("turns of unknown role", &self.unknown_roles)] {
            let total = roles.values().sum();
            if total > 0 {
                let counts = roles.iter().map(|(name, &count)| format!("{name} {}", grouped(count)));
                line(title, total, counts.collect::<Vec<_>>().join(", "))?;
            }
        }
        line("tokens per second", self.tokens_per_second as u64, format!("{:.1} s in total", self.seconds))?;
        match (&self.fingerprint, &self.rejects_file) {
            (Some(_), None) => writeln!(f, "store: {}", self.store.display()),
            (Some(_), Some(rejects)) => {
                writeln!(f, "store: {}\nrows without a sample: {}", self.store.display(), rejects.display())
            }
            (None, Some(rejects)) => writeln!(f, "no store was written; rows without a sample: {}", rejects.display()),
            (None, None) => writeln!(f, "no store was written"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_every_reason_and_the_rejects_file() {
        let report = PrepareReport {
            rows: 10,
            rejected: BTreeMap::from([(Reason::Empty, 2), (Reason::InvalidJson, 1)]),
            left_out: BTreeMap::from([(Reason::FewSupervised, 3)]),
            rejects_file: Some("x.rejects.jsonl".into()),
            ..PrepareReport::default()
        };
        let table = report.to_string();
        for word in ["empty", "invalid_json", "few_supervised", "30.0 %", "x.rejects.jsonl", "no store was written"] {
            assert!(table.contains(word), "{word} in\n{table}");
        }
        assert!(report.reasons().starts_with("2 x no turns"), "{}", report.reasons());
    }
}
