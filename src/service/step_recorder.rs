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

/// Reason why a record ends the run.
enum Stopped {
    Log(io::Error),
    /// Micro-batches in a row without a supervised position, at least an epoch of them.
    Unsupervised(u64),
}

/// Running step recorder. Ends when the sender of records is dropped.
pub struct StepRecorder {
    task: JoinHandle<Result<StepLog, Stopped>>,
    folder: RunDir,
}

impl StepRecorder {
    /// Opens the step log of a run that resumes at `position` and starts the task. `epoch` is the number of micro-batches of an
    /// epoch. Returns the recorder, the sender of records and the position of the run.
    ///
    /// # Errors
    /// A step log that cannot be opened.
    pub fn start(
        folder: &RunDir,
        position: RunProgress,
        epoch: u64,
        progress: Progress,
        shutdown: Shutdown,
    ) -> Result<(StepRecorder, mpsc::Sender<StepRecord>, watch::Receiver<RunProgress>), Failure> {
        let log = StepLog::open(folder.root(), position.step)
            .map_err(|error| folder.cannot_write(&StepLog::file(folder.root()), &error))?;
        let (records, recorded) = mpsc::channel(QUEUE);
        let (reached, reader) = watch::channel(position);
        let task = tokio::spawn(record(recorded, log, epoch, progress, reached, shutdown));
        Ok((StepRecorder { task, folder: folder.clone() }, records, reader))
    }

    /// Waits for the last record and returns the log.
    ///
    /// # Errors
    /// A step log that could not be written, or an epoch without a supervised position.
    pub async fn finish(self) -> Result<StepLog, Failure> {
        self.task.await.failed(Exit::Internal)?.map_err(|stopped| match stopped {
            Stopped::Log(error) => self.folder.cannot_write(&StepLog::file(self.folder.root()), &error),
            Stopped::Unsupervised(micro_batches) => Failure::new(
                Exit::Data,
                format!(
                    "nothing was supervised in {micro_batches} micro-batches in a row, a whole epoch, so nothing is learned; \
                     correct the loss masks of data.inputs and run draftmill prepare again, or raise drafter.anchors"
                ),
            ),
        })
    }
}

/// Records steps until the trainer drops the sender. A failed write stops the run, and so does an epoch without a supervised
/// position, whose loss of 0 looks like success.
async fn record(
    mut records: mpsc::Receiver<StepRecord>,
    mut log: StepLog,
    epoch: u64,
    mut progress: Progress,
    position: watch::Sender<RunProgress>,
    shutdown: Shutdown,
) -> Result<StepLog, Stopped> {
    let (mut result, mut unsupervised) = (Ok(()), 0);
    while let Some(record) = records.recv().await {
        progress.on_step(&record);
        position.send_modify(|position| {
            *position = RunProgress { step: record.step, micro_batches: position.micro_batches + record.micro_batches };
        });
        unsupervised = next_unsupervised(unsupervised, &record);
        if unsupervised > 0 {
            tracing::warn!(step = record.step, micro_batches = unsupervised, "step without supervised positions");
        }
        if result.is_ok() && unsupervised >= epoch.max(1) {
            result = Err(Stopped::Unsupervised(unsupervised));
            shutdown.stop.cancel();
        }
        if !matches!(result, Err(Stopped::Log(_)))
            && let Err(error) = log.push(record)
        {
            tracing::error!(%error, path = %log.path().display(), "step log not written; stopping the run");
            result = Err(Stopped::Log(error));
            shutdown.stop.cancel();
        }
    }
    progress.finish();
    result.map(|()| log)
}

/// Micro-batches in a row without a supervised position, after `record`.
fn next_unsupervised(before: u64, record: &StepRecord) -> u64 {
    if record.supervised == 0 { before + record.micro_batches } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admin::run_info::RunInfo;

    /// Ends a run of `supervised` positions per step, two micro-batches each and eight in an epoch.
    async fn ended(supervised: &[u64]) -> (Result<(), Failure>, bool) {
        let folder = tempfile::tempdir().unwrap();
        let run = RunDir::new(folder.path());
        let loaded = crate::config::load(None, &[]).unwrap();
        let progress = Progress::new(0, watch::channel(loaded).1, watch::channel(RunInfo::default()).1);
        let shutdown = Shutdown::default();
        let started = StepRecorder::start(&run, RunProgress::default(), 8, progress, shutdown.clone());
        let (recorder, records, _) = started.unwrap();
        for (step, &supervised) in (1..).zip(supervised) {
            let record = StepRecord { step, micro_batches: 2, supervised, ..StepRecord::default() };
            records.send(record).await.unwrap();
        }
        drop(records);
        let ended = recorder.finish().await.map(drop);
        (ended, shutdown.stop.is_cancelled())
    }

    /// Issue 17, E1: masks of zeros ended as "finished, loss 0.000".
    #[tokio::test]
    async fn an_epoch_without_supervised_positions_ends_the_run() {
        assert_eq!(ended(&[5, 0, 0, 0, 5, 0, 0, 0]).await, (Ok(()), false));
        let (failure, stopped) = ended(&[5, 0, 0, 0, 0]).await;
        let failure = failure.unwrap_err();
        assert!(stopped && failure.exit == Exit::Data && failure.message.contains("8 micro-batches"), "{failure}");
    }
}
