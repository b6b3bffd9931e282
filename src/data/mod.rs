//! Conversations in, one memory-mapped store of token ids out.
