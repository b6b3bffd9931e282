//! Engines of a torch run in a build without libtorch: an error.

use super::{engine_set::EngineSet, models::Models};
use crate::run_dir::RunDir;
use crate::{
    common::exit::{Exit, Failure},
    config::Loaded,
    data::Store,
    engines::checkpointing::CheckpointSettings,
    run_dir::checkpoint::Verified,
};
use draftmill_actors::simulated::{SimDrafter, SimOptimizer, SimTarget};
use std::sync::Arc;
use tokio::sync::watch;

/// Fails. `check` reports the same earlier, with the line of the configuration.
///
/// # Errors
/// Always.
pub async fn load(
    _in_force: watch::Receiver<Loaded>,
    _models: Models,
    _folder: RunDir,
    _from: Option<Verified>,
    _kept: watch::Receiver<CheckpointSettings>,
    _store: Arc<Store>,
) -> Result<EngineSet<SimTarget, SimDrafter, SimOptimizer>, Failure> {
    Err(Failure::new(
        Exit::Config,
        "this draftmill was built without libtorch; build with the default features, or set run.engine = \"simulated\"",
    ))
}
