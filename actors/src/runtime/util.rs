//! Helpers for waiting: optional replies, watched values, deadlines, blocking work, and work that may panic.

use super::fault::panic_text;
use std::{
    future::{Future, pending, poll_fn},
    panic::{AssertUnwindSafe, catch_unwind},
    pin::pin,
    task::Poll,
};
use tokio::{
    sync::{
        oneshot::{Receiver, error::RecvError},
        watch,
    },
    task::{JoinError, spawn_blocking},
    time::{Instant, sleep_until},
};

/// Waits for the reply to a pending request; pends forever without one. Keeps the request when cancelled.
///
/// # Errors
///
/// Fails if the replying actor is gone.
pub(crate) async fn reply<T>(request: &mut Option<Receiver<T>>) -> Result<T, RecvError> {
    match request {
        Some(receiver) => receiver.await,
        None => pending().await,
    }
}

/// Waits until a watched value changes; pends forever once its sender is gone.
pub(crate) async fn changed<T>(watched: &mut watch::Receiver<T>) {
    if watched.changed().await.is_err() {
        pending().await
    }
}

/// Waits until `due`; pends forever without a deadline.
pub(crate) async fn until(due: Option<Instant>) {
    match due {
        Some(due) => sleep_until(due).await,
        None => pending().await,
    }
}

/// Runs `work` on a blocking thread, or in place if it does not block.
///
/// # Errors
///
/// Fails if `work` panics on the blocking thread.
pub(crate) async fn off_thread<T: Send + 'static>(
    blocking: bool,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, JoinError> {
    if blocking { spawn_blocking(work).await } else { Ok(work()) }
}

/// Runs `work` and turns a panic into an error with the panic's message. Data that `work` borrowed may be in any state
/// afterwards.
///
/// # Errors
///
/// Fails if `work` panics.
pub(crate) async fn caught<T>(work: impl Future<Output = T>) -> Result<T, String> {
    let mut work = pin!(work);
    poll_fn(|cx| match catch_unwind(AssertUnwindSafe(|| work.as_mut().poll(cx))) {
        Ok(poll) => poll.map(Ok),
        Err(panic) => Poll::Ready(Err(format!("the engine panicked: {}", panic_text(&*panic)))),
    })
    .await
}
