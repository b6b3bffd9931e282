//! Drafter: draws a batch, trains it under a ticket, and exchanges gradients for weights.

mod actor;
pub mod state;

pub use actor::{Stats, run};
pub use state::Settings;
