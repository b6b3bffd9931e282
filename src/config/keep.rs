//! Retention of checkpoints, as the configuration sets it.

/// What is to be kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Keep {
    /// The newest; at least one is kept.
    pub last: usize,
    /// Of every so many steps the first checkpoint; 0 keeps none for that.
    pub every: u64,
    /// Those of the highest scores.
    pub best: usize,
}
