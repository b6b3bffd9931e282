//! The invariants of ARCHITECTURE.md as one macro: a panic in debug builds, a counted violation in release.

/// Checks an invariant by its id (see ARCHITECTURE.md). The message is only formatted on a violation.
#[macro_export]
macro_rules! invariant {
    ($id:literal, $holds:expr, $($message:tt)+) => {
        if !$holds {
            $crate::invariants::violated($id, format!($($message)+));
        }
    };
}

/// Reports a violation.
#[track_caller]
pub fn violated(id: &'static str, message: String) {
    metrics::counter!(crate::metrics::INVARIANT_VIOLATIONS, "id" => id).increment(1);
    tracing::error!(id, message, "invariant violated");
    debug_assert!(false, "invariant {id} violated: {message}");
}
