//! Lifecycle trace: one trace event for every state change of a job, so that a test can replay a run against a model.
//!
//! `log.level = "draftmill::lifecycle=trace"` enables it. A disabled event costs one comparison.

/// Tracing target of the lifecycle events.
pub const LIFECYCLE: &str = "draftmill::lifecycle";

/// Writes one event with its fields. Jobs are written as `%id`, all other fields as a number or a bool.
macro_rules! lifecycle {
    ($event:literal $(, $($field:tt)*)?) => {
        tracing::trace!(target: $crate::runtime::trace::LIFECYCLE, event = $event $(, $($field)*)?)
    };
}
pub(crate) use lifecycle;
