//! JSON log lines with the Rust module in the key `module`.
//!
//! tracing-subscriber names this key `target`, which is Draftmill's word for the target model.

use std::fmt;
use tracing::{Event, Subscriber};
use tracing_subscriber::{
    fmt::{
        FmtContext, FormatEvent, FormatFields,
        format::{Format, Json, Writer},
    },
    registry::LookupSpan,
};

/// Event format that writes one JSON object per line: timestamp, level, fields of the event, module.
pub struct JsonLines(Format<Json>);

impl JsonLines {
    /// Wraps tracing-subscriber's JSON format.
    pub fn new(format: Format<Json>) -> JsonLines {
        JsonLines(format.flatten_event(true).with_target(false))
    }
}

impl<S, N> FormatEvent<S, N> for JsonLines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, context: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let mut line = String::new();
        self.0.format_event(context, Writer::new(&mut line), event)?;
        let object = line.trim_end().strip_suffix('}').ok_or(fmt::Error)?;
        let module = serde_json::to_string(event.metadata().target()).map_err(|_| fmt::Error)?;
        writeln!(writer, "{object},\"module\":{module}}}")
    }
}

#[cfg(test)]
#[allow(clippy::disallowed_types, reason = "the writer of the layer is shared with the test")]
mod tests {
    use super::*;
    use serde_json::Value;
    use std::{
        io,
        sync::{Arc, Mutex},
    };
    use tracing_subscriber::{fmt::layer, layer::SubscriberExt};

    #[derive(Clone, Default)]
    struct Output(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Output {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_line_has_the_module_and_keeps_the_field_target() {
        let output = Output::default();
        let writer = output.clone();
        let lines = layer().with_writer(move || writer.clone()).json().map_event_format(JsonLines::new);
        tracing::subscriber::with_default(tracing_subscriber::registry().with(lines), || {
            tracing::warn!(target = 3, text = "a \"b\"}", "straggler");
        });
        let text = String::from_utf8(output.0.lock().unwrap().clone()).unwrap();
        assert!(text.ends_with("}\n") && text.lines().count() == 1, "{text}");
        let line: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((&line["message"], &line["level"]), (&"straggler".into(), &"WARN".into()), "{line}");
        assert_eq!((&line["target"], &line["text"]), (&3.into(), &"a \"b\"}".into()), "{line}");
        assert!(line["module"].as_str().unwrap().ends_with("json_lines::tests"), "{line}");
    }
}
