//! Labels from the target (speculators#477): what it would say at each place, by the plain forward and by speculators.

use super::drafter::Case as DraftCase;
use super::engine::{batch, target as engine};
use super::files::{close, ints, path, tensor};
use draftmill::engines::torch::{TargetOptions, TorchTarget};
use draftmill::hf::{config::TargetConfig, tensors::TensorFiles};
use draftmill::model::batch::Rows;
use draftmill::model::loss::{Labels, Tile, head_loss};
use draftmill::model::ops::rms_norm;
use draftmill::model::target::{Depth, Target};
use draftmill_actors::engine::{FeatureDtype, Features, TargetEngine};
use tch::{Device, Kind, Tensor};

fn load(folder: &str, depth: Depth) -> Target {
    let (config, files) = (TargetConfig::load(&path(folder)).unwrap(), TensorFiles::open(&path(folder)).unwrap());
    Target::load(config, &files, depth, Kind::Float, Device::Cpu).unwrap()
}

fn ids(io: &TensorFiles) -> Vec<i32> {
    ints(io, "input_ids").into_iter().map(|id| id as i32).collect()
}

#[test]
fn labels_are_what_the_plain_forward_finds_most_likely_one_place_before() {
    for folder in ["target_qwen3", "target_llama"] {
        let io = TensorFiles::open_file(&path(&format!("{folder}_io.safetensors"))).unwrap();
        let (ids, lengths) = (ids(&io), [24, 17, 9]);
        let rows = Rows::new(&ids, &lengths, 24).unwrap();
        let target = load(folder, Depth::Whole);
        let (taps, teacher) = target.taps_and_teacher(&rows, &[0, 2], Kind::Float, 1).unwrap();
        let labels = teacher.ids;
        assert_eq!(teacher.shares, vec![1.0; labels.len()]);
        assert!(taps.equal(&target.taps(&rows, &[0, 2], Kind::Float).unwrap()), "{folder}");
        let said = tensor(&io, "logits").argmax(-1, false);
        let mut want = Vec::new();
        for (row, len) in lengths.into_iter().enumerate() {
            want.push(ids[row * 24]);
            want.extend((1..len as i64).map(|place| said.int64_value(&[row as i64, place - 1]) as i32));
        }
        assert_eq!(labels, want, "{folder}");
        assert!(labels.iter().zip(&ids).any(|(label, id)| label != id), "{folder}: they are not the data");
        assert!(load(folder, Depth::Layers(3)).taps_and_teacher(&rows, &[0], Kind::Float, 1).is_err());
        assert!(target.taps_and_teacher(&rows, &[0], Kind::Float, target.config().vocab_size + 1).is_err());

        // Of several, the first is the same one, and their shares are those of a softmax over them.
        let several = target.taps_and_teacher(&rows, &[0], Kind::Float, 5).unwrap().1;
        assert_eq!(several.ids.iter().step_by(5).copied().collect::<Vec<_>>(), labels, "{folder}");
        let (best, _) = tensor(&io, "logits").get(0).get(0).topk(5, -1, true, true);
        let want = Vec::<f32>::try_from(best.softmax(-1, Kind::Float)).unwrap();
        assert!(several.shares[5..10].iter().zip(&want).all(|(got, want)| (got - want).abs() < 1e-4), "{folder}");
        assert_eq!(several.shares[..5], [1.0, 0.0, 0.0, 0.0, 0.0]);
    }
}

/// The labels that speculators trains on, from its own code, wherever a block lies in one document.
#[test]
fn speculators_477_labels_are_those_of_speculators() {
    let io = TensorFiles::open_file(&path("speculators_case.safetensors")).unwrap();
    let (ids, documents) = (ids(&io), ints(&io, "document_ids"));
    let mut rows: Vec<(i64, std::ops::Range<usize>)> = Vec::new();
    for (place, &document) in documents.iter().enumerate().filter(|(_, document)| **document >= 0) {
        match rows.last_mut() {
            Some((last, range)) if *last == document => range.end = place + 1,
            _ => rows.push((document, place..place + 1)),
        }
    }
    let target = load("target_qwen3", Depth::Whole);
    let mut labels = vec![-1; ids.len()];
    for (_, range) in &rows {
        let lengths = [range.len() as u32];
        let row = Rows::new(&ids[range.clone()], &lengths, range.len()).unwrap();
        labels[range.clone()].copy_from_slice(&target.taps_and_teacher(&row, &[1], Kind::Float, 1).unwrap().1.ids);
    }
    let (anchors, valid) = (ints(&io, "anchors"), ints(&io, "anchor_valid"));
    let wanted = ints(&io, "label_ids");
    let mask = Vec::<f64>::try_from(tensor(&io, "aligned_loss_mask").to_kind(Kind::Double).flatten(0, -1)).unwrap();
    let size = wanted.len() / anchors.len();
    let mut compared = 0;
    for (block, &anchor) in anchors.iter().enumerate().filter(|(block, _)| valid[*block] != 0) {
        for slot in 1..size {
            let (place, at) = (anchor as usize + slot, block * size + slot);
            if mask[at] > 0.0 && documents[place] == documents[anchor as usize] {
                assert_eq!(i64::from(labels[place]), wanted[at], "block {block}, slot {slot}");
                compared += 1;
            }
        }
    }
    // The other 4 of their 44 lie behind the end of their document.
    assert_eq!(compared, 40);
}

/// speculators' loss `kl_div` over the whole vocabulary, from its own hidden states of drafter and verifier.
#[test]
fn the_divergence_from_the_whole_distribution_is_that_of_speculators() {
    let io = TensorFiles::open_file(&path("speculators_case.safetensors")).unwrap();
    let target = TensorFiles::open(&path("target_qwen3")).unwrap();
    let (norm, head) = (tensor(&target, "model.norm.weight"), tensor(&target, "lm_head.weight"));
    let hidden = tensor(&io, "output_hidden").get(0);
    close("logits", &hidden.linear(&head, None::<Tensor>), &tensor(&io, "logits").get(0), 2e-5);

    let verifier = rms_norm(&tensor(&io, "verifier_last_hidden_pre_norm").get(0), &norm, 1e-6).unwrap();
    let anchors = ints(&io, "anchors");
    let (slots, tokens) = (hidden.size()[0], verifier.size()[0]);
    let size = slots / anchors.len() as i64;
    // What is said at the slot's place stands one place before it.
    let before = (0..slots).map(|slot| (anchors[(slot / size) as usize] + slot % size - 1).clamp(0, tokens - 1));
    let before = Tensor::from_slice(&before.collect::<Vec<_>>());
    let (values, ids) =
        verifier.linear(&head, None::<Tensor>).index_select(0, &before).topk(head.size()[0], -1, true, true);
    let labels = Labels { ids, shares: values.softmax(-1, Kind::Float) };

    let decay: Vec<f64> = (0..slots).map(|slot| (-((slot % size - 1).max(0) as f64) / 4.0).exp()).collect();
    let mask = tensor(&io, "aligned_loss_mask").get(0).to_kind(Kind::Double);
    let loss = head_loss(&hidden, &head, &labels, Tile { slots: 7, tokens: 100 }).unwrap().losses.to_kind(Kind::Double);
    let loss = (loss * &mask * Tensor::from_slice(&decay)).sum(Kind::Double) / (mask.sum(Kind::Double) + 1e-5);
    let case: serde_json::Value =
        serde_json::from_slice(&std::fs::read(path("speculators_case.json")).unwrap()).unwrap();
    let want = case["cases"]["full_attention_kl_div_fixed-exp-decay_gamma4"]["loss"].as_f64().unwrap();
    let got = f64::try_from(loss).unwrap();
    assert!((got / want - 1.0).abs() < 2e-6, "{got} and {want}");
}

#[tokio::test]
async fn labels_travel_with_their_batch_and_are_counted_in_its_bytes() {
    let case = DraftCase::load();
    let options = TargetOptions {
        device: Device::Cpu,
        compute: FeatureDtype::F32,
        features: FeatureDtype::F32,
        features_on: Device::Cpu,
        taps: case.config().target_layer_ids,
        labels: Some(2),
    };
    let mut with = TorchTarget::load(&path(case.json["target_dir"].as_str().unwrap()), options).unwrap();
    let mut without = engine(&case, FeatureDtype::F32);
    let padded = batch(&case, &[12, 7]);
    let (features, plain) =
        (with.extract(padded.clone()).await.unwrap(), without.extract(padded.clone()).await.unwrap());
    assert_eq!(features.bytes(), plain.bytes() + 2 * 8 * 19);
    assert_eq!(with.feature_bytes(&padded), features.bytes());
    assert_eq!(features.shape(), plain.shape());
    let (one, two): (&Tensor, &Tensor) = (features.packed().hidden, plain.packed().hidden);
    assert!(one.equal(two));
    assert!(plain.packed().teacher.is_none());
    let said = features.packed().teacher.unwrap();
    assert_eq!((said.ids.len(), said.shares.len()), (2 * 19, 2 * 19));
    assert_ne!(said.ids.iter().step_by(2).collect::<Vec<_>>(), features.packed().ids.iter().collect::<Vec<_>>());
    // A restarted target gives them too.
    with.restart().await.unwrap();
    assert_eq!(with.extract(padded).await.unwrap().packed().teacher, features.packed().teacher);
}
