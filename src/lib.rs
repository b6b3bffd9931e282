//! Draftmill: trains the draft model of a speculative decoder while the frozen target produces its training signal.

pub mod admin;
pub mod check;
pub mod cli;
#[cfg(feature = "torch")]
pub mod collective;
pub mod common;
pub mod config;
pub mod data;
pub mod doctor;
pub mod engines;
pub mod eval;
pub mod export;
pub mod generate;
pub mod hf;
pub mod import;
#[cfg(feature = "torch")]
pub mod inference;
#[cfg(feature = "torch")]
pub mod model;
pub mod run_dir;
pub mod service;
pub mod simulate;
