//! Loss of the drafter: its terms, the tiled head loss, and slot weights.

mod acceptance;
pub mod head_loss;
pub mod soft_loss;
mod teacher;
pub mod weighting;

pub use crate::config::{CeLabel, LossTerms};
