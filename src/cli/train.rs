//! `draftmill train`.

use super::{TrainArgs, output};
use crate::{
    common::{
        exit::{Exit, Failure},
        text::grouped,
    },
    config::{Loaded, Source},
    service::{self, Ended, Logs, Start},
};
use std::ffi::OsStr;

const MAX_WORKER_THREADS: usize = 1024;

const WORKER_THREADS: &str = "TOKIO_WORKER_THREADS";

/// Number of runtime threads from tokio's environment variable, on whose bad values tokio panics.
fn worker_threads(value: Option<&OsStr>) -> Result<Option<usize>, Failure> {
    let Some(value) = value else { return Ok(None) };
    match value.to_str().and_then(|text| text.parse::<usize>().ok()) {
        Some(threads @ 1..=MAX_WORKER_THREADS) => Ok(Some(threads)),
        _ => Err(Failure::new(
            Exit::Usage,
            format!("{WORKER_THREADS} = {value:?} is no number of threads; unset it, or set 1 to {MAX_WORKER_THREADS}"),
        )),
    }
}

/// Trains until the end of the last epoch, max_steps, a signal, or the first fault; then prints the summary.
pub fn run(args: &TrainArgs, loaded: Loaded, logs: Logs) -> Result<(), Failure> {
    let source = Source { file: args.config.config.clone(), sets: args.config.set.clone() };
    let start = Start { fresh: args.fresh, force: args.force, from_checkpoint: args.from_checkpoint, source, logs };
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    if let Some(threads) = worker_threads(std::env::var_os(WORKER_THREADS).as_deref())? {
        builder.worker_threads(threads);
    }
    let runtime = builder
        .enable_all()
        .build()
        .map_err(|e| Failure::new(Exit::Internal, format!("the runtime cannot start: {e}")))?;
    let ended = runtime.block_on(service::train(loaded, start));
    // Work on a device cannot be cancelled, and must not delay the end of the process.
    runtime.shutdown_background();
    let Ended { summary, terminated } = ended?;
    let Some(summary) = summary else { return Ok(()) };
    if args.json {
        output::print_json(&summary)?;
    } else {
        output::print(&summary.to_string())?;
    }
    if summary.finished {
        return Ok(());
    }
    let at = format!("at step {}; the same command resumes the run", grouped(summary.steps));
    if terminated {
        output::note(&format!("stopped {at}"));
        return Ok(());
    }
    Err(Failure::new(Exit::Interrupted, format!("interrupted {at}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Issue 17, E16.
    #[test]
    fn e16_a_bad_number_of_worker_threads_is_a_sentence() {
        assert_eq!(worker_threads(None), Ok(None));
        assert_eq!(worker_threads(Some(OsStr::new("2"))), Ok(Some(2)));
        for bad in ["0", "", "-1", "two", "99999999999999999999", "100000"] {
            let failure = worker_threads(Some(OsStr::new(bad))).unwrap_err();
            assert!(failure.exit == Exit::Usage && failure.message.contains("unset it"), "{failure}");
        }
    }
}
