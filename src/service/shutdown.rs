//! Shutdown of a run: export and summary.

use super::{Evaluation, Failed, Summary};
use crate::common::fs::write_json_atomic;
use crate::run_dir::{RunDir, step_log::StepLog};
use crate::{
    common::exit::{Exit, Failure},
    config::{Config, Engine, Loaded},
    eval::schedule::FinalWeights,
    run_dir::{
        db::{Checkpoint, RunEnd, StateDb},
        eval_log::EvalHistory,
    },
};
use draftmill_actors::pipeline::Report;

/// Outcome of the actors of a run.
pub struct RunOutcome<'a> {
    pub report: Report<StateDb>,
    pub log: &'a StepLog,
    pub seconds: f64,
    /// Resume point of this start. It is also the last checkpoint if a kill came between the last step and the export.
    pub resumed_from: Option<Checkpoint>,
    /// Evaluations during training.
    pub evaluations: Option<EvalHistory>,
}

impl RunOutcome<'_> {
    /// Kind of end: finished, step limit or stopped.
    pub fn end(&self, config: &Config) -> RunEnd {
        let at_limit = config.run.max_steps.is_some_and(|limit| self.report.trainer.step >= limit);
        match self.report.jobs.plan_ended && self.report.jobs.unfinished == 0 {
            true => RunEnd::Finished,
            false if at_limit => RunEnd::StepLimit,
            false => RunEnd::Stopped,
        }
    }

    /// Final weights of the run.
    pub fn final_weights(&self, folder: &RunDir) -> Option<FinalWeights> {
        let resumed_from = self.resumed_from.as_ref().map(|checkpoint| &checkpoint.name);
        let name = self.report.trainer.checkpoint.as_ref().or(resumed_from)?;
        Some(FinalWeights { step: self.report.trainer.step, checkpoint: folder.checkpoints().join(name) })
    }
}

/// Exports the drafter of a finished run and writes the summary.
///
/// # Errors
/// A failed export, or a file of the run that cannot be written.
pub fn close(loaded: &Loaded, folder: &RunDir, run: u64, outcome: RunOutcome<'_>) -> Result<Summary, Failure> {
    let end = outcome.end(&loaded.config);
    let RunOutcome { mut report, log, seconds, resumed_from, evaluations } = outcome;
    let config = &loaded.config;
    let (first, last) = log.windows();
    let mut summary = Summary::of(&report, &first, &last, seconds);
    summary.run_dir = folder.root().to_owned();
    summary.target_dir = config.target.dir.clone();
    summary.pool_max_bytes = config.pool.max_bytes.0;
    summary.finished = end != RunEnd::Stopped;
    summary.evaluation = evaluations.as_ref().and_then(Evaluation::of);
    summary.resumed_from = resumed_from.as_ref().map_or(0, |checkpoint| checkpoint.step);
    summary.checkpoint = report.trainer.checkpoint.or(resumed_from.map(|checkpoint| checkpoint.name));
    let checkpoint = summary.checkpoint.as_ref().map(|name| folder.checkpoints().join(name));
    if let Err(error) = crate::run_dir::checkpoint::retain(&folder.checkpoints(), config.checkpoint.retention())
        && folder.checkpoints().exists()
    {
        tracing::warn!(%error, "old checkpoints not deleted");
    }
    let exports = summary.finished && config.run.engine == Engine::Torch;
    if let Some(checkpoint) = checkpoint.filter(|dir| exports && dir.exists()) {
        let export = folder.export();
        tracing::info!(folder = %export.display(), "exporting the drafter and running the export self-test");
        summary.serve = crate::export::export_run(&checkpoint, &export, config).failed(Exit::Run)?.serve;
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
