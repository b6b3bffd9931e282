//! Target, drafter, loss and optimizer in tch.

pub mod adamw;
pub mod anchors;
pub mod batch;
pub mod blocks;
pub mod draft;
pub mod infer;
pub mod layers;
pub mod libtorch;
pub mod load;
pub mod loss;
pub mod ops;
pub mod oracle;
pub mod params;
pub mod rope;
pub mod target;

use thiserror::Error;

/// Why a tensor operation or a model could not be carried out.
#[derive(Debug, Error)]
pub enum ModelError {
    #[error("libtorch failed: {}", first_line(.0))]
    Torch(#[from] tch::TchError),
    #[error(transparent)]
    Hf(#[from] crate::hf::HfError),
    /// Something in the caller's hands: a shape, an id, a device name.
    #[error("{0}")]
    Input(String),
}

/// libtorch appends its C++ stack to every message; the first line is the message.
fn first_line(error: &tch::TchError) -> String {
    error.to_string().lines().next().unwrap_or_default().to_string()
}
