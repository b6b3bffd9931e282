//! Step recorder: writes each step to the step log, shows the progress, and publishes the position of the run.

use super::{Failed, progress::Progress};
use crate::{
    check::pipeline_settings::Place,
    common::exit::{Exit, Failure},
    run_dir::{RunFolder, step_log::StepLog},
};
use draftmill_actors::{runtime::fault::Shutdown, trainer::StepRecord};
use std::io;
use tokio::{
    sync::{mpsc, watch},
    task::JoinHandle,
};

/// Step records on their way to the log. The trainer waits for the disk only if this is full.
const RECORDS: usize = 64;

/// A running step recorder. It ends when the sender of records is dropped.
pub struct StepRecorder {
    task: JoinHandle<io::Result<StepLog>>,
    folder: RunFolder,
}

impl StepRecorder {
    /// Opens the step log of a run that continues from `place` and starts the task. Returns it with the sender of records and
    /// the position of the run.
    ///
    /// # Errors
    /// A step log that cannot be opened.
    pub fn start(
        folder: &RunFolder,
        place: Place,
        progress: Progress,
        shutdown: Shutdown,
    ) -> Result<(StepRecorder, mpsc::Sender<StepRecord>, watch::Receiver<Place>), Failure> {
        let log = StepLog::open(folder.root(), place.step)
            .map_err(|error| folder.cannot_write(&StepLog::file(folder.root()), &error))?;
        let (records, recorded) = mpsc::channel(RECORDS);
        let (reached, watched) = watch::channel(place);
        let task = tokio::spawn(record(recorded, log, progress, reached, shutdown));
        Ok((StepRecorder { task, folder: folder.clone() }, records, watched))
    }

    /// Waits for the last record and returns the log.
    ///
    /// # Errors
    /// A step log that could not be written.
    pub async fn finish(self) -> Result<StepLog, Failure> {
        let written = self.task.await.failed(Exit::Internal)?;
        written.map_err(|error| self.folder.cannot_write(&StepLog::file(self.folder.root()), &error))
    }
}

/// Records until the trainer is gone. A disk that fails ends the run.
async fn record(
    mut records: mpsc::Receiver<StepRecord>,
    mut log: StepLog,
    mut progress: Progress,
    place: watch::Sender<Place>,
    shutdown: Shutdown,
) -> io::Result<StepLog> {
    let mut result = Ok(());
    while let Some(record) = records.recv().await {
        progress.on_step(&record);
        place.send_modify(|place| {
            *place = Place { step: record.step, micro_batches: place.micro_batches + record.micro_batches };
        });
        if result.is_ok() {
            result = log.push(record);
            if let Err(error) = &result {
                tracing::error!(%error, path = %log.path().display(), "step log cannot be written; the run ends");
                shutdown.stop.cancel();
            }
        }
    }
    progress.finish();
    result.map(|()| log)
}
