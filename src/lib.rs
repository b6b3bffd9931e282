//! Draftmill: trains the draft model of a speculative decoder while the frozen target produces its training signal.

pub mod admin;
pub mod answer;
pub mod check;
pub mod checkpoint;
pub mod cli;
pub mod config;
pub mod data;
pub mod doctor;
pub mod engines;
pub mod eval;
pub mod exit;
pub mod export;
pub mod failpoint;
pub mod gpus;
pub mod hf;
pub mod import;
#[cfg(feature = "torch")]
pub mod model;
pub mod retention;
pub mod service;
pub mod simulate;
pub mod state;
