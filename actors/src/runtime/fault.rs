//! Faults and shutdown: the first fault is reported, and every actor learns of the end at once (S1).

use std::{
    any::Any,
    fmt,
    future::{Future, poll_fn},
    pin::pin,
};
use thiserror::Error;
use tokio_util::sync::CancellationToken;

/// Reason why an actor ended before its work was done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Actor that ended, with its index if there are several.
    pub actor: String,
    /// Sentence for a person.
    pub message: String,
    /// False if the actor ended only because another one did. Such a fault never hides its cause.
    pub root: bool,
}

impl Fault {
    pub fn new(actor: impl Into<String>, message: impl fmt::Display) -> Self {
        Self { actor: actor.into(), message: message.to_string(), root: true }
    }

    /// Returns the fault of an actor whose neighbour is gone.
    pub fn gone(actor: impl Into<String>, gone: Gone) -> Self {
        Self { root: false, ..Self::new(actor, gone) }
    }

    /// Returns the fault of an actor that was aborted.
    pub fn aborted(actor: impl Into<String>) -> Self {
        Self { root: false, ..Self::new(actor, "aborted") }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.actor, self.message)
    }
}

impl std::error::Error for Fault {}

/// The requested actor is gone.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("the {0} is gone")]
pub struct Gone(pub &'static str);

/// Shutdown signals, weakest first. `drain` begins nothing new and trains the batches in the pool. `stop` ends in order
/// without that; it implies `drain`. `abort` ends at once.
#[derive(Clone, Debug)]
pub struct Shutdown {
    pub drain: CancellationToken,
    pub stop: CancellationToken,
    pub abort: CancellationToken,
}

impl Default for Shutdown {
    fn default() -> Self {
        let stop = CancellationToken::new();
        Shutdown { drain: stop.child_token(), stop, abort: CancellationToken::new() }
    }
}

/// Returns the message of a panic.
pub fn panic_text(payload: &(dyn Any + Send)) -> String {
    match (payload.downcast_ref::<&str>(), payload.downcast_ref::<String>()) {
        (Some(text), _) => (*text).to_owned(),
        (_, Some(text)) => text.clone(),
        _ => "no message".into(),
    }
}

/// Injected fault, for tests of S1: one actor panics at its `nth` pending poll (the first is 1).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailAtPoll {
    /// Name as in [`Fault::actor`].
    pub actor: String,
    pub nth: u64,
}

impl FailAtPoll {
    pub(crate) async fn wrap<T>(nth: u64, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        let mut waits = 0;
        poll_fn(|cx| {
            let poll = work.as_mut().poll(cx);
            waits += u64::from(poll.is_pending());
            assert!(poll.is_ready() || waits < nth, "failed at poll {nth} for a test");
            poll
        })
        .await
    }
}
