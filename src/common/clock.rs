//! Wall-clock time for records that people read. Decisions use tokio's clock.

use std::time::{SystemTime, UNIX_EPOCH};

/// Seconds since 1970, UTC.
pub fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}
