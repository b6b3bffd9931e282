//! Simulated engine: sleeps by a cost model instead of computing.

mod engine;
mod noise;
mod round_robin;

pub use engine::*;
pub use noise::normal;
pub use round_robin::{RoundRobin, round_robin};
