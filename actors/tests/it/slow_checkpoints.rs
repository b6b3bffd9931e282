//! Optimizer of the world whose checkpoints take time.

use draftmill_actors::{
    messages::engine::{EngineError, Optimizer, StepReport, StepRequest, Writing},
    simulated::SimOptimizer,
};
use std::time::Duration;

/// Simulated optimizer whose checkpoints take time and can fail.
pub struct SlowCheckpoints {
    pub inner: SimOptimizer,
    pub takes: Duration,
    pub bad: Vec<u64>,
}

impl Optimizer for SlowCheckpoints {
    type Gradient = f64;
    type Weights = f64;

    async fn step(&mut self, gradients: Vec<f64>, request: StepRequest) -> Result<StepReport, EngineError> {
        self.inner.step(gradients, request).await
    }

    async fn weights(&mut self, drafter: usize) -> Result<f64, EngineError> {
        self.inner.weights(drafter).await
    }

    async fn checksum(&mut self) -> Result<Option<u64>, EngineError> {
        self.inner.checksum().await
    }

    async fn save(&mut self, step: u64) -> Result<Writing, EngineError> {
        let bad = self.bad.iter().position(|&bad| bad == step).map(|at| self.bad.swap_remove(at));
        let (writing, takes) = (self.inner.save(step).await?, self.takes);
        Ok(Box::pin(async move {
            tokio::time::sleep(takes).await;
            match bad {
                Some(_) => Err(EngineError::Failed("no space left on device".into())),
                None => writing.await,
            }
        }))
    }
}
