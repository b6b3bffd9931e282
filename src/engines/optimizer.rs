//! The optimizer behind the actors' seam: fp32 masters and moments on one device, a copy of the weights for each drafter.

use super::{saving::Saving, worker::Worker};
use crate::{
    checkpoint::{self, CheckpointError, NamedTensor, Verified},
    eval::evaluator::Snapshots,
    model::{
        ModelError,
        adamw::{AdamW, Hyper},
        load,
        params::{Gradient, ParamSet, Weights},
        route::Routes,
    },
};
use draftmill_actors::engine::{EngineError, Optimizer, StepReport, StepRequest, Writing};
use tch::{Device, Kind};

/// AdamW on one device; each call is one unit of blocking work.
pub struct TorchOptimizer {
    inner: Worker<Inner>,
    /// Where drafter `i` computes.
    drafters: Vec<Device>,
    /// How to get there and back.
    routes: Routes,
    /// Where weights go that are to be measured.
    snapshots: Option<Snapshots>,
}

struct Inner {
    adamw: AdamW,
    device: Device,
    saving: Saving,
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
        Ok(TorchOptimizer::over(Inner { adamw, device, saving }, drafters))
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
        Ok(TorchOptimizer::over(Inner { adamw, device, saving }, drafters))
    }
}

impl TorchOptimizer {
    fn over(inner: Inner, drafters: Vec<Device>) -> TorchOptimizer {
        TorchOptimizer { inner: Worker::new(inner), drafters, routes: Routes::default(), snapshots: None }
    }

    /// Gradients and weights travel by these.
    pub fn routed(mut self, routes: Routes) -> TorchOptimizer {
        self.routes = routes;
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
            let (device, routes) = (snapshots.device, self.routes.clone());
            let copied = self.inner.run(move |inner| routes.copy(&inner.adamw.masters, device)).await;
            snapshots.send(step, what, turn, copied.map_err(|error| error.to_string()));
        }
    }

    /// A copy of the weights on `device`, before the first unit of work.
    pub fn masters_on(&self, device: Device) -> Result<Weights, ModelError> {
        let inner = self.inner.peek().ok_or_else(|| ModelError::Input("the optimizer is at work".into()))?;
        self.routes.copy(&inner.adamw.masters, device)
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
        let routes = self.routes.clone();
        let report = self.inner.run(move |inner| inner.step(gradients, request, &routes)).await?;
        self.publish(request.step).await;
        Ok(report)
    }

    async fn weights(&mut self, drafter: usize) -> Result<Weights, EngineError> {
        let device = self.drafters.get(drafter).copied();
        let device = device.ok_or_else(|| EngineError::Failed(format!("there is no drafter {drafter}")))?;
        let routes = self.routes.clone();
        self.inner.run(move |inner| routes.copy(&inner.adamw.masters, device)).await
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
    fn step(
        &mut self,
        gradients: Vec<Gradient>,
        request: StepRequest,
        routes: &Routes,
    ) -> Result<StepReport, ModelError> {
        let _no_grad = tch::no_grad_guard();
        let mut gradients = gradients.into_iter();
        let Some(first) = gradients.next() else { return Ok(StepReport::default()) };
        let mut sum = routes.moved(first, self.device)?;
        for gradient in gradients {
            sum.add_(&routes.moved(gradient, self.device)?)?;
        }
        if request.denominator <= 0.0 {
            // Nothing was supervised: there is no mean to take a step by.
            return Ok(StepReport::default());
        }
        self.adamw.set_weight_decay(request.weight_decay);
        let grad_norm = self.adamw.step(sum, request.denominator, request.learning_rate, request.max_grad_norm)?;
        Ok(StepReport { grad_norm })
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
