//! The engines behind the actors' seam.

#[cfg(feature = "torch")]
pub mod optimizer;
#[cfg(feature = "torch")]
pub mod torch;
