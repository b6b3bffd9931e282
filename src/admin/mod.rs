//! Admin port: metrics, probes, status page and commands over HTTP.
//!
//! Listens on loopback by default. A sampler publishes a status once a second; readers get copies, so a slow reader never
//! delays the run.

mod access;
pub mod commands;
mod connections;
mod derive;
mod page;
pub mod recent_warnings;
mod routes;
pub mod run_info;
mod samples;
pub mod status;

pub use self::access::Refusal;
pub use crate::common::token::Token;
pub use connections::Limits;
pub use derive::StatusBuilder;
pub use samples::Samples;

use self::recent_warnings::Faults;
use self::{commands::Commands, run_info::RunInfo};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder};
use status::Status;
use std::{net::SocketAddr, sync::Arc, time::Duration};
use thiserror::Error;
use tokio::{
    net::{TcpListener, TcpSocket},
    sync::watch,
    time::{Instant, MissedTickBehavior, interval},
};
use tokio_util::sync::CancellationToken;

/// Interval of [`Status`] updates and of the exporter's upkeep, which moves histogram samples from buffers to buckets.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(1);

/// Send buffer of a connection in bytes.
const SEND_BUFFER: u32 = 32 << 10;
/// Connections that wait to be accepted.
const BACKLOG: u32 = 1024;

/// Error of the admin port or the metrics recorder.
#[derive(Debug, Error)]
pub enum AdminError {
    #[error("admin.listen = \"{address}\" is in use by another process; choose another port (0 = any), or \"off\"")]
    InUse { address: SocketAddr },
    #[error("admin.listen = \"{address}\" cannot be bound ({source}); choose an address of this machine, or \"off\"")]
    Bind { address: SocketAddr, source: std::io::Error },
    #[error("histogram {name} has no buckets; list at least one upper bound")]
    NoBuckets { name: String },
    #[error("a metrics recorder is already installed in this process")]
    Installed,
}

/// Binds the port. Called before a run begins, so that a port in use is reported at once.
///
/// # Errors
/// A port in use, or an address that is not this machine's.
pub async fn bind(address: SocketAddr) -> Result<TcpListener, AdminError> {
    listen(address).map_err(|source| match source.kind() {
        std::io::ErrorKind::AddrInUse => AdminError::InUse { address },
        _ => AdminError::Bind { address, source },
    })
}

fn listen(address: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    // As TcpListener::bind.
    socket.set_reuseaddr(true)?;
    // Connections inherit it. A reader of /events that stalls is noticed once the buffers are full.
    socket.set_send_buffer_size(SEND_BUFFER)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Metrics recorder with these buckets by histogram name. An unnamed histogram becomes a summary, which cannot be
/// aggregated: name every one.
///
/// # Errors
/// A histogram with an empty list of buckets.
pub fn recorder(buckets: &[(&str, &[f64])]) -> Result<PrometheusRecorder, AdminError> {
    Ok(builder(buckets)?.build_recorder())
}

fn builder(buckets: &[(&str, &[f64])]) -> Result<PrometheusBuilder, AdminError> {
    let mut builder = PrometheusBuilder::new();
    for (name, bounds) in buckets {
        builder = builder
            .set_buckets_for_metric(Matcher::Full((*name).into()), bounds)
            .map_err(|_| AdminError::NoBuckets { name: (*name).into() })?;
    }
    Ok(builder)
}

/// Installs the recorder of the process. Every series gets the label `run`, which distinguishes two consecutive runs on the
/// same port.
///
/// # Errors
/// A histogram without buckets, or a second recorder in the process.
pub fn install_recorder(run: &str, buckets: &[(&str, &[f64])]) -> Result<PrometheusHandle, AdminError> {
    let recorder = builder(buckets)?.add_global_label("run", label(run)).build_recorder();
    let handle = recorder.handle();
    metrics::set_global_recorder(recorder).map_err(|_| AdminError::Installed)?;
    Ok(handle)
}

/// Label value as the exporter expects it: metrics-exporter-prometheus 0.18 takes a backslash before a quote for an escape.
fn label(value: &str) -> String {
    value.replace('\\', "\\\\")
}

/// HTTP server of the admin port.
pub struct Server {
    pub listener: TcpListener,
    pub metrics: PrometheusHandle,
    pub info: watch::Receiver<RunInfo>,
    pub faults: watch::Receiver<Faults>,
    pub commands: Commands,
    /// Token of commands. `None` accepts commands from this machine only.
    pub token: Option<Token>,
    pub limits: Limits,
}

/// Status with its JSON, shared by all readers.
#[derive(Clone, Debug, Default)]
pub(crate) struct Published {
    /// Increases with every change.
    pub(crate) id: u64,
    pub(crate) status: Status,
    pub(crate) json: Arc<str>,
}

impl Server {
    /// Serves requests until `shutdown`, then finishes open ones.
    pub async fn run(self, shutdown: CancellationToken) {
        let (publish, published) = watch::channel(Published::default());
        let sampling = sample(self.metrics.clone(), self.info.clone(), self.faults, publish);
        let shared = routes::Shared::new(routes::Context {
            metrics: self.metrics,
            info: self.info,
            published,
            commands: self.commands,
            token: self.token,
            limits: self.limits,
            shutdown: shutdown.clone(),
        });
        let serving = connections::serve(self.listener, routes::router(shared), self.limits, shutdown);
        tokio::select! {
            () = serving => {}
            () = sampling => {}
        }
    }
}

/// Samples the metrics once a second and publishes a changed status.
async fn sample(
    metrics: PrometheusHandle,
    info: watch::Receiver<RunInfo>,
    faults: watch::Receiver<Faults>,
    publish: watch::Sender<Published>,
) {
    let mut builder = StatusBuilder::default();
    let born = Instant::now();
    let mut ticks = interval(SAMPLE_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        metrics.run_upkeep();
        let samples = Samples::parse(&metrics.render());
        let (info, faults) = (info.borrow().clone(), faults.borrow().clone());
        let status = builder.on_sample(&samples, &info, &faults, born.elapsed(), crate::common::clock::now());
        publish.send_if_modified(|old| {
            let changed = old.id == 0 || status.differs(&old.status);
            if changed {
                let json = serde_json::to_string(&status).unwrap_or_default().into();
                *old = Published { id: old.id + 1, status, json };
            }
            changed
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ANY_PORT: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 0);

    #[tokio::test]
    async fn a_port_in_use_names_the_key_to_change() {
        let first = bind(ANY_PORT).await.unwrap();
        let taken = first.local_addr().unwrap();
        let error = bind(taken).await.unwrap_err().to_string();
        assert!(error.contains(&format!("admin.listen = \"{taken}\" is in use")), "{error}");
        let elsewhere: SocketAddr = "192.0.2.1:1".parse().unwrap();
        assert!(matches!(bind(elsewhere).await, Err(AdminError::Bind { .. })));
    }

    /// Issue 17, E16.
    #[test]
    fn e16_a_label_keeps_its_backslashes() {
        for (value, text) in
            [("a\\\"b", r#"a\\\"b"#), ("a\\b\\\\", r"a\\b\\\\"), ("a\"", r#"a\""#), ("a\\\n", r"a\\\n")]
        {
            let recorder = PrometheusBuilder::new().add_global_label("run", label(value)).build_recorder();
            metrics::with_local_recorder(&recorder, || metrics::gauge!("g").set(1.0));
            let rendered = recorder.handle().render();
            assert!(rendered.contains(&format!("run=\"{text}\"")), "{value:?}: {rendered}");
        }
    }

    #[test]
    fn a_histogram_needs_buckets() {
        assert!(matches!(recorder(&[("seconds", &[])]), Err(AdminError::NoBuckets { name }) if name == "seconds"));
    }
}
