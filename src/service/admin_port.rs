//! The admin port of a run: metrics, status and commands, and the samplers behind them.

use super::Failed;
use crate::{
    admin::{self, commands::Commands, run_info::RunInfo},
    check::Forecast,
    common::{
        exit::{Exit, Failure},
        process,
    },
    config::Config,
};
use draftmill_actors::runtime::{fault::Shutdown, metrics};
use tokio::{net::TcpListener, sync::watch};

/// Channels between the admin port and the configuration controller.
pub struct AdminChannels {
    pub commands: Commands,
    pub info: watch::Receiver<RunInfo>,
}

/// Installs the metrics recorder and serves the port until the returned handle is dropped.
///
/// # Errors
/// A token file that cannot be used, or a recorder that is installed already.
pub fn serve(
    listener: TcpListener,
    config: &Config,
    forecast: &Forecast,
    checkpoint_time: f64,
    AdminChannels { commands, info }: AdminChannels,
    shutdown: &Shutdown,
) -> Result<tokio_util::task::AbortOnDropHandle<()>, Failure> {
    let token =
        config.admin.token().transpose().map_err(|why| format!("admin.token_file: {why}")).failed(Exit::Config)?;
    let histograms: Vec<_> =
        metrics::TABLE.iter().filter(|s| !s.buckets.is_empty()).map(|s| (s.name, s.buckets)).collect();
    let handle = admin::install_recorder(&config.run.dir.display().to_string(), &histograms).failed(Exit::Internal)?;
    metrics::register(&metrics::Known {
        targets: config.target.devices.len(),
        drafters: config.drafter.devices.len(),
        positions: config.drafter.head.proposed_tokens(config.drafter.block_size as usize),
        buckets: forecast.buckets.iter().map(|bucket| bucket.bound).collect(),
        gpus: forecast.gpus(),
        version: env!("CARGO_PKG_VERSION"),
        planned_steps: forecast.steps,
        checkpoint_time,
    });
    let watching = process::watch(forecast.gpus());
    let faults = admin::recent_warnings::recent();
    let server =
        admin::Server { listener, metrics: handle, info, faults, commands, token, limits: admin::Limits::default() };
    let serving = server.run(shutdown.abort.clone());
    Ok(tokio_util::task::AbortOnDropHandle::new(tokio::spawn(async move {
        tokio::select! {
            () = serving => {}
            () = watching => {}
        }
    })))
}
