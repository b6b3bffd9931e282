//! Progress and final report of `generate`.

use super::prompts::SkipReason;
use crate::common::text::{grouped, percent};
use serde::Serialize;
use std::{collections::BTreeMap, fmt, path::PathBuf};

/// Progress of `generate`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Progress {
    /// Bytes of the inputs on disk.
    pub bytes_total: u64,
    pub bytes_read: u64,
    /// Limit on the number of conversations.
    pub limit: Option<u64>,
    pub conversations: u64,
    pub answers: u64,
    /// Tokens of answers, and their rate since the start.
    pub tokens: u64,
    pub tokens_per_second: f64,
    /// Skipped rows.
    pub left_out: u64,
    /// Answers being decoded.
    pub rows: u64,
}

/// Counts of `generate`. The field names are keys of its JSON output.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct GenerateReport {
    /// File with the answers; `None` if there is no answer.
    pub out: Option<PathBuf>,
    /// Rows of the inputs that were read.
    pub rows: u64,
    /// Answered rows.
    pub conversations: u64,
    /// Answers in the file, including those of earlier starts.
    pub answers: u64,
    /// Conversations answered by an earlier start.
    pub conversations_before: u64,
    pub prompt_tokens: u64,
    /// Tokens of answers.
    pub tokens: u64,
    /// Answers that reached their token limit without a stop token.
    pub cut: u64,
    /// Skipped rows by reason.
    #[serde(serialize_with = "by_word")]
    pub left_out: BTreeMap<SkipReason, u64>,
    /// Skipped later prompts of answered rows, by reason.
    #[serde(serialize_with = "by_word")]
    pub questions_left_out: BTreeMap<SkipReason, u64>,
    /// Forwards of this start, and mean number of answers in a forward.
    pub forwards: u64,
    pub rows_per_forward: f64,
    /// Duration of this start without loading the target.
    pub seconds: f64,
    pub tokens_per_second: f64,
}

impl GenerateReport {
    pub fn rows_left_out(&self) -> u64 {
        self.left_out.values().sum()
    }

    /// Most frequent reasons of skipped rows, in one line.
    pub fn reasons(&self) -> String {
        let mut reasons: Vec<_> = self.left_out.iter().collect();
        reasons.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
        let texts = reasons.iter().take(3).map(|(reason, count)| format!("{count} x {reason}"));
        texts.collect::<Vec<_>>().join(", ")
    }
}

impl fmt::Display for GenerateReport {
    /// Writes the final table.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let share = |part: u64, whole: u64| percent(part as f64 / whole.max(1) as f64);
        let mut line = |name: &str, count: u64, note: String| {
            writeln!(f, "{}", format!("{name:<24}{:>14}  {note}", grouped(count)).trim_end())
        };
        line("rows", self.rows, String::new())?;
        line("left out", self.rows_left_out(), share(self.rows_left_out(), self.rows))?;
        for (reason, &count) in &self.left_out {
            line(&format!("  {}", reason.word()), count, reason.to_string())?;
        }
        let before = format!("{} by an earlier start", grouped(self.conversations_before));
        let before = if self.conversations_before > 0 { before } else { String::new() };
        line("conversations", self.conversations, before)?;
        line("answers", self.answers, String::new())?;
        line(
            "  cut",
            self.cut,
            format!("{} reached the token limit without a stop token", share(self.cut, self.answers)),
        )?;
        let unanswered = self.questions_left_out.values().sum();
        line("later prompts left out", unanswered, String::new())?;
        for (reason, &count) in &self.questions_left_out {
            line(&format!("  {}", reason.word()), count, reason.to_string())?;
        }
        let mean = |tokens: u64| format!("{} each", grouped(tokens / self.answers.max(1)));
        line("tokens of prompts", self.prompt_tokens, mean(self.prompt_tokens))?;
        line("tokens of answers", self.tokens, mean(self.tokens))?;
        let rate = format!("{:.1} s, {:.1} answers per forward", self.seconds, self.rows_per_forward);
        line("tokens per second", self.tokens_per_second as u64, rate)?;
        match &self.out {
            Some(out) => writeln!(f, "answers: {}", out.display()),
            None => writeln!(f, "no answers were written"),
        }
    }
}

fn by_word<S: serde::Serializer>(counts: &BTreeMap<SkipReason, u64>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(counts.iter().map(|(reason, count)| (reason.word(), count)))
}
