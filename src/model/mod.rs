//! Target, drafter, loss and optimizer in tch.

pub mod adamw;
pub mod batch;
pub mod drafter;
pub mod libtorch;
pub mod load;
pub mod loss;
pub mod ops;
pub mod params;
pub mod rope;
pub mod target;

use thiserror::Error;

/// Hits among the tries of one slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SlotCount {
    pub right: u64,
    pub tried: u64,
}

/// Why a tensor operation or a model could not be carried out.
#[derive(Debug, Error)]
pub enum ModelError {
    /// The message of an operation that failed, without libtorch's stack.
    #[error("libtorch failed: {0}")]
    Torch(String),
    #[error(transparent)]
    Hf(#[from] crate::hf::HfError),
    /// Something in the caller's hands: a shape, an id, a device name.
    #[error("{0}")]
    Input(String),
}

impl ModelError {
    /// Whether memory did not suffice. libtorch tells its errors apart by text alone.
    pub fn is_out_of_memory(&self) -> bool {
        let ModelError::Torch(text) = self else { return false };
        let text = text.to_lowercase();
        ["out of memory", "can't allocate memory", "bad_alloc"].iter().any(|word| text.contains(word))
    }
}

impl From<tch::TchError> for ModelError {
    fn from(error: tch::TchError) -> ModelError {
        // libtorch appends its C++ stack to every message: some 3 kB after the first line.
        let text = match error {
            tch::TchError::Torch(text) => text,
            other => other.to_string(),
        };
        ModelError::Torch(text.lines().next().unwrap_or_default().to_string())
    }
}
