//! Retention policy of checkpoints, as configured in section [checkpoint].

/// Checkpoints to keep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RetentionPolicy {
    /// Number of newest checkpoints. 0 counts as 1.
    pub last: usize,
    /// Steps of an interval whose first checkpoint is kept permanently; 0 keeps none.
    pub every: u64,
    /// Number of checkpoints with the highest scores.
    pub best: usize,
}
