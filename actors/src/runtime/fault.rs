//! How an actor's end reaches the others: the first fault is the one reported, and everybody hears of it at once (S1).

use std::{
    any::Any,
    fmt,
    future::{Future, poll_fn},
    pin::pin,
};
use thiserror::Error;
use tokio_util::sync::CancellationToken;

/// Why an actor ended before its work was done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The actor that ended, with its index where there are several.
    pub actor: String,
    /// A sentence for a person.
    pub message: String,
    /// False when the actor ended only because another one did: such a fault never hides the one that caused it.
    pub root: bool,
}

impl Fault {
    pub fn new(actor: impl Into<String>, message: impl fmt::Display) -> Self {
        Self { actor: actor.into(), message: message.to_string(), root: true }
    }

    /// The end of an actor whose neighbour is gone.
    pub fn gone(actor: impl Into<String>, gone: Gone) -> Self {
        Self { root: false, ..Self::new(actor, gone) }
    }

    /// The end of an actor that was told to abort.
    pub fn aborted(actor: impl Into<String>) -> Self {
        Self { root: false, ..Self::new(actor, "stopped at once") }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.actor, self.message)
    }
}

impl std::error::Error for Fault {}

/// The actor that was asked is gone.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("the {0} is gone")]
pub struct Gone(pub &'static str);

/// What ends actors: `close` asks that nothing new begins and what is in the pool is trained, `stop` for an orderly end without
/// that, `abort` for an immediate one. A stop closes, too.
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

/// What a panic said.
pub fn panic_text(payload: &(dyn Any + Send)) -> String {
    match (payload.downcast_ref::<&str>(), payload.downcast_ref::<String>()) {
        (Some(text), _) => (*text).to_owned(),
        (_, Some(text)) => text.clone(),
        _ => "no message".into(),
    }
}

/// Ends an actor in the middle of its life, for tests of S1: at its `nth` wait (the first is 1) it panics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailAtPoll {
    /// As in [`Fault::actor`].
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
