//! Where an optimizer's checkpoints go, and the writing of one beside the steps.

use crate::{
    config::{Keep, Loaded, annotated},
    hf::draft::DraftConfig,
    run_dir::checkpoint::{self, CheckpointError, NamedTensor, State},
};
use draftmill_actors::messages::engine::{EngineError, Writing};
use std::path::PathBuf;
use tokio::sync::watch;

/// Where and how checkpoints are written.
#[derive(Clone, Debug)]
pub struct Saving {
    /// The run's `checkpoints` folder.
    pub folder: PathBuf,
    /// What holds when a checkpoint is written.
    pub kept: watch::Receiver<Kept>,
    pub seed: u64,
    pub draft: DraftConfig,
}

/// What stays on disk.
#[derive(Clone, Debug)]
pub struct Kept {
    pub keep: Keep,
    /// The resolved configuration, kept with each checkpoint.
    pub config: String,
}

impl Kept {
    pub fn of(loaded: &Loaded) -> Kept {
        Kept { keep: loaded.config.checkpoint.keep(), config: annotated(&loaded.written.wire) }
    }
}

impl Saving {
    /// Writes a checkpoint of `step` on a blocking thread. `tensors` are weights, first and second moments.
    pub fn writing(&self, step: u64, tensors: [Vec<NamedTensor>; 3]) -> Writing {
        let saving = self.clone();
        Box::pin(async move {
            let written = tokio::task::spawn_blocking(move || saving.write(step, tensors)).await;
            let written = written.map_err(|error| EngineError::Failed(error.to_string()))?;
            written.map_err(|error| EngineError::Failed(error.to_string()))
        })
    }

    fn write(
        self,
        step: u64,
        [weights, exp_avg, exp_avg_sq]: [Vec<NamedTensor>; 3],
    ) -> Result<String, CheckpointError> {
        let Saving { folder, kept, seed, draft } = self;
        let Kept { keep, config } = kept.borrow().clone();
        let tensors = [
            (checkpoint::WEIGHTS, weights),
            (checkpoint::FIRST_MOMENTS, exp_avg),
            (checkpoint::SECOND_MOMENTS, exp_avg_sq),
        ];
        let name = checkpoint::write(&folder, &State::new(step, seed, config), &draft, &tensors)?;
        // One more than is kept stays until the new one exists in state.db.
        if let Err(error) = checkpoint::retain(&folder, Keep { last: keep.last + 1, ..keep }) {
            tracing::warn!(%error, folder = %folder.display(), "old checkpoints could not be deleted");
        }
        Ok(name)
    }
}
