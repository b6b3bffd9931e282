//! SIGINT and SIGTERM: the first asks for an orderly end, the second shutdown at once.

use super::Logs;
use crate::{
    common::exit::Exit,
    config::{Ending, Loaded},
};
use draftmill_actors::runtime::fault::Shutdown;
use std::{fmt, io, time::Duration};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::watch,
    time::{Instant, sleep, sleep_until},
};
use tokio_util::task::AbortOnDropHandle;

/// Signals within this time of the first count as the same one: `timeout` and terminals signal the process and its group.
const SAME: Duration = Duration::from_secs(1);
/// Time for actors to let go once they are told to stop at once.
const LAST: Duration = Duration::from_secs(2);

/// A signal that asks for the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    /// SIGINT: a person at a terminal.
    Interrupt,
    /// SIGTERM: a service manager, for which an orderly end is no failure.
    Terminate,
}

impl fmt::Display for Asked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Asked::Interrupt => "SIGINT",
            Asked::Terminate => "SIGTERM",
        })
    }
}

/// Turns signals into shutdown until it is dropped.
pub struct Signals {
    first: watch::Receiver<Option<Asked>>,
    _listening: AbortOnDropHandle<()>,
}

impl Signals {
    /// The first signal that came.
    pub fn first(&self) -> Option<Asked> {
        *self.first.borrow()
    }
}

/// Listens from now on. When `shutdown.grace` is over after the first signal, everything shutdown at once, too.
pub fn listen(shutdown: Shutdown, in_force: watch::Receiver<Loaded>, logs: Logs) -> io::Result<Signals> {
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let mut next = async move || {
        tokio::select! {
            _ = interrupt.recv() => Asked::Interrupt,
            _ = terminate.recv() => Asked::Terminate,
        }
    };
    let (tell, first) = watch::channel(None);
    let listening = tokio::spawn(async move {
        let name = next().await;
        tell.send_replace(Some(name));
        let shutdown = in_force.borrow().config.shutdown.clone();
        let pool = match shutdown.pool {
            Ending::Reopen => "finishing the running work",
            Ending::Train => "finishing the running work, training what is in the pool",
        };
        tracing::info!("{name}: {pool} and writing a checkpoint; a second signal shutdown at once");
        match shutdown.pool {
            Ending::Reopen => shutdown.stop.cancel(),
            Ending::Train => shutdown.drain.cancel(),
        }
        let (begun, grace) = (Instant::now(), shutdown.grace.0);
        let same = sleep(SAME.min(grace));
        tokio::pin!(same);
        loop {
            tokio::select! {
                _ = next() => {}
                () = &mut same => break,
            }
        }
        loop {
            tokio::select! {
                // The checkpoint needs its time, too.
                () = sleep_until(begun + grace / 2), if !shutdown.stop.is_cancelled() => {
                    tracing::warn!("half of shutdown.grace = {grace:?} is over: what is left in the pool is reopened");
                    shutdown.stop.cancel();
                }
                name = next() => {
                    tracing::warn!("{name} again: stopping at once");
                    break;
                }
                () = sleep_until(begun + grace) => {
                    tracing::error!("shutdown.grace = {grace:?} is over: stopping at once");
                    break;
                }
            }
        }
        shutdown.abort.cancel();
        // Work on a device cannot be called back; the process must not wait for it.
        sleep(LAST).await;
        logs.settle();
        Exit::Interrupted.leave();
    });
    Ok(Signals { first, _listening: AbortOnDropHandle::new(listening) })
}
