//! Target, drafter, loss and optimizer on tch.

pub mod adamw;
pub mod batch;
pub mod drafter;
pub mod libtorch;
pub mod load;
pub mod loss;
pub mod muon;
pub mod ops;
pub mod params;
pub mod rope;
pub mod target;

use thiserror::Error;

/// Correct and total predictions of one slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SlotCount {
    pub right: u64,
    pub tried: u64,
}

/// Failure of a tensor operation or of a model.
#[derive(Debug, Error)]
pub enum ModelError {
    /// First line of a libtorch error, without its stack trace.
    #[error("libtorch failed: {0}")]
    Torch(String),
    #[error(transparent)]
    Hf(#[from] crate::hf::HfError),
    /// Invalid argument: a shape, an id or a device.
    #[error("{0}")]
    Input(String),
}

impl ModelError {
    /// True if memory ran out. libtorch distinguishes its errors by text only.
    pub fn is_out_of_memory(&self) -> bool {
        let ModelError::Torch(text) = self else { return false };
        let text = text.to_lowercase();
        ["out of memory", "can't allocate memory", "bad_alloc"].iter().any(|word| text.contains(word))
    }
}

impl From<tch::TchError> for ModelError {
    fn from(error: tch::TchError) -> ModelError {
        // libtorch appends its C++ stack to every message: about 3 kB after the first line.
        let text = match error {
            tch::TchError::Torch(text) => text,
            other => other.to_string(),
        };
        ModelError::Torch(text.lines().next().unwrap_or_default().to_string())
    }
}
