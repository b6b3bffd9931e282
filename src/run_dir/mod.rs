//! Run folder: its files, checkpoints, retention, logs and database.

pub mod checkpoint;
pub mod db;
pub mod eval_log;
pub mod files;
mod open;
pub mod retention;
pub mod step_log;

pub use open::{OpenRun, RunDir, StartContext};
