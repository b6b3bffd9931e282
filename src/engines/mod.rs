//! Implementations of the actors' engine traits: on libtorch, one blocking unit of work at a time, and simulated.

pub mod checkpointing;
pub mod costs;
#[cfg(feature = "torch")]
mod features;
#[cfg(feature = "torch")]
pub mod gradient_exchange;
#[cfg(feature = "torch")]
mod oom_split;
#[cfg(feature = "torch")]
pub mod optimizer;
pub mod simulated;
#[cfg(feature = "torch")]
mod target_forward;
#[cfg(feature = "torch")]
pub mod torch;
#[cfg(feature = "torch")]
pub mod transfer;
#[cfg(feature = "torch")]
mod worker;
