//! Engines of a run: one for each target and drafter, the optimizer, and the evaluator.

use super::{Failed, prepared_run::PreparedRun};
use crate::{
    common::exit::{Exit, Failure},
    engines::{
        checkpointing::{CheckpointSettings, CheckpointWriter},
        costs,
        simulated::{self, JobLogDrafter, JobLogOptimizer, trained_jobs},
    },
    eval::schedule::Evaluator,
};
use draftmill_actors::simulated::{self as sim, SimOptimizer, SimTarget};
use tokio::sync::watch;

/// The engines that the actors of a run own.
pub struct EngineSet<T, D, O> {
    pub targets: Vec<T>,
    pub drafters: Vec<D>,
    pub optimizer: O,
    pub evaluator: Option<Evaluator>,
}

impl EngineSet<SimTarget, JobLogDrafter, JobLogOptimizer> {
    /// Simulated engines that resume from the run's checkpoint.
    ///
    /// # Errors
    /// An unreadable checkpoint.
    pub fn simulated(
        prepared: &PreparedRun,
        settings: watch::Receiver<CheckpointSettings>,
    ) -> Result<EngineSet<SimTarget, JobLogDrafter, JobLogOptimizer>, Failure> {
        let config = &prepared.loaded.config;
        let costs = costs::costs(config);
        let folder = prepared.opened.folder.checkpoints();
        let trained = match &prepared.opened.from {
            Some(from) => trained_jobs(&folder.join(&from.name)).failed(Exit::Model)?,
            None => Vec::new(),
        };
        let (run, seed) = (prepared.opened.folder.run_id()?, config.run.seed);
        let checkpoints = CheckpointWriter { folder, settings, seed, run, draft: simulated::placeholder_draft() };
        let weight = 0.01 * prepared.start_step() as f64;
        let optimizer = SimOptimizer::new(costs, weight);
        let mut drafters = sim::drafters(costs, &costs::drafter_speeds(config));
        drafters.iter_mut().for_each(|drafter| drafter.weight = weight);
        Ok(EngineSet {
            targets: sim::targets(costs, &costs::target_speeds(config)),
            drafters: drafters.into_iter().map(JobLogDrafter::new).collect(),
            optimizer: JobLogOptimizer::new(optimizer, trained, checkpoints),
            // A simulated run has no drafter to evaluate.
            evaluator: None,
        })
    }
}
