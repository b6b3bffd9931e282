//! SIGINT and SIGTERM: the first asks for an orderly end, the second stops at once.

use crate::{config::Loaded, exit::Exit};
use draftmill_actors::fault::Stops;
use std::{io, time::Duration};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::watch,
    task::JoinHandle,
    time::sleep,
};

/// Signals within this time of the first count as the same one: `timeout` and terminals signal the process and its group.
const SAME: Duration = Duration::from_secs(1);
/// Time for actors to let go once they are told to stop at once.
const LAST: Duration = Duration::from_secs(2);

/// Turns signals into stops until the handle is aborted. When `shutdown.grace` is over after the first one, it stops at once too.
pub fn listen(stops: Stops, in_force: watch::Receiver<Loaded>) -> io::Result<JoinHandle<()>> {
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let mut next = async move || {
        tokio::select! {
            _ = interrupt.recv() => "SIGINT",
            _ = terminate.recv() => "SIGTERM",
        }
    };
    Ok(tokio::spawn(async move {
        let name = next().await;
        tracing::info!("{name}: finishing the running work and writing a checkpoint; a second signal stops at once");
        stops.stop.cancel();
        let grace = in_force.borrow().config.shutdown.grace.0;
        let same = sleep(SAME);
        tokio::pin!(same);
        loop {
            tokio::select! {
                _ = next() => {}
                () = &mut same => break,
            }
        }
        tokio::select! {
            name = next() => tracing::warn!("{name} again: stopping at once"),
            () = sleep(grace.saturating_sub(SAME)) => {
                tracing::error!("shutdown.grace = {grace:?} is over: stopping at once");
            }
        }
        stops.abort.cancel();
        // Work on a device cannot be called back; the process must not wait for it.
        sleep(LAST).await;
        std::process::exit(i32::from(Exit::Interrupted.code()));
    }))
}
