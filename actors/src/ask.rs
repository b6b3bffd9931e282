//! Waiting for an answer that may not have been asked for yet.

use std::future::pending;
use tokio::sync::oneshot::{Receiver, error::RecvError};

/// The answer of a pending question; never ready without one. Keeps the question when it is cancelled.
pub(crate) async fn answer<T>(question: &mut Option<Receiver<T>>) -> Result<T, RecvError> {
    match question {
        Some(receiver) => receiver.await,
        None => pending().await,
    }
}
