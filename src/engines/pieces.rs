//! A micro-batch that memory does not hold: computed in smaller pieces, whose sums are those of the whole.

use crate::model::ModelError;
use crate::model::anchors::Anchors;
use crate::model::params::Gradient;
use draftmill_actors::engine::MicroReport;

/// The most blocks that have turned out to fit. It only ever shrinks, so that memory runs out once and not at every step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Most(pub usize);

/// What `compute` gives of all blocks: loss and gradient are sums over blocks, so they may be summed piece by piece. A piece of
/// several blocks that ends out of memory is halved; one of a single block is an error. Nothing of an attempt that failed is
/// part of the result.
pub fn in_pieces(
    anchors: &Anchors,
    most: &mut Most,
    mut compute: impl FnMut(&Anchors) -> Result<(MicroReport, Option<Gradient>), ModelError>,
) -> Result<(MicroReport, Option<Gradient>), ModelError> {
    let mut left = vec![anchors.clone()];
    let mut total: Option<(MicroReport, Option<Gradient>)> = None;
    while let Some(piece) = left.pop() {
        let count = piece.count();
        if count > most.0 {
            left.extend(piece.parts(2));
            continue;
        }
        match compute(&piece) {
            Ok((report, gradient)) => match &mut total {
                None => total = Some((report, gradient)),
                Some((sum, sums)) => {
                    // Each piece counts the tokens of the whole batch.
                    sum.add(&MicroReport { tokens: 0, ..report });
                    add(sums, gradient)?;
                }
            },
            Err(error) if error.is_out_of_memory() && count > 1 => {
                *most = Most(count / 2);
                tracing::warn!(
                    "a micro-batch of {count} blocks does not fit in memory ({error}); from now on it is trained in pieces of at most \
                     {} blocks, which takes longer and changes nothing else. Lower drafter.anchors or plan.job_tokens, or set \
                     drafter.recompute_layers = true",
                    most.0
                );
                left.push(piece);
            }
            Err(error) => return Err(error),
        }
    }
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
            let (mut most, failures) = (Most(usize::MAX), RefCell::new(0));
            let mut run = || in_pieces(&anchors, &mut most, |piece| {
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
            prop_assert_eq!(first > 0, anchors.count() > fits);
            prop_assert_eq!(run().unwrap().0, want);
            prop_assert_eq!(failures.take(), 0);
        }
    }

    #[test]
    fn a_single_block_that_does_not_fit_and_any_other_error_end_it() {
        let anchors = Anchors { rows: vec![vec![1, 2, 3]] };
        let mut most = Most(usize::MAX);
        let error = in_pieces(&anchors, &mut most, |_| Err(out_of_memory())).err().unwrap();
        assert!(error.is_out_of_memory());
        assert_eq!(most, Most(1));
        let mut calls = 0;
        let failed = in_pieces(&anchors, &mut Most(2), |_| {
            calls += 1;
            Err(ModelError::Input("no".into()))
        });
        assert_eq!((failed.err().unwrap().to_string(), calls), ("no".into(), 1));
    }
}
