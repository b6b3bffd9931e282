//! GPU memory as libtorch reports it. There is no report for a CPU or in a build without libtorch.

use draftmill_actors::runtime::metrics as m;
use metrics::gauge;
use serde::Serialize;

/// Memory of one GPU, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Memory {
    /// Used by this process's tensors.
    pub allocated: u64,
    /// Highest `allocated` so far.
    pub peak: u64,
    /// Reserved by libtorch's allocator, tensors included.
    pub reserved: u64,
    /// Free for any process.
    pub free: u64,
    pub total: u64,
}

impl Memory {
    /// Memory of the device with this name, for example `cuda:0`. The first call initialises the device.
    pub fn of(device: &str) -> Option<Memory> {
        query(device)
    }

    /// Series of a device by label `kind`, in the order of the metrics table.
    pub fn series(&self) -> [(&'static str, u64); 5] {
        let Memory { allocated, peak, reserved, free, total } = *self;
        [("allocated", allocated), ("reserved", reserved), ("peak", peak), ("free", free), ("total", total)]
    }

    /// Memory from the value of each kind's series.
    pub fn of_series(bytes: impl Fn(&'static str) -> u64) -> Memory {
        let [allocated, reserved, peak, free, total] = Memory::default().series().map(|(kind, _)| bytes(kind));
        Memory { allocated, peak, reserved, free, total }
    }

    /// Sets the device's gauges.
    pub fn publish(&self, device: &str) {
        for (kind, bytes) in self.series() {
            gauge!(m::DEVICE_MEMORY, "device" => device.to_owned(), "kind" => kind).set(bytes as f64);
        }
    }
}

#[cfg(feature = "torch")]
fn query(device: &str) -> Option<Memory> {
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
            tracing::debug!(%error, ?device, "GPU memory unknown");
            None
        }
    }
}

#[cfg(not(feature = "torch"))]
fn query(_: &str) -> Option<Memory> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admin::{Samples, recorder};

    #[test]
    fn each_kind_of_memory_is_one_series() {
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
    fn a_cpu_and_absent_devices_have_no_memory_report() {
        assert_eq!((Memory::of("cpu"), Memory::of("cuda:4096"), Memory::of("gpu")), (None, None, None));
    }
}
