//! Simulated engine: sleeps by a cost model instead of computing.

mod engine;
mod noise;

pub use engine::*;
pub use noise::normal;
