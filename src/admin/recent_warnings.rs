//! Recent warnings and errors of the process, for the status page.
//!
//! One bounded list per process, like the log. A repeated message is counted, not stored twice.

use crate::common::clock::now;
use serde::Serialize;
use std::{collections::VecDeque, fmt, sync::LazyLock};
use tokio::sync::watch;
use tracing::{
    Event, Level, Subscriber,
    field::{Field, Visit},
};
use tracing_subscriber::layer::{Context, Layer};

/// Limit of stored lines.
const MAX_LINES: usize = 20;
/// Limit of a line's text in bytes. The log has the full text.
const MAX_BYTES: usize = 600;

static RECENT: LazyLock<watch::Sender<Faults>> = LazyLock::new(|| watch::Sender::new(Faults::default()));

/// Stored lines, newest last.
pub type Faults = VecDeque<Fault>;

/// One warning or error.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Fault {
    /// Time of the newest occurrence, in seconds since 1970.
    pub at: f64,
    /// "warn" or "error".
    pub level: &'static str,
    /// Message with the fields of the newest occurrence.
    pub text: String,
    /// Number of occurrences of the message, with any fields, since it was stored.
    pub count: u64,
    #[serde(skip)]
    message: String,
}

/// Lines that [`FaultLayer`] stored.
pub fn recent() -> watch::Receiver<Faults> {
    RECENT.subscribe()
}

/// Layer that stores every warning and error, regardless of the log level.
#[derive(Clone, Copy, Debug, Default)]
pub struct FaultLayer;

impl<S: Subscriber> Layer<S> for FaultLayer {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let level = match *event.metadata().level() {
            Level::ERROR => "error",
            Level::WARN => "warn",
            _ => return,
        };
        let mut text = Text::default();
        event.record(&mut text);
        let message = text.message.clone();
        RECENT.send_modify(|faults| store(faults, Fault { at: now(), level, text: text.whole(), count: 1, message }));
    }
}

fn store(faults: &mut Faults, mut fault: Fault) {
    let same = faults.iter().position(|stored| stored.level == fault.level && stored.message == fault.message);
    if let Some(stored) = same.and_then(|index| faults.remove(index)) {
        fault.count += stored.count;
    } else if faults.len() == MAX_LINES {
        faults.pop_front();
    }
    faults.push_back(fault);
}

/// Event as text: `message (field=value, ...)`.
#[derive(Default)]
struct Text {
    message: String,
    fields: Vec<String>,
}

impl Text {
    fn whole(self) -> String {
        let mut text = match (self.message.is_empty(), self.fields.is_empty()) {
            (_, true) => self.message,
            (true, false) => self.fields.join(", "),
            (false, false) => format!("{} ({})", self.message, self.fields.join(", ")),
        };
        if text.len() > MAX_BYTES {
            text.truncate(text.floor_char_boundary(MAX_BYTES));
            text.push('…');
        }
        text
    }
}

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        match field.name() {
            "message" => self.message = format!("{value:?}"),
            name => self.fields.push(format!("{name}={value:?}")),
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "message" => self.message = value.to_owned(),
            name => self.fields.push(format!("{name}={value}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tracing_subscriber::layer::SubscriberExt;

    fn fault(message: &str, field: u32) -> Fault {
        Fault { at: 1.0, level: "warn", text: format!("{message} ({field})"), count: 1, message: message.into() }
    }

    #[test]
    fn the_newest_lines_are_stored_and_repeats_counted() {
        let mut faults = Faults::default();
        for n in 0..MAX_LINES + 5 {
            store(&mut faults, fault(&format!("line {n}"), 0));
        }
        assert_eq!((faults.len(), faults[0].text.as_str()), (MAX_LINES, "line 5 (0)"));
        for n in 1..=3 {
            store(&mut faults, fault("line 7", n));
        }
        let newest = faults.back().unwrap();
        assert_eq!((faults.len(), newest.text.as_str(), newest.count), (MAX_LINES, "line 7 (3)", 4));
    }

    /// Ignores lines of other tests in this process.
    #[test]
    fn warnings_and_errors_are_stored_with_their_fields() {
        tracing::subscriber::with_default(tracing_subscriber::registry().with(FaultLayer), || {
            tracing::info!("faults test: fine");
            tracing::warn!(job = 7, error = %"out of memory", "faults test: a job was skipped");
            tracing::error!("faults test: {}", "x".repeat(2 * MAX_BYTES));
        });
        let seen = recent().borrow().clone();
        let ours: Vec<_> = seen.iter().filter(|fault| fault.text.starts_with("faults test")).collect();
        assert_eq!(ours.len(), 2, "{ours:?}");
        assert_eq!(ours[0].text, "faults test: a job was skipped (job=7, error=out of memory)");
        assert_eq!((ours[0].level, ours[1].level), ("warn", "error"));
        assert!(ours[1].text.len() < MAX_BYTES + 4 && ours[1].text.ends_with('…'));
    }
}
