//! Problem report of a setting: file, line, key, value, message and remedy.

use crate::common::exit::{Exit, Failure};
use serde::Serialize;
use std::fmt;

/// One problem, displayed as `file:line: key = value: message; remedy`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Problem {
    /// File of the value, "--set", or "default".
    pub file: String,
    /// Line in that file, counted from 1; `None` if unknown.
    pub line: Option<usize>,
    /// `section.key`, a section, or the text of a malformed `--set`.
    pub key: String,
    /// Value in TOML syntax; empty if there is none.
    pub value: String,
    /// Reason why the value is refused.
    pub message: String,
    /// Change that solves the problem.
    pub remedy: String,
}

/// All problems of a configuration. As an error it is never empty.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Problems(pub Vec<Problem>);

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.file)?;
        if let Some(line) = self.line {
            write!(f, ":{line}")?;
        }
        f.write_str(": ")?;
        // One problem is one line, also if the value contains line breaks.
        let (key, value) = (self.key.replace('\n', "\\n"), self.value.replace('\n', "\\n"));
        match (key.is_empty(), value.is_empty()) {
            (true, _) => {}
            (false, true) => write!(f, "{key}: ")?,
            (false, false) => write!(f, "{key} = {value}: ")?,
        }
        f.write_str(&self.message)?;
        if !self.remedy.is_empty() {
            write!(f, "; {}", self.remedy)?;
        }
        Ok(())
    }
}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, problem) in self.0.iter().enumerate() {
            if index > 0 {
                f.write_str("\n")?;
            }
            problem.fmt(f)?;
        }
        Ok(())
    }
}

impl std::error::Error for Problems {}

impl From<Problems> for Failure {
    fn from(problems: Problems) -> Self {
        Failure::new(Exit::Config, problems)
    }
}
