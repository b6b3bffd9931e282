//! The end of a run: the export, and the figures for people and programs.

use super::{Evaluation, Failed, Summary};
use crate::common::fs::write_json_atomic;
use crate::run_dir::{RunFolder, step_log::StepLog};
use crate::{
    common::exit::{Exit, Failure},
    config::{Config, Engine, Loaded},
    eval::schedule::Last,
    run_dir::{
        db::{Checkpoint, RunEnd, StateDb},
        eval_log::History,
    },
};
use draftmill_actors::pipeline::Report;

/// What the actors of a run left.
pub struct Left<'a> {
    pub report: Report<StateDb>,
    pub log: &'a StepLog,
    pub seconds: f64,
    /// The checkpoint that the run went on from, which is its last where a kill came between the last step and the export.
    pub before: Option<Checkpoint>,
    /// What was measured beside the steps.
    pub evaluated: Option<History>,
}

impl Left<'_> {
    pub fn how(&self, config: &Config) -> RunEnd {
        let at_limit = config.run.max_steps.is_some_and(|limit| self.report.trainer.step >= limit);
        match self.report.jobs.plan_ended && self.report.jobs.unfinished == 0 {
            true => RunEnd::Finished,
            false if at_limit => RunEnd::StepLimit,
            false => RunEnd::Stopped,
        }
    }

    /// The weights that the run ended with.
    pub fn last(&self, folder: &RunFolder) -> Option<Last> {
        let before = self.before.as_ref().map(|checkpoint| &checkpoint.name);
        let name = self.report.trainer.checkpoint.as_ref().or(before)?;
        Some(Last { step: self.report.trainer.step, checkpoint: folder.checkpoints().join(name) })
    }
}

/// Exports the drafter of a finished run and writes the figures.
pub fn close(loaded: &Loaded, folder: &RunFolder, run: u64, left: Left<'_>) -> Result<Summary, Failure> {
    let end = left.how(&loaded.config);
    let Left { mut report, log, seconds, before, evaluated } = left;
    let config = &loaded.config;
    let (first, last) = log.windows();
    let mut summary = Summary::of(&report, &first, &last, seconds);
    summary.run_dir = folder.root().to_owned();
    summary.target_dir = config.target.dir.clone();
    summary.pool_max_bytes = config.pool.max_bytes.0;
    summary.finished = end != RunEnd::Stopped;
    summary.evaluation = evaluated.as_ref().and_then(Evaluation::of);
    summary.resumed_from = before.as_ref().map_or(0, |checkpoint| checkpoint.step);
    summary.checkpoint = report.trainer.checkpoint.or(before.map(|checkpoint| checkpoint.name));
    let checkpoint = summary.checkpoint.as_ref().map(|name| folder.checkpoints().join(name));
    if let Err(error) = crate::run_dir::checkpoint::retain(&folder.checkpoints(), config.checkpoint.keep())
        && folder.checkpoints().exists()
    {
        tracing::warn!(%error, "old checkpoints could not be deleted");
    }
    let exports = summary.finished && config.run.engine == Engine::Torch;
    if let Some(checkpoint) = checkpoint.filter(|dir| exports && dir.exists()) {
        let export = folder.export();
        tracing::info!("exporting the drafter, and serving the export once before it counts");
        crate::export::export_run(&checkpoint, &export, config).failed(Exit::Run)?;
        summary.export_dir = Some(export);
    }
    write_json_atomic(&folder.summary(), &summary).map_err(|e| folder.cannot_write(&folder.summary(), &e))?;
    if let Some(state) = &mut report.ledger {
        if let Some(evaluation) = &summary.evaluation {
            state.event("evaluation", &evaluation.to_string()).failed(Exit::Run)?;
        }
        state.end_run(run, &end, Some(report.trainer.step)).failed(Exit::Run)?;
    }
    Ok(summary)
}
