//! Loss of the drafter: the head's loss in tiles of the vocabulary, and the weights of the slots.

pub mod head_loss;
pub mod weighting;
