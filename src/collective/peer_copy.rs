//! Peer copies of weights and gradients between devices, with a self-test for each pair.
//!
//! Peer-to-peer copies can silently write zeros or garbage if an IOMMU or PCIe access control (ACS) blocks them
//! (pytorch#84803, #132397). Each pair of GPUs is therefore self-tested before use.

use crate::model::{ModelError, params::ParamSet};
use draftmill_actors::runtime::random::stream_seed;
use rand::RngExt;
use rand_chacha::{ChaCha8Rng, rand_core::SeedableRng};
use serde::Serialize;
use std::collections::BTreeSet;
use tch::{Device, Tensor};

/// Remedy for a failed peer copy.
pub const REMEDY: &str = "turn the IOMMU off or set it to pass-through (kernel parameter iommu=pt), and PCIe access control (ACS) in \
                          the firmware or with setpci; in a virtual machine ask its host";

/// Number of values in a self-test: about 8 MiB, and not a multiple of a power of two.
const TEST_VALUES: usize = (1 << 20) + 3;

/// Copy method between two devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum PeerCopy {
    /// One device-to-device copy.
    Direct,
    /// Two copies, staged in host memory.
    ThroughHost,
}

/// Copy method of each pair of devices: direct unless the self-test of the pair failed.
#[derive(Clone, Debug, Default)]
pub struct PeerCopies {
    /// Source and destination of the failed pairs.
    through_host: Vec<(Device, Device)>,
}

impl PeerCopy {
    /// Copies `tensor` to `to` in its own dtype, even if it is on that device already.
    ///
    /// # Errors
    /// Returns an error if libtorch fails.
    pub fn copy(self, tensor: &Tensor, to: Device) -> Result<Tensor, ModelError> {
        let kind = tensor.f_kind()?;
        Ok(match self {
            PeerCopy::Direct => tensor.f_to_device_(to, kind, false, true)?,
            PeerCopy::ThroughHost => {
                tensor.f_to_device_(Device::Cpu, kind, false, true)?.f_to_device_(to, kind, false, false)?
            }
        })
    }

    /// Copies random bits from `from` to `to` and returns true if the host reads the same bits back.
    ///
    /// # Errors
    /// Returns an error if libtorch fails.
    pub fn self_test(self, from: Device, to: Device) -> Result<bool, ModelError> {
        // Different bits for each pair and method: reused memory must not hold the expected values.
        let words = [self as u64, code(from), code(to)];
        let mut rng = ChaCha8Rng::from_seed(stream_seed(0, "route", &words));
        let bits: Vec<i64> = (0..TEST_VALUES).map(|_| rng.random()).collect();
        let sent = Tensor::f_from_slice(&bits)?;
        let arrived = self.copy(&sent.f_to_device(from)?, to)?.f_to_device(Device::Cpu)?;
        Ok(arrived.f_equal(&sent)?)
    }
}

impl PeerCopies {
    /// Runs `self_test` for each pair. If it returns false or fails, logs a warning and copies this pair through the
    /// host.
    pub fn self_test(
        pairs: impl IntoIterator<Item = (Device, Device)>,
        mut self_test: impl FnMut(Device, Device) -> Result<bool, ModelError>,
    ) -> PeerCopies {
        let mut through_host = Vec::new();
        for (from, to) in pairs {
            let why = match self_test(from, to) {
                Ok(true) => continue,
                Ok(false) => "the received values differ from those sent".to_owned(),
                Err(error) => error.to_string(),
            };
            let (from_name, to_name) = (name(from), name(to));
            tracing::warn!(
                from = from_name,
                to = to_name,
                why,
                remedy = REMEDY,
                "peer copy failed its self-test; copying through the host, which is slower"
            );
            through_host.push((from, to));
        }
        PeerCopies { through_host }
    }

    /// Copy method from `from` to `to`.
    pub fn between(&self, from: Device, to: Device) -> PeerCopy {
        if self.through_host.contains(&(from, to)) { PeerCopy::ThroughHost } else { PeerCopy::Direct }
    }

    /// Copies a set to `to` as one flat buffer, in one transfer.
    ///
    /// # Errors
    /// Returns an error if libtorch fails.
    pub fn copy(&self, set: &ParamSet, to: Device) -> Result<ParamSet, ModelError> {
        let method = self.between(set.device().unwrap_or(to), to);
        set.copy_with(|buffer| method.copy(buffer, to))
    }

    /// Returns the set itself if it is on `to` already, else a copy there.
    ///
    /// # Errors
    /// Returns an error if libtorch fails.
    pub fn move_to(&self, set: ParamSet, to: Device) -> Result<ParamSet, ModelError> {
        if set.device().is_none_or(|from| from == to) { Ok(set) } else { self.copy(&set, to) }
    }
}

/// Pairs of GPUs (source, destination) between which a run copies: gradients from drafters to the optimizer, weights
/// from the optimizer to drafters and to the evaluation device.
pub fn copy_pairs(optimizer: Device, drafters: &[Device], evaluation: Option<Device>) -> Vec<(Device, Device)> {
    let gradients = drafters.iter().map(|&drafter| (drafter, optimizer));
    let weights = drafters.iter().copied().chain(evaluation).map(|reader| (optimizer, reader));
    let between_gpus = |(from, to): &(Device, Device)| from.is_cuda() && to.is_cuda() && from != to;
    let mut seen = BTreeSet::new();
    gradients.chain(weights).filter(between_gpus).filter(|&(from, to)| seen.insert((code(from), code(to)))).collect()
}

/// Device name as in the configuration.
pub fn name(device: Device) -> String {
    match device {
        Device::Cpu => "cpu".into(),
        Device::Cuda(index) => format!("cuda:{index}"),
        other => format!("{other:?}").to_lowercase(),
    }
}

fn code(device: Device) -> u64 {
    match device {
        Device::Cuda(index) => index as u64,
        _ => u64::MAX,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tch::Kind;

    const GPUS: [Device; 3] = [Device::Cuda(0), Device::Cuda(1), Device::Cuda(2)];

    #[test]
    fn each_copy_pair_is_listed_once() {
        let [a, b, c] = GPUS;
        assert_eq!(copy_pairs(Device::Cpu, &[Device::Cpu, Device::Cpu], Some(Device::Cpu)), []);
        assert_eq!(copy_pairs(a, &[a, a], Some(a)), []);
        assert_eq!(copy_pairs(a, &[a, b, b], Some(b)), [(b, a), (a, b)]);
        // The evaluation device sends nothing, and copies with the CPU need no self-test.
        assert_eq!(copy_pairs(a, &[a, Device::Cpu], Some(c)), [(a, c)]);
    }

    /// pytorch#84803, pytorch#132397: a copy between two GPUs gives zeros, in one or both directions, without an error.
    #[test]
    fn only_pairs_that_fail_the_self_test_go_through_the_host() {
        let [a, b, c] = GPUS;
        let pairs = [(a, b), (b, a), (a, c), (c, a)];
        let mut tested = Vec::new();
        let copies = PeerCopies::self_test(pairs, |from, to| {
            tested.push((from, to));
            match (from, to) {
                pair if pair == (b, a) => Ok(false),
                pair if pair == (a, c) => Err(ModelError::Torch("CUDA error: peer access".into())),
                _ => Ok(true),
            }
        });
        assert_eq!(tested, pairs);
        let found = pairs.map(|(from, to)| copies.between(from, to));
        assert_eq!(found, [PeerCopy::Direct, PeerCopy::ThroughHost, PeerCopy::ThroughHost, PeerCopy::Direct]);
        assert_eq!(PeerCopies::default().between(b, a), PeerCopy::Direct);
    }

    #[test]
    fn both_methods_pass_the_self_test_on_the_cpu() {
        for method in [PeerCopy::Direct, PeerCopy::ThroughHost] {
            assert!(method.self_test(Device::Cpu, Device::Cpu).unwrap(), "{method:?}");
        }
    }

    proptest! {
        /// Compares bits, so that a NaN keeps its payload.
        #[test]
        fn both_methods_copy_the_bits_to_new_storage(bits in prop::collection::vec(any::<i32>(), 1..100)) {
            let from = Tensor::from_slice(&bits).view_dtype(Kind::Float);
            for method in [PeerCopy::Direct, PeerCopy::ThroughHost] {
                let copy = method.copy(&from, Device::Cpu).unwrap();
                prop_assert_eq!(Vec::<i32>::try_from(copy.view_dtype(Kind::Int)).unwrap(), &bits[..]);
                prop_assert_ne!(copy.data_ptr(), from.data_ptr());
            }
        }

        #[test]
        fn set_is_moved_as_it_is_or_copied_as_one_buffer(values in prop::collection::vec(-1.0f32..1.0, 1..300), split in 1usize..300) {
            let (one, two) = values.split_at(split.min(values.len()));
            let set = || ParamSet::new(vec![("a".into(), Tensor::from_slice(one)), ("b".into(), Tensor::from_slice(two))]);
            let copies = PeerCopies::default();
            let here = copies.move_to(set(), Device::Cpu).unwrap();
            prop_assert!(!here.is_flat());
            let copy = copies.copy(&here, Device::Cpu).unwrap();
            prop_assert!(copy.is_flat());
            for (a, b) in here.tensors().iter().zip(copy.tensors()) {
                prop_assert!(a.equal(b));
            }
            let again = copies.copy(&copy, Device::Cpu).unwrap();
            prop_assert!(again.is_flat() && again.tensors()[0].data_ptr() != copy.tensors()[0].data_ptr());
        }
    }
}
