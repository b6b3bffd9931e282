//! Foundation of every actor: faults, shutdown, meters, the metrics table, invariants, and seeded randomness.

pub mod causes;
pub mod fault;
pub mod invariants;
pub mod meter;
pub mod metrics;
pub mod random;
pub mod trace;
pub(crate) mod util;
