//! Startup banner: plan, devices, resume point and addresses of a run, and how to reload and stop it.

use super::prepared_run::PreparedRun;
use crate::{
    common::text::counted,
    config::{ByteSize, Engine, PoolAtShutdown, TimeSpan},
};
use draftmill_actors::pool::DrawPolicy;
use std::{
    fmt::{self, Display},
    net::SocketAddr,
    path::Path,
};

/// Startup banner, one text for each line.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StartupBanner {
    drafter: String,
    data: String,
    plan: String,
    pool: String,
    devices: String,
    start: String,
    folder: String,
    page: String,
    metrics: String,
    reload: String,
    stop: String,
}

impl StartupBanner {
    /// Logs the banner: as lines in the human format, else as one event with a field for each line.
    pub(super) fn log(prepared: &PreparedRun, address: Option<SocketAddr>, file: Option<&Path>, human: bool) {
        let banner = StartupBanner::of(prepared, address, file);
        if human {
            tracing::info!("training\n{banner}");
            return;
        }
        let (targets, drafters) = prepared.workers();
        let StartupBanner { drafter, data, plan, pool, devices, start, folder, page, metrics, reload, stop } = banner;
        tracing::info!(
            run = folder,
            samples = prepared.lengths.len(),
            targets,
            drafters,
            steps = prepared.forecast.steps,
            drafter,
            data,
            plan,
            pool,
            devices,
            start,
            page,
            metrics,
            reload,
            stop,
            "training"
        );
    }

    fn of(prepared: &PreparedRun, address: Option<SocketAddr>, file: Option<&Path>) -> StartupBanner {
        let PreparedRun { loaded, forecast, .. } = prepared;
        let config = &loaded.config;
        let url = |path| address.map_or("off (admin.listen)".into(), |address| format!("http://{address}{path}"));
        StartupBanner {
            drafter: match config.run.engine {
                Engine::Torch => format!(
                    "{}, blocks of {}, {} per sample, for the target in {}",
                    counted(config.drafter.layers.into(), "layer"),
                    config.drafter.block_size,
                    counted(config.drafter.anchors.into(), "anchor"),
                    config.target.dir.display()
                ),
                Engine::Simulated => "none: run.engine = \"simulated\" sleeps instead of computing".into(),
            },
            data: format!(
                "{}, {} from {}",
                counted(forecast.samples as u64, "sample"),
                counted(forecast.tokens, "token"),
                config.data.store.display()
            ),
            plan: format!(
                "{} of {}: {} of {} in {}",
                counted(forecast.steps, "step"),
                counted(config.micro_batches_per_step(), "micro-batch"),
                counted(config.run.epochs.into(), "epoch"),
                counted(forecast.jobs_per_epoch as u64, "job"),
                counted(forecast.buckets.len() as u64, "length bucket"),
            ),
            pool: format!(
                "at most {} and {}; {}",
                counted(config.pool.max_batches.into(), "batch"),
                ByteSize(config.pool.max_bytes.0).rounded(),
                match config.pool.draw_policy {
                    DrawPolicy::Replay => "plan and seed determine the draw order".into(),
                    DrawPolicy::Proportional | DrawPolicy::Uniform =>
                        format!("a draw needs {}", counted(config.pool.min_ready.into(), "ready batch")),
                }
            ),
            devices: format!(
                "{} on {}; {} on {}",
                counted(config.target.devices.len() as u64, "target"),
                list(&config.target.devices),
                counted(config.drafter.devices.len() as u64, "drafter"),
                list(&config.drafter.devices),
            ),
            start: prepared.resumed().unwrap_or_else(|| "from the beginning".into()),
            folder: config.run.dir.display().to_string(),
            page: url("/"),
            metrics: url("/metrics"),
            reload: match file {
                None => "impossible: started without --config".into(),
                Some(file) if config.reload.poll.0.is_zero() => {
                    format!("edit {} and send SIGHUP to process {}", file.display(), std::process::id())
                }
                Some(file) => format!("edit {}; SIGHUP reloads it at once", file.display()),
            },
            stop: format!(
                "Ctrl-C or SIGTERM: with a checkpoint within {}{}; twice: at once",
                TimeSpan(config.shutdown.grace.0),
                match config.shutdown.pool {
                    PoolAtShutdown::Reopen => "",
                    PoolAtShutdown::Train => ", after training the pool's batches",
                }
            ),
        }
    }
}

impl Display for StartupBanner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows = [
            ("drafter", &self.drafter),
            ("data", &self.data),
            ("plan", &self.plan),
            ("pool", &self.pool),
            ("devices", &self.devices),
            ("start", &self.start),
            ("folder", &self.folder),
            ("page", &self.page),
            ("metrics", &self.metrics),
            ("reload", &self.reload),
            ("stop", &self.stop),
        ];
        let lines: Vec<_> = rows.iter().map(|(name, text)| format!("  {name:<9}{text}")).collect();
        f.write_str(&lines.join("\n"))
    }
}

/// Devices as a list: `cpu, cuda:0`.
fn list(devices: &[impl Display]) -> String {
    devices.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_banner_has_aligned_lines() {
        let banner = StartupBanner { drafter: "5 layers".into(), stop: "Ctrl-C".into(), ..StartupBanner::default() };
        let text = banner.to_string();
        assert_eq!(text.lines().count(), 11);
        assert!(
            text.starts_with("  drafter  5 layers\n  data     ") && text.ends_with("\n  stop     Ctrl-C"),
            "{text}"
        );
    }
}
