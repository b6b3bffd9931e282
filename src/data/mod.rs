//! Conversations in, one memory-mapped store of token ids out.
//!
//! ```text
//! files ──split──▶ rows ──row, chat, tokenizer──▶ samples ──writer──▶ store ──source──▶ padded batches
//!                    └──────── reject ────────▶ <store>.rejects.jsonl
//! ```

pub mod chat;
pub(crate) mod encode;
pub(crate) mod input;
mod prepare;
mod reject;
mod report;
pub(crate) mod row;
mod source;
pub(crate) mod split;
mod store;
mod writer;

pub(crate) use self::writer::{beside, locked, sync_folder_of};
pub use self::{
    prepare::{PrepareError, PrepareOptions, prepare},
    reject::{Reason, Reject},
    report::{PrepareReport, Progress, grouped},
    source::StoreSource,
    store::{FORMAT, Split, Store, StoreError},
};
