//! `draftmill prepare`.

use super::{
    PrepareArgs,
    interruptible::{Shown, stop_on_signal},
    output,
};
use crate::{
    check::{Samples, Stored},
    common::{
        exit::{Exit, Failure},
        text::grouped,
    },
    config::{ByteSize, Config, Loaded},
    data::{PrepareError, PrepareOptions, Progress, Split, Store, prepare},
};
use std::ops::ControlFlow;

/// Turns conversations into the store and tells what became of the rows, also where that is an error.
pub fn run(args: &PrepareArgs, loaded: &Loaded) -> Result<(), Failure> {
    let options = PrepareOptions::from(&loaded.config);
    let (_runtime, stop) = stop_on_signal().map_err(Failure::of(Exit::Internal))?;
    let mut shown = Shown::new(loaded.config.log.progress_every.0);
    let result = prepare(&options, &mut |progress| {
        let bytes = |bytes| ByteSize(bytes).rounded();
        let Progress { bytes_read: read, bytes_total: total, .. } = progress;
        shown.update(read, total, || text(&progress), || format!("read {} of {}", bytes(read), bytes(total)));
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
            PrepareError::NoInputs | PrepareError::Refused(_) | PrepareError::BeyondPositions { .. } => Exit::Config,
            _ => Exit::Data,
        };
        Failure::new(exit, error)
    })
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

/// State of the store that the configuration names, and the store if it can be opened.
pub fn stored(config: &Config) -> (Stored, Option<Store>) {
    let path = &config.data.store;
    if !path.exists() {
        return (Stored::Absent, None);
    }
    match Store::open(path) {
        Ok(store) => {
            let samples = Samples { lengths: store.lengths(Split::Train), validation: store.len(Split::Validation) };
            (Stored::Ready(samples), Some(store))
        }
        Err(error) => (Stored::Broken(error.to_string()), None),
    }
}
