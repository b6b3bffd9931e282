//! The checkpoint that is on its way: written, and made to exist in the ledger, while training goes on; at most one at a time.

use crate::{
    engine::{EngineError, Writing},
    metrics as m, planner,
};
use metrics::{counter, gauge, histogram};
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

/// Writes checkpoints beside the steps.
pub(crate) struct Saver {
    planner: planner::Handle,
    /// The newest step that a checkpoint holds.
    saved: u64,
    /// The checkpoint that this run wrote last.
    name: Option<String>,
    on_its_way: Option<OnItsWay>,
}

/// Dropping it gives the checkpoint up.
struct OnItsWay {
    step: u64,
    since: Instant,
    task: AbortOnDropHandle<Result<String, String>>,
}

impl Saver {
    /// `saved` is the step that the run goes on from.
    pub fn new(planner: planner::Handle, saved: u64) -> Self {
        Self { planner, saved, name: None, on_its_way: None }
    }

    pub fn is_busy(&self) -> bool {
        self.on_its_way.is_some()
    }

    pub fn saved(&self) -> u64 {
        self.saved
    }

    pub fn name(&self) -> Option<&String> {
        self.name.as_ref()
    }

    /// Begins the checkpoint of `step`, of which the optimizer made a copy. The outcomes of its steps must have been sent to
    /// the planner before.
    pub fn begin(&mut self, step: u64, copied: Result<Writing, EngineError>) {
        let (planner, since) = (self.planner.clone(), Instant::now());
        let task = tokio::spawn(async move {
            let name = copied.map_err(|e| e.to_string())?.await.map_err(|e| e.to_string())?;
            planner.checkpoint(step, name.clone()).await.map_err(|gone| gone.to_string())?;
            Ok(name)
        });
        self.on_its_way = Some(OnItsWay { step, since, task: AbortOnDropHandle::new(task) });
    }

    /// Waits until the checkpoint on its way exists or failed; for ever, where there is none. A failure costs only that
    /// checkpoint: the ones before stay.
    pub async fn written(&mut self) -> Result<(), String> {
        let Some(OnItsWay { step, since, task }) = &mut self.on_its_way else { return std::future::pending().await };
        let result = task.await.unwrap_or_else(|panic| Err(panic.to_string()));
        let (step, took) = (*step, since.elapsed());
        self.on_its_way = None;
        match result {
            Ok(name) => {
                counter!(m::CHECKPOINTS, "result" => "written").increment(1);
                histogram!(m::CHECKPOINT_SECONDS).record(took.as_secs_f64());
                gauge!(m::CHECKPOINT_STEP).set(step as f64);
                tracing::info!(step, name, "checkpoint written");
                (self.saved, self.name) = (step, Some(name));
                Ok(())
            }
            Err(reason) => {
                counter!(m::CHECKPOINTS, "result" => "failed").increment(1);
                tracing::error!(step, reason, "the checkpoint could not be written; the ones before it stay");
                Err(format!("the checkpoint of step {step} could not be written: {reason}"))
            }
        }
    }
}
