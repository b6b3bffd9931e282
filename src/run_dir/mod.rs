//! The run folder as one thing on disk: checkpoints, retention, logs and the database.

pub mod checkpoint;
pub mod db;
pub mod eval_log;
mod open;
pub mod retention;
pub mod step_log;

pub use open::{About, Opened, RunFolder, hash};
