//! The integration tests: one binary, one module for each part.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking, and so do its helpers")]

mod admin;
mod attacks;
mod bench;
#[cfg(feature = "torch")]
#[path = "../../benches/conformance/block.rs"]
mod block;
mod cli;
mod config;
mod dashboards;
mod data;
#[cfg(feature = "torch")]
mod decode;
mod deploy;
#[cfg(feature = "torch")]
mod diverged;
mod ending;
mod eval;
#[cfg(feature = "torch")]
mod evaluation;
mod export;
#[cfg(feature = "failpoints")]
mod failpoints;
mod faults;
mod fetch;
mod generate;
#[cfg(feature = "torch")]
mod golden;
#[cfg(feature = "torch")]
mod golden_heads;
#[cfg(feature = "torch")]
mod heads;
mod identity;
mod import;
mod imports;
mod jinja;
mod ledger;
#[cfg(feature = "torch")]
mod openmp;
mod origin;
mod public_templates;
mod recovery;
mod reload;
mod scrape;
mod simulate;
mod style;
mod templates;
mod tidy;
mod torture;
mod train;
mod workers;
