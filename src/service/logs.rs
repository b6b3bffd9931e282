//! What the log can do for a running service.

use super::SetLevel;

/// The log of this process, as whoever started it set it up.
#[derive(Clone, Default)]
pub struct Logs {
    /// Changes the filter; `None` where the command line fixes it.
    pub set_level: Option<SetLevel>,
    /// People read it, not programs.
    pub human: bool,
    /// Tells what was held back so far, before the process ends.
    pub settle: Option<fn()>,
}

impl Logs {
    /// Tells what was held back so far.
    pub fn settle(&self) {
        if let Some(settle) = self.settle {
            settle();
        }
    }
}
