//! `draftmill train`.

use super::TrainArgs;
use crate::{
    config::Loaded,
    exit::{Exit, Failure},
};

/// Trains until the end of the last epoch, max_steps, a signal, or the first fault.
pub fn run(_args: &TrainArgs, _loaded: Loaded) -> Result<(), Failure> {
    Err(Failure::new(Exit::Internal, "train is not wired to the service yet"))
}
