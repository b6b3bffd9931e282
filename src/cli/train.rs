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

/// Trains until the end of the last epoch, max_steps, a signal, or the first fault; then prints the summary.
pub fn run(args: &TrainArgs, loaded: Loaded, logs: Logs) -> Result<(), Failure> {
    let source = Source { file: args.config.config.clone(), sets: args.config.set.clone() };
    let start = Start { fresh: args.fresh, force: args.force, source, logs };
    let runtime = tokio::runtime::Builder::new_multi_thread()
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
