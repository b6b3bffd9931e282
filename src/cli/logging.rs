//! Logging to stderr: human-readable lines or JSON.

use super::{LogArgs, json_lines::JsonLines, log_throttle, log_writer};
use crate::{
    admin::recent_warnings::FaultLayer,
    common::exit::{Exit, Failure},
    config::{Log, LogFormat, log_filter},
    service::{Logs, SetLevel},
};
use std::{
    backtrace::{Backtrace, BacktraceStatus},
    io::{self, IsTerminal, Write, stderr},
    panic::{self, PanicHookInfo},
    sync::Arc,
};
use tracing_subscriber::{
    EnvFilter, Layer, Registry, filter::LevelFilter, fmt, layer::SubscriberExt, reload, util::SubscriberInitExt,
};

/// Starts logging for the process. The command line overrides the configuration. If it sets no level, the returned handle
/// can change the level.
///
/// # Errors
/// If the filter is invalid, or a logger exists already.
pub fn start(args: &LogArgs, log: &Log) -> Result<Logs, Failure> {
    let level = level(args, log);
    let filter = checked(level).map_err(|error| {
        Failure::new(
            Exit::Usage,
            format!("--log-level {level} is not a log filter ({error}); choose error, warn, info, debug or trace"),
        )
    })?;
    let terminal = stderr().is_terminal();
    let lines = fmt::layer().with_writer(move || OverProgress::new(terminal));
    let human = !json(log.format, terminal);
    let lines: Box<dyn Layer<Registry> + Send + Sync> = if !human {
        lines.json().map_event_format(|format| log_throttle::throttled(JsonLines::new(format))).boxed()
    } else {
        lines.with_ansi(terminal).with_target(false).map_event_format(log_throttle::throttled).boxed()
    };
    let (filter, handle) = reload::Layer::new(filter);
    let faults = FaultLayer.with_filter(LevelFilter::WARN);
    let registry = tracing_subscriber::registry().with(lines.with_filter(filter)).with(faults);
    registry.try_init().map_err(Failure::of(Exit::Internal))?;
    log_writer::start(!human);
    panic::set_hook(Box::new(report_panic));
    let set_level = move |level: &str| {
        let filter = checked(level)?;
        handle.reload(filter).map_err(|error| error.to_string())
    };
    let fixed = args.log_level.is_some() || args.verbose > 0;
    let set_level = (!fixed).then(|| Arc::new(set_level) as SetLevel);
    Ok(Logs { set_level, human, settle: Some(settle) })
}

fn checked(level: &str) -> Result<EnvFilter, String> {
    match log_filter::problem(level) {
        Some(problem) => Err(problem),
        None => EnvFilter::try_new(level).map_err(|error| error.to_string()),
    }
}

/// Writes the counts of suppressed lines and the queued lines, with a time limit.
pub fn settle() {
    log_throttle::flush();
    log_writer::flush();
}

/// Text of the standard hook, which would wait for the reader of stderr.
fn report_panic(info: &PanicHookInfo<'_>) {
    let thread = std::thread::current();
    let mut text = format!("\nthread '{}' {info}\n", thread.name().unwrap_or("<unnamed>"));
    let trace = Backtrace::capture();
    match trace.status() {
        BacktraceStatus::Captured => text += &format!("stack backtrace:\n{trace}\n"),
        _ => text += "note: run with `RUST_BACKTRACE=1` environment variable to display a backtrace\n",
    }
    log_writer::write(text.into_bytes());
}

/// Writer of one event to stderr. On a terminal it first clears the line of a progress bar, which is then drawn again.
struct OverProgress(Vec<u8>);

impl OverProgress {
    fn new(terminal: bool) -> OverProgress {
        OverProgress(if terminal { b"\r\x1b[2K".to_vec() } else { Vec::new() })
    }
}

impl Write for OverProgress {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for OverProgress {
    fn drop(&mut self) {
        // A suppressed line is empty.
        if self.0.ends_with(b"\n") {
            log_writer::write(std::mem::take(&mut self.0));
        }
    }
}

fn level<'a>(args: &'a LogArgs, log: &'a Log) -> &'a str {
    match (&args.log_level, args.verbose) {
        (Some(level), _) => level,
        (None, 0) => &log.level,
        (None, 1) => "debug",
        (None, _) => "trace",
    }
}

fn json(format: LogFormat, terminal: bool) -> bool {
    match format {
        LogFormat::Auto => !terminal,
        LogFormat::Human => false,
        LogFormat::Json => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_wins_over_the_configuration() {
        let log = Log { level: "warn".into(), ..Log::default() };
        let args = |verbose, log_level: Option<&str>| LogArgs { verbose, log_level: log_level.map(Into::into) };
        assert_eq!(level(&args(0, None), &log), "warn");
        assert_eq!(level(&args(1, None), &log), "debug");
        assert_eq!(level(&args(3, None), &log), "trace");
        assert_eq!(level(&args(0, Some("error")), &log), "error");
    }

    #[test]
    fn auto_is_json_unless_on_a_terminal() {
        assert!(json(LogFormat::Auto, false) && json(LogFormat::Json, true));
        assert!(!json(LogFormat::Auto, true) && !json(LogFormat::Human, false));
    }
}
