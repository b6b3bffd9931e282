//! How gradients become one sum and how new weights come to the drafters: by copies, or by NCCL as long as that works.

use crate::{
    collective::{
        nccl::Communicator,
        nccl_ffi::NcclError,
        peer_copy::{Routes, name},
    },
    model::{
        ModelError,
        params::{Gradient, ParamSet, Weights},
    },
};
use std::collections::HashSet;
use tch::Device;

/// The ways of one run, between the optimizer and its drafters.
#[derive(Default)]
pub struct Exchange {
    copies: Routes,
    /// Over the drafters' GPUs, in their order, the first of which is the optimizer's. `None` where it is not asked for, not to be
    /// had, or failed.
    nccl: Option<Communicator>,
    /// What a broadcast brought since the last step, for each drafter that has not taken it yet.
    brought: Vec<Option<Weights>>,
}

impl Exchange {
    pub fn by_copies(copies: Routes) -> Exchange {
        Exchange { copies, ..Exchange::default() }
    }

    /// By NCCL where `open` brings it, tried out, for these drafters; else a warning says why and what helps, and copies go on.
    pub fn with_nccl(
        mut self,
        drafters: &[Device],
        open: impl FnOnce(&[Device]) -> Result<Communicator, NcclError>,
    ) -> Exchange {
        if drafters.len() < 2 {
            // Nothing travels.
            return self;
        }
        match apart(drafters).and_then(|()| open(drafters)).and_then(|nccl| Ok((nccl.version()?, nccl))) {
            Ok((version, nccl)) => {
                tracing::info!(
                    "NCCL {version} adds the gradients of {} GPUs and brings them the weights",
                    drafters.len()
                );
                self.nccl = Some(nccl);
            }
            Err(error) => tracing::warn!(
                "drafter.exchange = \"nccl\", but {error}. Gradients and weights go by copies; {}",
                error.remedy()
            ),
        }
        self
    }

    /// The sum of what drafters handed in, on `device`; `None` of nothing.
    pub fn sum(&mut self, gradients: Vec<Gradient>, device: Device) -> Result<Option<Gradient>, ModelError> {
        let _no_grad = tch::no_grad_guard();
        // These are about to be old.
        self.brought.clear();
        if let Some(sum) = self.reduced(&gradients) {
            return Ok(Some(sum));
        }
        let mut gradients = gradients.into_iter();
        let Some(first) = gradients.next() else { return Ok(None) };
        let mut sum = self.copies.moved(first, device)?;
        for gradient in gradients {
            sum.add_(&self.copies.moved(gradient, device)?)?;
        }
        Ok(Some(sum))
    }

    /// The weights for a drafter on `device`. By NCCL the first who asks after a step has them brought to all.
    pub fn weights(&mut self, masters: &Weights, drafter: usize, device: Device) -> Result<Weights, ModelError> {
        if self.brought.is_empty() {
            self.brought = self.broadcast(masters).unwrap_or_default();
        }
        match self.brought.get_mut(drafter).and_then(Option::take) {
            Some(weights) => Ok(weights),
            None => self.copy(masters, device),
        }
    }

    /// A copy for whoever is no drafter.
    pub fn copy(&self, masters: &Weights, device: Device) -> Result<Weights, ModelError> {
        self.copies.copy(masters, device)
    }

    /// The sum by NCCL, where there is one gradient on each of its GPUs. It leaves them as they are.
    fn reduced(&mut self, gradients: &[Gradient]) -> Option<Gradient> {
        let nccl = self.nccl.as_mut()?;
        let from = gradients.iter().map(ParamSet::device);
        if !from.eq(nccl.devices().iter().copied().map(Some)) {
            // A drafter is paused, or had nothing to train.
            return None;
        }
        let sum = reduce(nccl, gradients);
        self.unless_failed(sum)
    }

    fn broadcast(&mut self, masters: &Weights) -> Option<Vec<Option<Weights>>> {
        let sets = broadcast(self.nccl.as_mut()?, masters);
        self.unless_failed(sets)
    }

    /// What NCCL gave. Where it failed it is left for good.
    fn unless_failed<T>(&mut self, given: Result<T, NcclError>) -> Option<T> {
        let report = |error: &NcclError| {
            tracing::warn!("{error}. Gradients and weights go by copies from now on; {}", error.remedy());
            self.nccl = None;
        };
        given.inspect_err(report).ok()
    }
}

fn reduce(nccl: &mut Communicator, gradients: &[Gradient]) -> Result<Gradient, NcclError> {
    let parts = gradients.iter().map(ParamSet::buffer).collect::<Result<Vec<_>, _>>()?;
    let sum = nccl.reduce(&parts)?;
    Ok(gradients[0].of_buffer(sum)?)
}

fn broadcast(nccl: &mut Communicator, masters: &Weights) -> Result<Vec<Option<Weights>>, NcclError> {
    let copies = nccl.broadcast(&masters.buffer()?)?;
    let sets = copies.into_iter().map(|copy| Ok(Some(masters.of_buffer(copy)?)));
    sets.collect()
}

/// Whether each drafter has a GPU of its own.
fn apart(drafters: &[Device]) -> Result<(), NcclError> {
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

    /// Calls until the communicator is there.
    const OPENED: usize = 1;

    fn exchange(drafters: usize) -> Exchange {
        let nccl = Communicator::new(fake_nccl::table(), &vec![Device::Cpu; drafters]).unwrap();
        Exchange { nccl: Some(nccl), ..Exchange::default() }
    }

    /// Whether a set is one buffer, and its values.
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
        Exchange::default().sum(gradients, Device::Cpu).unwrap().unwrap()
    }

    fn bits(set: &ParamSet) -> Vec<u32> {
        values(set).into_iter().map(f32::to_bits).collect()
    }

    /// As many gradients as there may be drafters, each of so many values.
    fn gradients() -> impl Strategy<Value = Vec<Drawn>> {
        (2usize..6, 1usize..300).prop_flat_map(|(drafters, count)| {
            let one = (any::<bool>(), prop::collection::vec(-1e3f32..1e3, count));
            prop::collection::vec(one, drafters)
        })
    }

    proptest! {
        /// Two numbers have one sum; of more the order counts, and NCCL's is its own.
        #[test]
        fn a_sum_by_nccl_is_that_of_copies(drawn in gradients(), split in 0usize..300) {
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
            for (place, (got, want)) in values(&sum).into_iter().zip(values(&want)).enumerate() {
                let size: f32 = drawn.iter().map(|(_, values)| values[place].abs()).sum();
                prop_assert!((got - want).abs() <= size * f32::EPSILON * drawn.len() as f32, "{got} is not {want}");
            }
        }

        /// One broadcast for all, in whichever order they ask; who asks twice gets a copy.
        #[test]
        fn weights_by_nccl_are_the_masters_bit_by_bit(
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
                let places = all.iter().chain([&masters]).map(|set| set.tensors()[0].data_ptr());
                prop_assert_eq!(places.collect::<HashSet<_>>().len(), drafters + 1, "each has storage of its own");
                let again = exchange.weights(&masters, first % drafters, Device::Cpu).unwrap();
                prop_assert_eq!(again.checksum().unwrap(), masters.checksum().unwrap());
                let broadcasts = fake_nccl::calls().iter().filter(|&&call| call == "ncclBroadcast").count();
                prop_assert_eq!(broadcasts, (round + 1) * drafters);
                exchange.sum(Vec::new(), Device::Cpu).unwrap();
            }
        }

        /// Whichever call fails: the step's sum is that of copies to the bit, weights are the masters, and NCCL is asked no more.
        #[test]
        fn a_failing_nccl_fails_no_step(drawn in gradients(), split in 0usize..300, failing: prop::sample::Index) {
            let mut exchange = exchange(drawn.len());
            // Start, one for each GPU, end; of the reduce and of the broadcast.
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

    /// As when a drafter is paused: NCCL waits for its next step.
    #[test]
    fn where_a_gradient_is_missing_the_others_go_by_copies() {
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
    fn nccl_is_for_drafters_with_a_gpu_each() {
        let gpus = [0, 1, 2].map(Device::Cuda);
        for (drafters, text) in [
            (vec![gpus[0], gpus[1], gpus[0]], "several drafters share cuda:0"),
            (vec![gpus[0], Device::Cpu], "a drafter computes on cpu"),
            (vec![Device::Cpu; 2], "a drafter computes on cpu"),
        ] {
            let error = apart(&drafters).unwrap_err();
            assert_eq!(error.to_string(), text);
            assert!(error.remedy().contains("drafter.devices"), "{error:?}");
        }
        let opened = Cell::new(0);
        let open = |gpus: &[Device]| {
            opened.set(opened.get() + 1);
            Communicator::new(fake_nccl::table(), gpus)
        };
        let with =
            |drafters: &[Device]| Exchange::by_copies(Routes::default()).with_nccl(drafters, open).nccl.is_some();
        assert!(!with(&gpus[..1]) && !with(&[gpus[0]; 2]) && !with(&[Device::Cpu; 2]));
        assert_eq!(opened.get(), 0, "nothing is opened in vain");
        assert!(with(&gpus));
        let missing = |_: &[Device]| Err(NcclError::Missing("no such file".into()));
        assert!(Exchange::default().with_nccl(&gpus, missing).nccl.is_none());
    }
}
