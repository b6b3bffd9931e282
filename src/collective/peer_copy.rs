//! How weights and gradients travel from one device to another, and whether what arrives is what left.
//!
//! Copies between GPUs can bring zeros or garbage without an error, where an IOMMU or PCIe access control stands in the way of
//! peer-to-peer traffic (pytorch#84803, #132397). So each way is tried out before it is used.

use crate::model::{ModelError, params::ParamSet};
use draftmill_actors::runtime::random::stream_seed;
use rand::RngExt;
use rand_chacha::{ChaCha8Rng, rand_core::SeedableRng};
use serde::Serialize;
use std::collections::BTreeSet;
use tch::{Device, Tensor};

/// What helps where a GPU's values do not arrive at another one.
pub const REMEDY: &str = "turn the IOMMU off or set it to pass-through (kernel parameter iommu=pt), and PCIe access control (ACS) in \
                          the firmware or with setpci; in a virtual machine ask its host";

/// Values that a trial sends: 8 MiB, and no round number of them.
const TRIAL: usize = (1 << 20) + 3;

/// The way from one device to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Route {
    /// One copy, from device to device.
    Direct,
    /// Two copies, by way of the host.
    ThroughHost,
}

/// The routes of a run: direct, but for the pairs that are known not to work.
#[derive(Clone, Debug, Default)]
pub struct Routes {
    /// From, to.
    through_host: Vec<(Device, Device)>,
}

impl Route {
    /// A copy of `tensor` on `to`, in its own number type; also where it is there already.
    pub fn copy(self, tensor: &Tensor, to: Device) -> Result<Tensor, ModelError> {
        let kind = tensor.f_kind()?;
        Ok(match self {
            Route::Direct => tensor.f_to_device_(to, kind, false, true)?,
            Route::ThroughHost => {
                tensor.f_to_device_(Device::Cpu, kind, false, true)?.f_to_device_(to, kind, false, false)?
            }
        })
    }

    /// Whether random bits that go this way arrive as they left, read back by the host.
    pub fn copies_right(self, from: Device, to: Device) -> Result<bool, ModelError> {
        // Of each way other bits: memory that is used again must not hold what should arrive.
        let words = [self as u64, code(from), code(to)];
        let mut rng = ChaCha8Rng::from_seed(stream_seed(0, "route", &words));
        let bits: Vec<i64> = (0..TRIAL).map(|_| rng.random()).collect();
        let sent = Tensor::f_from_slice(&bits)?;
        let arrived = self.copy(&sent.f_to_device(from)?, to)?.f_to_device(Device::Cpu)?;
        Ok(arrived.f_equal(&sent)?)
    }
}

impl Routes {
    /// Tries each pair of different GPUs by `copies_right`. Where that says no or fails, a warning names both, and what goes this way
    /// goes by way of the host from now on.
    pub fn tried(
        pairs: impl IntoIterator<Item = (Device, Device)>,
        mut copies_right: impl FnMut(Device, Device) -> Result<bool, ModelError>,
    ) -> Routes {
        let mut through_host = Vec::new();
        for (from, to) in pairs {
            let why = match copies_right(from, to) {
                Ok(true) => continue,
                Ok(false) => "what arrived is not what was sent".to_owned(),
                Err(error) => error.to_string(),
            };
            tracing::warn!(
                "a copy from {} to {} failed its trial: {why}. Gradients and weights go by way of the host there, which is slower; \
                 {REMEDY}",
                name(from),
                name(to)
            );
            through_host.push((from, to));
        }
        Routes { through_host }
    }

    pub fn between(&self, from: Device, to: Device) -> Route {
        if self.through_host.contains(&(from, to)) { Route::ThroughHost } else { Route::Direct }
    }

    /// A flat copy of a set on `to`, in one transfer.
    pub fn copy(&self, set: &ParamSet, to: Device) -> Result<ParamSet, ModelError> {
        let route = self.between(set.device().unwrap_or(to), to);
        set.copied_by(|buffer| route.copy(buffer, to))
    }

    /// The set on `to`: as it is where it lies there already.
    pub fn moved(&self, set: ParamSet, to: Device) -> Result<ParamSet, ModelError> {
        if set.device().is_none_or(|from| from == to) { Ok(set) } else { self.copy(&set, to) }
    }
}

/// Each pair of GPUs, from and to, that gradients and weights of a run travel: from the drafters to the optimizer and back, and
/// from there to where weights are measured.
pub fn travelled(optimizer: Device, drafters: &[Device], measured: Option<Device>) -> Vec<(Device, Device)> {
    let gradients = drafters.iter().map(|&drafter| (drafter, optimizer));
    let weights = drafters.iter().copied().chain(measured).map(|reader| (optimizer, reader));
    let between_gpus = |(from, to): &(Device, Device)| from.is_cuda() && to.is_cuda() && from != to;
    let mut seen = BTreeSet::new();
    gradients.chain(weights).filter(between_gpus).filter(|&(from, to)| seen.insert((code(from), code(to)))).collect()
}

/// As the configuration writes it.
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
    fn each_pair_that_is_travelled_is_named_once() {
        let [a, b, c] = GPUS;
        assert_eq!(travelled(Device::Cpu, &[Device::Cpu, Device::Cpu], Some(Device::Cpu)), []);
        assert_eq!(travelled(a, &[a, a], Some(a)), []);
        assert_eq!(travelled(a, &[a, b, b], Some(b)), [(b, a), (a, b)]);
        // Nothing comes back from a measure, and what goes through the CPU needs no trial.
        assert_eq!(travelled(a, &[a, Device::Cpu], Some(c)), [(a, c)]);
    }

    /// pytorch_84803, pytorch_132397: a copy between two GPUs gives zeros, one way or both, and no error.
    #[test]
    fn a_pair_whose_copies_lie_or_fail_goes_through_the_host_and_no_other() {
        let [a, b, c] = GPUS;
        let pairs = [(a, b), (b, a), (a, c), (c, a)];
        let mut asked = Vec::new();
        let routes = Routes::tried(pairs, |from, to| {
            asked.push((from, to));
            match (from, to) {
                pair if pair == (b, a) => Ok(false),
                pair if pair == (a, c) => Err(ModelError::Torch("CUDA error: peer access".into())),
                _ => Ok(true),
            }
        });
        assert_eq!(asked, pairs);
        let found = pairs.map(|(from, to)| routes.between(from, to));
        assert_eq!(found, [Route::Direct, Route::ThroughHost, Route::ThroughHost, Route::Direct]);
        assert_eq!(Routes::default().between(b, a), Route::Direct);
    }

    #[test]
    fn on_the_cpu_both_routes_pass_the_trial() {
        for route in [Route::Direct, Route::ThroughHost] {
            assert!(route.copies_right(Device::Cpu, Device::Cpu).unwrap(), "{route:?}");
        }
    }

    proptest! {
        /// Of bits, not of numbers: NaN keeps its payload.
        #[test]
        fn both_routes_give_the_same_bits_in_storage_of_their_own(bits in prop::collection::vec(any::<i32>(), 1..100)) {
            let from = Tensor::from_slice(&bits).view_dtype(Kind::Float);
            for route in [Route::Direct, Route::ThroughHost] {
                let copy = route.copy(&from, Device::Cpu).unwrap();
                prop_assert_eq!(Vec::<i32>::try_from(copy.view_dtype(Kind::Int)).unwrap(), &bits[..]);
                prop_assert_ne!(copy.data_ptr(), from.data_ptr());
            }
        }

        #[test]
        fn a_set_goes_as_it_is_or_as_one_buffer(values in prop::collection::vec(-1.0f32..1.0, 1..300), split in 1usize..300) {
            let (one, two) = values.split_at(split.min(values.len()));
            let set = || ParamSet::new(vec![("a".into(), Tensor::from_slice(one)), ("b".into(), Tensor::from_slice(two))]);
            let routes = Routes::default();
            let here = routes.moved(set(), Device::Cpu).unwrap();
            prop_assert!(!here.is_flat());
            let copy = routes.copy(&here, Device::Cpu).unwrap();
            prop_assert!(copy.is_flat());
            for (a, b) in here.tensors().iter().zip(copy.tensors()) {
                prop_assert!(a.equal(b));
            }
            let again = routes.copy(&copy, Device::Cpu).unwrap();
            prop_assert!(again.is_flat() && again.tensors()[0].data_ptr() != copy.tensors()[0].data_ptr());
        }
    }
}
