//! One unit of work at a time on a blocking thread: the state moves into the closure and back.

use crate::model::ModelError;
use draftmill_actors::engine::EngineError;

/// State that only blocking threads touch. Lost for good when a unit of work panics.
pub struct Worker<T> {
    state: Option<T>,
}

impl<T: Send + 'static> Worker<T> {
    pub fn new(state: T) -> Worker<T> {
        Worker { state: Some(state) }
    }

    /// Runs one unit of work with the state. Grad mode is per thread and threads are shared, so the work sets its own.
    pub async fn run<R: Send + 'static>(
        &mut self,
        work: impl FnOnce(&mut T) -> Result<R, ModelError> + Send + 'static,
    ) -> Result<R, EngineError> {
        let lost = || EngineError::Lost("an earlier unit of work panicked".into());
        let mut state = self.state.take().ok_or_else(lost)?;
        let job = move || {
            let result = work(&mut state);
            (state, result)
        };
        match tokio::task::spawn_blocking(job).await {
            Ok((state, result)) => {
                self.state = Some(state);
                result.map_err(|error| error_of(&error))
            }
            Err(panic) => Err(EngineError::Lost(panic.to_string())),
        }
    }

    /// The state between units of work; `None` once it is lost.
    pub fn peek(&self) -> Option<&T> {
        self.state.as_ref()
    }
}

/// libtorch tells an exhausted device only by its text.
fn error_of(error: &ModelError) -> EngineError {
    let text = error.to_string();
    if text.contains("out of memory") || text.contains("can't allocate memory") {
        EngineError::OutOfMemory(text)
    } else {
        EngineError::Failed(text)
    }
}
