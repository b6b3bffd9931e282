//! The engines behind the actors' seam: libtorch's state, driven one unit of blocking work at a time, and the simulated ones.

#[cfg(feature = "torch")]
pub mod exchange;
#[cfg(feature = "torch")]
pub mod optimizer;
#[cfg(feature = "torch")]
mod pieces;
#[cfg(feature = "torch")]
mod rows;
pub mod saving;
pub mod simulated;
#[cfg(feature = "torch")]
pub mod staging;
#[cfg(feature = "torch")]
pub mod torch;
#[cfg(feature = "torch")]
mod worker;
