//! What is wrong with a setting: where it was written, what it says, why that cannot work, and what to do instead.

use crate::common::exit::{Exit, Failure};
use serde::Serialize;
use std::fmt;

/// One finding. Shown as `file:line: key = value: message; remedy`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Problem {
    /// The file that holds the value, "--set", or "default".
    pub file: String,
    /// Line in that file, where it is known. Counted from 1.
    pub line: Option<usize>,
    /// `section.key`, or what else is at fault.
    pub key: String,
    /// The value as TOML writes it; empty where there is none.
    pub value: String,
    /// Why it cannot work.
    pub message: String,
    /// What to do instead.
    pub remedy: String,
}

/// Everything that is wrong at once; never empty where it is an error.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Problems(pub Vec<Problem>);

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.file)?;
        if let Some(line) = self.line {
            write!(f, ":{line}")?;
        }
        f.write_str(": ")?;
        // One finding is one line, whatever was written.
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
