//! The engines behind the actors' seam.

#[cfg(feature = "torch")]
mod blocking;
#[cfg(feature = "torch")]
pub mod optimizer;
