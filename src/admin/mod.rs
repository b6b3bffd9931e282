//! The admin port: what a run does, for Prometheus, probes, programs and people, and the orders that it takes from them.
//!
//! On loopback unless the configuration says otherwise. Whoever reads gets copies that a sampler makes once a second, so that no
//! reader, however slow, is ever waited for.

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
pub use derive::Derivation;
pub use samples::Samples;

use self::recent_warnings::Faults;
use self::{commands::Orders, run_info::Facts};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder};
use status::Status;
use std::{net::SocketAddr, sync::Arc, time::Duration};
use thiserror::Error;
use tokio::{
    net::TcpListener,
    sync::watch,
    time::{Instant, MissedTickBehavior, interval},
};
use tokio_util::sync::CancellationToken;

/// How often samples of histograms move from their buffers into buckets, also when nobody scrapes, and how often there is a
/// new [`Status`].
const SAMPLE: Duration = Duration::from_secs(1);

#[derive(Debug, Error)]
pub enum AdminError {
    #[error("admin.listen = \"{address}\" is in use by another process; choose another port (0 = any), or \"off\"")]
    InUse { address: SocketAddr },
    #[error(
        "admin.listen = \"{address}\" cannot be listened on ({source}); choose an address of this machine, or \"off\""
    )]
    Bind { address: SocketAddr, source: std::io::Error },
    #[error("histogram {name} has no buckets; list at least one upper bound")]
    NoBuckets { name: String },
    #[error("a metrics recorder is already installed in this process")]
    Installed,
}

/// Takes the port. Done before a run begins, so that a port in use is told at once.
pub async fn bind(address: SocketAddr) -> Result<TcpListener, AdminError> {
    TcpListener::bind(address).await.map_err(|source| match source.kind() {
        std::io::ErrorKind::AddrInUse => AdminError::InUse { address },
        _ => AdminError::Bind { address, source },
    })
}

/// A recorder whose histograms have the buckets given by name. A histogram that is not named becomes a summary, which
/// cannot be aggregated: name every one.
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

/// Makes [`recorder`] the recorder of the whole process. Every series gets the label `run`: two runs that listen on one port,
/// one after the other, are two.
pub fn install_recorder(run: &str, buckets: &[(&str, &[f64])]) -> Result<PrometheusHandle, AdminError> {
    let recorder = builder(buckets)?.add_global_label("run", run).build_recorder();
    let handle = recorder.handle();
    metrics::set_global_recorder(recorder).map_err(|_| AdminError::Installed)?;
    Ok(handle)
}

/// The admin port and all that it tells and takes.
pub struct Server {
    pub listener: TcpListener,
    pub metrics: PrometheusHandle,
    pub facts: watch::Receiver<Facts>,
    pub faults: watch::Receiver<Faults>,
    pub orders: Orders,
    /// Without one, orders are taken from this machine alone: give one where others reach the port.
    pub token: Option<Token>,
    pub limits: Limits,
}

/// A status and its JSON, as every reader gets it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Published {
    /// Grows with every change.
    pub(crate) id: u64,
    pub(crate) status: Status,
    pub(crate) json: Arc<str>,
}

impl Server {
    /// Answers requests until `shutdown`; then ends what is under way and returns.
    pub async fn run(self, shutdown: CancellationToken) {
        let (publish, published) = watch::channel(Published::default());
        let sampling = sample(self.metrics.clone(), self.facts.clone(), self.faults, publish);
        let shared = routes::Shared::new(routes::Parts {
            metrics: self.metrics,
            facts: self.facts,
            published,
            orders: self.orders,
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

/// Looks once a second and publishes what has changed.
async fn sample(
    metrics: PrometheusHandle,
    facts: watch::Receiver<Facts>,
    faults: watch::Receiver<Faults>,
    publish: watch::Sender<Published>,
) {
    let mut derivation = Derivation::default();
    let born = Instant::now();
    let mut ticks = interval(SAMPLE);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        metrics.run_upkeep();
        let samples = Samples::parse(&metrics.render());
        let (facts, faults) = (facts.borrow().clone(), faults.borrow().clone());
        let status = derivation.on_sample(&samples, &facts, &faults, born.elapsed(), crate::common::clock::now());
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

    #[test]
    fn a_histogram_needs_buckets() {
        assert!(matches!(recorder(&[("seconds", &[])]), Err(AdminError::NoBuckets { name }) if name == "seconds"));
    }
}
