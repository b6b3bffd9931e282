//! What stands in for the engines of a real run in a build without libtorch: a sentence.

use super::{engine_set::EngineSet, models::Models};
use crate::run_dir::RunFolder;
use crate::{
    common::exit::{Exit, Failure},
    config::Loaded,
    data::Store,
    engines::checkpointing::Kept,
    run_dir::checkpoint::Verified,
};
use draftmill_actors::simulated::{SimDrafter, SimOptimizer, SimTarget};
use std::sync::Arc;
use tokio::sync::watch;

/// Refuses. `check` does so earlier, with the line of the configuration.
pub async fn load(
    _in_force: watch::Receiver<Loaded>,
    _models: Models,
    _folder: RunFolder,
    _from: Option<Verified>,
    _kept: watch::Receiver<Kept>,
    _store: Arc<Store>,
) -> Result<EngineSet<SimTarget, SimDrafter, SimOptimizer>, Failure> {
    Err(Failure::new(
        Exit::Config,
        "this draftmill was built without libtorch; build with the default features, or set run.engine = \"simulated\"",
    ))
}
