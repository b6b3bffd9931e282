//! What a long command shows while it works, and the signals that end it in good order.

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

/// A token that SIGINT and SIGTERM cancel, so that nothing is left half-written. It works as long as the runtime lives.
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

/// What a person sees meanwhile: a bar on a terminal, a line every few seconds elsewhere.
pub struct Shown {
    bar: Option<ProgressBar>,
    every: Duration,
    last: Instant,
}

impl Shown {
    pub fn new(every: Duration) -> Shown {
        let style = ProgressStyle::with_template("{spinner} {percent:>3}% [{wide_bar}] {msg} {eta} left");
        let bar = stderr().is_terminal().then(|| {
            let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr_with_hz(4));
            if let Ok(style) = style {
                bar.set_style(style);
            }
            bar
        });
        Shown { bar, every, last: Instant::now() }
    }

    /// `done` of `total` in any unit; `text` says what was made, and `so_far` how far that is where there is no bar.
    pub fn update(&mut self, done: u64, total: u64, text: impl Fn() -> String, so_far: impl Fn() -> String) {
        if let Some(bar) = &self.bar {
            bar.set_length(total);
            bar.set_position(done);
            bar.set_message(text());
        } else if self.last.elapsed() >= self.every {
            self.last = Instant::now();
            tracing::info!("{}: {}", so_far(), text());
        }
    }

    /// Clears the bar.
    pub fn finish(self) {
        if let Some(bar) = self.bar {
            bar.finish_and_clear();
        }
    }
}
