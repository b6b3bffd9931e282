//! `draftmill prepare`.

use super::PrepareArgs;
use crate::{
    check::{Samples, Stored},
    config::{Config, Loaded},
    data::{Split, Store},
    exit::{Exit, Failure},
};

/// Turns conversations into the store.
pub fn run(_args: &PrepareArgs, _loaded: &Loaded) -> Result<(), Failure> {
    Err(Failure::new(Exit::Internal, "prepare is not wired to src/data yet"))
}

/// What is known of the store that the configuration names.
pub fn stored(config: &Config) -> Stored {
    let path = &config.data.store;
    if !path.exists() {
        return Stored::Absent;
    }
    match Store::open(path) {
        Ok(store) => {
            Stored::Ready(Samples { lengths: store.lengths(Split::Train), validation: store.len(Split::Validation) })
        }
        Err(error) => Stored::Broken(error.to_string()),
    }
}
