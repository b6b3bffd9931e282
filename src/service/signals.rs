//! SIGINT and SIGTERM: the first requests an orderly shutdown, the second stops at once.

use super::Logs;
use crate::{
    common::{exit::Exit, process},
    config::{Loaded, PoolAtShutdown},
};
use draftmill_actors::runtime::fault::Shutdown;
use std::{fmt, io, time::Duration};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::watch,
    time::{Instant, sleep, sleep_until},
};
use tokio_util::task::AbortOnDropHandle;

/// Debounce time: further signals within it count as the first. `timeout` and terminals signal the process and its group.
const DEBOUNCE: Duration = Duration::from_secs(1);
/// Time for actors to end after the abort.
const ABORT_TIME: Duration = Duration::from_secs(2);

/// Signal that requests a shutdown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopSignal {
    /// SIGINT, from a terminal.
    Interrupt,
    /// SIGTERM, from a service manager, for which an orderly end is a success.
    Terminate,
}

impl fmt::Display for StopSignal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            StopSignal::Interrupt => "SIGINT",
            StopSignal::Terminate => "SIGTERM",
        })
    }
}

/// Signal listener. Stops listening when it is dropped.
pub struct Signals {
    first: watch::Receiver<Option<StopSignal>>,
    _listening: AbortOnDropHandle<()>,
}

impl Signals {
    /// First signal.
    pub fn first(&self) -> Option<StopSignal> {
        *self.first.borrow()
    }
}

/// Starts to listen. The process stops at once at a second signal, or `shutdown.grace` after the first one.
///
/// # Errors
/// A signal handler that cannot be installed.
pub fn listen(shutdown: Shutdown, in_force: watch::Receiver<Loaded>, logs: Logs) -> io::Result<Signals> {
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    process::hold_stop_signals(false);
    let mut next = async move || {
        tokio::select! {
            _ = interrupt.recv() => StopSignal::Interrupt,
            _ = terminate.recv() => StopSignal::Terminate,
        }
    };
    let (sender, first) = watch::channel(None);
    let listening = tokio::spawn(async move {
        let signal = next().await;
        sender.send_replace(Some(signal));
        let settings = in_force.borrow().config.shutdown.clone();
        let (pool, stop) = match settings.pool {
            PoolAtShutdown::Reopen => ("reopen", &shutdown.stop),
            PoolAtShutdown::Train => ("train", &shutdown.drain),
        };
        tracing::info!(%signal, pool, "shutting down with a checkpoint; a second signal stops at once");
        stop.cancel();
        let (begun, grace) = (Instant::now(), settings.grace.0);
        let debounce = sleep(DEBOUNCE.min(grace));
        tokio::pin!(debounce);
        loop {
            tokio::select! {
                _ = next() => {}
                () = &mut debounce => break,
            }
        }
        loop {
            tokio::select! {
                // Reserves half of the time for the checkpoint.
                () = sleep_until(begun + grace / 2), if !shutdown.stop.is_cancelled() => {
                    tracing::warn!(?grace, "half of shutdown.grace elapsed; batches in the pool are reopened");
                    shutdown.stop.cancel();
                }
                signal = next() => {
                    tracing::warn!(%signal, "second signal; stopping at once");
                    break;
                }
                () = sleep_until(begun + grace) => {
                    tracing::error!(?grace, "shutdown.grace elapsed; stopping at once");
                    break;
                }
            }
        }
        shutdown.abort.cancel();
        // Work on a device cannot be cancelled; the process must not wait for it.
        sleep(ABORT_TIME).await;
        logs.settle();
        Exit::Interrupted.leave();
    });
    Ok(Signals { first, _listening: AbortOnDropHandle::new(listening) })
}
