//! Tests of the actors: properties of each `State`, and the real loops with the simulated engine under paused time.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod checkpoints;
mod closing;
mod control;
#[allow(clippy::disallowed_types, reason = "a recorder of metrics is shared by its nature")]
mod counted;
mod dispatcher;
mod drafter;
mod edges;
mod faults;
mod in_order;
mod mix;
mod pipeline;
mod planner;
mod pool;
mod replayed;
mod replicas;
mod round_robin;
mod slow_checkpoints;
mod soak;
mod stragglers;
mod tags;
mod trace;
mod trainer;
mod world;
