//! Split on out-of-memory: computes a unit of work in smaller pieces if the device cannot hold it whole.

use crate::model::ModelError;
use crate::model::drafter::anchors::Anchors;
use crate::model::params::Gradient;
use draftmill_actors::messages::engine::MicroReport;
use tch::Device;

/// Unit of work that can be split; the joined results of its pieces equal the result of the whole.
pub trait Splittable: Sized {
    const TEXT: SplitText;

    /// Number of indivisible units.
    fn count(&self) -> usize;

    /// Two pieces of about the same size, in order. Neither is empty if the count is at least 2.
    fn halves(&self) -> [Self; 2];
}

/// Nouns and remedy for log messages and errors.
pub struct SplitText {
    /// For example `a micro-batch`.
    pub whole: &'static str,
    pub unit: &'static str,
    pub units: &'static str,
    /// Sentence without a full stop.
    pub remedy: &'static str,
}

impl Splittable for Anchors {
    const TEXT: SplitText = SplitText {
        whole: "a micro-batch",
        unit: "block",
        units: "blocks",
        remedy: "Lower drafter.anchors or plan.job_tokens, or set drafter.recompute_layers = true",
    };

    fn count(&self) -> usize {
        Anchors::count(self)
    }

    fn halves(&self) -> [Anchors; 2] {
        [0, 1].map(|half| self.chunk(half, 2))
    }
}

/// Largest piece that fits in a device's memory, as learnt from out-of-memory errors.
pub struct FitLimit {
    device: Device,
    /// Never grows, so that later units do not run out of memory again.
    max_count: usize,
    empty_cache: EmptyCache,
}

/// Returns unused memory of libtorch's caching allocator to the device.
type EmptyCache = fn(Device) -> Result<(), draftmill_torch_ext::Error>;

impl FitLimit {
    /// No limit yet.
    pub fn new(device: Device) -> FitLimit {
        FitLimit { device, max_count: usize::MAX, empty_cache: draftmill_torch_ext::empty_cache }
    }

    /// Empties the allocator's cache: its blocks have the sizes of the failed attempt, which the smaller pieces cannot use.
    fn release_cache(&self) {
        if let Err(error) = (self.empty_cache)(self.device) {
            tracing::warn!(%error, device = ?self.device, "libtorch's memory cache not emptied");
        }
    }
}

/// Computes the whole piece, or halves of it after an out-of-memory error, and passes each result to `join` in order.
///
/// A failed attempt joins nothing.
///
/// # Errors
/// Out of memory for a single unit, and any other error of `compute` or `join`.
pub fn split_on_oom<P: Splittable, R>(
    piece: &P,
    limit: &mut FitLimit,
    compute: &mut dyn FnMut(&P) -> Result<R, ModelError>,
    join: &mut dyn FnMut(R) -> Result<(), ModelError>,
) -> Result<(), ModelError> {
    let (count, SplitText { whole, unit, units, remedy }) = (piece.count(), P::TEXT);
    if count <= limit.max_count {
        match compute(piece) {
            Ok(result) => return join(result),
            Err(error) if error.is_out_of_memory() => {
                limit.release_cache();
                if count <= 1 {
                    return Err(ModelError::Torch(format!("{error}; not even a single {unit} fits. {remedy}")));
                }
                limit.max_count = count / 2;
                tracing::warn!(
                    %error,
                    device = ?limit.device,
                    count,
                    max_count = limit.max_count,
                    work = whole,
                    units,
                    remedy,
                    "out of memory; smaller pieces are computed from now on, with the same result"
                );
            }
            Err(error) => return Err(error),
        }
    }
    piece.halves().iter().try_for_each(|half| split_on_oom(half, limit, compute, join))
}

/// Loss sums and gradient of a micro-batch over all blocks, split on out-of-memory.
///
/// # Errors
/// As [`split_on_oom`].
pub fn sums_split_on_oom(
    anchors: &Anchors,
    limit: &mut FitLimit,
    mut compute: impl FnMut(&Anchors) -> Result<(MicroReport, Option<Gradient>), ModelError>,
) -> Result<(MicroReport, Option<Gradient>), ModelError> {
    let mut total: Option<(MicroReport, Option<Gradient>)> = None;
    split_on_oom(anchors, limit, &mut compute, &mut |(report, gradient)| match &mut total {
        None => {
            total = Some((report, gradient));
            Ok(())
        }
        Some((sum, sums)) => {
            // Each piece reports the tokens of the whole batch.
            sum.add(&MicroReport { tokens: 0, ..report });
            add(sums, gradient)
        }
    })?;
    Ok(total.unwrap_or_default())
}

/// Adds a gradient to a sum. Either may be absent.
///
/// # Errors
/// A libtorch failure, or parameters of other shapes.
pub fn add(sum: &mut Option<Gradient>, gradient: Option<Gradient>) -> Result<(), ModelError> {
    let Some(gradient) = gradient else { return Ok(()) };
    match sum {
        None => *sum = Some(gradient),
        Some(sum) => sum.add_(&gradient)?,
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
        let sum: f64 = anchors.rows.iter().flatten().map(|&position| f64::from(position)).sum();
        let report =
            MicroReport { loss_numerator: sum, anchors: anchors.count() as u64, tokens: 7, ..Default::default() };
        let gradient = ParamSet::new(vec![("w".into(), Tensor::from_slice(&[sum]))]);
        (report, (anchors.count() > 0).then_some(gradient))
    }

    thread_local! {
        /// Devices whose cache this thread emptied.
        static EMPTIED: RefCell<Vec<Device>> = const { RefCell::new(Vec::new()) };
    }

    /// Limit of a device that records each emptying of its cache and fails it, which must change nothing.
    fn limit() -> FitLimit {
        let empty_cache: EmptyCache = |device| {
            EMPTIED.with_borrow_mut(|devices| devices.push(device));
            Err(draftmill_torch_ext::Error::Failed("no".into()))
        };
        FitLimit { empty_cache, ..FitLimit::new(Device::Cuda(3)) }
    }

    fn emptied() -> usize {
        let devices = EMPTIED.take();
        assert!(devices.iter().all(|device| *device == Device::Cuda(3)), "{devices:?}");
        devices.len()
    }

    fn out_of_memory() -> ModelError {
        ModelError::Torch("CUDA out of memory. Tried to allocate 2.00 GiB".into())
    }

    proptest! {
        /// Every block is computed once, in a piece that fits, and the next micro-batch runs out of memory no more.
        #[test]
        fn pieces_sum_to_the_whole(
            rows in prop::collection::vec(prop::collection::btree_set(0u32..100, 0..20), 1..5), fits in 1usize..60,
        ) {
            let anchors = Anchors { rows: rows.into_iter().map(|row| row.into_iter().collect()).collect() };
            let (mut limit, failures) = (limit(), RefCell::new(0));
            let mut run = || sums_split_on_oom(&anchors, &mut limit, |piece| {
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
            prop_assert_eq!(emptied(), first);
            prop_assert_eq!(first > 0, anchors.count() > fits);
            prop_assert_eq!(run().unwrap().0, want);
            prop_assert_eq!(failures.take(), 0);
        }
    }

    #[test]
    fn oom_of_one_block_and_other_errors_fail() {
        let anchors = Anchors { rows: vec![vec![1, 2, 3]] };
        let mut limit = limit();
        let error = sums_split_on_oom(&anchors, &mut limit, |_| Err(out_of_memory())).err().unwrap();
        assert!(error.is_out_of_memory());
        assert!(error.to_string().contains("not even a single block fits. Lower drafter.anchors"), "{error}");
        assert_eq!((limit.max_count, emptied()), (1, 2));
        let mut calls = 0;
        let failed = sums_split_on_oom(&anchors, &mut FitLimit { max_count: 2, ..limit }, |_| {
            calls += 1;
            Err(ModelError::Input("no".into()))
        });
        assert_eq!((failed.err().unwrap().to_string(), calls, emptied()), ("no".into(), 1, 0));
    }
}
