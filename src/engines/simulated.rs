//! Simulated drafter and optimizer with real checkpoints that list every trained job.
//!
//! The list makes a checkpoint's content verifiable without the ledger.

use super::checkpointing::CheckpointWriter;
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

/// Name of the tensor of trained jobs, `[jobs, 3]`: epoch, index / 2^16, index mod 2^16, each exact in f32.
const JOBS: &str = "trained_jobs";
const HALF: u32 = 1 << 16;

/// Simulated drafter whose gradient lists its jobs.
pub struct JobLogDrafter {
    inner: SimDrafter,
    trained: Vec<JobId>,
}

impl JobLogDrafter {
    pub fn new(inner: SimDrafter) -> JobLogDrafter {
        JobLogDrafter { inner, trained: Vec::new() }
    }
}

impl DraftEngine for JobLogDrafter {
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

/// Simulated optimizer that writes the trained jobs into its checkpoints.
pub struct JobLogOptimizer {
    inner: SimOptimizer,
    trained: Vec<JobId>,
    checkpoints: CheckpointWriter,
}

impl JobLogOptimizer {
    pub fn new(inner: SimOptimizer, trained: Vec<JobId>, checkpoints: CheckpointWriter) -> JobLogOptimizer {
        JobLogOptimizer { inner, trained, checkpoints }
    }
}

impl Optimizer for JobLogOptimizer {
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
        Ok(self.checkpoints.start(step, [weights, vec![one("weight", 0.0)], vec![one("weight", 0.0)]]))
    }
}

/// Trained jobs that a simulated run's checkpoint folder lists, in training order.
///
/// # Errors
/// A missing or damaged checkpoint.
pub fn trained_jobs(dir: &Path) -> Result<Vec<JobId>, SimulatedError> {
    Verified::open(dir)?;
    let files = TensorFiles::open_file(&dir.join(checkpoint::WEIGHTS))?;
    let values = files.get(JOBS)?.bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]) as u32);
    let values: Vec<u32> = values.collect();
    let jobs = values.chunks_exact(3);
    Ok(jobs.map(|row| JobId { epoch: row[0], index: row[1] * HALF + row[2] }).collect())
}

/// Reason why a simulated run's checkpoint cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum SimulatedError {
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Tensors(#[from] HfError),
}

/// Smallest valid drafter configuration, for checkpoints of simulated runs.
pub fn placeholder_draft() -> DraftConfig {
    DraftConfig {
        head: Default::default(),
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
        sliding_causal: true,
        bos_token_id: None,
        eos_token_ids: Vec::new(),
        pad_token_id: None,
        dtype: Dtype::F32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engines::checkpointing::CheckpointSettings;
    use draftmill_actors::simulated::CostModel;
    use tokio::sync::watch;

    #[tokio::test(start_paused = true)]
    async fn a_checkpoint_lists_its_jobs() {
        let dir = tempfile::tempdir().unwrap();
        let keep = crate::config::RetentionPolicy { last: 1, ..Default::default() };
        let settings = watch::channel(CheckpointSettings { keep, config: String::new() }).1;
        let checkpoints = CheckpointWriter {
            folder: dir.path().to_owned(),
            settings,
            seed: 0,
            run: String::new(),
            draft: placeholder_draft(),
        };
        let inner = SimOptimizer::new(CostModel::default(), 0.0);
        let mut optimizer = JobLogOptimizer::new(inner, vec![JobId { epoch: 0, index: 1 << 20 }], checkpoints);
        let jobs = vec![JobId { epoch: 1, index: u32::MAX }, JobId { epoch: 2, index: 65_537 }];
        let request =
            StepRequest { step: 1, denominator: 1.0, learning_rate: 1.0, max_grad_norm: 1.0, weight_decay: 0.0 };
        optimizer.step(vec![(1.0, jobs.clone())], request).await.unwrap();
        let name = optimizer.save(1).await.unwrap().await.unwrap();
        let listed = trained_jobs(&dir.path().join(name)).unwrap();
        assert_eq!(listed, [vec![JobId { epoch: 0, index: 1 << 20 }], jobs].concat());
    }
}
