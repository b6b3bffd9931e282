//! Target, drafter, loss and optimizer in tch.

pub mod adamw;
pub mod anchors;
pub mod batch;
pub mod blocks;
pub mod cache;
pub mod decode;
pub mod draft;
pub mod fit;
pub mod heldout;
pub mod infer;
pub mod layers;
pub mod libtorch;
pub mod load;
pub mod loss;
pub mod nccl;
pub mod ops;
pub mod oracle;
pub mod params;
mod pass;
pub mod rope;
pub mod route;
mod shares;
pub mod shelves;
pub mod target;
pub mod trial;
pub mod weighting;

use thiserror::Error;

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
