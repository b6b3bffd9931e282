//! What a start says of itself before training begins: what it will do, where to look, how to change and how to stop it.

use super::prepared_run::PreparedRun;
use crate::{
    common::text::grouped,
    config::{ByteSize, Ending, Engine, TimeSpan},
};
use draftmill_actors::pool::DrawPolicy;
use std::{
    fmt::{self, Display},
    net::SocketAddr,
    path::Path,
};

/// A start in about ten sentences.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Opening {
    trains: String,
    data: String,
    plan: String,
    pool: String,
    devices: String,
    begins: String,
    folder: String,
    page: String,
    metrics: String,
    change: String,
    stop: String,
}

impl Opening {
    /// Logs it: lines for people, one event with a field for each of them otherwise.
    pub(super) fn announce(prepared: &PreparedRun, address: Option<SocketAddr>, file: Option<&Path>, human: bool) {
        let opening = Opening::of(prepared, address, file);
        if human {
            tracing::info!("training\n{opening}");
            return;
        }
        let (targets, drafters) = prepared.workers();
        let Opening { trains, data, plan, pool, devices, begins, folder, page, metrics, change, stop } = opening;
        tracing::info!(
            run = folder,
            samples = prepared.lengths.len(),
            targets,
            drafters,
            steps = prepared.forecast.steps,
            trains,
            data,
            plan,
            pool,
            devices,
            begins,
            page,
            metrics,
            change,
            stop,
            "training"
        );
    }

    fn of(prepared: &PreparedRun, address: Option<SocketAddr>, file: Option<&Path>) -> Opening {
        let PreparedRun { loaded, forecast, .. } = prepared;
        let config = &loaded.config;
        let number = |n: u64| grouped(n);
        let url = |path| address.map_or("off (admin.listen)".into(), |address| format!("http://{address}{path}"));
        Opening {
            trains: match config.run.engine {
                Engine::Torch => format!(
                    "a drafter of {} layers, blocks of {} and {} anchors a sample, for the target in {}",
                    config.drafter.layers,
                    config.drafter.block_size,
                    config.drafter.anchors,
                    config.target.dir.display()
                ),
                Engine::Simulated => "nothing: run.engine = \"simulated\" sleeps instead of computing".into(),
            },
            data: format!(
                "{} samples with {} tokens, from {}",
                number(forecast.samples as u64),
                number(forecast.tokens),
                config.data.store.display()
            ),
            plan: format!(
                "{} steps of {}: {} of {} in {}",
                number(forecast.steps),
                some(config.micro_batches_per_step(), "micro-batch", "micro-batches"),
                some(config.run.epochs.into(), "epoch", "epochs"),
                some(forecast.jobs_per_epoch as u64, "job", "jobs"),
                some(forecast.buckets.len() as u64, "length bucket", "length buckets"),
            ),
            pool: format!(
                "at most {} and {}; {}",
                some(config.pool.max_batches.into(), "batch", "batches"),
                ByteSize(config.pool.max_bytes.0).rounded(),
                match config.pool.draw_policy {
                    DrawPolicy::Replay => "drawn in an order that plan and seed fix".into(),
                    DrawPolicy::Proportional | DrawPolicy::Uniform =>
                        format!("a draw waits until {}", some_are(config.pool.min_ready.into())),
                }
            ),
            devices: format!(
                "{} on {}; {} on {}",
                some(config.target.devices.len() as u64, "target", "targets"),
                list(&config.target.devices),
                some(config.drafter.devices.len() as u64, "drafter", "drafters"),
                list(&config.drafter.devices),
            ),
            begins: prepared.resumed().unwrap_or_else(|| "at the beginning".into()),
            folder: config.run.dir.display().to_string(),
            page: url("/"),
            metrics: url("/metrics"),
            change: match file {
                None => "only by a restart: it was started without --config".into(),
                Some(file) if config.reload.poll.0.is_zero() => {
                    format!("edit {} and send SIGHUP to process {}", file.display(), std::process::id())
                }
                Some(file) => format!("edit {}; SIGHUP has it read at once", file.display()),
            },
            stop: format!(
                "Ctrl-C or SIGTERM: a checkpoint within {}{}; twice: at once",
                TimeSpan(config.shutdown.grace.0),
                match config.shutdown.pool {
                    Ending::Reopen => "",
                    Ending::Train => ", what is in the pool trained",
                }
            ),
        }
    }
}

impl Display for Opening {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows = [
            ("trains", &self.trains),
            ("data", &self.data),
            ("plan", &self.plan),
            ("pool", &self.pool),
            ("devices", &self.devices),
            ("begins", &self.begins),
            ("folder", &self.folder),
            ("page", &self.page),
            ("metrics", &self.metrics),
            ("change", &self.change),
            ("stop", &self.stop),
        ];
        let lines: Vec<_> = rows.iter().map(|(name, text)| format!("  {name:<9}{text}")).collect();
        f.write_str(&lines.join("\n"))
    }
}

/// "1 job", "2 jobs".
fn some(count: u64, one: &str, more: &str) -> String {
    format!("{} {}", grouped(count), if count == 1 { one } else { more })
}

fn some_are(ready: u64) -> String {
    format!("{} {} ready", some(ready, "batch", "batches"), if ready == 1 { "is" } else { "are" })
}

/// "cpu", "cpu, cuda:0".
fn list(devices: &[impl Display]) -> String {
    devices.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lines_stand_below_each_other() {
        let opening = Opening { trains: "a drafter".into(), stop: "Ctrl-C".into(), ..Opening::default() };
        let text = opening.to_string();
        assert_eq!(text.lines().count(), 11);
        assert!(
            text.starts_with("  trains   a drafter\n  data     ") && text.ends_with("\n  stop     Ctrl-C"),
            "{text}"
        );
        assert_eq!((some(1, "job", "jobs"), some(2000, "job", "jobs")), ("1 job".into(), "2,000 jobs".into()));
        assert_eq!((some_are(1), some_are(4)), ("1 batch is ready".into(), "4 batches are ready".into()));
    }
}
