//! Pinned transfers of hidden states: from a target's GPU to the host, and to a drafter's GPU while it trains the batch before.

use super::{
    features::{FinishCopy, Prefetch, TorchFeatures},
    worker::Worker,
};
use crate::{collective::peer_copy, model::ModelError};
use draftmill_actors::messages::engine::{EngineError, Staging};
use draftmill_torch_ext::{PendingCopy, PinnedTransfer};
use std::fmt::Display;
use tch::{Device, Kind, Tensor};
use tokio::sync::{mpsc, oneshot};

/// Limit of queued copies. Further batches are copied when they are trained.
const QUEUE: usize = 8;

/// Values of 8 bytes in a self-test: slightly more than both pinned buffers hold.
const TEST_VALUES: i64 = (9 << 20) + 3;

struct CopyRequest {
    hidden: Tensor,
    reply: oneshot::Sender<FinishCopy>,
}

/// Pinned transfer between the host and `device` that passed a self-test in both directions; `None` if the device is no GPU.
///
/// # Errors
/// A CUDA failure, or values that differ after the transfer.
pub fn self_tested(device: Device) -> Result<Option<PinnedTransfer>, ModelError> {
    let Some(mut ferry) = PinnedTransfer::new(device)? else { return Ok(None) };
    let sent = Tensor::f_arange_start(1i64, TEST_VALUES + 1, (Kind::Int64, Device::Cpu))?;
    let on_gpu = ferry.to_gpu(&sent)?.into_tensor()?;
    let copied = on_gpu.f_to_device(Device::Cpu)?;
    // Other values on the way back, so that reused memory cannot pass for a correct copy.
    let back = ferry.to_host(&on_gpu.f_mul_scalar(-3)?)?;
    match copied.f_equal(&sent)? && back.f_equal(&sent.f_mul_scalar(-3)?)? {
        true => Ok(Some(ferry)),
        false => Err(ModelError::Torch("pinned transfer returned other values than were sent".into())),
    }
}

/// Transfer of hidden states from a target's device.
pub(super) struct OutboundTransfer(Option<PinnedTransfer>);

impl OutboundTransfer {
    pub(super) fn new(device: Device) -> OutboundTransfer {
        OutboundTransfer(self_tested(device).unwrap_or_else(|error| {
            log_fallback(device, &error);
            None
        }))
    }

    /// Copy of the tensor on `device`; the tensor itself if it is already there.
    pub(super) fn copied_to(&mut self, tensor: &Tensor, device: Device) -> Result<Tensor, ModelError> {
        if let Some(ferry) = self.0.as_mut().filter(|_| tensor.device().is_cuda() && device == Device::Cpu) {
            match ferry.to_host(tensor) {
                Ok(copy) => return Ok(copy),
                Err(error) => {
                    log_fallback(tensor.device(), &error);
                    self.0 = None;
                }
            }
        }
        Ok(tensor.f_to_device(device)?)
    }
}

/// Prefetches hidden states of batches to `device`, one after another. Requires a tokio runtime.
pub(super) fn staging(device: Device) -> Staging<TorchFeatures> {
    if !device.is_cuda() {
        return Box::new(|_| ());
    }
    let mut ferry = None;
    staged_by(device, move |hidden| {
        let ferry = match &mut ferry {
            Some(ferry) => ferry,
            none => {
                none.insert(self_tested(device)?.ok_or_else(|| ModelError::Input(format!("{device:?} is not a GPU")))?)
            }
        };
        let arrival = ferry.to_gpu(hidden)?;
        Ok(Box::new(move || Ok(PendingCopy::into_tensor(arrival)?)))
    })
}

fn staged_by(
    device: Device,
    send: impl FnMut(&Tensor) -> Result<FinishCopy, ModelError> + Send + 'static,
) -> Staging<TorchFeatures> {
    let (requests, mut inbox) = mpsc::channel::<CopyRequest>(QUEUE);
    tokio::spawn(async move {
        let mut sender = Worker::new(send);
        while let Some(CopyRequest { hidden, reply }) = inbox.recv().await {
            match sender.run(move |send| send(&hidden)).await {
                // The receiver is gone if its drafter is.
                Ok(take) => drop(reply.send(take)),
                // The current batch needs the memory; this one is copied after it.
                Err(EngineError::OutOfMemory(error)) => tracing::debug!(error, "no memory to prefetch hidden states"),
                Err(error) => {
                    log_fallback(device, &error);
                    break;
                }
            }
        }
    });
    Box::new(move |features| {
        let (reply, prefetch) = oneshot::channel();
        let hidden = features.hidden.shallow_clone();
        if features.hidden.device() == Device::Cpu && requests.try_send(CopyRequest { hidden, reply }).is_ok() {
            features.prefetch = Some(Prefetch(prefetch));
        }
    })
}

fn log_fallback(device: Device, error: &dyn Display) {
    tracing::warn!(
        %error,
        device = peer_copy::name(device),
        "pinned transfer unavailable; hidden states are copied when they are needed, which takes longer"
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use draftmill_actors::messages::engine::{FeatureDtype, FeatureShape};
    use std::sync::mpsc::{SyncSender, sync_channel};

    const CPU: Device = Device::Cpu;

    fn features(value: f32) -> TorchFeatures {
        TorchFeatures {
            hidden: Tensor::full([3, 2], f64::from(value), (Kind::Float, CPU)),
            ids: vec![1, 2, 3],
            target_labels: None,
            loss_mask: vec![1; 3],
            lengths: vec![3],
            shape: FeatureShape { tokens: 3, taps: 1, width: 2, dtype: FeatureDtype::F32 },
            finite: true,
            prefetch: None,
        }
    }

    /// Prefetcher that sends the values doubled; each message on the gate lets one copy succeed or fail.
    fn gated() -> (Staging<TorchFeatures>, SyncSender<Result<(), &'static str>>) {
        let (gate, opened) = sync_channel(100);
        let send = move |hidden: &Tensor| -> Result<FinishCopy, ModelError> {
            let open = opened.recv().unwrap_or(Err("closed"));
            open.map_err(|text| ModelError::Torch(text.into()))?;
            let doubled = hidden * 2.0;
            Ok(Box::new(move || Ok(doubled)))
        };
        (staged_by(Device::Cuda(0), send), gate)
    }

    async fn prefetched(features: &mut TorchFeatures) -> Option<f64> {
        let finish = features.prefetch.take()?.enqueued().await?;
        Some(finish().unwrap().mean(Kind::Double).double_value(&[]))
    }

    #[tokio::test]
    async fn each_batch_gets_its_own_copy_without_waiting() {
        let (mut stage, gate) = gated();
        let mut batches: Vec<_> = (1..4).map(|value| features(value as f32)).collect();
        // Returns although no copy is sent yet.
        batches.iter_mut().for_each(&mut stage);
        (0..3).for_each(|_| gate.send(Ok(())).unwrap());
        for (batch, value) in batches.iter_mut().zip([2.0, 4.0, 6.0]) {
            assert_eq!(prefetched(batch).await, Some(value));
            // The source is unchanged.
            assert_eq!(batch.hidden.mean(Kind::Double).double_value(&[]), value / 2.0);
        }
    }

    #[tokio::test]
    async fn a_cuda_error_ends_prefetching() {
        let (mut stage, gate) = gated();
        let mut batches: Vec<_> = (1..4).map(|value| features(value as f32)).collect();
        batches.iter_mut().for_each(&mut stage);
        gate.send(Ok(())).unwrap();
        gate.send(Err("CUDA error: an illegal memory access")).unwrap();
        let mut all = Vec::new();
        for batch in &mut batches {
            all.push(prefetched(batch).await);
        }
        assert_eq!(all, [Some(2.0), None, None]);
        let mut late = features(9.0);
        stage(&mut late);
        assert!(late.prefetch.is_none());
    }

    #[tokio::test]
    async fn out_of_memory_skips_one_prefetch_only() {
        let (mut stage, gate) = gated();
        let mut batches: Vec<_> = (1..4).map(|value| features(value as f32)).collect();
        batches.iter_mut().for_each(&mut stage);
        gate.send(Err("CUDA out of memory. Tried to allocate 2.00 GiB")).unwrap();
        (0..2).for_each(|_| gate.send(Ok(())).unwrap());
        let mut all = Vec::new();
        for batch in &mut batches {
            all.push(prefetched(batch).await);
        }
        assert_eq!(all, [None, Some(4.0), Some(6.0)]);
    }

    #[tokio::test]
    async fn the_queue_of_copies_is_limited() {
        let (mut stage, gate) = gated();
        let mut batches: Vec<_> = (0..QUEUE + 5).map(|value| features(value as f32)).collect();
        batches.iter_mut().for_each(&mut stage);
        let queued = batches.iter().filter(|batch| batch.prefetch.is_some()).count();
        assert_eq!(queued, QUEUE);
        drop(gate);
    }

    #[tokio::test]
    async fn a_cpu_drafter_has_no_prefetch() {
        let mut batch = features(1.0);
        staging(CPU)(&mut batch);
        assert!(batch.prefetch.is_none() && self_tested(CPU).unwrap().is_none());
        let same = OutboundTransfer::new(CPU).copied_to(&batch.hidden, CPU).unwrap();
        assert_eq!(same.data_ptr(), batch.hidden.data_ptr());
    }
}
