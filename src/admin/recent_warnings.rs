//! The newest warnings and errors of the process, kept for whoever asks what went wrong lately.
//!
//! Like the log itself this is one for the whole process. It is bounded, and a message that comes again is counted, not kept twice.

use crate::common::clock::now;
use serde::Serialize;
use std::{collections::VecDeque, fmt, sync::LazyLock};
use tokio::sync::watch;
use tracing::{
    Event, Level, Subscriber,
    field::{Field, Visit},
};
use tracing_subscriber::layer::{Context, Layer};

/// Lines that are kept.
const KEPT: usize = 20;
/// Longest text of a line, in bytes: a page shows it, a log file has all of it.
const LONGEST: usize = 600;

static RECENT: LazyLock<watch::Sender<Faults>> = LazyLock::new(|| watch::Sender::new(Faults::default()));

/// The lines that are kept, the newest last.
pub type Faults = VecDeque<Fault>;

/// One warning or error.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Fault {
    /// When it came last, in seconds since 1970.
    pub at: f64,
    /// "warn" or "error".
    pub level: &'static str,
    /// The message with the fields of the newest time.
    pub text: String,
    /// How often the message came while it was kept, whatever its fields.
    pub count: u64,
    #[serde(skip)]
    message: String,
}

/// The lines that [`FaultLayer`] kept.
pub fn recent() -> watch::Receiver<Faults> {
    RECENT.subscribe()
}

/// Keeps every warning and error that passes, whatever the log shows.
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
        RECENT.send_modify(|faults| keep(faults, Fault { at: now(), level, text: text.whole(), count: 1, message }));
    }
}

fn keep(faults: &mut Faults, mut fault: Fault) {
    let same = faults.iter().position(|kept| kept.level == fault.level && kept.message == fault.message);
    if let Some(kept) = same.and_then(|at| faults.remove(at)) {
        fault.count += kept.count;
    } else if faults.len() == KEPT {
        faults.pop_front();
    }
    faults.push_back(fault);
}

/// "message (field=value, ...)".
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
        if text.len() > LONGEST {
            text.truncate(text.floor_char_boundary(LONGEST));
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
    fn the_newest_are_kept_and_repeats_are_counted() {
        let mut faults = Faults::default();
        for n in 0..KEPT + 5 {
            keep(&mut faults, fault(&format!("line {n}"), 0));
        }
        assert_eq!((faults.len(), faults[0].text.as_str()), (KEPT, "line 5 (0)"));
        for n in 1..=3 {
            keep(&mut faults, fault("line 7", n));
        }
        let newest = faults.back().unwrap();
        assert_eq!((faults.len(), newest.text.as_str(), newest.count), (KEPT, "line 7 (3)", 4));
    }

    /// The other tests of this process may log as well: only these lines are looked at.
    #[test]
    fn warnings_and_errors_come_with_their_fields_and_nothing_else_does() {
        tracing::subscriber::with_default(tracing_subscriber::registry().with(FaultLayer), || {
            tracing::info!("faults test: fine");
            tracing::warn!(job = 7, error = %"no room", "faults test: a job was skipped");
            tracing::error!("faults test: {}", "x".repeat(2 * LONGEST));
        });
        let seen = recent().borrow().clone();
        let ours: Vec<_> = seen.iter().filter(|fault| fault.text.starts_with("faults test")).collect();
        assert_eq!(ours.len(), 2, "{ours:?}");
        assert_eq!(ours[0].text, "faults test: a job was skipped (job=7, error=no room)");
        assert_eq!((ours[0].level, ours[1].level), ("warn", "error"));
        assert!(ours[1].text.len() < LONGEST + 4 && ours[1].text.ends_with('…'));
    }
}
