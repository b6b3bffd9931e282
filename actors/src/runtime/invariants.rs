//! Invariants of ARCHITECTURE.md: predicates, and a macro that panics on a violation in debug builds and counts it in
//! release builds. Tests check recorded runs against the same predicates.

/// D2: no target waits while a padded job is ready. If bytes are lacking, targets wait for them in the pool, with their
/// job.
pub fn d2(waiting_pulls: usize, padded_jobs: usize) -> bool {
    waiting_pulls == 0 || padded_jobs == 0
}

/// L1: the bytes and batches in the pool never exceed the limits.
pub fn l1(bytes: u64, max_bytes: u64, batches: usize, max_batches: usize) -> bool {
    bytes <= max_bytes && batches <= max_batches
}

/// L2: no draw is answered with fewer than `min_ready` batches ready, unless the pool drains or the draw order is
/// fixed.
pub fn l2(ready: usize, min_ready: usize, draining: bool, ordered: bool) -> bool {
    ready >= min_ready || draining || ordered
}

/// L3: when the pool starts to drain, only `late` forwards, whose results are not needed, hold reservations.
pub fn l3(reserved: usize, late: usize) -> bool {
    reserved <= late
}

/// T1: a step has all its micro-batches, or is the last of the run.
pub fn t1(micro_batches: u64, per_step: u64, last: bool) -> bool {
    micro_batches == per_step || (last && micro_batches < per_step)
}

/// Checks an invariant by its id (see ARCHITECTURE.md). The message is formatted only on a violation.
#[macro_export]
macro_rules! invariant {
    ($id:literal, $holds:expr, $($message:tt)+) => {
        if !$holds {
            $crate::runtime::invariants::violated($id, format!($($message)+));
        }
    };
}

/// Reports a violation.
#[track_caller]
pub fn violated(id: &'static str, message: String) {
    metrics::counter!(super::metrics::INVARIANT_VIOLATIONS, "id" => id).increment(1);
    tracing::error!(id, reason = message, "invariant violated");
    debug_assert!(false, "invariant {id} violated: {message}");
}
