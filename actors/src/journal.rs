//! The journal: one trace event for every change of a job's place, so that a whole run can be replayed against a model.
//!
//! `log.level = "draftmill::journal=trace"` shows it. Switched off, it costs a comparison for each event.

/// Target of the journal's events.
pub const JOURNAL: &str = "draftmill::journal";

/// Writes an event with its fields. Jobs are written as `%id`, everything else as a number or a bool.
macro_rules! journal {
    ($what:literal $(, $($field:tt)*)?) => {
        tracing::trace!(target: $crate::journal::JOURNAL, what = $what $(, $($field)*)?)
    };
}
pub(crate) use journal;
