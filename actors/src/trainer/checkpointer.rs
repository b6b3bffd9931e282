//! Checkpointer: writes a checkpoint and makes it exist in the ledger while training continues; at most one at a time.

use super::messages::CheckpointReply;
use crate::{
    messages::engine::{EngineError, Writing},
    planner,
    runtime::metrics as m,
};
use metrics::{counter, gauge, histogram};
use std::time::Duration;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

/// Writer of checkpoints, concurrent with the steps.
pub(crate) struct Checkpointer {
    planner: planner::Handle,
    /// Newest step in a checkpoint.
    saved: u64,
    /// Name of the last checkpoint of this run.
    name: Option<String>,
    in_flight: Option<InFlight>,
    /// Another checkpoint became due meanwhile; these are its requests.
    due: bool,
    requests: Vec<CheckpointReply>,
}

/// Checkpoint in progress. Dropping it abandons the checkpoint.
struct InFlight {
    step: u64,
    since: Instant,
    requests: Vec<CheckpointReply>,
    task: AbortOnDropHandle<Result<String, String>>,
}

impl Checkpointer {
    /// Creates a checkpointer. `saved` is the step that the run resumes from.
    pub fn new(planner: planner::Handle, saved: u64) -> Self {
        Self { planner, saved, name: None, in_flight: None, due: false, requests: Vec::new() }
    }

    pub fn is_busy(&self) -> bool {
        self.in_flight.is_some()
    }

    /// Returns true if a checkpoint became due while another was written, and that one is finished.
    pub fn is_due(&self) -> bool {
        self.due && !self.is_busy()
    }

    /// Returns true if a checkpoint may begin now; otherwise marks one as due.
    pub fn may_begin(&mut self) -> bool {
        self.due = self.is_busy();
        !self.due
    }

    /// Takes in a request for a checkpoint of `step`, the last one in the weights. It replies at once if that
    /// checkpoint exists, or if no step is complete. Returns true if a checkpoint must begin.
    pub fn request(&mut self, step: u64, reply: CheckpointReply) -> bool {
        match &mut self.in_flight {
            Some(in_flight) if in_flight.step == step => in_flight.requests.push(reply),
            None if step == self.saved => {
                // The requester may be gone.
                let _ = reply.send(match step {
                    0 => Err("no step is complete yet; request a checkpoint after the first step".into()),
                    _ => Ok(format!("step {step}, the last one, already has a checkpoint")),
                });
            }
            _ => {
                self.requests.push(reply);
                return true;
            }
        }
        false
    }

    pub fn saved(&self) -> u64 {
        self.saved
    }

    pub fn name(&self) -> Option<&String> {
        self.name.as_ref()
    }

    /// Begins the checkpoint of `step` from the optimizer's copy. The outcomes of its steps must have been sent to the
    /// planner before.
    pub fn begin(&mut self, step: u64, copied: Result<Writing, EngineError>) {
        let (planner, since) = (self.planner.clone(), Instant::now());
        let task = tokio::spawn(async move {
            let name = copied.map_err(|e| e.to_string())?.await.map_err(|e| e.to_string())?;
            planner.checkpoint(step, name.clone()).await.map_err(|gone| gone.to_string())?;
            Ok(name)
        });
        let requests = std::mem::take(&mut self.requests);
        self.in_flight = Some(InFlight { step, since, requests, task: AbortOnDropHandle::new(task) });
    }

    /// Waits until the checkpoint in progress is written; pends forever without one.
    ///
    /// # Errors
    ///
    /// Fails if it could not be written. Earlier checkpoints stay.
    pub async fn written(&mut self) -> Result<(), String> {
        let Some(InFlight { step, since, task, requests }) = &mut self.in_flight else {
            return std::future::pending().await;
        };
        let result = task.await.unwrap_or_else(|panic| Err(panic.to_string()));
        let (step, took, requests) = (*step, since.elapsed(), std::mem::take(requests));
        self.in_flight = None;
        let result = self.judge(step, took, result);
        for reply in requests {
            // The requester may be gone.
            let _ = reply.send(result.clone().map(|()| format!("the checkpoint of step {step} is written")));
        }
        result
    }

    fn judge(&mut self, step: u64, took: Duration, result: Result<String, String>) -> Result<(), String> {
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
                tracing::error!(step, reason, "checkpoint failed");
                Err(format!("the checkpoint of step {step} could not be written: {reason}"))
            }
        }
    }
}
