//! Notifications to the service manager, see sd_notify(3): readiness, status, watchdog and shutdown.
//!
//! The watchdog message is sent by a tokio task, so it stops if the runtime hangs. Without `$NOTIFY_SOCKET` nothing is sent.

use crate::{admin::run_info::RunInfo, check::pipeline_settings::RunProgress};
use std::{
    env,
    ffi::OsStr,
    io,
    os::{
        linux::net::SocketAddrExt,
        unix::{
            ffi::OsStrExt,
            net::{SocketAddr, UnixDatagram},
        },
    },
    path::Path,
    time::Duration,
};
use tokio::{
    sync::watch,
    time::{Instant, interval, sleep_until},
};
use tokio_util::sync::CancellationToken;

/// Interval of status updates, and of timeout extensions during the shutdown.
const INTERVAL: Duration = Duration::from_secs(5);
/// Requested timeout extension. The service itself ends within `shutdown.grace`.
const EXTENSION: Duration = Duration::from_secs(3 * INTERVAL.as_secs());

/// Connection to the service manager.
#[derive(Debug)]
pub struct ServiceManager {
    socket: UnixDatagram,
    address: SocketAddr,
    /// Silence after which the service manager kills the service.
    watchdog: Option<Duration>,
}

impl ServiceManager {
    /// Service manager of this process; `None` without `$NOTIFY_SOCKET`.
    pub fn from_env() -> Option<ServiceManager> {
        let name = env::var_os("NOTIFY_SOCKET").filter(|name| !name.is_empty())?;
        let text = |name| env::var(name).ok();
        let watchdog = watchdog(text("WATCHDOG_USEC"), text("WATCHDOG_PID"), std::process::id());
        match ServiceManager::at(&name, watchdog) {
            Ok(manager) => Some(manager),
            Err(error) => {
                tracing::warn!(%error, socket = ?name, "service manager at $NOTIFY_SOCKET unreachable");
                None
            }
        }
    }

    /// Service manager at socket `name`: an absolute path, or `@` and an abstract name.
    fn at(name: &OsStr, watchdog: Option<Duration>) -> io::Result<ServiceManager> {
        let address = match name.as_bytes().strip_prefix(b"@") {
            Some(name) => SocketAddr::from_abstract_name(name)?,
            None if Path::new(name).is_absolute() => SocketAddr::from_pathname(name)?,
            None => return Err(io::Error::other("neither an absolute path nor an abstract name")),
        };
        let socket = UnixDatagram::unbound()?;
        // A manager that does not read must not block a worker of the runtime.
        socket.set_nonblocking(true)?;
        Ok(ServiceManager { socket, address, watchdog })
    }

    /// Notifies the manager until the future is dropped. Reports readiness now, and the shutdown when `close` is cancelled.
    pub async fn run(
        self,
        info: watch::Receiver<RunInfo>,
        position: watch::Receiver<RunProgress>,
        close: CancellationToken,
    ) {
        let status = |ending| status(&info.borrow(), position.borrow().step, ending);
        let mut sent = status(false);
        self.send(&format!("READY=1\nSTATUS={sent}"));
        let mut ticks = interval(INTERVAL);
        let mut ending = false;
        let mut last_watchdog = Instant::now();
        loop {
            tokio::select! {
                biased;
                () = close.cancelled(), if !ending => {
                    ending = true;
                    sent = status(ending);
                    self.send(&format!("STOPPING=1\nSTATUS={sent}"));
                }
                () = watchdog_due(last_watchdog, self.watchdog) => {
                    last_watchdog = Instant::now();
                    self.send("WATCHDOG=1");
                }
                _ = ticks.tick() => {
                    if ending {
                        self.send(&format!("EXTEND_TIMEOUT_USEC={}", EXTENSION.as_micros()));
                    }
                    let now = status(ending);
                    if now != sent {
                        self.send(&format!("STATUS={now}"));
                        sent = now;
                    }
                }
            }
        }
    }

    fn send(&self, state: &str) {
        if let Err(error) = self.socket.send_to_addr(state.as_bytes(), &self.address) {
            tracing::debug!(%error, state, "notification to the service manager failed");
        }
    }
}

/// Waits for half of the watchdog's time; forever without a watchdog.
async fn watchdog_due(last: Instant, watchdog: Option<Duration>) {
    match watchdog {
        Some(watchdog) => sleep_until(last + watchdog / 2).await,
        None => std::future::pending().await,
    }
}

fn status(info: &RunInfo, step: u64, ending: bool) -> String {
    let position = format!("step {step} of {}", info.planned_steps);
    match (ending, info.paused) {
        (true, _) => format!("stopping at {position}: finishing work in progress and writing a checkpoint"),
        (false, true) => format!("paused at {position}"),
        (false, false) => format!("training, {position}"),
    }
}

/// Watchdog time, if the watchdog applies to the process with id `this`.
fn watchdog(usec: Option<String>, pid: Option<String>, this: u32) -> Option<Duration> {
    let applies = pid.is_none_or(|pid| pid.parse() == Ok(this));
    let time = Duration::from_micros(usec?.parse().ok()?);
    (applies && !time.is_zero()).then_some(time)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_watchdog_applies_to_its_process_only() {
        let of = |usec: &str, pid: Option<&str>| watchdog(Some(usec.into()), pid.map(Into::into), 7);
        assert_eq!(of("30000000", None), Some(Duration::from_secs(30)));
        assert_eq!(of("30000000", Some("7")), Some(Duration::from_secs(30)));
        assert_eq!((of("30000000", Some("8")), of("0", None), of("soon", None)), (None, None, None));
        assert_eq!(watchdog(None, None, 7), None);
    }

    #[test]
    fn other_sockets_are_refused() {
        for name in ["relative", "vsock:2:1234"] {
            assert!(ServiceManager::at(OsStr::new(name), None).is_err(), "{name}");
        }
    }

    fn received(manager: &UnixDatagram) -> Vec<String> {
        let mut buffer = [0; 4096];
        let mut all = Vec::new();
        while let Ok(n) = manager.recv(&mut buffer) {
            all.push(String::from_utf8(buffer[..n].to_vec()).unwrap());
        }
        all
    }

    #[tokio::test(start_paused = true)]
    async fn the_manager_receives_readiness_status_watchdog_and_shutdown() {
        let name = format!("draftmill-test-{}", std::process::id());
        let manager = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
        manager.set_nonblocking(true).unwrap();
        let service = ServiceManager::at(OsStr::new(&format!("@{name}")), Some(Duration::from_secs(4))).unwrap();
        let (info, reader) = watch::channel(RunInfo { planned_steps: 90, ..RunInfo::default() });
        let (reached, position) = watch::channel(RunProgress::default());
        let close = CancellationToken::new();
        let task = tokio::spawn(service.run(reader, position, close.clone()));
        let pass = async |ms| tokio::time::sleep(Duration::from_millis(ms)).await;
        pass(1).await;
        assert_eq!(received(&manager), ["READY=1\nSTATUS=training, step 0 of 90"]);
        pass(1_998).await;
        assert!(received(&manager).is_empty());
        reached.send_replace(RunProgress { step: 3, micro_batches: 6 });
        pass(4_000).await;
        assert_eq!(received(&manager), ["WATCHDOG=1", "WATCHDOG=1", "STATUS=training, step 3 of 90"]);
        info.send_modify(|info| info.paused = true);
        pass(5_000).await;
        assert_eq!(received(&manager), ["WATCHDOG=1", "WATCHDOG=1", "WATCHDOG=1", "STATUS=paused at step 3 of 90"]);
        close.cancel();
        pass(1).await;
        let [stopping] = &received(&manager)[..] else { panic!("expected one message") };
        assert!(stopping.starts_with("STOPPING=1\nSTATUS=stopping at step 3 of 90"), "{stopping}");
        pass(5_000).await;
        let messages = received(&manager);
        assert!(messages.contains(&"EXTEND_TIMEOUT_USEC=15000000".to_owned()), "{messages:?}");
        assert!(messages.contains(&"WATCHDOG=1".to_owned()), "{messages:?}");
        task.abort();
    }
}
