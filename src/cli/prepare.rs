//! `draftmill prepare`.

use super::PrepareArgs;
use crate::{
    check::Stored,
    config::{Config, Loaded},
    exit::{Exit, Failure},
};

/// Turns conversations into the store.
pub fn run(_args: &PrepareArgs, _loaded: &Loaded) -> Result<(), Failure> {
    Err(Failure::new(Exit::Internal, "prepare is not wired to src/data yet"))
}

/// What is known of the store that the configuration names.
pub fn stored(config: &Config) -> Stored {
    match config.data.store.exists() {
        false => Stored::Absent,
        true => Stored::Broken("stores cannot be read yet: src/data is not wired".into()),
    }
}
