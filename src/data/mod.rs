//! Conversations in, one memory-mapped store of token ids out.

pub mod chat;
mod source;
mod split;
mod store;
mod writer;

pub use self::{
    source::StoreSource,
    store::{FORMAT, Split, Store, StoreError},
};
