//! Engines behind the actors' interface, on the folder's target and drafter.

use super::drafter::Case;
use super::files::{GRADIENT, close_to_largest, path};
use draftmill::engines::torch::{DrafterOptions, TargetOptions, TorchDrafter, TorchFeatures, TorchTarget};
use draftmill::model::drafter::DraftOptions;
use draftmill::model::drafter::anchors::{Anchors, job_rng};
use draftmill::model::loss::weighting::Weighting;
use draftmill::model::params::{Gradient, init_params};
use draftmill_actors::messages::engine::{DraftEngine, EngineError, FeatureDtype, Features, TargetEngine};
use draftmill_actors::messages::types::{JobId, PaddedBatch};
use std::sync::Arc;
use tch::{Device, Kind};

/// Rows of these lengths with distinct ids, supervised except for some holes.
pub fn batch(case: &Case, lengths: &[u32]) -> Arc<PaddedBatch> {
    let width = lengths.iter().copied().max().unwrap() as usize;
    let vocab = case.config().vocab_size;
    let mut batch = PaddedBatch { rows: lengths.len(), width, lengths: lengths.to_vec(), ..PaddedBatch::default() };
    for (row, &len) in lengths.iter().enumerate() {
        for place in 0..width {
            let real = place < len as usize;
            batch.ids.push(if real { ((row * 31 + place * 7) % vocab) as i32 } else { 0 });
            batch.loss_mask.push(u8::from(real && place % 5 != 4));
        }
    }
    Arc::new(batch)
}

pub fn target(case: &Case, features: FeatureDtype) -> TorchTarget {
    let options = TargetOptions {
        device: Device::Cpu,
        compute: FeatureDtype::F32,
        features,
        features_on: Device::Cpu,
        taps: case.config().target_layer_ids,
        labels: None,
    };
    TorchTarget::load(&path(case.json["target_dir"].as_str().unwrap()), options).unwrap()
}

fn options(case: &Case) -> DrafterOptions {
    let model = DraftOptions { weighting: Weighting::Decay(case.gamma()), ..DraftOptions::new(Device::Cpu) };
    DrafterOptions { model, num_anchors: 3, seed: 17 }
}

pub async fn drafter(case: &Case) -> TorchDrafter {
    let folder = path(case.json["target_dir"].as_str().unwrap());
    let mut drafter = TorchDrafter::load(case.config(), &folder, options(case)).unwrap();
    drafter.load_weights(init_params(&case.config(), 5).unwrap()).await.unwrap();
    drafter
}

async fn features(case: &Case, lengths: &[u32]) -> TorchFeatures {
    target(case, FeatureDtype::F32).extract(batch(case, lengths)).await.unwrap()
}

fn job(index: u32) -> JobId {
    JobId { epoch: 1, index }
}

fn equal(what: &str, one: &Gradient, two: &Gradient) {
    assert_eq!(one.names(), two.names());
    for ((name, one), two) in one.iter().zip(two.tensors()) {
        close_to_largest(&format!("{what} {name}"), one, two, GRADIENT);
    }
}

#[tokio::test]
async fn features_report_the_shape_and_the_bytes_that_were_promised() {
    let case = Case::load();
    for dtype in [FeatureDtype::F32, FeatureDtype::F16, FeatureDtype::Bf16] {
        let mut target = target(&case, dtype);
        for lengths in [vec![9, 4, 1], vec![6, 6], vec![3]] {
            let batch = batch(&case, &lengths);
            let (shape, bytes) = (target.expected_shape(&batch), target.feature_bytes(&batch));
            let features = target.extract(batch.clone()).await.unwrap();
            assert_eq!(features.shape(), shape);
            assert_eq!(features.bytes(), bytes);
            let packed = features.packed();
            let real = packed.hidden.numel() * packed.hidden.kind().elt_size_in_bytes();
            let side = packed.ids.len() * 4 + packed.loss_mask.len() + packed.lengths.len() * 4;
            assert_eq!((real + side) as u64, bytes);
            assert_eq!(shape.tokens, batch.tokens());
            assert!(features.all_finite());
        }
    }
}

/// `drafter.anchors` changes during a run: the next micro-batch trains the new number of blocks.
#[tokio::test]
async fn the_next_micro_batch_has_as_many_anchors_as_were_set() {
    let case = Case::load();
    let mut drafter = drafter(&case).await;
    let mut blocks = Vec::new();
    for anchors in [3, 1, 2] {
        drafter.set_anchors(anchors);
        blocks.push(drafter.micro_batch(job(0), features(&case, &[20]).await).await.unwrap().anchors);
    }
    assert_eq!(blocks, [3, 1, 2]);
}

/// The gradient is a sum of numerators: that of two micro-batches is the sum of both, in any order.
#[tokio::test]
async fn micro_batches_add_up() {
    let case = Case::load();
    let mut drafter = drafter(&case).await;
    let (one, two) = ([12, 7], [20]);
    let mut alone = Vec::new();
    for (index, lengths) in [(0, &one[..]), (1, &two[..])] {
        let report = drafter.micro_batch(job(index), features(&case, lengths).await).await.unwrap();
        assert!(report.loss_denominator > 0.0 && report.anchors > 0);
        alone.push((report, drafter.take_gradient().await.unwrap().unwrap()));
    }
    assert!(drafter.take_gradient().await.unwrap().is_none(), "taking starts again from nothing");
    for order in [[1, 0], [0, 1]] {
        for index in order {
            let lengths = if index == 0 { &one[..] } else { &two[..] };
            let report = drafter.micro_batch(job(index), features(&case, lengths).await).await.unwrap();
            assert_eq!(report, alone[index as usize].0, "a job's anchors do not depend on what came before");
        }
        let mut sum = alone[0].1.deep_copy(Device::Cpu, Kind::Float).unwrap();
        for (sum, part) in sum.tensors_mut().iter_mut().zip(alone[1].1.tensors()) {
            *sum += part;
        }
        equal("sum", &drafter.take_gradient().await.unwrap().unwrap(), &sum);
    }
}

/// Sampling depends only on the seed and the job, so that another run or device can repeat it.
#[tokio::test]
async fn anchors_follow_from_the_seed_and_the_job() {
    let case = Case::load();
    let mut engine = drafter(&case).await;
    let features_of = || features(&case, &[20, 9]);
    let report = engine.micro_batch(job(3), features_of().await).await.unwrap();
    let features = features_of().await;
    let batch = features.packed();
    let (options, mut rng) = (options(&case), job_rng(options(&case).seed, job(3)));
    let anchors = Anchors::sample(batch.loss_mask, batch.lengths, options.num_anchors, &mut rng).unwrap();
    let mut plain = case.drafter(case.config(), case.gamma());
    plain.load_weights(init_params(&case.config(), 5).unwrap()).unwrap();
    let (want, gradient) = plain.loss_and_gradient(&batch, &anchors).unwrap();
    assert_eq!(report, want);
    equal("gradient", &engine.take_gradient().await.unwrap().unwrap(), &gradient.unwrap());
}

#[tokio::test]
async fn a_batch_without_a_valid_anchor_adds_nothing_and_is_no_error() {
    let case = Case::load();
    let mut drafter = drafter(&case).await;
    let mut target = target(&case, FeatureDtype::F32);
    for mask in [vec![0; 6], vec![1, 0, 1, 0, 1, 0], vec![0, 0, 0, 0, 0, 1]] {
        let mut padded = (*batch(&case, &[6])).clone();
        padded.loss_mask = mask;
        let features = target.extract(Arc::new(padded)).await.unwrap();
        let report = drafter.micro_batch(job(0), features).await.unwrap();
        assert_eq!((report.anchors, report.supervised, report.loss_denominator), (0, 0.0, 0.0));
        assert_eq!(report.tokens, 6);
        assert!(drafter.take_gradient().await.unwrap().is_none());
    }
}

#[tokio::test]
async fn a_failed_micro_batch_leaves_no_trace() {
    let case = Case::load();
    let mut drafter = drafter(&case).await;
    let report = drafter.micro_batch(job(0), features(&case, &[12, 7]).await).await.unwrap();
    let want = drafter.take_gradient().await.unwrap().unwrap();
    let again = drafter.micro_batch(job(0), features(&case, &[12, 7]).await).await.unwrap();
    assert_eq!(report, again);
    // Features of one tap too many.
    let mut taps = case.config().target_layer_ids;
    taps.push(taps[0]);
    let options = TargetOptions {
        device: Device::Cpu,
        compute: FeatureDtype::F32,
        features: FeatureDtype::F32,
        features_on: Device::Cpu,
        taps,
        labels: None,
    };
    let mut other = TorchTarget::load(&path(case.json["target_dir"].as_str().unwrap()), options).unwrap();
    let wrong = other.extract(batch(&case, &[12, 7])).await.unwrap();
    let failed = drafter.micro_batch(job(1), wrong).await.unwrap_err();
    assert!(failed.features.is_some(), "the batch comes back");
    let error = failed.error;
    assert!(matches!(&error, EngineError::Failed(text) if text.contains("features of shape")), "{error}");
    equal("kept", &drafter.take_gradient().await.unwrap().unwrap(), &want);
}

#[tokio::test]
async fn a_restarted_target_gives_the_same_features() {
    let case = Case::load();
    let mut target = target(&case, FeatureDtype::F32);
    let before = target.extract(batch(&case, &[12, 7])).await.unwrap();
    target.restart().await.unwrap();
    let after = target.extract(batch(&case, &[12, 7])).await.unwrap();
    assert_eq!(before.packed().hidden, after.packed().hidden);
}

#[tokio::test]
async fn ids_outside_the_vocabulary_are_a_sentence_and_not_a_crash() {
    let case = Case::load();
    let mut target = target(&case, FeatureDtype::F32);
    let mut padded = (*batch(&case, &[6])).clone();
    padded.ids[2] = case.config().vocab_size as i32;
    let error = target.extract(Arc::new(padded)).await.err().unwrap();
    assert!(matches!(&error, EngineError::Failed(text) if text.contains("vocabulary")), "{error}");
    assert!(target.extract(batch(&case, &[6])).await.is_ok(), "the engine still works");
}
