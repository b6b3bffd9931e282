//! The actors of Draftmill and the types that they share; knows nothing of libtorch.
//!
//! The picture (see ARCHITECTURE.md): planner → dispatcher → targets → pool → drafters ⇄ trainer → planner.

pub mod buckets;
pub mod dispatcher;
pub mod dispatcher_state;
pub mod drafter;
pub mod engine;
pub mod fault;
pub mod invariants;
pub mod job;
pub mod journal;
pub mod ledger;
pub mod meter;
pub mod metrics;
pub mod mill;
pub mod plan;
pub mod planner;
pub mod planner_state;
pub mod pool;
mod pool_settings;
pub mod pool_state;
pub mod replay;
pub mod sim;
pub mod steering;
pub mod target;
pub mod trainer;
pub mod trainer_state;
pub mod types;

mod ask;
mod pace;
mod pool_figures;
mod replicas;
mod saver;
mod trainer_figures;
