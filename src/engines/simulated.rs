//! The simulated engine of a run on disk: it sleeps as the cost model says, and its "weights" remember every job that trained
//! them, so that a checkpoint says by itself what it holds, whatever the ledger says.

use super::checkpointing::Saving;
use crate::{
    hf::{
        Dtype, HfError,
        draft::{DraftConfig, LayerType},
        tensors::TensorFiles,
    },
    run_dir::checkpoint::{self, CheckpointError, NamedTensor, Verified},
};
use draftmill_actors::{
    messages::{
        engine::{DraftEngine, EngineError, MicroFailure, MicroReport, Optimizer, StepReport, StepRequest, Writing},
        types::JobId,
    },
    simulated::{SimDrafter, SimFeatures, SimOptimizer},
};
use std::path::Path;

/// The tensor of job ids in a checkpoint's weights: one row a job, (epoch, index / 2^16, index mod 2^16), each exact in f32.
const JOBS: &str = "trained_jobs";
const HALF: u32 = 1 << 16;

/// A simulated drafter whose gradient says which jobs it is of.
pub struct RememberingDrafter {
    inner: SimDrafter,
    trained: Vec<JobId>,
}

impl RememberingDrafter {
    pub fn new(inner: SimDrafter) -> RememberingDrafter {
        RememberingDrafter { inner, trained: Vec::new() }
    }
}

impl DraftEngine for RememberingDrafter {
    type Features = SimFeatures;
    type Gradient = (f64, Vec<JobId>);
    type Weights = f64;

    async fn micro_batch(
        &mut self,
        job: JobId,
        features: SimFeatures,
    ) -> Result<MicroReport, MicroFailure<SimFeatures>> {
        let report = self.inner.micro_batch(job, features).await?;
        self.trained.push(job);
        Ok(report)
    }

    async fn take_gradient(&mut self) -> Result<Option<Self::Gradient>, EngineError> {
        let gradient = self.inner.take_gradient().await?;
        Ok(gradient.map(|sum| (sum, std::mem::take(&mut self.trained))))
    }

    async fn load_weights(&mut self, weights: f64) -> Result<(), EngineError> {
        self.inner.load_weights(weights).await
    }

    async fn checksum(&mut self) -> Result<Option<u64>, EngineError> {
        self.inner.checksum().await
    }
}

/// A simulated optimizer with real checkpoints.
pub struct RememberingOptimizer {
    inner: SimOptimizer,
    trained: Vec<JobId>,
    saving: Saving,
}

impl RememberingOptimizer {
    pub fn new(inner: SimOptimizer, trained: Vec<JobId>, saving: Saving) -> RememberingOptimizer {
        RememberingOptimizer { inner, trained, saving }
    }
}

impl Optimizer for RememberingOptimizer {
    type Gradient = (f64, Vec<JobId>);
    type Weights = f64;

    async fn step(&mut self, gradients: Vec<Self::Gradient>, request: StepRequest) -> Result<StepReport, EngineError> {
        let (sums, jobs): (Vec<_>, Vec<_>) = gradients.into_iter().unzip();
        let report = self.inner.step(sums, request).await?;
        self.trained.extend(jobs.into_iter().flatten());
        Ok(report)
    }

    async fn weights(&mut self, drafter: usize) -> Result<f64, EngineError> {
        self.inner.weights(drafter).await
    }

    async fn checksum(&mut self) -> Result<Option<u64>, EngineError> {
        self.inner.checksum().await
    }

    async fn save(&mut self, step: u64) -> Result<Writing, EngineError> {
        let one = |name: &str, value| NamedTensor { name: name.into(), shape: vec![1], data: vec![value] };
        let rows = self.trained.iter().flat_map(|job| [job.epoch, job.index / HALF, job.index % HALF]);
        let data = rows.map(|part| part as f32).collect();
        let jobs = NamedTensor { name: JOBS.into(), shape: vec![self.trained.len(), 3], data };
        let weights = vec![one("weight", self.inner.weight as f32), jobs];
        Ok(self.saving.writing(step, [weights, vec![one("weight", 0.0)], vec![one("weight", 0.0)]]))
    }
}

/// The jobs whose gradients are in the weights of a simulated run's checkpoint folder, in the order in which they were trained.
pub fn trained_jobs(dir: &Path) -> Result<Vec<JobId>, SimulatedError> {
    Verified::open(dir)?;
    let files = TensorFiles::open_file(&dir.join(checkpoint::WEIGHTS))?;
    let values = files.get(JOBS)?.bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]) as u32);
    let values: Vec<u32> = values.collect();
    let jobs = values.chunks_exact(3);
    Ok(jobs.map(|row| JobId { epoch: row[0], index: row[1] * HALF + row[2] }).collect())
}

/// Why a simulated run's checkpoint cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum SimulatedError {
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Tensors(#[from] HfError),
}

/// The smallest drafter there can be: a simulated run has none.
pub fn stand_in() -> DraftConfig {
    DraftConfig {
        hidden_size: 2,
        intermediate_size: 2,
        num_hidden_layers: 1,
        num_attention_heads: 1,
        num_key_value_heads: 1,
        head_dim: 2,
        rms_norm_eps: 1e-6,
        rope_theta: 1e4,
        vocab_size: 2,
        block_size: 2,
        mask_token_id: 0,
        target_layer_ids: vec![0],
        num_target_layers: 2,
        max_position_embeddings: 2,
        layer_types: vec![LayerType::Full],
        sliding_window: None,
        bos_token_id: None,
        eos_token_ids: Vec::new(),
        pad_token_id: None,
        dtype: Dtype::F32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engines::checkpointing::Kept;
    use draftmill_actors::simulated::CostModel;
    use tokio::sync::watch;

    #[tokio::test(start_paused = true)]
    async fn a_checkpoint_says_which_jobs_are_in_it() {
        let dir = tempfile::tempdir().unwrap();
        let keep = crate::config::Keep { last: 1, ..Default::default() };
        let kept = watch::channel(Kept { keep, config: String::new() }).1;
        let saving = Saving { folder: dir.path().to_owned(), kept, seed: 0, draft: stand_in() };
        let inner = SimOptimizer::new(CostModel::default(), 0.0);
        let mut optimizer = RememberingOptimizer::new(inner, vec![JobId { epoch: 0, index: 1 << 20 }], saving);
        let jobs = vec![JobId { epoch: 1, index: u32::MAX }, JobId { epoch: 2, index: 65_537 }];
        let request =
            StepRequest { step: 1, denominator: 1.0, learning_rate: 1.0, max_grad_norm: 1.0, weight_decay: 0.0 };
        optimizer.step(vec![(1.0, jobs.clone())], request).await.unwrap();
        let name = optimizer.save(1).await.unwrap().await.unwrap();
        let held = trained_jobs(&dir.path().join(name)).unwrap();
        assert_eq!(held, [vec![JobId { epoch: 0, index: 1 << 20 }], jobs].concat());
    }
}
