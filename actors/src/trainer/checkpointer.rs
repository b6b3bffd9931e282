//! The checkpoint that is on its way: written, and made to exist in the ledger, while training goes on; at most one at a time.

use crate::{
    messages::engine::{EngineError, Writing},
    planner,
    runtime::metrics as m,
    trainer::Answer,
};
use metrics::{counter, gauge, histogram};
use std::time::Duration;
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
    /// Another one was due meanwhile, and who asked for it.
    due: bool,
    asked: Vec<Answer>,
}

/// Dropping it gives the checkpoint up.
struct OnItsWay {
    step: u64,
    since: Instant,
    asked: Vec<Answer>,
    task: AbortOnDropHandle<Result<String, String>>,
}

impl Saver {
    /// `saved` is the step that the run goes on from.
    pub fn new(planner: planner::Handle, saved: u64) -> Self {
        Self { planner, saved, name: None, on_its_way: None, due: false, asked: Vec::new() }
    }

    pub fn is_busy(&self) -> bool {
        self.on_its_way.is_some()
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
    pub fn ask(&mut self, step: u64, answer: Answer) -> bool {
        match &mut self.on_its_way {
            Some(on_its_way) if on_its_way.step == step => on_its_way.asked.push(answer),
            None if step == self.saved => {
                // Who asked may be gone.
                let _ =
                    answer.send(match step {
                        0 => Err("no step is complete yet, so there is nothing to keep; ask again after the first one"
                            .into()),
                        _ => Ok(format!("step {step}, the last one, has a checkpoint already")),
                    });
            }
            _ => {
                self.asked.push(answer);
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
        let asked = std::mem::take(&mut self.asked);
        self.on_its_way = Some(OnItsWay { step, since, asked, task: AbortOnDropHandle::new(task) });
    }

    /// Waits until the checkpoint on its way exists or failed; for ever, where there is none. A failure costs only that
    /// checkpoint: the ones before stay.
    pub async fn written(&mut self) -> Result<(), String> {
        let Some(OnItsWay { step, since, task, asked }) = &mut self.on_its_way else {
            return std::future::pending().await;
        };
        let result = task.await.unwrap_or_else(|panic| Err(panic.to_string()));
        let (step, took, asked) = (*step, since.elapsed(), std::mem::take(asked));
        self.on_its_way = None;
        let result = self.judge(step, took, result);
        for answer in asked {
            // Who asked may be gone.
            let _ = answer.send(result.clone().map(|()| format!("the checkpoint of step {step} is written")));
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
