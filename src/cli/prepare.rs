//! `draftmill prepare`.

use super::{
    PrepareArgs,
    interruptible::{ProgressDisplay, stop_on_signal},
    output,
};
use crate::{
    check::{Samples, Stored, beyond_positions},
    common::{
        exit::{Exit, Failure},
        text::{counted, grouped},
    },
    config::{ByteSize, Config, Loaded, Problems},
    data::{PrepareError, PrepareOptions, Progress, Split, Store, prepare},
    hf::config::TargetConfig,
};
use std::ops::ControlFlow;

/// Converts conversations to the store and prints the summary table, also after an error.
pub fn run(args: &PrepareArgs, loaded: &Loaded) -> Result<(), Failure> {
    let options = PrepareOptions::from(&loaded.config);
    let target = TargetConfig::load(&options.model_dir).ok();
    let beyond = target.and_then(|target| beyond_positions(&loaded.config, &loaded.written, &target));
    if let Some(problem) = beyond {
        return Err(Problems(vec![problem]).into());
    }
    let (_runtime, stop) = stop_on_signal().map_err(Failure::of(Exit::Internal))?;
    let mut display = ProgressDisplay::new(loaded.config.log.progress_every.0);
    let result = prepare(&options, &mut |progress| {
        let bytes = |bytes| ByteSize(bytes).rounded();
        let Progress { bytes_read: read, bytes_total: total, .. } = progress;
        display.update(read, total, || text(&progress), || format!("read {} of {}", bytes(read), bytes(total)));
        if stop.is_cancelled() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    display.finish();
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
        "{}, {}, {} without a sample, {}",
        counted(progress.rows, "row"),
        counted(progress.samples, "sample"),
        grouped(progress.lost),
        counted(progress.tokens, "token")
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
