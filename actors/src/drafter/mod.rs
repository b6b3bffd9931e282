//! Drafter: draws a batch, trains it under a ticket, and exchanges gradients for weights.

mod actor;

pub use actor::{Settings, Work, run};
