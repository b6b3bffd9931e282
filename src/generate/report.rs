//! What `answer` tells: how far it is, and the closing table.

use super::prompts::LeftOut;
use crate::common::text::grouped;
use serde::Serialize;
use std::{collections::BTreeMap, fmt, path::PathBuf};

/// How far it is.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Progress {
    /// Bytes of the inputs as they lie on disk.
    pub bytes_total: u64,
    pub bytes_read: u64,
    /// Conversations to answer at most.
    pub limit: Option<u64>,
    pub conversations: u64,
    pub answers: u64,
    /// Tokens of answers, and how many came in a second since the start.
    pub tokens: u64,
    pub tokens_per_second: f64,
    /// Rows that are not answered.
    pub left_out: u64,
    /// Answers on their way.
    pub rows: u64,
}

/// What was asked and what was answered.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct GenerateReport {
    /// The file with the answers; none where there is no answer.
    pub out: Option<PathBuf>,
    /// Rows of the inputs that were looked at.
    pub rows: u64,
    /// Rows that are answered.
    pub conversations: u64,
    /// All answers in the file, those of earlier starts included.
    pub answers: u64,
    /// Conversations that an earlier start had answered.
    pub conversations_before: u64,
    pub prompt_tokens: u64,
    /// Tokens of answers.
    pub tokens: u64,
    /// Answers that end where their room ended, without a stop token.
    pub cut: u64,
    /// Rows that are not answered, by reason.
    #[serde(serialize_with = "by_word")]
    pub left_out: BTreeMap<LeftOut, u64>,
    /// Later questions of answered rows that are not answered, by reason.
    #[serde(serialize_with = "by_word")]
    pub questions_left_out: BTreeMap<LeftOut, u64>,
    /// Forwards of this start, and answers side by side in one of them.
    pub forwards: u64,
    pub rows_per_forward: f64,
    /// Of this start, without the loading of the target.
    pub seconds: f64,
    pub tokens_per_second: f64,
}

impl GenerateReport {
    pub fn rows_left_out(&self) -> u64 {
        self.left_out.values().sum()
    }

    /// The most frequent reasons for which rows are not answered, in one line.
    pub fn reasons(&self) -> String {
        let mut reasons: Vec<_> = self.left_out.iter().collect();
        reasons.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
        let texts = reasons.iter().take(3).map(|(reason, count)| format!("{count} x {reason}"));
        texts.collect::<Vec<_>>().join(", ")
    }
}

impl fmt::Display for GenerateReport {
    /// The closing table.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let share = |part: u64, whole: u64| format!("{:.1}%", 100.0 * part as f64 / whole.max(1) as f64);
        let mut line = |name: &str, count: u64, note: String| {
            writeln!(f, "{}", format!("{name:<24}{:>14}  {note}", grouped(count)).trim_end())
        };
        line("rows", self.rows, String::new())?;
        line("left out", self.rows_left_out(), share(self.rows_left_out(), self.rows))?;
        for (reason, &count) in &self.left_out {
            line(&format!("  {}", reason.word()), count, reason.to_string())?;
        }
        let before = format!("{} of them by an earlier start", grouped(self.conversations_before));
        let before = if self.conversations_before > 0 { before } else { String::new() };
        line("conversations", self.conversations, before)?;
        line("answers", self.answers, String::new())?;
        line(
            "  cut",
            self.cut,
            format!("{} ended with their room, not with a stop token", share(self.cut, self.answers)),
        )?;
        let unanswered = self.questions_left_out.values().sum();
        line("later questions left out", unanswered, String::new())?;
        for (reason, &count) in &self.questions_left_out {
            line(&format!("  {}", reason.word()), count, reason.to_string())?;
        }
        let mean = |tokens: u64| format!("{} each", tokens / self.answers.max(1));
        line("tokens of prompts", self.prompt_tokens, mean(self.prompt_tokens))?;
        line("tokens of answers", self.tokens, mean(self.tokens))?;
        let pace = format!("{:.1} s, {:.1} answers side by side in a forward", self.seconds, self.rows_per_forward);
        line("tokens per second", self.tokens_per_second as u64, pace)?;
        match &self.out {
            Some(out) => writeln!(f, "answers: {}", out.display()),
            None => writeln!(f, "no answers were written"),
        }
    }
}

fn by_word<S: serde::Serializer>(counts: &BTreeMap<LeftOut, u64>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(counts.iter().map(|(reason, count)| (reason.word(), count)))
}
