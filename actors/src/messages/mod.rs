//! Types that actors exchange: samples, jobs with their receipts, and the interface of the engines.

pub mod engine;
pub mod job;
pub mod types;
