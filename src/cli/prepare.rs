//! `draftmill prepare`.

use super::{PrepareArgs, output};
use crate::{
    check::{Samples, Stored},
    config::{ByteSize, Config, Loaded},
    data::{PrepareError, PrepareOptions, Progress, Split, Store, grouped, prepare},
    exit::{Exit, Failure},
};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::{
    io::{IsTerminal, stderr},
    ops::ControlFlow,
    time::Duration,
};
use tokio::{
    runtime::Runtime,
    signal::unix::{SignalKind, signal},
    time::Instant,
};
use tokio_util::sync::CancellationToken;

/// Turns conversations into the store and tells what became of the rows, also where that is an error.
pub fn run(args: &PrepareArgs, loaded: &Loaded) -> Result<(), Failure> {
    let options = PrepareOptions::from(&loaded.config);
    let (_runtime, stop) = stop_on_signal().map_err(Failure::of(Exit::Internal))?;
    let mut shown = Shown::new(loaded.config.log.progress_every.0);
    let result = prepare(&options, &mut |progress| {
        shown.update(&progress);
        if stop.is_cancelled() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    shown.finish();
    if let Some(report) = result.as_ref().map_or_else(PrepareError::report, Some) {
        if args.json {
            output::print_json(report)?;
        } else {
            output::print(&report.to_string())?;
        }
    }
    result.map(drop).map_err(|error| {
        let exit = match error {
            PrepareError::Model(_) => Exit::Model,
            PrepareError::Interrupted => Exit::Interrupted,
            PrepareError::NoInputs => Exit::Config,
            _ => Exit::Data,
        };
        Failure::new(exit, error)
    })
}

/// A token that SIGINT and SIGTERM cancel, so that nothing is left half-written. It works as long as the runtime lives.
fn stop_on_signal() -> std::io::Result<(Runtime, CancellationToken)> {
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
struct Shown {
    bar: Option<ProgressBar>,
    every: Duration,
    last: Instant,
}

impl Shown {
    fn new(every: Duration) -> Shown {
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

    fn update(&mut self, progress: &Progress) {
        if let Some(bar) = &self.bar {
            bar.set_length(progress.bytes_total);
            bar.set_position(progress.bytes_read);
            bar.set_message(text(progress));
        } else if self.last.elapsed() >= self.every {
            self.last = Instant::now();
            let bytes = |bytes| ByteSize(bytes).rounded();
            let (read, total) = (bytes(progress.bytes_read), bytes(progress.bytes_total));
            tracing::info!("read {read} of {total}: {}", text(progress));
        }
    }

    /// Clears the bar.
    fn finish(self) {
        if let Some(bar) = self.bar {
            bar.finish_and_clear();
        }
    }
}

fn text(progress: &Progress) -> String {
    format!(
        "{} rows, {} samples, {} without a sample, {} tokens",
        grouped(progress.rows),
        grouped(progress.samples),
        grouped(progress.lost),
        grouped(progress.tokens)
    )
}

/// What is known of the store that the configuration names.
pub fn stored(config: &Config) -> Stored {
    let path = &config.data.store;
    if !path.exists() {
        return Stored::Absent;
    }
    match Store::open(path) {
        Ok(store) => {
            Stored::Ready(Samples { lengths: store.lengths(Split::Train), validation: store.len(Split::Validation) })
        }
        Err(error) => Stored::Broken(error.to_string()),
    }
}
