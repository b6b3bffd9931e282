//! Target forward of a padded batch, split by rows on out-of-memory.

use super::features::{TargetOptions, TorchFeatures};
use super::oom_split::{FitLimit, SplitText, Splittable, split_on_oom};
use super::transfer::OutboundTransfer;
use crate::model::ModelError;
use crate::model::batch::{Rows, TargetLabels, all_finite};
use crate::model::load::kind_of;
use crate::model::target::Target;
use draftmill_actors::messages::engine::FeatureShape;
use draftmill_actors::messages::types::PaddedBatch;
use tch::Tensor;

/// Target model with the fit limit of its device, in rows.
pub(super) struct Forward {
    target: Target,
    limit: FitLimit,
    outbound: OutboundTransfer,
}

impl Splittable for PaddedBatch {
    const TEXT: SplitText = SplitText {
        whole: "a batch",
        unit: "row",
        units: "rows",
        remedy: "Lower plan.job_tokens or data.max_length, or give the target its own device (target.devices)",
    };

    fn count(&self) -> usize {
        self.lengths.len()
    }

    /// Halves by rows, padded to the width of the whole.
    fn halves(&self) -> [PaddedBatch; 2] {
        let middle = self.lengths.len() / 2;
        let cut = (middle * self.width).min(self.ids.len());
        let half = |lengths: &[u32], ids: &[i32], loss_mask: &[u8]| PaddedBatch {
            job: self.job,
            rows: lengths.len(),
            width: self.width,
            lengths: lengths.to_vec(),
            ids: ids.to_vec(),
            loss_mask: loss_mask.to_vec(),
        };
        let (lengths, ids) = (self.lengths.split_at(middle), self.ids.split_at(cut));
        let mask = self.loss_mask.split_at(cut.min(self.loss_mask.len()));
        [half(lengths.0, ids.0, mask.0), half(lengths.1, ids.1, mask.1)]
    }
}

impl Forward {
    pub(super) fn new(target: Target) -> Forward {
        let (limit, outbound) = (FitLimit::new(target.device()), OutboundTransfer::new(target.device()));
        Forward { target, limit, outbound }
    }

    pub(super) fn extract(
        &mut self,
        batch: &PaddedBatch,
        options: &TargetOptions,
    ) -> Result<TorchFeatures, ModelError> {
        let Forward { target, limit, outbound } = self;
        rows_split_on_oom(batch, limit, |rows| extract(target, rows, options, outbound))
    }
}

/// Features of all rows, joined from the pieces that `compute` extracts.
fn rows_split_on_oom(
    batch: &PaddedBatch,
    limit: &mut FitLimit,
    mut compute: impl FnMut(&PaddedBatch) -> Result<TorchFeatures, ModelError>,
) -> Result<TorchFeatures, ModelError> {
    let mut whole = None;
    split_on_oom(batch, limit, &mut compute, &mut |piece| append(&mut whole, piece, batch.tokens()))?;
    whole.ok_or_else(|| ModelError::Input("a batch without rows has no features".into()))
}

/// Appends the features of a sub-batch to `whole`.
///
/// The first call allocates `[tokens, taps * width]` for the whole batch, so that no hidden state exists twice.
fn append(whole: &mut Option<TorchFeatures>, piece: TorchFeatures, tokens: u64) -> Result<(), ModelError> {
    let whole = match whole {
        None if piece.shape.tokens == tokens => {
            *whole = Some(piece);
            return Ok(());
        }
        None => {
            let width = piece.hidden.size()[1];
            let hidden =
                piece.hidden.f_new_empty([tokens as i64, width], (piece.hidden.f_kind()?, piece.hidden.device()))?;
            whole.insert(TorchFeatures {
                hidden,
                ids: Vec::new(),
                target_labels: None,
                loss_mask: Vec::new(),
                lengths: Vec::new(),
                shape: FeatureShape { tokens: 0, ..piece.shape },
                finite: true,
                prefetch: None,
            })
        }
        Some(whole) => whole,
    };
    let (start, tokens) = (whole.shape.tokens as i64, piece.shape.tokens as i64);
    whole.hidden.f_narrow(0, start, tokens)?.f_copy_(&piece.hidden)?;
    whole.shape.tokens += piece.shape.tokens;
    whole.ids.extend(piece.ids);
    whole.loss_mask.extend(piece.loss_mask);
    whole.lengths.extend(piece.lengths);
    whole.finite &= piece.finite;
    match (&mut whole.target_labels, piece.target_labels) {
        (Some(target_labels), Some(next)) => target_labels.append(next)?,
        (target_labels, next) => *target_labels = target_labels.take().or(next),
    }
    Ok(())
}

/// Features of a batch from a single forward.
fn extract(
    target: &Target,
    batch: &PaddedBatch,
    options: &TargetOptions,
    outbound: &mut OutboundTransfer,
) -> Result<TorchFeatures, ModelError> {
    let _no_grad = tch::no_grad_guard();
    let rows = Rows::new(&batch.ids, &batch.lengths, batch.width)?;
    if batch.loss_mask.len() != batch.ids.len() {
        let (mask, ids) = (batch.loss_mask.len(), batch.ids.len());
        return Err(ModelError::Input(format!("loss mask has {mask} entries, expected {ids}: one for each id")));
    }
    let (hidden, target_labels) =
        target.forward_with_labels(&rows, &options.taps, kind_of(options.features), options.labels)?;
    // Checked on the target's device, before the copy.
    let finite = all_finite(&hidden)? && target_labels.as_ref().map_or(Ok(true), TargetLabels::all_finite)?;
    let mut copy = |tensor: &Tensor| outbound.copied_to(tensor, options.features_on);
    let hidden = copy(&hidden)?;
    let target_labels = target_labels.map(|target_labels| target_labels.map_tensors(&mut copy)).transpose()?;
    let cells: Vec<usize> = batch
        .lengths
        .iter()
        .enumerate()
        .flat_map(|(row, &len)| {
            let start = row * batch.width;
            start..start + len as usize
        })
        .collect();
    let shape = FeatureShape {
        tokens: cells.len() as u64,
        taps: options.taps.len() as u32,
        width: target.config().hidden_size as u32,
        dtype: options.features,
    };
    Ok(TorchFeatures {
        hidden,
        target_labels,
        ids: cells.iter().map(|&cell| batch.ids[cell]).collect(),
        loss_mask: cells.iter().map(|&cell| batch.loss_mask[cell]).collect(),
        lengths: batch.lengths.clone(),
        shape,
        finite,
        prefetch: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::TopK;
    use crate::hf::{config::TargetConfig, tensors::TensorFiles};
    use crate::model::batch::{TargetLabels, TopKLabels};
    use crate::model::target::Depth;
    use draftmill_actors::messages::engine::{FeatureDtype, Features};
    use proptest::prelude::*;
    use std::path::Path;
    use tch::{Device, Kind};

    const CPU: Device = Device::Cpu;

    fn target() -> Target {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/target_qwen3");
        let (config, files) = (TargetConfig::load(&folder).unwrap(), TensorFiles::open(&folder).unwrap());
        Target::load(config, &files, Depth::Whole, Kind::Float, CPU).unwrap()
    }

    fn options(labels: Option<TopK>) -> TargetOptions {
        let (compute, features) = (FeatureDtype::F32, FeatureDtype::F32);
        TargetOptions { device: CPU, compute, features, features_on: CPU, taps: vec![0, 2], labels }
    }

    fn batch(lengths: &[u32], vocab: usize) -> PaddedBatch {
        let width = lengths.iter().copied().max().unwrap_or(0) as usize;
        let cells = || (0..lengths.len()).flat_map(|row| (0..width).map(move |column| (row, column)));
        PaddedBatch {
            rows: lengths.len(),
            width,
            lengths: lengths.to_vec(),
            ids: cells().map(|(row, column)| ((row * 31 + column * 7) % vocab) as i32).collect(),
            loss_mask: cells().map(|(row, column)| u8::from((row + column) % 3 > 0)).collect(),
            ..PaddedBatch::default()
        }
    }

    fn same(got: &TorchFeatures, want: &TorchFeatures) {
        assert_eq!((&got.ids, &got.loss_mask, &got.lengths), (&want.ids, &want.loss_mask, &want.lengths));
        assert_eq!((got.shape, got.bytes(), got.finite), (want.shape, want.bytes(), want.finite));
        assert_eq!(got.hidden.size(), want.hidden.size());
        // The number of rows selects the matmul kernel, which changes the order of additions.
        assert!(got.hidden.allclose(&want.hidden, 1e-5, 1e-5, false), "{}", (&got.hidden - &want.hidden).abs().max());
        match (&got.target_labels, &want.target_labels) {
            (None, None) => (),
            (Some(TargetLabels::States(got)), Some(TargetLabels::States(want))) => {
                assert_eq!(got.size(), want.size());
                assert!(got.allclose(want, 1e-5, 1e-5, false), "{}", (got - want).abs().max());
            }
            (Some(TargetLabels::TopK(got)), Some(TargetLabels::TopK(want))) => {
                let of = |said: &TopKLabels| (said.k, said.ids.clone());
                assert_eq!(of(got), of(want));
                assert!(got.probabilities.iter().zip(&want.probabilities).all(|(got, want)| (got - want).abs() < 1e-5));
            }
            others => panic!("{others:?}"),
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]
        /// Each row is extracted once, in order, and the next batch runs out of memory no more.
        #[test]
        fn a_split_batch_equals_the_whole(
            lengths in prop::collection::vec(1u32..20, 1..9), fits in 1usize..9,
            labels in prop::option::of(prop_oneof![(1u32..4).prop_map(TopK::Tokens), Just(TopK::All)]),
        ) {
            let (target, options) = (target(), options(labels));
            let batch = batch(&lengths, target.config().vocab_size);
            let want = extract(&target, &batch, &options, &mut OutboundTransfer::new(CPU)).unwrap();
            let (mut limit, mut rows, mut failures) = (FitLimit::new(CPU), 0, 0);
            let mut run = |max_rows: usize| {
                let got = rows_split_on_oom(&batch, &mut limit, |piece| {
                    if piece.rows > max_rows {
                        failures += 1;
                        return Err(ModelError::Torch("CUDA out of memory. Tried to allocate 2.00 GiB".into()));
                    }
                    rows += piece.rows;
                    extract(&target, piece, &options, &mut OutboundTransfer::new(CPU))
                });
                (got, std::mem::take(&mut rows), std::mem::take(&mut failures))
            };
            let (got, rows, failures) = run(fits);
            same(&got.unwrap(), &want);
            prop_assert_eq!(rows, lengths.len());
            prop_assert_eq!(failures > 0, lengths.len() > fits);
            let (got, rows, failures) = run(fits);
            same(&got.unwrap(), &want);
            prop_assert_eq!((rows, failures), (lengths.len(), 0));
            // `Forward` respects the learnt limit.
            let mut forward = Forward { target: target.shallow_clone(), limit, outbound: OutboundTransfer::new(CPU) };
            same(&forward.extract(&batch, &options).unwrap(), &want);
        }
    }

    #[test]
    fn oom_of_one_row_names_the_remedy() {
        let mut calls = 0;
        let failed = rows_split_on_oom(&batch(&[3, 5, 4], 9), &mut FitLimit::new(CPU), |_| {
            calls += 1;
            Err(ModelError::Torch("CUDA out of memory. Tried to allocate 2.00 GiB".into()))
        });
        let error = failed.err().unwrap();
        assert!(error.is_out_of_memory());
        for word in ["not even a single row fits", "plan.job_tokens", "target.devices"] {
            assert!(error.to_string().contains(word), "{error}");
        }
        assert_eq!(calls, 2);
    }

    #[test]
    fn a_non_finite_value_in_any_piece_is_found() {
        let (target, options) = (target(), options(None));
        let batch = batch(&[3, 4], target.config().vocab_size);
        let mut limit = FitLimit::new(CPU);
        for broken in 0..2 {
            let mut piece = 0;
            let features = rows_split_on_oom(&batch, &mut limit, |rows| {
                if rows.rows > 1 {
                    return Err(ModelError::Torch("out of memory".into()));
                }
                let features = extract(&target, rows, &options, &mut OutboundTransfer::new(CPU))?;
                piece += 1;
                Ok(TorchFeatures { finite: piece - 1 != broken, ..features })
            });
            assert!(!features.unwrap().all_finite());
        }
    }
}
