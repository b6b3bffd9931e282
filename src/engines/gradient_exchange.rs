//! Sums the drafters' gradients and distributes the new weights, by peer copies or by NCCL.

use crate::{
    collective::{
        nccl::Communicator,
        nccl_ffi::NcclError,
        peer_copy::{PeerCopies, name},
    },
    model::{
        ModelError,
        params::{Gradient, ParamSet, Weights},
    },
};
use std::collections::HashSet;
use tch::Device;

/// Gradient sum and weight distribution between the optimizer and its drafters.
///
/// The default moves tensors with plain copies. The first NCCL failure switches to copies permanently.
#[derive(Default)]
pub struct GradientExchange {
    copies: PeerCopies,
    /// Communicator over the drafters' GPUs, in drafter order; the first one is the optimizer's. `None` if NCCL is not
    /// configured, not available, or failed.
    nccl: Option<Communicator>,
    /// Weights of the last broadcast, by drafter, until that drafter takes them or the next step begins.
    broadcast: Vec<Option<Weights>>,
}

impl GradientExchange {
    pub fn with_peer_copies(copies: PeerCopies) -> GradientExchange {
        GradientExchange { copies, ..GradientExchange::default() }
    }

    /// Uses NCCL for these drafters if `open` returns a self-tested communicator. Otherwise logs a warning and keeps to copies.
    pub fn with_nccl(
        mut self,
        drafters: &[Device],
        open: impl FnOnce(&[Device]) -> Result<Communicator, NcclError>,
    ) -> GradientExchange {
        if drafters.len() < 2 {
            // One drafter shares the optimizer's device: no exchange is needed.
            return self;
        }
        match require_own_gpus(drafters).and_then(|()| open(drafters)).and_then(|nccl| Ok((nccl.version()?, nccl))) {
            Ok((version, nccl)) => {
                tracing::info!(%version, gpus = drafters.len(), "NCCL enabled for gradients and weights");
                self.nccl = Some(nccl);
            }
            Err(error) => tracing::warn!(
                %error,
                remedy = error.remedy(),
                "NCCL unavailable despite drafter.collectives = \"nccl\"; copies are used instead"
            ),
        }
        self
    }

    /// Sum of the drafters' gradients, on `device`. `None` if there are none.
    ///
    /// # Errors
    /// A libtorch failure. An NCCL failure is logged and replaced by copies.
    pub fn sum(&mut self, gradients: Vec<Gradient>, device: Device) -> Result<Option<Gradient>, ModelError> {
        let _no_grad = tch::no_grad_guard();
        // The step makes these weights stale.
        self.broadcast.clear();
        if let Some(sum) = self.reduce_by_nccl(&gradients) {
            return Ok(Some(sum));
        }
        let mut gradients = gradients.into_iter();
        let Some(first) = gradients.next() else { return Ok(None) };
        let mut sum = self.copies.move_to(first, device)?;
        for gradient in gradients {
            sum.add_(&self.copies.move_to(gradient, device)?)?;
        }
        Ok(Some(sum))
    }

    /// Weights for a drafter on `device`. With NCCL, the first request after a step broadcasts them to all drafters.
    ///
    /// # Errors
    /// A libtorch failure.
    pub fn weights(&mut self, masters: &Weights, drafter: usize, device: Device) -> Result<Weights, ModelError> {
        if self.broadcast.is_empty() {
            self.broadcast = self.broadcast_by_nccl(masters).unwrap_or_default();
        }
        match self.broadcast.get_mut(drafter).and_then(Option::take) {
            Some(weights) => Ok(weights),
            None => self.copy(masters, device),
        }
    }

    /// Copy of the weights on `device`, without NCCL.
    ///
    /// # Errors
    /// A libtorch failure.
    pub fn copy(&self, masters: &Weights, device: Device) -> Result<Weights, ModelError> {
        self.copies.copy(masters, device)
    }

    /// Sum by NCCL if each of its GPUs has one gradient. Does not change the gradients.
    fn reduce_by_nccl(&mut self, gradients: &[Gradient]) -> Option<Gradient> {
        let nccl = self.nccl.as_mut()?;
        let from = gradients.iter().map(ParamSet::device);
        if !from.eq(nccl.devices().iter().copied().map(Some)) {
            // A drafter is paused or had nothing to train.
            return None;
        }
        let sum = reduce(nccl, gradients);
        self.disable_on_error(sum)
    }

    fn broadcast_by_nccl(&mut self, masters: &Weights) -> Option<Vec<Option<Weights>>> {
        let sets = broadcast(self.nccl.as_mut()?, masters);
        self.disable_on_error(sets)
    }

    /// Result of an NCCL call. A failure disables NCCL permanently.
    fn disable_on_error<T>(&mut self, result: Result<T, NcclError>) -> Option<T> {
        let disable = |error: &NcclError| {
            tracing::warn!(%error, remedy = error.remedy(), "NCCL failed; copies are used from now on");
            self.nccl = None;
        };
        result.inspect_err(disable).ok()
    }
}

fn reduce(nccl: &mut Communicator, gradients: &[Gradient]) -> Result<Gradient, NcclError> {
    let parts = gradients.iter().map(ParamSet::buffer).collect::<Result<Vec<_>, _>>()?;
    let sum = nccl.reduce(&parts)?;
    Ok(gradients[0].with_buffer(sum)?)
}

fn broadcast(nccl: &mut Communicator, masters: &Weights) -> Result<Vec<Option<Weights>>, NcclError> {
    let copies = nccl.broadcast(&masters.buffer()?)?;
    let sets = copies.into_iter().map(|copy| Ok(Some(masters.with_buffer(copy)?)));
    sets.collect()
}

/// Fails unless each drafter has its own GPU.
fn require_own_gpus(drafters: &[Device]) -> Result<(), NcclError> {
    let mut seen = HashSet::new();
    match drafters.iter().find(|&&device| !device.is_cuda() || !seen.insert(name(device))) {
        None => Ok(()),
        Some(device) if device.is_cuda() => {
            Err(NcclError::Unsuitable(format!("several drafters share {}", name(*device))))
        }
        Some(device) => Err(NcclError::Unsuitable(format!("a drafter computes on {}", name(*device)))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::fake_nccl;
    use proptest::prelude::*;
    use std::cell::Cell;
    use tch::{Kind, Tensor};

    /// Number of library calls that open a communicator.
    const OPENED: usize = 1;

    fn exchange(drafters: usize) -> GradientExchange {
        let nccl = Communicator::new(fake_nccl::table(), &vec![Device::Cpu; drafters]).unwrap();
        GradientExchange { nccl: Some(nccl), ..GradientExchange::default() }
    }

    /// Values of a set, and true if they are in one buffer.
    type Drawn = (bool, Vec<f32>);

    fn set((flat, values): &Drawn, split: usize) -> ParamSet {
        let (one, two) = values.split_at(split.min(values.len()));
        let set = ParamSet::new(vec![("a".into(), Tensor::from_slice(one)), ("b".into(), Tensor::from_slice(two))]);
        if *flat { set.deep_copy(Device::Cpu, Kind::Float).unwrap() } else { set }
    }

    fn values(set: &ParamSet) -> Vec<f32> {
        set.tensors().iter().flat_map(|tensor| Vec::<f32>::try_from(tensor).unwrap()).collect()
    }

    fn by_copies(drawn: &[Drawn], split: usize) -> ParamSet {
        let gradients = drawn.iter().map(|one| set(one, split)).collect();
        GradientExchange::default().sum(gradients, Device::Cpu).unwrap().unwrap()
    }

    fn bits(set: &ParamSet) -> Vec<u32> {
        values(set).into_iter().map(f32::to_bits).collect()
    }

    /// Gradients of 2 to 5 drafters, each with the same number of values.
    fn gradients() -> impl Strategy<Value = Vec<Drawn>> {
        (2usize..6, 1usize..300).prop_flat_map(|(drafters, count)| {
            let one = (any::<bool>(), prop::collection::vec(-1e3f32..1e3, count));
            prop::collection::vec(one, drafters)
        })
    }

    proptest! {
        /// Exact for two drafters. For more the order of additions differs, so the tolerance is relative.
        #[test]
        fn the_nccl_sum_equals_the_copy_sum(drawn in gradients(), split in 0usize..300) {
            let mut exchange = exchange(drawn.len());
            let given = drawn.iter().map(|one| set(one, split)).collect();
            let sum = exchange.sum(given, Device::Cpu).unwrap().unwrap();
            prop_assert_eq!(fake_nccl::calls().iter().filter(|&&call| call == "ncclReduce").count(), drawn.len());
            let want = by_copies(&drawn, split);
            prop_assert!(sum.is_flat() && sum.names() == want.names());
            if drawn.len() == 2 {
                prop_assert_eq!(bits(&sum), bits(&want));
                prop_assert_eq!(sum.checksum().unwrap(), want.checksum().unwrap());
            }
            for (index, (got, want)) in values(&sum).into_iter().zip(values(&want)).enumerate() {
                let size: f32 = drawn.iter().map(|(_, values)| values[index].abs()).sum();
                prop_assert!((got - want).abs() <= size * f32::EPSILON * drawn.len() as f32, "{got} is not {want}");
            }
        }

        /// One broadcast serves all drafters in any order; a second request of a drafter gets a copy.
        #[test]
        fn broadcast_weights_equal_the_masters_bit_for_bit(
            bits_of in prop::collection::vec(any::<u32>(), 1..300), split in 1usize..300, flat: bool,
            drafters in 2usize..6, first in 0usize..6,
        ) {
            let masters = set(&(flat, bits_of.iter().map(|&bits| f32::from_bits(bits)).collect()), split);
            let mut exchange = exchange(drafters);
            for round in 0..3 {
                let mut all = Vec::new();
                for drafter in 0..drafters {
                    let weights = exchange.weights(&masters, (first + drafter) % drafters, Device::Cpu).unwrap();
                    prop_assert_eq!(weights.checksum().unwrap(), masters.checksum().unwrap());
                    prop_assert!(weights.is_flat() && weights.names() == masters.names());
                    all.push(weights);
                }
                let pointers = all.iter().chain([&masters]).map(|set| set.tensors()[0].data_ptr());
                prop_assert_eq!(pointers.collect::<HashSet<_>>().len(), drafters + 1, "separate storage");
                let again = exchange.weights(&masters, first % drafters, Device::Cpu).unwrap();
                prop_assert_eq!(again.checksum().unwrap(), masters.checksum().unwrap());
                let broadcasts = fake_nccl::calls().iter().filter(|&&call| call == "ncclBroadcast").count();
                prop_assert_eq!(broadcasts, (round + 1) * drafters);
                exchange.sum(Vec::new(), Device::Cpu).unwrap();
            }
        }

        /// After a failure of any call, sums and weights equal those of copies bit for bit, and NCCL is not called again.
        #[test]
        fn an_nccl_failure_fails_no_step(drawn in gradients(), split in 0usize..300, failing: prop::sample::Index) {
            let mut exchange = exchange(drawn.len());
            // Calls of one group: start, one for each GPU, end. There are two groups: reduce and broadcast.
            let group = drawn.len() + 2;
            let at = failing.index(2 * group);
            fake_nccl::fail_at(OPENED + at);
            let want = by_copies(&drawn, split);
            let give = || drawn.iter().map(|one| set(one, split)).collect::<Vec<_>>();
            let sum = exchange.sum(give(), Device::Cpu).unwrap().unwrap();
            if at < group {
                prop_assert_eq!(bits(&sum), bits(&want));
            }
            for drafter in 0..drawn.len() {
                let weights = exchange.weights(&sum, drafter, Device::Cpu).unwrap();
                prop_assert_eq!(bits(&weights), bits(&sum));
            }
            let calls = fake_nccl::calls();
            prop_assert!(exchange.nccl.is_none() && calls.ends_with(&vec!["ncclCommAbort"; drawn.len()]), "{calls:?}");
            let next = exchange.sum(give(), Device::Cpu).unwrap().unwrap();
            prop_assert_eq!(bits(&next), bits(&want));
            prop_assert_eq!(fake_nccl::calls(), calls);
        }
    }

    /// A paused drafter sends no gradient; NCCL is used again when all drafters send one.
    #[test]
    fn a_missing_gradient_falls_back_to_copies_for_one_step() {
        let mut exchange = exchange(3);
        let give = |count| (0..count).map(|at| set(&(true, vec![at as f32, 1.0]), 1)).collect::<Vec<_>>();
        let sum = exchange.sum(give(2), Device::Cpu).unwrap().unwrap();
        assert_eq!((values(&sum), fake_nccl::calls().len()), (vec![1.0, 2.0], OPENED));
        assert!(exchange.sum(Vec::new(), Device::Cpu).unwrap().is_none());
        let sum = exchange.sum(give(3), Device::Cpu).unwrap().unwrap();
        assert_eq!(values(&sum), [3.0, 3.0]);
        assert!(fake_nccl::calls().contains(&"ncclReduce"));
    }

    #[test]
    fn nccl_requires_one_gpu_per_drafter() {
        let gpus = [0, 1, 2].map(Device::Cuda);
        for (drafters, text) in [
            (vec![gpus[0], gpus[1], gpus[0]], "several drafters share cuda:0"),
            (vec![gpus[0], Device::Cpu], "a drafter computes on cpu"),
            (vec![Device::Cpu; 2], "a drafter computes on cpu"),
        ] {
            let error = require_own_gpus(&drafters).unwrap_err();
            assert_eq!(error.to_string(), text);
            assert!(error.remedy().contains("drafter.devices"), "{error:?}");
        }
        let opened = Cell::new(0);
        let open = |gpus: &[Device]| {
            opened.set(opened.get() + 1);
            Communicator::new(fake_nccl::table(), gpus)
        };
        let with = |drafters: &[Device]| {
            GradientExchange::with_peer_copies(PeerCopies::default()).with_nccl(drafters, open).nccl.is_some()
        };
        assert!(!with(&gpus[..1]) && !with(&[gpus[0]; 2]) && !with(&[Device::Cpu; 2]));
        assert_eq!(opened.get(), 0, "unsuitable devices open no communicator");
        assert!(with(&gpus));
        let missing = |_: &[Device]| Err(NcclError::Missing("no such file".into()));
        assert!(GradientExchange::default().with_nccl(&gpus, missing).nccl.is_none());
    }
}
