//! Control of the process log by a running service.

use super::SetLevel;

/// Controls of the process log.
#[derive(Clone, Default)]
pub struct Logs {
    /// Sets the filter; `None` if the command line fixes it.
    pub set_level: Option<SetLevel>,
    /// True for the human format, false for JSON.
    pub human: bool,
    /// Writes the counts of suppressed lines.
    pub settle: Option<fn()>,
}

impl Logs {
    /// Writes the counts of suppressed lines. Called before the process ends.
    pub fn settle(&self) {
        if let Some(settle) = self.settle {
            settle();
        }
    }
}
