//! Small helpers for waiting: for an answer that may not have been asked for yet, and for work that may need a thread of its own.

use std::future::pending;
use tokio::{
    sync::oneshot::{Receiver, error::RecvError},
    task::{JoinError, spawn_blocking},
};

/// The answer of a pending question; never ready without one. Keeps the question when it is cancelled.
pub(crate) async fn answer<T>(question: &mut Option<Receiver<T>>) -> Result<T, RecvError> {
    match question {
        Some(receiver) => receiver.await,
        None => pending().await,
    }
}

/// Does `work` on a blocking thread, or in place where it does not block.
pub(crate) async fn off_thread<T: Send + 'static>(
    blocking: bool,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, JoinError> {
    if blocking { spawn_blocking(work).await } else { Ok(work()) }
}
