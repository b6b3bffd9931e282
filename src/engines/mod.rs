//! The engines behind the actors' seam: libtorch's state, driven one unit of blocking work at a time.

#[cfg(feature = "torch")]
pub mod optimizer;
#[cfg(feature = "torch")]
pub mod torch;
#[cfg(feature = "torch")]
mod worker;
