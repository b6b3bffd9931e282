//! Hidden states between host and GPU through pinned buffers: from a target as soon as they are made, and to a drafter while the
//! batch before is in work.

use super::{
    features::{Coming, Take, TorchFeatures},
    worker::Worker,
};
use crate::{collective::peer_copy, model::ModelError};
use draftmill_actors::messages::engine::{EngineError, Staging};
use draftmill_torch_ext::{Arrival, Ferry};
use std::fmt::Display;
use tch::{Device, Kind, Tensor};
use tokio::sync::{mpsc, oneshot};

/// Batches that wait for their turn; what a drafter holds beyond these is copied when it is needed.
const WAITING: usize = 8;

/// 8-byte values that a trial sends: some more than both buffers of a ferry hold.
const TRIAL: i64 = (9 << 20) + 3;

struct Order {
    hidden: Tensor,
    reply: oneshot::Sender<Take>,
}

/// A way between the host and a GPU over which known bits come right, both ways; `None` of any other device. An error where it
/// fails or brings other bits.
pub fn tried(device: Device) -> Result<Option<Ferry>, ModelError> {
    let Some(mut ferry) = Ferry::new(device)? else { return Ok(None) };
    let sent = Tensor::f_arange_start(1i64, TRIAL + 1, (Kind::Int64, Device::Cpu))?;
    let there = ferry.to_gpu(&sent)?.taken()?;
    let seen = there.f_to_device(Device::Cpu)?;
    // Other bits on the way back: memory that is used again must not hold what should arrive.
    let back = ferry.to_host(&there.f_mul_scalar(-3)?)?;
    match seen.f_equal(&sent)? && back.f_equal(&sent.f_mul_scalar(-3)?)? {
        true => Ok(Some(ferry)),
        false => Err(ModelError::Torch("what arrived is not what was sent".into())),
    }
}

/// How hidden states leave a target's device.
pub(super) struct Outbound(Option<Ferry>);

impl Outbound {
    pub(super) fn new(device: Device) -> Outbound {
        Outbound(tried(device).unwrap_or_else(|error| {
            given_up(device, &error);
            None
        }))
    }

    /// The tensor on `device`: as it is where it is there already.
    pub(super) fn brought(&mut self, tensor: &Tensor, device: Device) -> Result<Tensor, ModelError> {
        if let Some(ferry) = self.0.as_mut().filter(|_| tensor.device().is_cuda() && device == Device::Cpu) {
            match ferry.to_host(tensor) {
                Ok(copy) => return Ok(copy),
                Err(error) => {
                    given_up(tensor.device(), &error);
                    self.0 = None;
                }
            }
        }
        Ok(tensor.f_to_device(device)?)
    }
}

/// Sends the hidden states of batches to `device`, one after another. Call it on the runtime.
pub(super) fn staging(device: Device) -> Staging<TorchFeatures> {
    if !device.is_cuda() {
        return Box::new(|_| ());
    }
    let mut ferry = None;
    staged_by(device, move |hidden| {
        let ferry = match &mut ferry {
            Some(ferry) => ferry,
            none => none.insert(tried(device)?.ok_or_else(|| ModelError::Input("the CPU is no GPU".into()))?),
        };
        let arrival = ferry.to_gpu(hidden)?;
        Ok(Box::new(move || Ok(Arrival::taken(arrival)?)))
    })
}

fn staged_by(
    device: Device,
    send: impl FnMut(&Tensor) -> Result<Take, ModelError> + Send + 'static,
) -> Staging<TorchFeatures> {
    let (orders, mut inbox) = mpsc::channel::<Order>(WAITING);
    tokio::spawn(async move {
        let mut sender = Worker::new(send);
        while let Some(Order { hidden, reply }) = inbox.recv().await {
            match sender.run(move |send| send(&hidden)).await {
                // The batch may be gone by now, with its drafter.
                Ok(take) => drop(reply.send(take)),
                // The batch in work has all of it; this one is copied when that is done.
                Err(EngineError::OutOfMemory(error)) => tracing::debug!("no room for hidden states ahead: {error}"),
                Err(error) => {
                    given_up(device, &error);
                    break;
                }
            }
        }
    });
    Box::new(move |features| {
        let (reply, coming) = oneshot::channel();
        let hidden = features.hidden.shallow_clone();
        if features.hidden.device() == Device::Cpu && orders.try_send(Order { hidden, reply }).is_ok() {
            features.coming = Some(Coming(coming));
        }
    })
}

fn given_up(device: Device, error: &dyn Display) {
    tracing::warn!(
        "hidden states cannot travel between the host and {} beside its work ({error}); from now on they are copied when they are \
         needed, which takes longer and changes nothing else",
        peer_copy::name(device)
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
            teacher: None,
            loss_mask: vec![1; 3],
            lengths: vec![3],
            shape: FeatureShape { tokens: 3, taps: 1, width: 2, dtype: FeatureDtype::F32 },
            finite: true,
            coming: None,
        }
    }

    /// A way that sends twice the values, when it is let, and fails with what it is told.
    fn gated() -> (Staging<TorchFeatures>, SyncSender<Result<(), &'static str>>) {
        let (gate, opened) = sync_channel(100);
        let send = move |hidden: &Tensor| -> Result<Take, ModelError> {
            let open = opened.recv().unwrap_or(Err("closed"));
            open.map_err(|text| ModelError::Torch(text.into()))?;
            let twice = hidden * 2.0;
            Ok(Box::new(move || Ok(twice)))
        };
        (staged_by(Device::Cuda(0), send), gate)
    }

    async fn arrived(features: &mut TorchFeatures) -> Option<f64> {
        let take = features.coming.take()?.here().await?;
        Some(take().unwrap().mean(Kind::Double).double_value(&[]))
    }

    #[tokio::test]
    async fn each_batch_gets_its_own_in_its_turn_and_who_asks_does_not_wait() {
        let (mut stage, gate) = gated();
        let mut batches: Vec<_> = (1..4).map(|value| features(value as f32)).collect();
        // Nothing is sent yet, and this goes on.
        batches.iter_mut().for_each(&mut stage);
        (0..3).for_each(|_| gate.send(Ok(())).unwrap());
        for (batch, value) in batches.iter_mut().zip([2.0, 4.0, 6.0]) {
            assert_eq!(arrived(batch).await, Some(value));
            // What waits in the pool is left as it was.
            assert_eq!(batch.hidden.mean(Kind::Double).double_value(&[]), value / 2.0);
        }
    }

    #[tokio::test]
    async fn what_cannot_be_sent_is_missed_and_nothing_more_is_sent() {
        let (mut stage, gate) = gated();
        let mut batches: Vec<_> = (1..4).map(|value| features(value as f32)).collect();
        batches.iter_mut().for_each(&mut stage);
        gate.send(Ok(())).unwrap();
        gate.send(Err("CUDA error: an illegal memory access")).unwrap();
        let mut all = Vec::new();
        for batch in &mut batches {
            all.push(arrived(batch).await);
        }
        assert_eq!(all, [Some(2.0), None, None]);
        let mut late = features(9.0);
        stage(&mut late);
        assert!(late.coming.is_none());
    }

    #[tokio::test]
    async fn where_there_is_no_room_the_next_one_is_sent_all_the_same() {
        let (mut stage, gate) = gated();
        let mut batches: Vec<_> = (1..4).map(|value| features(value as f32)).collect();
        batches.iter_mut().for_each(&mut stage);
        gate.send(Err("CUDA out of memory. Tried to allocate 2.00 GiB")).unwrap();
        (0..2).for_each(|_| gate.send(Ok(())).unwrap());
        let mut all = Vec::new();
        for batch in &mut batches {
            all.push(arrived(batch).await);
        }
        assert_eq!(all, [None, Some(4.0), Some(6.0)]);
    }

    #[tokio::test]
    async fn more_than_may_wait_are_not_ordered() {
        let (mut stage, gate) = gated();
        let mut batches: Vec<_> = (0..WAITING + 5).map(|value| features(value as f32)).collect();
        batches.iter_mut().for_each(&mut stage);
        let ordered = batches.iter().filter(|batch| batch.coming.is_some()).count();
        assert_eq!(ordered, WAITING);
        drop(gate);
    }

    #[tokio::test]
    async fn on_a_cpu_nothing_is_sent() {
        let mut batch = features(1.0);
        staging(CPU)(&mut batch);
        assert!(batch.coming.is_none() && tried(CPU).unwrap().is_none());
        let same = Outbound::new(CPU).brought(&batch.hidden, CPU).unwrap();
        assert_eq!(same.data_ptr(), batch.hidden.data_ptr());
    }
}
