//! The checkpoint that is on its way: written, and made to exist in the ledger, while training goes on; at most one at a time.

use crate::{
    messages::engine::{EngineError, Writing},
    planner,
    runtime::metrics as m,
    trainer::CheckpointReply,
};
use metrics::{counter, gauge, histogram};
use std::time::Duration;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

/// Writes checkpoints beside the steps.
pub(crate) struct Checkpointer {
    planner: planner::Handle,
    /// The newest step that a checkpoint holds.
    saved: u64,
    /// The checkpoint that this run wrote last.
    name: Option<String>,
    in_flight: Option<InFlight>,
    /// Another one was due meanwhile, and who requests for it.
    due: bool,
    requests: Vec<CheckpointReply>,
}

/// Dropping it gives the checkpoint up.
struct InFlight {
    step: u64,
    since: Instant,
    requests: Vec<CheckpointReply>,
    task: AbortOnDropHandle<Result<String, String>>,
}

impl Checkpointer {
    /// `saved` is the step that the run goes on from.
    pub fn new(planner: planner::Handle, saved: u64) -> Self {
        Self { planner, saved, name: None, in_flight: None, due: false, requests: Vec::new() }
    }

    pub fn is_busy(&self) -> bool {
        self.in_flight.is_some()
    }

    /// Whether one was due while another was being written, which is now.
    pub fn is_due(&self) -> bool {
        self.due && !self.is_busy()
    }

    /// Whether one may begin; else it is due when the one on its way is written.
    pub fn may_begin(&mut self) -> bool {
        self.due = self.is_busy();
        !self.due
    }

    /// Somebody wants a checkpoint of `step`, the last one in the weights. Answered now where there is one, or nothing to keep;
    /// true where one has to be begun.
    pub fn request(&mut self, step: u64, reply: CheckpointReply) -> bool {
        match &mut self.in_flight {
            Some(in_flight) if in_flight.step == step => in_flight.requests.push(reply),
            None if step == self.saved => {
                // Who requests may be gone.
                let _ =
                    reply.send(match step {
                        0 => Err("no step is complete yet, so there is nothing to keep; ask again after the first one"
                            .into()),
                        _ => Ok(format!("step {step}, the last one, has a checkpoint already")),
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

    /// Begins the checkpoint of `step`, of which the optimizer made a copy. The outcomes of its steps must have been sent to
    /// the planner before.
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

    /// Waits until the checkpoint on its way exists or failed; for ever, where there is none. A failure costs only that
    /// checkpoint: the ones before stay.
    pub async fn written(&mut self) -> Result<(), String> {
        let Some(InFlight { step, since, task, requests }) = &mut self.in_flight else {
            return std::future::pending().await;
        };
        let result = task.await.unwrap_or_else(|panic| Err(panic.to_string()));
        let (step, took, requests) = (*step, since.elapsed(), std::mem::take(requests));
        self.in_flight = None;
        let result = self.judge(step, took, result);
        for reply in requests {
            // Who requests may be gone.
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
                tracing::error!(step, reason, "the checkpoint could not be written; the ones before it stay");
                Err(format!("the checkpoint of step {step} could not be written: {reason}"))
            }
        }
    }
}
