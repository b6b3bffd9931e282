//! Worker that runs one unit of work at a time on a blocking thread; the engine's state moves into the closure and back.

use crate::model::ModelError;
use draftmill_actors::{messages::engine::EngineError, runtime::fault::panic_text};
use std::any::Any;

/// Runs closures on blocking threads, one at a time, each with exclusive access to the state.
pub(super) struct Worker<S> {
    /// Absent while a closure runs. Lost permanently after a panic or if the caller dropped the future.
    state: Option<S>,
}

impl<S: Send + 'static> Worker<S> {
    pub(super) fn new(state: S) -> Worker<S> {
        Worker { state: Some(state) }
    }

    /// Worker with a lost state: every unit of work fails.
    pub(super) fn lost() -> Worker<S> {
        Worker { state: None }
    }

    /// State between units of work; `None` if it is lost.
    pub(super) fn peek(&self) -> Option<&S> {
        self.state.as_ref()
    }

    /// Mutable [`peek`](Worker::peek).
    pub(super) fn peek_mut(&mut self) -> Option<&mut S> {
        self.state.as_mut()
    }

    /// Runs one unit of work.
    ///
    /// # Errors
    /// The error of `work`, or `Lost` after a panic, a cancellation or a lost state.
    pub(super) async fn run<T: Send + 'static>(
        &mut self,
        work: impl FnOnce(&mut S) -> Result<T, ModelError> + Send + 'static,
    ) -> Result<T, EngineError> {
        let Some(mut state) = self.state.take() else {
            return Err(EngineError::Lost("an earlier unit of work panicked or was abandoned".into()));
        };
        let task = tokio::task::spawn_blocking(move || {
            let result = work(&mut state);
            (state, result)
        });
        match task.await {
            Ok((state, result)) => {
                self.state = Some(state);
                result.map_err(engine_error)
            }
            Err(error) => Err(EngineError::Lost(match error.try_into_panic() {
                Ok(panic) => panicked(panic),
                Err(_) => "its unit of work was cancelled".into(),
            })),
        }
    }
}

/// Classifies a model error as out of memory, lost or failed.
pub(super) fn engine_error(error: ModelError) -> EngineError {
    let text = error.to_string();
    if error.is_out_of_memory() {
        EngineError::OutOfMemory(text)
    } else if text.to_lowercase().contains("cuda error") {
        // The CUDA context is corrupt: every later call on this device fails.
        EngineError::Lost(text)
    } else {
        EngineError::Failed(text)
    }
}

/// Sentence with a panic's text.
pub(super) fn panicked(payload: Box<dyn Any + Send>) -> String {
    format!("its unit of work panicked: {}", panic_text(&*payload))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::{Device, Tensor};

    #[tokio::test]
    async fn a_panic_loses_the_engine_and_an_error_does_not() {
        let mut worker = Worker::new(1u32);
        let failed = worker.run(|_| -> Result<(), ModelError> { Err(ModelError::Input("no".into())) }).await;
        assert_eq!(failed, Err(EngineError::Failed("no".into())));
        assert_eq!(worker.run(|state| Ok(*state)).await, Ok(1));
        let Err(EngineError::Lost(text)) = worker.run(|_| -> Result<(), ModelError> { panic!("boom") }).await else {
            panic!("a panic is a lost engine");
        };
        assert!(text.contains("boom"), "{text}");
        assert!(matches!(worker.run(|state| Ok(*state)).await, Err(EngineError::Lost(_))));
    }

    /// A panic must restore the thread's grad mode for the next unit of work.
    #[tokio::test]
    async fn grad_mode_survives_a_panic() {
        for _ in 0..4 {
            let mut worker = Worker::new(());
            let panicked = worker.run(|_| -> Result<(), ModelError> {
                let _guard = tch::no_grad_guard();
                panic!("boom")
            });
            assert!(panicked.await.is_err());
            let mut worker = Worker::new(());
            let tracked = worker.run(|_| {
                let leaf = Tensor::f_zeros([1], (tch::Kind::Float, Device::Cpu))?.f_set_requires_grad(true)?;
                Ok(leaf.f_mul_scalar(2.0)?.requires_grad())
            });
            assert_eq!(tracked.await, Ok(true));
        }
    }

    #[test]
    fn a_failed_allocation_is_out_of_memory_in_one_line() {
        let error = Tensor::f_zeros([1 << 50], (tch::Kind::Float, Device::Cpu)).unwrap_err();
        let EngineError::OutOfMemory(text) = engine_error(error.into()) else { panic!("not out of memory") };
        assert_eq!(text.lines().count(), 1, "{text}");
        // Allocation failure outside libtorch.
        assert!(ModelError::Torch("std::bad_alloc".into()).is_out_of_memory());
    }
}
