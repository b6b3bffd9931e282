//! Step recorder: writes each step to the step log, shows the progress, and publishes the position of the run.

use super::{Failed, progress::Progress};
use crate::{
    check::pipeline_settings::RunProgress,
    common::exit::{Exit, Failure},
    run_dir::{RunDir, step_log::StepLog},
};
use draftmill_actors::{runtime::fault::Shutdown, trainer::StepRecord};
use std::io;
use tokio::{
    sync::{mpsc, watch},
    task::JoinHandle,
};

/// Limit of queued step records. The trainer waits for the disk only if the queue is full.
const QUEUE: usize = 64;

/// Running step recorder. Ends when the sender of records is dropped.
pub struct StepRecorder {
    task: JoinHandle<io::Result<StepLog>>,
    folder: RunDir,
}

impl StepRecorder {
    /// Opens the step log of a run that resumes at `position` and starts the task. Returns the recorder, the sender of records
    /// and the position of the run.
    ///
    /// # Errors
    /// A step log that cannot be opened.
    pub fn start(
        folder: &RunDir,
        position: RunProgress,
        progress: Progress,
        shutdown: Shutdown,
    ) -> Result<(StepRecorder, mpsc::Sender<StepRecord>, watch::Receiver<RunProgress>), Failure> {
        let log = StepLog::open(folder.root(), position.step)
            .map_err(|error| folder.cannot_write(&StepLog::file(folder.root()), &error))?;
        let (records, recorded) = mpsc::channel(QUEUE);
        let (reached, reader) = watch::channel(position);
        let task = tokio::spawn(record(recorded, log, progress, reached, shutdown));
        Ok((StepRecorder { task, folder: folder.clone() }, records, reader))
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

/// Records steps until the trainer drops the sender. A failed write stops the run.
async fn record(
    mut records: mpsc::Receiver<StepRecord>,
    mut log: StepLog,
    mut progress: Progress,
    position: watch::Sender<RunProgress>,
    shutdown: Shutdown,
) -> io::Result<StepLog> {
    let mut result = Ok(());
    while let Some(record) = records.recv().await {
        progress.on_step(&record);
        position.send_modify(|position| {
            *position = RunProgress { step: record.step, micro_batches: position.micro_batches + record.micro_batches };
        });
        if result.is_ok() {
            result = log.push(record);
            if let Err(error) = &result {
                tracing::error!(%error, path = %log.path().display(), "step log not written; stopping the run");
                shutdown.stop.cancel();
            }
        }
    }
    progress.finish();
    result.map(|()| log)
}
