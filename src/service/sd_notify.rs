//! Tells a service manager how the service is: sd_notify's datagrams, with a watchdog that is fed as long as the runtime answers.
//!
//! See sd_notify(3). Without `$NOTIFY_SOCKET` nobody is told anything.

use crate::{admin::run_info::Facts, check::pipeline_settings::Place};
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

/// Time between looks whether the status has changed, and between pleas for more time while the service ends.
const EVERY: Duration = Duration::from_secs(5);
/// What a plea asks for. The service itself ends when `shutdown.grace` is over.
const MORE: Duration = Duration::from_secs(3 * EVERY.as_secs());

/// The service manager.
#[derive(Debug)]
pub struct Manager {
    socket: UnixDatagram,
    address: SocketAddr,
    /// It kills a service that is silent for so long.
    watchdog: Option<Duration>,
}

impl Manager {
    /// The manager that started this process and wants to hear of it.
    pub fn of_this_process() -> Option<Manager> {
        let name = env::var_os("NOTIFY_SOCKET").filter(|name| !name.is_empty())?;
        let text = |name| env::var(name).ok();
        let watchdog = watchdog(text("WATCHDOG_USEC"), text("WATCHDOG_PID"), std::process::id());
        match Manager::at(&name, watchdog) {
            Ok(manager) => Some(manager),
            Err(error) => {
                tracing::warn!(%error, socket = ?name, "the service manager at $NOTIFY_SOCKET cannot be told anything");
                None
            }
        }
    }

    /// `name`: a path, or `@` and an abstract name.
    fn at(name: &OsStr, watchdog: Option<Duration>) -> io::Result<Manager> {
        let address = match name.as_bytes().strip_prefix(b"@") {
            Some(name) => SocketAddr::from_abstract_name(name)?,
            None if Path::new(name).is_absolute() => SocketAddr::from_pathname(name)?,
            None => return Err(io::Error::other("it is neither an absolute path nor an abstract name")),
        };
        let socket = UnixDatagram::unbound()?;
        // A manager that does not read must not hold a worker of the runtime.
        socket.set_nonblocking(true)?;
        Ok(Manager { socket, address, watchdog })
    }

    /// Keeps the manager informed until it is dropped: the service is up now, and ends from `close` on.
    pub async fn keep(self, facts: watch::Receiver<Facts>, place: watch::Receiver<Place>, close: CancellationToken) {
        let status = |ending| status(&facts.borrow(), place.borrow().step, ending);
        let mut told = status(false);
        self.tell(&format!("READY=1\nSTATUS={told}"));
        let mut looks = interval(EVERY);
        let mut ending = false;
        let mut fed = Instant::now();
        loop {
            tokio::select! {
                biased;
                () = close.cancelled(), if !ending => {
                    ending = true;
                    told = status(ending);
                    self.tell(&format!("STOPPING=1\nSTATUS={told}"));
                }
                () = until(fed, self.watchdog) => {
                    fed = Instant::now();
                    self.tell("WATCHDOG=1");
                }
                _ = looks.tick() => {
                    if ending {
                        self.tell(&format!("EXTEND_TIMEOUT_USEC={}", MORE.as_micros()));
                    }
                    let now = status(ending);
                    if now != told {
                        self.tell(&format!("STATUS={now}"));
                        told = now;
                    }
                }
            }
        }
    }

    fn tell(&self, state: &str) {
        if let Err(error) = self.socket.send_to_addr(state.as_bytes(), &self.address) {
            tracing::debug!(%error, state, "the service manager did not hear this");
        }
    }
}

/// When the watchdog wants to hear again: twice as often as it must.
async fn until(fed: Instant, watchdog: Option<Duration>) {
    match watchdog {
        Some(watchdog) => sleep_until(fed + watchdog / 2).await,
        None => std::future::pending().await,
    }
}

fn status(facts: &Facts, step: u64, ending: bool) -> String {
    let place = format!("step {step} of {}", facts.planned_steps);
    match (ending, facts.paused) {
        (true, _) => format!("ending at {place}: finishing the running work and writing a checkpoint"),
        (false, true) => format!("paused at {place}"),
        (false, false) => format!("training, {place}"),
    }
}

/// The time after which the process counts as hung, where the watchdog means this process.
fn watchdog(usec: Option<String>, pid: Option<String>, this: u32) -> Option<Duration> {
    let meant = pid.is_none_or(|pid| pid.parse() == Ok(this));
    let time = Duration::from_micros(usec?.parse().ok()?);
    (meant && !time.is_zero()).then_some(time)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_watchdog_is_fed_by_the_process_that_it_means() {
        let of = |usec: &str, pid: Option<&str>| watchdog(Some(usec.into()), pid.map(Into::into), 7);
        assert_eq!(of("30000000", None), Some(Duration::from_secs(30)));
        assert_eq!(of("30000000", Some("7")), Some(Duration::from_secs(30)));
        assert_eq!((of("30000000", Some("8")), of("0", None), of("soon", None)), (None, None, None));
        assert_eq!(watchdog(None, None, 7), None);
    }

    #[test]
    fn other_sockets_are_refused() {
        for name in ["relative", "vsock:2:1234"] {
            assert!(Manager::at(OsStr::new(name), None).is_err(), "{name}");
        }
    }

    fn heard(manager: &UnixDatagram) -> Vec<String> {
        let mut buffer = [0; 4096];
        let mut all = Vec::new();
        while let Ok(n) = manager.recv(&mut buffer) {
            all.push(String::from_utf8(buffer[..n].to_vec()).unwrap());
        }
        all
    }

    #[tokio::test(start_paused = true)]
    async fn the_manager_hears_of_start_progress_life_and_end() {
        let name = format!("draftmill-test-{}", std::process::id());
        let manager = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
        manager.set_nonblocking(true).unwrap();
        let service = Manager::at(OsStr::new(&format!("@{name}")), Some(Duration::from_secs(4))).unwrap();
        let (facts, told) = watch::channel(Facts { planned_steps: 90, ..Facts::default() });
        let (reached, place) = watch::channel(Place::default());
        let close = CancellationToken::new();
        let keeping = tokio::spawn(service.keep(told, place, close.clone()));
        let pass = async |ms| tokio::time::sleep(Duration::from_millis(ms)).await;
        pass(1).await;
        assert_eq!(heard(&manager), ["READY=1\nSTATUS=training, step 0 of 90"]);
        pass(1_998).await;
        assert!(heard(&manager).is_empty());
        reached.send_replace(Place { step: 3, micro_batches: 6 });
        pass(4_000).await;
        assert_eq!(heard(&manager), ["WATCHDOG=1", "WATCHDOG=1", "STATUS=training, step 3 of 90"]);
        facts.send_modify(|facts| facts.paused = true);
        pass(5_000).await;
        assert_eq!(heard(&manager), ["WATCHDOG=1", "WATCHDOG=1", "WATCHDOG=1", "STATUS=paused at step 3 of 90"]);
        close.cancel();
        pass(1).await;
        let [stopping] = &heard(&manager)[..] else { panic!("one message tells of the end") };
        assert!(stopping.starts_with("STOPPING=1\nSTATUS=ending at step 3 of 90"), "{stopping}");
        pass(5_000).await;
        let said = heard(&manager);
        assert!(said.contains(&"EXTEND_TIMEOUT_USEC=15000000".to_owned()), "{said:?}");
        assert!(said.contains(&"WATCHDOG=1".to_owned()), "{said:?}");
        keeping.abort();
    }
}
