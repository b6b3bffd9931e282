//! Loss of the drafter: tiled head loss and slot weights.

pub mod head_loss;
pub mod weighting;
