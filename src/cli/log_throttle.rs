//! Holds back warnings that repeat: of the same one, by its place in the code, a few are logged in a window of time, the rest is
//! counted, and told when the window ends.

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

/// Lines of one warning that are logged in a window.
const SHOWN: u64 = 10;
const WINDOW: Duration = Duration::from_secs(10);
/// Time between looks whether a window has ended.
const LOOK: Duration = Duration::from_secs(1);
/// Warnings that are counted at once; more than that are logged as they come.
const KEPT: usize = 256;
/// Longest text that is kept of a line that was held back, in bytes.
const LONGEST: usize = 300;
/// What tells of repeats is never held back itself.
const TARGET: &str = "draftmill::repeats";

static PROCESS: Lock<Repeats> = Lock::new(Repeats::new(false));

/// Tells what was held back in windows that have not ended. For the end of the process.
pub fn settle() {
    tell(with(&PROCESS, Repeats::all));
}

/// Makes `lines` leave out what repeats in this process.
pub fn few<F>(lines: F) -> Few<F> {
    Few { lines, repeats: &PROCESS }
}

/// Formats a few of each warning, and everything that is no warning or error; of the others nothing is left to write.
///
/// (A filter would be the obvious place, but tracing-subscriber 0.3.23 loses count where a filter refuses an event late.)
pub struct Few<F> {
    lines: F,
    repeats: &'static Lock<Repeats>,
}

impl<S, N, F> FormatEvent<S, N> for Few<F>
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

impl<F> Few<F> {
    fn admit(&self, event: &Event<'_>) -> bool {
        let metadata = event.metadata();
        // Levels compare by how much they say.
        if *metadata.level() > Level::WARN || metadata.target() == TARGET {
            return true;
        }
        with(self.repeats, |repeats| {
            let shown = repeats.admit(metadata.callsite(), Instant::now(), || Text::of(event));
            if !shown && !std::mem::replace(&mut repeats.watched, true) {
                // As long as the process lives. Without a thread it is told at the end.
                let _ = std::thread::Builder::new().name("repeats".into()).spawn(|| {
                    loop {
                        std::thread::sleep(LOOK);
                        tell(with(&PROCESS, |repeats| repeats.ended(Instant::now())));
                    }
                });
            }
            shown
        })
    }
}

fn with<T>(repeats: &Lock<Repeats>, work: impl FnOnce(&mut Repeats) -> T) -> T {
    work(&mut repeats.lock().unwrap_or_else(PoisonError::into_inner))
}

fn tell(held: Vec<Held>) {
    for Held { lines, last } in held {
        tracing::warn!(target: TARGET, lines, last, "the same warning came more often than is logged");
    }
}

/// Lines that were not logged.
#[derive(Debug, PartialEq)]
struct Held {
    lines: u64,
    last: String,
}

#[derive(Debug)]
struct Window {
    callsite: Identifier,
    since: Instant,
    shown: u64,
    held: Held,
}

impl Window {
    fn told(self) -> Option<Held> {
        (self.held.lines > 0).then_some(self.held)
    }
}

/// How often each warning came of late.
#[derive(Debug)]
struct Repeats {
    windows: Vec<Window>,
    /// Somebody looks for windows that end.
    watched: bool,
}

impl Repeats {
    const fn new(watched: bool) -> Repeats {
        Repeats { windows: Vec::new(), watched }
    }

    /// Whether this line is logged; otherwise it is counted.
    fn admit(&mut self, callsite: Identifier, now: Instant, text: impl FnOnce() -> String) -> bool {
        // A window in which nothing was held back needs no telling.
        self.windows.retain(|window| window.held.lines > 0 || now < window.since + WINDOW);
        let counted = self.windows.len();
        match self.windows.iter_mut().find(|window| window.callsite == callsite) {
            Some(window) if window.shown >= SHOWN => {
                window.held = Held { lines: window.held.lines + 1, last: text() };
                return false;
            }
            Some(window) => window.shown += 1,
            None if counted < KEPT => {
                let held = Held { lines: 0, last: String::new() };
                self.windows.push(Window { callsite, since: now, shown: 1, held });
            }
            None => {}
        }
        true
    }

    /// What was held back in windows that are over by now; their warnings are logged again.
    fn ended(&mut self, now: Instant) -> Vec<Held> {
        self.windows.extract_if(.., |window| now >= window.since + WINDOW).filter_map(Window::told).collect()
    }

    fn all(&mut self) -> Vec<Held> {
        self.windows.drain(..).filter_map(Window::told).collect()
    }
}

/// "message name=value ...", as far as it is kept.
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
        whole.truncate(whole.floor_char_boundary(LONGEST));
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
        /// What was logged since the last look.
        fn take(&self) -> Vec<String> {
            let bytes = std::mem::take(&mut *self.0.lock().unwrap());
            String::from_utf8(bytes).unwrap().lines().map(str::to_owned).collect()
        }
    }

    fn warn(n: u64) {
        tracing::warn!(n, "a job failed");
    }

    /// Logs through the filter, with a state of its own.
    fn logged(level: &str, work: impl FnOnce(&'static Lock<Repeats>, &Lines)) {
        let state: &'static Lock<Repeats> = Box::leak(Box::new(Lock::new(Repeats::new(true))));
        let lines = Lines::default();
        let layer = tracing_subscriber::fmt::layer().with_writer(lines.clone()).without_time().with_ansi(false);
        let layer = layer.map_event_format(|lines| Few { lines, repeats: state }).with_filter(EnvFilter::new(level));
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || work(state, &lines));
    }

    #[tokio::test(start_paused = true)]
    async fn a_few_of_a_warning_are_logged_and_the_rest_is_told_when_the_window_ends() {
        let (mut warned, mut windows) = (0, 0);
        logged("info", |state, lines| {
            for round in 0..3 {
                (0..500).for_each(|n| warn(1000 * round + n));
                warned += 500;
                let seen = lines.take();
                assert_eq!(seen.len() as u64, SHOWN, "{seen:?}");
                // Another warning, and what is none, have their own way.
                tracing::error!("the disk is full");
                (0..50).for_each(|n| tracing::info!(n, "step"));
                assert_eq!(lines.take().len(), 51);
                futures_free_advance(WINDOW - Duration::from_millis(1));
                assert_eq!(with(state, |repeats| repeats.ended(Instant::now())), []);
                futures_free_advance(Duration::from_millis(1));
                tell(with(state, |repeats| repeats.ended(Instant::now())));
                let told = lines.take();
                assert_eq!(told.len(), 1, "{told:?}");
                assert!(told[0].contains("lines=490") && told[0].contains("a job failed n="), "{told:?}");
                windows += 1;
            }
        });
        assert_eq!(warned, windows * (SHOWN + 490), "nothing is lost");
    }

    /// Advances the paused clock in the middle of plain code.
    fn futures_free_advance(time: Duration) {
        let mut advancing = Box::pin(tokio::time::advance(time));
        let waker = std::task::Waker::noop();
        let mut context = std::task::Context::from_waker(waker);
        let _ = advancing.as_mut().poll(&mut context);
    }

    #[tokio::test(start_paused = true)]
    async fn what_the_level_hides_is_not_counted_and_the_end_tells_what_is_open() {
        logged("error", |state, lines| {
            (0..500).for_each(warn);
            assert!(lines.take().is_empty() && with(state, Repeats::all).is_empty());
        });
        logged("warn", |state, lines| {
            (0..12).for_each(warn);
            assert_eq!(lines.take().len() as u64, SHOWN);
            tell(with(state, Repeats::all));
            assert!(lines.take()[0].contains("lines=2"));
            assert!(with(state, Repeats::all).is_empty(), "told once");
        });
    }

    #[tokio::test(start_paused = true)]
    async fn memory_is_bounded_however_many_warnings_there_are() {
        let long = || "x".repeat(10_000);
        logged("warn", |state, lines| {
            (0..100).for_each(|_| tracing::warn!("{}", long()));
            lines.take();
            let held = with(state, Repeats::all);
            assert!(held.len() == 1 && held[0].lines == 90 && held[0].last.len() == LONGEST, "{held:?}");
        });
        let mut repeats = Repeats::new(true);
        let callsite = || Identifier(Box::leak(Box::new(Place::default())));
        let sites: Vec<_> = (0..2 * KEPT).map(|_| callsite()).collect();
        for _ in 0..20 {
            for site in &sites {
                repeats.admit(site.clone(), Instant::now(), String::new);
            }
        }
        assert_eq!(repeats.windows.len(), KEPT);
        assert_eq!(repeats.ended(Instant::now() + WINDOW).len(), KEPT);
    }

    #[derive(Default)]
    struct Place(u8);

    impl tracing::Callsite for Place {
        fn set_interest(&self, _: Interest) {}

        fn metadata(&self) -> &Metadata<'_> {
            unreachable!("nobody asks place {}", self.0)
        }
    }
}
