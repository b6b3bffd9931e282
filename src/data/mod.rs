//! `draftmill prepare`: turns files of conversations into one memory-mapped store of token ids.
//!
//! ```text
//! files ──split──▶ rows ──row, chat, tokenizer──▶ samples ──writer──▶ store ──source──▶ padded batches
//!                    └──────── reject ────────▶ <store>.rejects.jsonl
//! ```

pub(crate) mod change;
pub mod chat;
pub(crate) mod encode;
mod format;
pub(crate) mod input;
mod options;
mod prepare;
mod provenance;
mod reject;
mod report;
pub mod row;
mod source;
pub(crate) mod split;
mod store;
mod writer;

pub use self::{
    change::Change,
    options::PrepareOptions,
    prepare::{PrepareError, prepare},
    provenance::{Difference, differences},
    reject::{Reason, Reject},
    report::{PrepareReport, Progress},
    source::StoreSource,
    store::{Contents, FORMAT, Split, Store, StoreError},
};
pub use crate::common::text::grouped;
