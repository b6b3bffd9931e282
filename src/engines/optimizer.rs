//! The optimizer behind the actors' seam: fp32 masters and moments on one device, a copy of the weights for each drafter.

use super::{checkpointing::Saving, gradient_exchange::Exchange, worker::Worker};
use crate::{
    eval::evaluator::Snapshots,
    model::{
        ModelError,
        adamw::{AdamW, Hyper},
        load,
        params::{Gradient, ParamSet, Weights},
    },
    run_dir::checkpoint::{self, CheckpointError, NamedTensor, Verified},
};
use draftmill_actors::messages::engine::{EngineError, Optimizer, StepReport, StepRequest, Writing};
use tch::{Device, Kind};

/// AdamW on one device; each call is one unit of blocking work.
pub struct TorchOptimizer {
    inner: Worker<Inner>,
    /// Where drafter `i` computes.
    drafters: Vec<Device>,
    /// Where weights go that are to be measured.
    snapshots: Option<Snapshots>,
}

struct Inner {
    adamw: AdamW,
    device: Device,
    saving: Saving,
    /// How gradients come and weights go.
    exchange: Exchange,
}

impl TorchOptimizer {
    /// Starts from fresh or imported weights.
    pub fn new(
        weights: &Weights,
        hyper: Hyper,
        device: Device,
        drafters: Vec<Device>,
        saving: Saving,
    ) -> Result<TorchOptimizer, ModelError> {
        let adamw = AdamW::new(weights.deep_copy(device, Kind::Float)?, hyper)?;
        Ok(TorchOptimizer::over(adamw, device, saving, drafters))
    }

    /// Goes on from a checkpoint: the same bits in weights and moments.
    pub fn resume(
        from: &Verified,
        hyper: Hyper,
        device: Device,
        drafters: Vec<Device>,
        saving: Saving,
    ) -> Result<TorchOptimizer, ResumeError> {
        let set = |file| -> Result<ParamSet, ResumeError> { Ok(read(from, file)?.deep_copy(device, Kind::Float)?) };
        let masters = set(checkpoint::WEIGHTS)?;
        let (exp_avg, exp_avg_sq) = (set(checkpoint::FIRST_MOMENTS)?, set(checkpoint::SECOND_MOMENTS)?);
        let adamw = AdamW::resume(masters, exp_avg, exp_avg_sq, from.state.step, hyper);
        Ok(TorchOptimizer::over(adamw, device, saving, drafters))
    }
}

impl TorchOptimizer {
    fn over(adamw: AdamW, device: Device, saving: Saving, drafters: Vec<Device>) -> TorchOptimizer {
        let inner = Inner { adamw, device, saving, exchange: Exchange::default() };
        TorchOptimizer { inner: Worker::new(inner), drafters, snapshots: None }
    }

    /// Gradients and weights travel so.
    pub fn exchanging(mut self, exchange: Exchange) -> TorchOptimizer {
        if let Some(inner) = self.inner.peek_mut() {
            inner.exchange = exchange;
        }
        self
    }

    /// From now on weights are measured where that is due; the first ones at once, where nothing was measured yet.
    pub fn measured(mut self, snapshots: Snapshots, first: bool) -> TorchOptimizer {
        if let Some((what, turn)) = snapshots.due(0).filter(|_| first) {
            let weights = self.masters_on(snapshots.device).map_err(|error| error.to_string());
            snapshots.send(0, what, turn, weights);
        }
        self.snapshots = Some(snapshots);
        self
    }

    /// Copies the weights for a measure that is due. One that fails costs that measure and no step.
    async fn publish(&mut self, step: u64) {
        if let Some(snapshots) = &self.snapshots
            && let Some((what, turn)) = snapshots.due(step)
        {
            let device = snapshots.device;
            let copied = self.inner.run(move |inner| inner.masters_on(device)).await;
            snapshots.send(step, what, turn, copied.map_err(|error| error.to_string()));
        }
    }

    /// A copy of the weights on `device`, before the first unit of work.
    pub fn masters_on(&self, device: Device) -> Result<Weights, ModelError> {
        let inner = self.inner.peek().ok_or_else(|| ModelError::Input("the optimizer is at work".into()))?;
        inner.masters_on(device)
    }
}

/// Why a checkpoint cannot be gone on from.
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

    /// Replicas are kept in f32 as the masters are, whatever they compute in, so theirs is the same.
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
            // Nothing was supervised: there is no mean to take a step by.
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
        Ok(self.saving.writing(step, [named(masters)?, named(exp_avg)?, named(exp_avg_sq)?]))
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
        config::Keep,
        engines::checkpointing::Kept,
        hf::{config::TargetConfig, draft::DraftConfig},
        model::params::init_params,
    };
    use tokio::sync::watch;

    fn inner(draft: &DraftConfig, exchange: Exchange) -> Inner {
        let kept = watch::channel(Kept { keep: Keep::default(), config: String::new() }).1;
        let saving = Saving { folder: "unused".into(), kept, seed: 0, draft: draft.clone() };
        let hyper = Hyper { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01 };
        let masters = init_params(draft, 0).unwrap().deep_copy(Device::Cpu, Kind::Float).unwrap();
        Inner { adamw: AdamW::new(masters, hyper).unwrap(), device: Device::Cpu, saving, exchange }
    }

    /// Step by step to the bit, also over a failure and after it.
    #[test]
    fn two_drafters_train_the_same_by_nccl_as_by_copies() {
        let target = serde_json::json!({
            "model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 9,
            "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 50, "max_position_embeddings": 128,
        });
        let target = TargetConfig::from_json(&target).unwrap();
        let draft = DraftConfig::for_target(&target, 2, vec![1, 3, 5], 4, 49);
        let open = |_: &[Device]| Communicator::new(fake_nccl::table(), &[Device::Cpu; 2]);
        let by_nccl = Exchange::default().with_nccl(&[Device::Cuda(0), Device::Cuda(1)], open);
        let mut both = [inner(&draft, Exchange::default()), inner(&draft, by_nccl)];
        for step in 1..=5 {
            if step == 4 {
                // Its reduce works, its broadcast does not.
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
