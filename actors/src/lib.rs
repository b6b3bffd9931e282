//! The actors of Draftmill and the types that they share; knows nothing of libtorch.

pub mod buckets;
pub mod engine;
pub mod ledger;
pub mod plan;
pub mod types;
