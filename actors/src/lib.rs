//! The actors of Draftmill and the types that they share. This crate uses no libtorch, no files and no network.
//!
//! The picture (see ARCHITECTURE.md): planner → dispatcher → targets → pool → drafters ⇄ trainer → planner.

pub mod dispatcher;
pub mod drafter;
pub mod messages;
pub mod pipeline;
pub mod planner;
pub mod pool;
pub mod runtime;
pub mod simulated;
pub mod target;
pub mod trainer;
