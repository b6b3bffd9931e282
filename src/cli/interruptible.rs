//! Progress display and signals of a long command.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::{
    io::{IsTerminal, stderr},
    time::Duration,
};
use tokio::{
    runtime::Runtime,
    signal::unix::{SignalKind, signal},
    time::Instant,
};
use tokio_util::sync::CancellationToken;

/// Returns a token that SIGINT and SIGTERM cancel, and the runtime that must outlive it.
///
/// # Errors
/// If the runtime or a signal handler cannot be created.
pub fn stop_on_signal() -> std::io::Result<(Runtime, CancellationToken)> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let stop = CancellationToken::new();
    let _context = runtime.enter();
    for kind in [SignalKind::interrupt(), SignalKind::terminate()] {
        let (mut signal, stop) = (signal(kind)?, stop.clone());
        runtime.spawn(async move {
            signal.recv().await;
            stop.cancel();
        });
    }
    drop(_context);
    Ok((runtime, stop))
}

/// Progress on stderr: a bar on a terminal, else a log line at a fixed interval.
pub struct ProgressDisplay {
    bar: Option<ProgressBar>,
    every: Duration,
    last: Instant,
}

impl ProgressDisplay {
    pub fn new(every: Duration) -> ProgressDisplay {
        let style = ProgressStyle::with_template("{spinner} {percent:>3}% [{wide_bar}] {msg} {eta} left");
        let bar = stderr().is_terminal().then(|| {
            let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr_with_hz(4));
            if let Ok(style) = style {
                bar.set_style(style);
            }
            bar
        });
        ProgressDisplay { bar, every, last: Instant::now() }
    }

    /// Updates the display to `done` of `total` in any unit. `counts` describes the results; `position` replaces the bar in
    /// log lines.
    pub fn update(&mut self, done: u64, total: u64, counts: impl Fn() -> String, position: impl Fn() -> String) {
        if let Some(bar) = &self.bar {
            bar.set_length(total);
            bar.set_position(done);
            bar.set_message(counts());
        } else if self.last.elapsed() >= self.every {
            self.last = Instant::now();
            tracing::info!("{}: {}", position(), counts());
        }
    }

    /// Clears the bar.
    pub fn finish(self) {
        if let Some(bar) = self.bar {
            bar.finish_and_clear();
        }
    }
}
