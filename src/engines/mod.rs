//! The engines behind the actors' seam.

#[cfg(feature = "torch")]
pub mod torch;
