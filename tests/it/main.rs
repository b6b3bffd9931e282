//! The integration tests: one binary, one module for each part.

// clippy.toml allows it in test functions only, and their helpers are tests too.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod data;
mod fetch;
#[cfg(feature = "torch")]
mod golden;
mod import;
