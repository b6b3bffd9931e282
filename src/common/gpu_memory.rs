//! Memory of GPUs as libtorch tells it. Without libtorch, and for a CPU, there is nothing to tell.

use draftmill_actors::runtime::metrics as m;
use metrics::gauge;
use serde::Serialize;

/// In bytes, at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Memory {
    /// Held by this process's tensors, and the most that they ever held.
    pub allocated: u64,
    pub peak: u64,
    /// Held by libtorch's allocator, tensors included.
    pub reserved: u64,
    /// Left for any process.
    pub free: u64,
    pub total: u64,
}

impl Memory {
    /// Of a device by its name, `cuda:0`. The first question takes the device into use.
    pub fn of(device: &str) -> Option<Memory> {
        told(device)
    }

    /// The series of a device, each by its kind, in the order of the metrics table.
    pub fn series(&self) -> [(&'static str, u64); 5] {
        let Memory { allocated, peak, reserved, free, total } = *self;
        [("allocated", allocated), ("reserved", reserved), ("peak", peak), ("free", free), ("total", total)]
    }

    /// The other way round: from what each kind's series says.
    pub fn of_series(bytes: impl Fn(&'static str) -> u64) -> Memory {
        let [allocated, reserved, peak, free, total] = Memory::default().series().map(|(kind, _)| bytes(kind));
        Memory { allocated, peak, reserved, free, total }
    }

    pub fn publish(&self, device: &str) {
        for (kind, bytes) in self.series() {
            gauge!(m::DEVICE_MEMORY, "device" => device.to_owned(), "kind" => kind).set(bytes as f64);
        }
    }
}

#[cfg(feature = "torch")]
fn told(device: &str) -> Option<Memory> {
    let device: super::device::Device = device.parse().ok()?;
    match draftmill_torch_ext::memory(device.into()) {
        Ok(memory) => memory.map(|draftmill_torch_ext::Memory { allocated, reserved, peak, free, total }| Memory {
            allocated,
            peak,
            reserved,
            free,
            total,
        }),
        Err(error) => {
            tracing::debug!("{device:?} does not tell of its memory: {error}");
            None
        }
    }
}

#[cfg(not(feature = "torch"))]
fn told(_: &str) -> Option<Memory> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admin::{Samples, recorder};

    #[test]
    fn each_kind_of_the_table_is_a_series_of_its_own_value() {
        let memory = Memory { allocated: 10, reserved: 20, peak: 15, free: 40, total: 70 };
        let spec = m::TABLE.iter().find(|spec| spec.name == m::DEVICE_MEMORY).unwrap();
        let kinds: Vec<_> = memory.series().map(|(kind, _)| kind).to_vec();
        assert_eq!(spec.labels, [("device", &[][..]), ("kind", &kinds[..])]);
        let recorder = recorder(&[]).unwrap();
        metrics::with_local_recorder(&recorder, || {
            memory.publish("cuda:1");
            Memory { free: 1, ..memory }.publish("cuda:0");
        });
        let samples = Samples::parse(&recorder.handle().render());
        let value = |device, kind| samples.with(m::DEVICE_MEMORY, &[("device", device), ("kind", kind)]);
        let kinds = ["allocated", "reserved", "peak", "free", "total"];
        assert_eq!(kinds.map(|kind| value("cuda:1", kind)), [10.0, 20.0, 15.0, 40.0, 70.0]);
        assert_eq!(value("cuda:0", "free"), 1.0);
    }

    #[test]
    fn a_cpu_and_what_is_not_there_tell_nothing() {
        assert_eq!((Memory::of("cpu"), Memory::of("cuda:4096"), Memory::of("gpu")), (None, None, None));
    }
}
