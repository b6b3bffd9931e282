//! The integration tests: one binary, one module for each part.

mod cli;
mod config;
mod data;
mod export;
#[cfg(feature = "torch")]
mod golden;
mod import;
