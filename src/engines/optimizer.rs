//! Optimizer engine: fp32 master weights and moments on one device, and a copy of the weights for each drafter.

use super::{checkpointing::CheckpointWriter, gradient_exchange::GradientExchange, worker::Worker};
use crate::{
    eval::evaluator::Snapshots,
    model::{
        ModelError,
        adamw::{AdamW, Hyper},
        load,
        muon::Muon,
        params::{Gradient, ParamSet, Weights},
    },
    run_dir::checkpoint::{self, CheckpointError, NamedTensor, Verified},
};
use draftmill_actors::messages::engine::{EngineError, Optimizer, StepReport, StepRequest, Writing};
use tch::{Device, Kind};

/// Optimizer on one device. Each call is one unit of blocking work.
pub struct TorchOptimizer {
    inner: Worker<Inner>,
    /// Device of drafter `i`.
    drafters: Vec<Device>,
    /// Channel of weight snapshots to the evaluator.
    snapshots: Option<Snapshots>,
}

struct Inner {
    adamw: AdamW,
    device: Device,
    checkpoints: CheckpointWriter,
    exchange: GradientExchange,
}

impl TorchOptimizer {
    /// Optimizer at step 0 with these weights and zero moments.
    ///
    /// # Errors
    /// A libtorch failure, for example out of memory on `device`.
    pub fn new(
        weights: &Weights,
        hyper: Hyper,
        muon: Option<Muon>,
        device: Device,
        drafters: Vec<Device>,
        checkpoints: CheckpointWriter,
    ) -> Result<TorchOptimizer, ModelError> {
        let adamw = AdamW::new(weights.deep_copy(device, Kind::Float)?, hyper)?.with_muon(muon)?;
        Ok(TorchOptimizer::with_adamw(adamw, device, checkpoints, drafters))
    }

    /// Optimizer that resumes from a checkpoint, with bit-identical weights and moments.
    ///
    /// # Errors
    /// An unreadable checkpoint file or a libtorch failure.
    pub fn resume(
        from: &Verified,
        hyper: Hyper,
        muon: Option<Muon>,
        device: Device,
        drafters: Vec<Device>,
        checkpoints: CheckpointWriter,
    ) -> Result<TorchOptimizer, ResumeError> {
        let set = |file| -> Result<ParamSet, ResumeError> { Ok(read(from, file)?.deep_copy(device, Kind::Float)?) };
        let masters = set(checkpoint::WEIGHTS)?;
        let (exp_avg, exp_avg_sq) = (set(checkpoint::FIRST_MOMENTS)?, set(checkpoint::SECOND_MOMENTS)?);
        let adamw = AdamW::resume(masters, exp_avg, exp_avg_sq, from.state.step, hyper).with_muon(muon)?;
        Ok(TorchOptimizer::with_adamw(adamw, device, checkpoints, drafters))
    }
}

impl TorchOptimizer {
    fn with_adamw(
        adamw: AdamW,
        device: Device,
        checkpoints: CheckpointWriter,
        drafters: Vec<Device>,
    ) -> TorchOptimizer {
        let inner = Inner { adamw, device, checkpoints, exchange: GradientExchange::default() };
        TorchOptimizer { inner: Worker::new(inner), drafters, snapshots: None }
    }

    /// Replaces the gradient exchange; the default is plain copies.
    pub fn with_exchange(mut self, exchange: GradientExchange) -> TorchOptimizer {
        if let Some(inner) = self.inner.peek_mut() {
            inner.exchange = exchange;
        }
        self
    }

    /// Sends weight snapshots to the evaluator whenever an evaluation is due. With `initial`, sends those of step 0 now.
    pub fn with_evaluation(mut self, snapshots: Snapshots, initial: bool) -> TorchOptimizer {
        if let Some((what, turn)) = snapshots.due(0).filter(|_| initial) {
            let weights = self.masters_on(snapshots.device).map_err(|error| error.to_string());
            snapshots.send(0, what, turn, weights);
        }
        self.snapshots = Some(snapshots);
        self
    }

    /// Copies the weights if an evaluation is due. A failed copy skips that evaluation; the step succeeds.
    async fn publish(&mut self, step: u64) {
        if let Some(snapshots) = &self.snapshots
            && let Some((what, turn)) = snapshots.due(step)
        {
            let device = snapshots.device;
            let copied = self.inner.run(move |inner| inner.masters_on(device)).await;
            snapshots.send(step, what, turn, copied.map_err(|error| error.to_string()));
        }
    }

    /// Copy of the master weights on `device`, before the first unit of work.
    ///
    /// # Errors
    /// A running unit of work, or a libtorch failure.
    pub fn masters_on(&self, device: Device) -> Result<Weights, ModelError> {
        let inner = self.inner.peek().ok_or_else(|| ModelError::Input("the optimizer is busy".into()))?;
        inner.masters_on(device)
    }
}

/// Reason why training cannot resume from a checkpoint.
#[derive(Debug, thiserror::Error)]
pub enum ResumeError {
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Model(#[from] ModelError),
}

fn read(from: &Verified, file: &str) -> Result<ParamSet, ResumeError> {
    let files = from.tensors(file)?;
    let pairs = files.names().map(|name| Ok((name.to_owned(), load::tensor(&files, name)?)));
    Ok(ParamSet::new(pairs.collect::<Result<_, ModelError>>()?))
}

impl Optimizer for TorchOptimizer {
    type Gradient = Gradient;
    type Weights = Weights;

    async fn step(&mut self, gradients: Vec<Gradient>, request: StepRequest) -> Result<StepReport, EngineError> {
        let report = self.inner.run(move |inner| inner.step(gradients, request)).await?;
        self.publish(request.step).await;
        Ok(report)
    }

    async fn weights(&mut self, drafter: usize) -> Result<Weights, EngineError> {
        let device = self.drafters.get(drafter).copied();
        let device = device.ok_or_else(|| EngineError::Failed(format!("there is no drafter {drafter}")))?;
        self.inner.run(move |inner| inner.exchange.weights(&inner.adamw.masters, drafter, device)).await
    }

    /// Checksum of the masters. Replicas store f32 weights too, whatever their compute dtype, so the sums are comparable.
    async fn checksum(&mut self) -> Result<Option<u64>, EngineError> {
        self.inner.run(|inner| inner.adamw.masters.checksum().map(Some)).await
    }

    async fn save(&mut self, step: u64) -> Result<Writing, EngineError> {
        self.inner.run(move |inner| inner.save(step)).await
    }
}

impl Inner {
    fn step(&mut self, gradients: Vec<Gradient>, request: StepRequest) -> Result<StepReport, ModelError> {
        let _no_grad = tch::no_grad_guard();
        let Some(sum) = self.exchange.sum(gradients, self.device)? else { return Ok(StepReport::default()) };
        if request.denominator <= 0.0 {
            // No supervised position, so the mean gradient is undefined.
            return Ok(StepReport::default());
        }
        self.adamw.set_weight_decay(request.weight_decay);
        let grad_norm = self.adamw.step(sum, request.denominator, request.learning_rate, request.max_grad_norm)?;
        Ok(StepReport { grad_norm })
    }

    fn masters_on(&self, device: Device) -> Result<Weights, ModelError> {
        self.exchange.copy(&self.adamw.masters, device)
    }

    fn save(&mut self, step: u64) -> Result<Writing, ModelError> {
        let AdamW { masters, exp_avg, exp_avg_sq, .. } = &self.adamw;
        Ok(self.checkpoints.start(step, [named(masters)?, named(exp_avg)?, named(exp_avg_sq)?]))
    }
}

fn named(set: &ParamSet) -> Result<Vec<NamedTensor>, ModelError> {
    let tensors = set.iter().map(|(name, tensor)| {
        let shape = tensor.size().iter().map(|&n| n as usize).collect();
        let mut data = vec![0.0_f32; tensor.numel()];
        tensor.f_to_device(Device::Cpu)?.f_contiguous()?.f_copy_data(&mut data, tensor.numel())?;
        Ok(NamedTensor { name: name.to_owned(), shape, data })
    });
    tensors.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        collective::{fake_nccl, nccl::Communicator},
        config::RetentionPolicy,
        engines::checkpointing::CheckpointSettings,
        hf::{config::TargetConfig, draft::DraftConfig},
        model::params::init_params,
    };
    use tokio::sync::watch;

    fn inner(draft: &DraftConfig, exchange: GradientExchange) -> Inner {
        let settings = watch::channel(CheckpointSettings { keep: RetentionPolicy::default(), config: String::new() }).1;
        let checkpoints =
            CheckpointWriter { folder: "unused".into(), settings, seed: 0, run: String::new(), draft: draft.clone() };
        let hyper = Hyper { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01 };
        let masters = init_params(draft, 0).unwrap().deep_copy(Device::Cpu, Kind::Float).unwrap();
        Inner { adamw: AdamW::new(masters, hyper).unwrap(), device: Device::Cpu, checkpoints, exchange }
    }

    /// Bit-identical in each step, including the step in which NCCL fails and those after it.
    #[test]
    fn nccl_and_copies_train_two_drafters_identically() {
        let target = serde_json::json!({
            "model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 9,
            "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 50, "max_position_embeddings": 128,
        });
        let target = TargetConfig::from_json(&target).unwrap();
        let draft = DraftConfig::for_target(&target, 2, vec![1, 3, 5], 4, 49);
        let open = |_: &[Device]| Communicator::new(fake_nccl::table(), &[Device::Cpu; 2]);
        let by_nccl = GradientExchange::default().with_nccl(&[Device::Cuda(0), Device::Cuda(1)], open);
        let mut both = [inner(&draft, GradientExchange::default()), inner(&draft, by_nccl)];
        for step in 1..=5 {
            if step == 4 {
                // The reduce succeeds, the broadcast fails.
                fake_nccl::fail_at(fake_nccl::calls().len() + 5);
            }
            let request =
                StepRequest { step, denominator: 3.0, learning_rate: 1e-2, max_grad_norm: 1.0, weight_decay: 0.0 };
            let reports = both.each_mut().map(|inner| {
                let gradients = [2 * step, 2 * step + 1].map(|seed| init_params(&draft, seed).unwrap());
                inner.step(gradients.into(), request).unwrap()
            });
            assert!(reports[0].grad_norm > 0.0 && reports[0] == reports[1], "{reports:?}");
            let sums = both.each_mut().map(|inner| {
                let Inner { adamw, exchange, .. } = inner;
                let weights = [1, 0].map(|drafter| exchange.weights(&adamw.masters, drafter, Device::Cpu).unwrap());
                [&weights[0], &weights[1], &adamw.masters].map(|set| set.checksum().unwrap())
            });
            assert_eq!(sums[0], [sums[1][0]; 3], "step {step}");
            assert_eq!(sums[1], [sums[0][0]; 3], "step {step}");
        }
        let count = |name| fake_nccl::calls().iter().filter(|&&call| call == name).count();
        assert_eq!((count("ncclReduce"), count("ncclBroadcast"), count("ncclCommAbort")), (8, 7, 2));
    }
}
