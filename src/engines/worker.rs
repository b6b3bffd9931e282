//! One unit of work at a time on a blocking thread: an engine's state moves into the closure and back.

use crate::model::ModelError;
use draftmill_actors::{messages::engine::EngineError, runtime::fault::panic_text};
use std::any::Any;

/// Runs closures on blocking threads, one at a time, with a state that moves in and out.
pub(super) struct Worker<S> {
    /// Absent while a closure runs, and for good after one panicked or its caller gave up waiting.
    state: Option<S>,
}

impl<S: Send + 'static> Worker<S> {
    pub(super) fn new(state: S) -> Worker<S> {
        Worker { state: Some(state) }
    }

    /// One whose state is lost: every unit of work fails.
    pub(super) fn lost() -> Worker<S> {
        Worker { state: None }
    }

    /// The state between units of work; `None` once it is lost.
    pub(super) fn peek(&self) -> Option<&S> {
        self.state.as_ref()
    }

    /// The same to change it.
    pub(super) fn peek_mut(&mut self) -> Option<&mut S> {
        self.state.as_mut()
    }

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

pub(super) fn engine_error(error: ModelError) -> EngineError {
    let text = error.to_string();
    if error.is_out_of_memory() {
        EngineError::OutOfMemory(text)
    } else if text.to_lowercase().contains("cuda error") {
        // The context is poisoned: every later call on this device would fail too.
        EngineError::Lost(text)
    } else {
        EngineError::Failed(text)
    }
}

/// What a panic said, as a sentence.
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

    /// A panic inside must not leave gradients off, or on, for whoever uses the thread next.
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
    fn an_allocation_that_cannot_be_had_is_out_of_memory_and_one_line_long() {
        let error = Tensor::f_zeros([1 << 50], (tch::Kind::Float, Device::Cpu)).unwrap_err();
        let EngineError::OutOfMemory(text) = engine_error(error.into()) else { panic!("not out of memory") };
        assert_eq!(text.lines().count(), 1, "{text}");
        // Where it was no tensor.
        assert!(ModelError::Torch("std::bad_alloc".into()).is_out_of_memory());
    }
}
