//! A unit of work that a device's memory does not hold: done in smaller pieces, one after another.

use crate::model::ModelError;
use crate::model::drafter::anchors::Anchors;
use crate::model::params::Gradient;
use draftmill_actors::messages::engine::MicroReport;
use tch::Device;

/// What can be done in pieces whose results make up that of the whole.
pub trait Divisible: Sized {
    const WORDS: Words;

    /// Of what it is divided into.
    fn count(&self) -> usize;

    /// Two parts of about the same size, in order; none of two or more is empty.
    fn halves(&self) -> [Self; 2];
}

/// How a piece is spoken of.
pub struct Words {
    /// "a micro-batch of 8 blocks".
    pub whole: &'static str,
    pub one: &'static str,
    pub many: &'static str,
    /// Parts of a sentence: "trained in pieces of at most 4 blocks".
    pub done: &'static str,
    /// A sentence without its full stop.
    pub remedy: &'static str,
}

impl Divisible for Anchors {
    const WORDS: Words = Words {
        whole: "a micro-batch",
        one: "block",
        many: "blocks",
        done: "trained",
        remedy: "Lower drafter.anchors or plan.job_tokens, or set drafter.recompute_layers = true",
    };

    fn count(&self) -> usize {
        Anchors::count(self)
    }

    fn halves(&self) -> [Anchors; 2] {
        [0, 1].map(|half| self.part(half, 2))
    }
}

/// What a device was found to have room for at once.
pub struct Room {
    device: Device,
    /// It only ever shrinks, so that memory runs out once and not every time.
    most: usize,
    give_back: GiveBack,
}

/// Gives memory back that the allocator of a device keeps and no tensor touches.
type GiveBack = fn(Device) -> Result<(), draftmill_torch_ext::Error>;

impl Room {
    /// Without a limit as yet.
    pub fn new(device: Device) -> Room {
        Room { device, most: usize::MAX, give_back: draftmill_torch_ext::empty_cache }
    }

    /// Work that ran out of memory leaves blocks behind that are cut for other sizes than those of what comes next.
    fn ran_out(&self) {
        if let Err(error) = (self.give_back)(self.device) {
            tracing::warn!("the memory that libtorch keeps on {:?} could not be given back: {error}", self.device);
        }
    }
}

/// Gives `join` what `compute` makes of each piece, in order: of the whole, if it fits. A piece of several that ends out of
/// memory is halved; one of a single one is an error. Of an attempt that failed nothing is joined.
pub fn in_pieces<P: Divisible, R>(
    piece: &P,
    room: &mut Room,
    compute: &mut dyn FnMut(&P) -> Result<R, ModelError>,
    join: &mut dyn FnMut(R) -> Result<(), ModelError>,
) -> Result<(), ModelError> {
    let (count, Words { whole, one, many, done, remedy }) = (piece.count(), P::WORDS);
    if count <= room.most {
        match compute(piece) {
            Ok(result) => return join(result),
            Err(error) if error.is_out_of_memory() => {
                room.ran_out();
                if count <= 1 {
                    return Err(ModelError::Torch(format!("{error}; not even a single {one} fits. {remedy}")));
                }
                room.most = count / 2;
                tracing::warn!(
                    "{whole} of {count} {many} does not fit in memory ({error}); from now on it is {done} in pieces of at most {} \
                     {many}, which takes longer and changes nothing else. {remedy}",
                    room.most
                );
            }
            Err(error) => return Err(error),
        }
    }
    piece.halves().iter().try_for_each(|half| in_pieces(half, room, compute, join))
}

/// A micro-batch's sums over all blocks, which may be made piece by piece.
pub fn sums_in_pieces(
    anchors: &Anchors,
    room: &mut Room,
    mut compute: impl FnMut(&Anchors) -> Result<(MicroReport, Option<Gradient>), ModelError>,
) -> Result<(MicroReport, Option<Gradient>), ModelError> {
    let mut total: Option<(MicroReport, Option<Gradient>)> = None;
    in_pieces(anchors, room, &mut compute, &mut |(report, gradient)| match &mut total {
        None => {
            total = Some((report, gradient));
            Ok(())
        }
        Some((sum, sums)) => {
            // Each piece counts the tokens of the whole batch.
            sum.add(&MicroReport { tokens: 0, ..report });
            add(sums, gradient)
        }
    })?;
    Ok(total.unwrap_or_default())
}

/// Adds a gradient to a sum, either of which may be absent.
pub fn add(sum: &mut Option<Gradient>, part: Option<Gradient>) -> Result<(), ModelError> {
    let Some(part) = part else { return Ok(()) };
    match sum {
        None => *sum = Some(part),
        Some(sum) => sum.add_(&part)?,
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::params::ParamSet;
    use proptest::prelude::*;
    use std::cell::RefCell;
    use tch::Tensor;

    /// Each block adds its position to the loss and to the gradient.
    fn positions(anchors: &Anchors) -> (MicroReport, Option<Gradient>) {
        let sum: f64 = anchors.rows.iter().flatten().map(|&place| f64::from(place)).sum();
        let report =
            MicroReport { loss_numerator: sum, anchors: anchors.count() as u64, tokens: 7, ..Default::default() };
        let gradient = ParamSet::new(vec![("w".into(), Tensor::from_slice(&[sum]))]);
        (report, (anchors.count() > 0).then_some(gradient))
    }

    thread_local! {
        /// Devices whose memory was given back by this thread.
        static GIVEN_BACK: RefCell<Vec<Device>> = const { RefCell::new(Vec::new()) };
    }

    /// A device whose failures to give memory back are remembered, and change nothing.
    fn room() -> Room {
        let give_back: GiveBack = |device| {
            GIVEN_BACK.with_borrow_mut(|devices| devices.push(device));
            Err(draftmill_torch_ext::Error::Failed("no".into()))
        };
        Room { give_back, ..Room::new(Device::Cuda(3)) }
    }

    fn given_back() -> usize {
        let devices = GIVEN_BACK.take();
        assert!(devices.iter().all(|device| *device == Device::Cuda(3)), "{devices:?}");
        devices.len()
    }

    fn out_of_memory() -> ModelError {
        ModelError::Torch("CUDA out of memory. Tried to allocate 2.00 GiB".into())
    }

    proptest! {
        /// Whatever fits, every block is computed once, in a piece that fits, and the next micro-batch tries nothing that does not.
        #[test]
        fn pieces_sum_to_the_whole_and_memory_runs_out_only_on_the_way_down(
            rows in prop::collection::vec(prop::collection::btree_set(0u32..100, 0..20), 1..5), fits in 1usize..60,
        ) {
            let anchors = Anchors { rows: rows.into_iter().map(|row| row.into_iter().collect()).collect() };
            let (mut room, failures) = (room(), RefCell::new(0));
            let mut run = || sums_in_pieces(&anchors, &mut room, |piece| {
                assert!(piece.check(&vec![100; anchors.rows.len()]).is_ok());
                if piece.count() > fits {
                    *failures.borrow_mut() += 1;
                    return Err(out_of_memory());
                }
                Ok(positions(piece))
            });
            let value = |gradient: Option<Gradient>| gradient.map(|g| f64::try_from(&g.tensors()[0]).unwrap());
            let (want, gradient) = positions(&anchors);
            let (got, sum) = run().unwrap();
            prop_assert_eq!(&got, &want);
            prop_assert_eq!(value(sum), value(gradient));
            let first = failures.take();
            prop_assert_eq!(given_back(), first);
            prop_assert_eq!(first > 0, anchors.count() > fits);
            prop_assert_eq!(run().unwrap().0, want);
            prop_assert_eq!(failures.take(), 0);
        }
    }

    #[test]
    fn a_single_block_that_does_not_fit_and_any_other_error_end_it() {
        let anchors = Anchors { rows: vec![vec![1, 2, 3]] };
        let mut room = room();
        let error = sums_in_pieces(&anchors, &mut room, |_| Err(out_of_memory())).err().unwrap();
        assert!(error.is_out_of_memory());
        assert!(error.to_string().contains("not even a single block fits. Lower drafter.anchors"), "{error}");
        assert_eq!((room.most, given_back()), (1, 2));
        let mut calls = 0;
        let failed = sums_in_pieces(&anchors, &mut Room { most: 2, ..room }, |_| {
            calls += 1;
            Err(ModelError::Input("no".into()))
        });
        assert_eq!((failed.err().unwrap().to_string(), calls, given_back()), ("no".into(), 1, 0));
    }
}
