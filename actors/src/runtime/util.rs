//! Small helpers for waiting: for an answer that may not have been asked for yet, and for work that may need a thread of its own
//! or may panic.

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

/// The answer of a pending request; never ready without one. Keeps the request when it is cancelled.
pub(crate) async fn reply<T>(request: &mut Option<Receiver<T>>) -> Result<T, RecvError> {
    match request {
        Some(receiver) => receiver.await,
        None => pending().await,
    }
}

/// Waits until a watched value changes; for ever, where nobody can change it any more.
pub(crate) async fn changed<T>(watched: &mut watch::Receiver<T>) {
    if watched.changed().await.is_err() {
        pending().await
    }
}

/// Waits until `due`; for ever, where there is no such time.
pub(crate) async fn until(due: Option<Instant>) {
    match due {
        Some(due) => sleep_until(due).await,
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

/// Does `work`; a panic in it becomes an error with the panic's text. What `work` borrowed may be in any state then.
pub(crate) async fn caught<T>(work: impl Future<Output = T>) -> Result<T, String> {
    let mut work = pin!(work);
    poll_fn(|cx| match catch_unwind(AssertUnwindSafe(|| work.as_mut().poll(cx))) {
        Ok(poll) => poll.map(Ok),
        Err(panic) => Poll::Ready(Err(format!("it panicked: {}", panic_text(&*panic)))),
    })
    .await
}
