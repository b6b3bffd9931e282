//! The admin port: `/metrics` for Prometheus and `/livez`, on loopback unless the configuration says otherwise.

use axum::{Router, http::header::CONTENT_TYPE, routing::get};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder};
use std::{future::Future, net::SocketAddr, time::Duration};
use thiserror::Error;
use tokio::net::TcpListener;

/// How often samples of histograms move from their buffers into buckets, also when nobody scrapes.
const UPKEEP: Duration = Duration::from_secs(5);

/// The exposition format that `PrometheusHandle::render` writes.
const PROMETHEUS_TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";

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

/// Answers requests until `shutdown` is ready; then ends what is under way and returns.
pub async fn serve(
    listener: TcpListener,
    handle: PrometheusHandle,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> std::io::Result<()> {
    let rendered = handle.clone();
    let router = Router::new()
        .route("/metrics", get(move || async move { ([(CONTENT_TYPE, PROMETHEUS_TEXT)], rendered.render()) }))
        .route("/livez", get(|| async { "ok\n" }));
    let upkeep = async {
        let mut ticks = tokio::time::interval(UPKEEP);
        loop {
            ticks.tick().await;
            handle.run_upkeep();
        }
    };
    tokio::select! {
        served = axum::serve(listener, router).with_graceful_shutdown(shutdown) => served,
        () = upkeep => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use metrics::{counter, histogram, with_local_recorder};
    use std::{
        io::{Read, Write},
        net::TcpStream,
    };
    use tokio::{sync::oneshot, task::spawn_blocking};

    const ANY_PORT: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 0);

    /// One raw request from a blocking thread.
    async fn request(address: SocketAddr, path: &'static str) -> String {
        spawn_blocking(move || {
            let mut stream = TcpStream::connect(address).unwrap();
            write!(stream, "GET {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n").unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).unwrap();
            answer
        })
        .await
        .unwrap()
    }

    #[tokio::test]
    async fn metrics_are_served_until_shutdown() {
        let recorder = recorder(&[("seconds", &[0.1, 1.0])]).unwrap();
        with_local_recorder(&recorder, || {
            counter!("jobs_total", "outcome" => "trained").increment(3);
            histogram!("seconds").record(0.5);
        });
        let listener = bind(ANY_PORT).await.unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        let shutdown = async move { drop(stopped.await) };
        let server = tokio::spawn(serve(listener, recorder.handle(), shutdown));

        let answer = request(address, "/metrics").await;
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
        for line in [
            "content-type: text/plain; version=0.0.4",
            "jobs_total{outcome=\"trained\"} 3\n",
            "seconds_bucket{le=\"0.1\"} 0\n",
            "seconds_bucket{le=\"1\"} 1\n",
            "seconds_count 1\n",
        ] {
            assert!(answer.contains(line), "{line} is not in\n{answer}");
        }
        assert!(request(address, "/livez").await.ends_with("\r\n\r\nok\n"));
        assert!(request(address, "/other").await.starts_with("HTTP/1.1 404"));

        stop.send(()).unwrap();
        server.await.unwrap().unwrap();
        assert!(TcpStream::connect(address).is_err());
    }

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
