//! Parity with independent implementations: the numbers under `tests/golden`, and the properties that a drafter must have.
//! Shapes, block size, taps and numbers are read from the files, so `DRAFTMILL_GOLDEN` may name any folder of the same
//! layout.

mod adamw;
mod drafter;
mod engine;
mod exact;
pub mod files;
mod labels;
mod ladder;
mod memory;
mod other_folder;
mod plain;
mod random;
mod target;
mod uneven;
