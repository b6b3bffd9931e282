//! Target: pulls a job, reserves bytes, runs the forward, and moves the result into the pool.

mod actor;
pub mod state;

pub use actor::{Stats, run};
pub use state::{Recovery, Settings, State};
