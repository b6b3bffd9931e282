//! Checkpoint folder and settings of an optimizer, and the background writing of checkpoints.

use crate::{
    config::{Loaded, RetentionPolicy, annotated},
    hf::draft::DraftConfig,
    run_dir::checkpoint::{self, CheckpointError, NamedTensor, State},
};
use draftmill_actors::messages::engine::{EngineError, Writing};
use std::path::PathBuf;
use tokio::sync::watch;

/// Writes the checkpoints of one run.
#[derive(Clone, Debug)]
pub struct CheckpointWriter {
    /// The run's `checkpoints` folder.
    pub folder: PathBuf,
    /// Settings, read at the start of each write; a reload changes them.
    pub settings: watch::Receiver<CheckpointSettings>,
    pub seed: u64,
    /// Id of the run, written into each checkpoint.
    pub run: String,
    pub draft: DraftConfig,
}

/// Retention policy and configuration text of the next checkpoint.
#[derive(Clone, Debug)]
pub struct CheckpointSettings {
    pub keep: RetentionPolicy,
    /// Resolved configuration, stored in each checkpoint.
    pub config: String,
}

impl CheckpointSettings {
    pub fn new(loaded: &Loaded) -> CheckpointSettings {
        CheckpointSettings { keep: loaded.config.checkpoint.retention(), config: annotated(&loaded.written.wire) }
    }
}

impl CheckpointWriter {
    /// Starts to write the checkpoint of `step` on a blocking thread.
    ///
    /// `tensors` are the weights, the first moments and the second moments. The returned future yields the checkpoint's name.
    pub fn start(&self, step: u64, tensors: [Vec<NamedTensor>; 3]) -> Writing {
        let writer = self.clone();
        Box::pin(async move {
            let written = tokio::task::spawn_blocking(move || writer.write(step, tensors)).await;
            let written = written.map_err(|error| EngineError::Failed(error.to_string()))?;
            written.map_err(|error| EngineError::Failed(error.to_string()))
        })
    }

    fn write(
        self,
        step: u64,
        [weights, exp_avg, exp_avg_sq]: [Vec<NamedTensor>; 3],
    ) -> Result<String, CheckpointError> {
        let CheckpointWriter { folder, settings, seed, run, draft } = self;
        let CheckpointSettings { keep, config } = settings.borrow().clone();
        let tensors = [
            (checkpoint::WEIGHTS, weights),
            (checkpoint::FIRST_MOMENTS, exp_avg),
            (checkpoint::SECOND_MOMENTS, exp_avg_sq),
        ];
        let state = State { run, ..State::new(step, seed, config) };
        let name = checkpoint::write(&folder, &state, &draft, &tensors)?;
        // state.db does not name the new checkpoint yet, so one more than `keep.last` stays until it does.
        if let Err(error) = checkpoint::retain(&folder, RetentionPolicy { last: keep.last + 1, ..keep }) {
            tracing::warn!(%error, folder = %folder.display(), "old checkpoints not deleted");
        }
        Ok(name)
    }
}
