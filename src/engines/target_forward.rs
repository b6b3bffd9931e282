//! A target's forward: of a whole batch where memory holds it, and else of some of its rows after others.

use super::features::{TargetOptions, TorchFeatures};
use super::oom_split::{Divisible, Room, Words, in_pieces};
use super::transfer::Outbound;
use crate::model::ModelError;
use crate::model::batch::{Rows, Teacher, all_finite};
use crate::model::load::kind_of;
use crate::model::target::Target;
use draftmill_actors::messages::engine::FeatureShape;
use draftmill_actors::messages::types::PaddedBatch;
use tch::Tensor;

/// A target, and how many rows its device was found to hold.
pub(super) struct Forward {
    target: Target,
    room: Room,
    outbound: Outbound,
}

impl Divisible for PaddedBatch {
    const WORDS: Words = Words {
        whole: "a batch",
        one: "row",
        many: "rows",
        done: "extracted",
        remedy: "Lower plan.job_tokens or data.max_length, or give the target a device of its own (target.devices)",
    };

    fn count(&self) -> usize {
        self.lengths.len()
    }

    /// Both as wide as the whole.
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
        let (room, outbound) = (Room::new(target.device()), Outbound::new(target.device()));
        Forward { target, room, outbound }
    }

    pub(super) fn extract(
        &mut self,
        batch: &PaddedBatch,
        options: &TargetOptions,
    ) -> Result<TorchFeatures, ModelError> {
        let Forward { target, room, outbound } = self;
        rows_in_pieces(batch, room, |rows| extract(target, rows, options, outbound))
    }
}

/// The features of all rows, whichever of them `compute` is given at once.
fn rows_in_pieces(
    batch: &PaddedBatch,
    room: &mut Room,
    mut compute: impl FnMut(&PaddedBatch) -> Result<TorchFeatures, ModelError>,
) -> Result<TorchFeatures, ModelError> {
    let mut whole = None;
    in_pieces(batch, room, &mut compute, &mut |part| gather(&mut whole, part, batch.tokens()))?;
    whole.ok_or_else(|| ModelError::Input("a batch without rows has no features".into()))
}

/// Sets the features of some rows behind those before them, which are of a batch of so many tokens. They lie in one tensor
/// from the beginning, so that they never exist twice.
fn gather(whole: &mut Option<TorchFeatures>, part: TorchFeatures, tokens: u64) -> Result<(), ModelError> {
    let whole = match whole {
        None if part.shape.tokens == tokens => {
            *whole = Some(part);
            return Ok(());
        }
        None => {
            let width = part.hidden.size()[1];
            let hidden =
                part.hidden.f_new_empty([tokens as i64, width], (part.hidden.f_kind()?, part.hidden.device()))?;
            whole.insert(TorchFeatures {
                hidden,
                ids: Vec::new(),
                teacher: None,
                loss_mask: Vec::new(),
                lengths: Vec::new(),
                shape: FeatureShape { tokens: 0, ..part.shape },
                finite: true,
                coming: None,
            })
        }
        Some(whole) => whole,
    };
    let (before, more) = (whole.shape.tokens as i64, part.shape.tokens as i64);
    whole.hidden.f_narrow(0, before, more)?.f_copy_(&part.hidden)?;
    whole.shape.tokens += part.shape.tokens;
    whole.ids.extend(part.ids);
    whole.loss_mask.extend(part.loss_mask);
    whole.lengths.extend(part.lengths);
    whole.finite &= part.finite;
    match (&mut whole.teacher, part.teacher) {
        (Some(teacher), Some(next)) => teacher.append(next)?,
        (teacher, next) => *teacher = teacher.take().or(next),
    }
    Ok(())
}

/// One forward of the whole batch.
fn extract(
    target: &Target,
    batch: &PaddedBatch,
    options: &TargetOptions,
    outbound: &mut Outbound,
) -> Result<TorchFeatures, ModelError> {
    let _no_grad = tch::no_grad_guard();
    let rows = Rows::new(&batch.ids, &batch.lengths, batch.width)?;
    if batch.loss_mask.len() != batch.ids.len() {
        let (mask, ids) = (batch.loss_mask.len(), batch.ids.len());
        return Err(ModelError::Input(format!("a loss mask of {mask} entries does not fit {ids} ids")));
    }
    let (hidden, teacher) = target.taught(&rows, &options.taps, kind_of(options.features), options.labels)?;
    // Read before the copy, where the values were made.
    let finite = all_finite(&hidden)? && teacher.as_ref().map_or(Ok(true), Teacher::all_finite)?;
    let mut brought = |tensor: &Tensor| outbound.brought(tensor, options.features_on);
    let hidden = brought(&hidden)?;
    let teacher = teacher.map(|teacher| teacher.by(&mut brought)).transpose()?;
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
        teacher,
        ids: cells.iter().map(|&cell| batch.ids[cell]).collect(),
        loss_mask: cells.iter().map(|&cell| batch.loss_mask[cell]).collect(),
        lengths: batch.lengths.clone(),
        shape,
        finite,
        coming: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::TopK;
    use crate::hf::{config::TargetConfig, tensors::TensorFiles};
    use crate::model::batch::{Likeliest, Teacher};
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
        let cells = || (0..lengths.len()).flat_map(|row| (0..width).map(move |place| (row, place)));
        PaddedBatch {
            rows: lengths.len(),
            width,
            lengths: lengths.to_vec(),
            ids: cells().map(|(row, place)| ((row * 31 + place * 7) % vocab) as i32).collect(),
            loss_mask: cells().map(|(row, place)| u8::from((row + place) % 3 > 0)).collect(),
            ..PaddedBatch::default()
        }
    }

    fn same(got: &TorchFeatures, want: &TorchFeatures) {
        assert_eq!((&got.ids, &got.loss_mask, &got.lengths), (&want.ids, &want.loss_mask, &want.lengths));
        assert_eq!((got.shape, got.bytes(), got.finite), (want.shape, want.bytes(), want.finite));
        assert_eq!(got.hidden.size(), want.hidden.size());
        // Another number of rows is another kernel of the products, and so another order of sums.
        assert!(got.hidden.allclose(&want.hidden, 1e-5, 1e-5, false), "{}", (&got.hidden - &want.hidden).abs().max());
        match (&got.teacher, &want.teacher) {
            (None, None) => (),
            (Some(Teacher::States(got)), Some(Teacher::States(want))) => {
                assert_eq!(got.size(), want.size());
                assert!(got.allclose(want, 1e-5, 1e-5, false), "{}", (got - want).abs().max());
            }
            (Some(Teacher::Likeliest(got)), Some(Teacher::Likeliest(want))) => {
                let of = |said: &Likeliest| (said.each, said.ids.clone());
                assert_eq!(of(got), of(want));
                assert!(got.shares.iter().zip(&want.shares).all(|(got, want)| (got - want).abs() < 1e-5));
            }
            others => panic!("{others:?}"),
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]
        /// Whatever fits, each row is extracted once and stands in its place, and the next batch tries nothing that does not fit.
        #[test]
        fn a_batch_in_pieces_is_the_batch_and_memory_runs_out_only_on_the_way_down(
            lengths in prop::collection::vec(1u32..20, 1..9), fits in 1usize..9,
            labels in prop::option::of(prop_oneof![(1u32..4).prop_map(TopK::Likeliest), Just(TopK::All)]),
        ) {
            let (target, options) = (target(), options(labels));
            let batch = batch(&lengths, target.config().vocab_size);
            let want = extract(&target, &batch, &options, &mut Outbound::new(CPU)).unwrap();
            let (mut room, mut rows, mut failures) = (Room::new(CPU), 0, 0);
            let mut run = |most: usize| {
                let got = rows_in_pieces(&batch, &mut room, |piece| {
                    if piece.rows > most {
                        failures += 1;
                        return Err(ModelError::Torch("CUDA out of memory. Tried to allocate 2.00 GiB".into()));
                    }
                    rows += piece.rows;
                    extract(&target, piece, &options, &mut Outbound::new(CPU))
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
            // What was learnt holds for the target's own forward.
            let mut forward = Forward { target: target.share(), room, outbound: Outbound::new(CPU) };
            same(&forward.extract(&batch, &options).unwrap(), &want);
        }
    }

    #[test]
    fn a_single_row_that_does_not_fit_tells_what_to_change() {
        let mut calls = 0;
        let failed = rows_in_pieces(&batch(&[3, 5, 4], 9), &mut Room::new(CPU), |_| {
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
    fn a_value_that_is_not_finite_in_any_piece_is_found() {
        let (target, options) = (target(), options(None));
        let batch = batch(&[3, 4], target.config().vocab_size);
        let mut room = Room::new(CPU);
        for broken in 0..2 {
            let mut piece = 0;
            let features = rows_in_pieces(&batch, &mut room, |rows| {
                if rows.rows > 1 {
                    return Err(ModelError::Torch("out of memory".into()));
                }
                let features = extract(&target, rows, &options, &mut Outbound::new(CPU))?;
                piece += 1;
                Ok(TorchFeatures { finite: piece - 1 != broken, ..features })
            });
            assert!(!features.unwrap().all_finite());
        }
    }
}
