//! Log throttle: limits the lines of each warning per time window, and logs the number of suppressed lines at its end.
//!
//! A warning is identified by its call site.

use std::{
    fmt::{self, Write},
    sync::PoisonError,
    time::Duration,
};
use tokio::time::Instant;
use tracing::{
    Event, Level, Subscriber,
    callsite::Identifier,
    field::{Field, Visit},
};
use tracing_subscriber::{
    fmt::{FmtContext, FormatEvent, FormatFields, format::Writer},
    registry::LookupSpan,
};

#[allow(clippy::disallowed_types, reason = "the log is written from any thread, and is no actor")]
type Lock<T> = std::sync::Mutex<T>;

/// Maximum lines of one warning in a window.
const MAX_LINES: u64 = 10;
const WINDOW: Duration = Duration::from_secs(10);
/// Time between checks for ended windows.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum warnings with a window. Further warnings are not throttled.
const MAX_WINDOWS: usize = 256;
/// Maximum stored text of a suppressed line, in bytes.
const MAX_TEXT: usize = 300;
/// Log target of the throttle's own lines, which are never suppressed.
const TARGET: &str = "draftmill::log_throttle";

static PROCESS: Lock<Throttle> = Lock::new(Throttle::new(false));

/// Logs the suppressed lines of all open windows, at the end of the process.
pub fn flush() {
    report(with(&PROCESS, Throttle::all));
}

/// Throttles the warnings that `lines` formats.
pub fn throttled<F>(lines: F) -> Throttled<F> {
    Throttled { lines, throttle: &PROCESS }
}

/// Event format that writes nothing for a suppressed warning or error, and all other events.
///
/// A filter cannot do this: tracing-subscriber 0.3.23 counts wrongly if a filter refuses an event late.
pub struct Throttled<F> {
    lines: F,
    throttle: &'static Lock<Throttle>,
}

impl<S, N, F> FormatEvent<S, N> for Throttled<F>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(&self, context: &FmtContext<'_, S, N>, writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        match self.admit(event) {
            true => self.lines.format_event(context, writer, event),
            false => Ok(()),
        }
    }
}

impl<F> Throttled<F> {
    fn admit(&self, event: &Event<'_>) -> bool {
        let metadata = event.metadata();
        // A more verbose level is greater.
        if *metadata.level() > Level::WARN || metadata.target() == TARGET {
            return true;
        }
        with(self.throttle, |throttle| {
            let admitted = throttle.admit(metadata.callsite(), Instant::now(), || Text::of(event));
            if !admitted && !std::mem::replace(&mut throttle.watched, true) {
                // The thread lives as long as the process. If it cannot start, `flush` logs the count.
                let _ = std::thread::Builder::new().name("log throttle".into()).spawn(|| {
                    loop {
                        std::thread::sleep(CHECK_INTERVAL);
                        report(with(&PROCESS, |throttle| throttle.ended(Instant::now())));
                    }
                });
            }
            admitted
        })
    }
}

fn with<T>(throttle: &Lock<Throttle>, work: impl FnOnce(&mut Throttle) -> T) -> T {
    work(&mut throttle.lock().unwrap_or_else(PoisonError::into_inner))
}

fn report(suppressed: Vec<Suppressed>) {
    for Suppressed { lines, last } in suppressed {
        tracing::warn!(target: TARGET, lines, last, "repeated warnings suppressed");
    }
}

/// Suppressed lines of one warning.
#[derive(Debug, PartialEq)]
struct Suppressed {
    lines: u64,
    last: String,
}

#[derive(Debug)]
struct Window {
    callsite: Identifier,
    since: Instant,
    logged: u64,
    suppressed: Suppressed,
}

impl Window {
    fn end(self) -> Option<Suppressed> {
        (self.suppressed.lines > 0).then_some(self.suppressed)
    }
}

/// Windows of the recent warnings.
#[derive(Debug)]
struct Throttle {
    windows: Vec<Window>,
    /// True if a thread checks for ended windows.
    watched: bool,
}

impl Throttle {
    const fn new(watched: bool) -> Throttle {
        Throttle { windows: Vec::new(), watched }
    }

    /// Returns true if the line is logged. Otherwise counts it.
    fn admit(&mut self, callsite: Identifier, now: Instant, text: impl FnOnce() -> String) -> bool {
        // An ended window without suppressed lines has nothing to report.
        self.windows.retain(|window| window.suppressed.lines > 0 || now < window.since + WINDOW);
        let open = self.windows.len();
        match self.windows.iter_mut().find(|window| window.callsite == callsite) {
            Some(window) if window.logged >= MAX_LINES => {
                window.suppressed = Suppressed { lines: window.suppressed.lines + 1, last: text() };
                return false;
            }
            Some(window) => window.logged += 1,
            None if open < MAX_WINDOWS => {
                let suppressed = Suppressed { lines: 0, last: String::new() };
                self.windows.push(Window { callsite, since: now, logged: 1, suppressed });
            }
            None => {}
        }
        true
    }

    /// Removes the ended windows and returns their suppressed lines. Their warnings are logged again.
    fn ended(&mut self, now: Instant) -> Vec<Suppressed> {
        self.windows.extract_if(.., |window| now >= window.since + WINDOW).filter_map(Window::end).collect()
    }

    fn all(&mut self) -> Vec<Suppressed> {
        self.windows.drain(..).filter_map(Window::end).collect()
    }
}

/// Text of an event: "message name=value ...", up to [`MAX_TEXT`] bytes.
#[derive(Default)]
struct Text {
    message: String,
    fields: String,
}

impl Text {
    fn of(event: &Event<'_>) -> String {
        let mut text = Text::default();
        event.record(&mut text);
        let mut whole = text.message + &text.fields;
        whole.truncate(whole.floor_char_boundary(MAX_TEXT));
        whole
    }
}

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Writing to a string cannot fail.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " {name}={value:?}"),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{io, sync::Arc};
    use tracing::{Metadata, subscriber::Interest};
    use tracing_subscriber::{EnvFilter, Layer, fmt::MakeWriter, layer::SubscriberExt};

    #[derive(Clone, Default)]
    struct Lines(Arc<Lock<Vec<u8>>>);

    impl io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl<'a> MakeWriter<'a> for Lines {
        type Writer = Lines;

        fn make_writer(&'a self) -> Lines {
            self.clone()
        }
    }

    impl Lines {
        /// Returns the lines since the last call.
        fn take(&self) -> Vec<String> {
            let bytes = std::mem::take(&mut *self.0.lock().unwrap());
            String::from_utf8(bytes).unwrap().lines().map(str::to_owned).collect()
        }
    }

    fn warn(n: u64) {
        tracing::warn!(n, "a job failed");
    }

    /// Logs through the throttle, with a separate state.
    fn logged(level: &str, work: impl FnOnce(&'static Lock<Throttle>, &Lines)) {
        let state: &'static Lock<Throttle> = Box::leak(Box::new(Lock::new(Throttle::new(true))));
        let lines = Lines::default();
        let layer = tracing_subscriber::fmt::layer().with_writer(lines.clone()).without_time().with_ansi(false);
        let layer =
            layer.map_event_format(|lines| Throttled { lines, throttle: state }).with_filter(EnvFilter::new(level));
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || work(state, &lines));
    }

    #[tokio::test(start_paused = true)]
    async fn a_window_limits_a_warning_and_reports_the_rest() {
        let (mut warned, mut windows) = (0, 0);
        logged("info", |state, lines| {
            for round in 0..3 {
                (0..500).for_each(|n| warn(1000 * round + n));
                warned += 500;
                let seen = lines.take();
                assert_eq!(seen.len() as u64, MAX_LINES, "{seen:?}");
                // Other warnings and lower levels are not affected.
                tracing::error!("the disk is full");
                (0..50).for_each(|n| tracing::info!(n, "step"));
                assert_eq!(lines.take().len(), 51);
                advance_clock(WINDOW - Duration::from_millis(1));
                assert_eq!(with(state, |throttle| throttle.ended(Instant::now())), []);
                advance_clock(Duration::from_millis(1));
                report(with(state, |throttle| throttle.ended(Instant::now())));
                let reported = lines.take();
                assert_eq!(reported.len(), 1, "{reported:?}");
                let line = &reported[0];
                assert!(line.contains("lines=490") && line.contains("a job failed n="), "{line}");
                windows += 1;
            }
        });
        assert_eq!(warned, windows * (MAX_LINES + 490), "nothing is lost");
    }

    /// Advances the paused clock in synchronous code.
    fn advance_clock(time: Duration) {
        let mut advancing = Box::pin(tokio::time::advance(time));
        let waker = std::task::Waker::noop();
        let mut context = std::task::Context::from_waker(waker);
        let _ = advancing.as_mut().poll(&mut context);
    }

    #[tokio::test(start_paused = true)]
    async fn flush_reports_open_windows_of_enabled_levels() {
        logged("error", |state, lines| {
            (0..500).for_each(warn);
            assert!(lines.take().is_empty() && with(state, Throttle::all).is_empty());
        });
        logged("warn", |state, lines| {
            (0..12).for_each(warn);
            assert_eq!(lines.take().len() as u64, MAX_LINES);
            report(with(state, Throttle::all));
            assert!(lines.take()[0].contains("lines=2"));
            assert!(with(state, Throttle::all).is_empty(), "reported once");
        });
    }

    #[tokio::test(start_paused = true)]
    async fn memory_is_bounded_for_any_number_of_warnings() {
        let long = || "x".repeat(10_000);
        logged("warn", |state, lines| {
            (0..100).for_each(|_| tracing::warn!("{}", long()));
            lines.take();
            let all = with(state, Throttle::all);
            assert!(all.len() == 1 && all[0].lines == 90 && all[0].last.len() == MAX_TEXT, "{all:?}");
        });
        let mut throttle = Throttle::new(true);
        let callsite = || Identifier(Box::leak(Box::new(Site::default())));
        let sites: Vec<_> = (0..2 * MAX_WINDOWS).map(|_| callsite()).collect();
        for _ in 0..20 {
            for site in &sites {
                throttle.admit(site.clone(), Instant::now(), String::new);
            }
        }
        assert_eq!(throttle.windows.len(), MAX_WINDOWS);
        assert_eq!(throttle.ended(Instant::now() + WINDOW).len(), MAX_WINDOWS);
    }

    #[derive(Default)]
    struct Site(u8);

    impl tracing::Callsite for Site {
        fn set_interest(&self, _: Interest) {}

        fn metadata(&self) -> &Metadata<'_> {
            unreachable!("metadata of site {}", self.0)
        }
    }
}
