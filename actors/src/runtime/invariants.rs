//! The invariants of ARCHITECTURE.md: predicates, and one macro that makes a violation a panic in debug builds and counts it in
//! release. The predicates are also what a recorded run is held to.

/// D2: no target waits while a padded job is ready. Where room is lacking, targets wait for it in the pool, with their job.
pub fn d2(waiting_pulls: usize, padded_jobs: usize) -> bool {
    waiting_pulls == 0 || padded_jobs == 0
}

/// L1: what is held never exceeds the limits.
pub fn l1(bytes: u64, max_bytes: u64, batches: usize, max_batches: usize) -> bool {
    bytes <= max_bytes && batches <= max_batches
}

/// L2: no draw is answered with fewer than `min_ready` batches ready, unless draining or in a fixed order.
pub fn l2(ready: usize, min_ready: usize, draining: bool, ordered: bool) -> bool {
    ready >= min_ready || draining || ordered
}

/// L3: when everything is said to be here, no room is reserved but that of `late` forwards whose results nobody wants.
pub fn l3(reserved: usize, late: usize) -> bool {
    reserved <= late
}

/// T1: a step has all its micro-batches, or is the last of the run.
pub fn t1(micro_batches: u64, per_step: u64, last: bool) -> bool {
    micro_batches == per_step || (last && micro_batches < per_step)
}

/// Checks an invariant by its id (see ARCHITECTURE.md). The message is only formatted on a violation.
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
    tracing::error!(id, why = message, "invariant violated");
    debug_assert!(false, "invariant {id} violated: {message}");
}
