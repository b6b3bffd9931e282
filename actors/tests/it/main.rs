//! Tests of the actors: properties of each `State`, and the real loops with the simulated engine under paused time.

mod dispatcher;
mod faults;
mod pipeline;
mod pool;
mod trainer;
mod world;
