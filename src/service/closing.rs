//! The end of a run: the export, and the figures for people and programs.

use super::{Failed, RunFolder, StepLog, Summary};
use crate::{
    config::{Engine, Loaded},
    exit::{Exit, Failure},
    state::{Checkpoint, RunEnd, StateDb},
};
use draftmill_actors::mill::Report;
use std::path::Path;

/// Exports the drafter of a finished run and writes the figures. `before`: the checkpoint that the run went on from, which is
/// its last where a kill came between the last step and the export.
pub fn close(
    loaded: &Loaded,
    folder: &RunFolder,
    run: u64,
    mut report: Report<StateDb>,
    log: &StepLog,
    seconds: f64,
    before: Option<Checkpoint>,
) -> Result<Summary, Failure> {
    let config = &loaded.config;
    let (first, last) = log.windows();
    let mut summary = Summary::of(&report, &first, &last, seconds);
    summary.run_dir = folder.root().to_owned();
    summary.target_dir = config.target.dir.clone();
    summary.pool_max_bytes = config.pool.max_bytes.0;
    let at_limit = config.run.max_steps.is_some_and(|limit| report.trainer.step >= limit);
    let end = match report.jobs.plan_ended && report.jobs.unfinished == 0 {
        true => RunEnd::Finished,
        false if at_limit => RunEnd::StepLimit,
        false => RunEnd::Stopped,
    };
    summary.finished = end != RunEnd::Stopped;
    summary.resumed_from = before.as_ref().map_or(0, |checkpoint| checkpoint.step);
    summary.checkpoint = report.trainer.checkpoint.or(before.map(|checkpoint| checkpoint.name));
    let checkpoint = summary.checkpoint.as_ref().map(|name| folder.checkpoints().join(name));
    if let Err(error) = crate::checkpoint::retain(&folder.checkpoints(), config.checkpoint.keep())
        && folder.checkpoints().exists()
    {
        tracing::warn!(%error, "old checkpoints could not be deleted");
    }
    let exports = summary.finished && config.run.engine == Engine::Torch;
    if let Some(checkpoint) = checkpoint.filter(|dir| exports && dir.exists()) {
        let export = folder.export();
        crate::export::export_checkpoint(&checkpoint, &export, config.checkpoint.export_dtype.into(), true)
            .failed(Exit::Run)?;
        summary.export_dir = Some(export);
    }
    write_summary(&summary, &folder.summary()).map_err(|e| folder.cannot_write(&folder.summary(), &e))?;
    if let Some(state) = &mut report.ledger {
        state.end_run(run, &end, Some(report.trainer.step)).failed(Exit::Run)?;
    }
    Ok(summary)
}

fn write_summary(summary: &Summary, path: &Path) -> std::io::Result<()> {
    let fresh = path.with_extension("json.tmp");
    crate::checkpoint::write_json(&fresh, summary)?;
    crate::failpoint::point("rename", "summary.json")?;
    std::fs::rename(fresh, path)
}
