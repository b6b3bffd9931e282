//! Labels from the target (speculators#477): its most likely tokens at each position, by the plain forward and by
//! speculators, and its whole distribution (`kl_div`).

use super::drafter::Case as DraftCase;
use super::engine::{batch, target as engine};
use super::files::{close, close_to_largest, ints, json, number, path, tensor};
use super::random::scene;
use super::target::cases;
use draftmill::config::TopK;
use draftmill::engines::torch::{TargetOptions, TorchTarget};
use draftmill::hf::{config::TargetConfig, tensors::TensorFiles};
use draftmill::model::batch::{Packed, Rows, TargetLabels};
use draftmill::model::drafter::anchors::Anchors;
use draftmill::model::loss::head_loss::{Labels, Tile, head_loss};
use draftmill::model::ops::rms_norm;
use draftmill::model::params::Gradient;
use draftmill::model::target::{Depth, Target};
use draftmill_actors::messages::engine::{FeatureDtype, Features, MicroReport, TargetEngine};
use tch::{Device, Kind, Tensor};

fn load(folder: &str, depth: Depth) -> Target {
    let (config, files) = (TargetConfig::load(&path(folder)).unwrap(), TensorFiles::open(&path(folder)).unwrap());
    Target::load(config, &files, depth, Kind::Float, Device::Cpu).unwrap()
}

#[test]
fn labels_are_what_the_plain_forward_finds_most_likely_one_place_before() {
    for case in cases() {
        let (name, layers) = (&case.name, case.config.num_hidden_layers);
        let (ids, lengths, taps) = (case.ids(), case.lengths(), [0, layers - 2]);
        let width = ids.len() / lengths.len();
        let rows = Rows::new(&ids, &lengths, width).unwrap();
        let load = |depth| Target::load(case.config.clone(), &case.weights, depth, Kind::Float, Device::Cpu).unwrap();
        let target = load(Depth::Whole);
        let (hidden, target_labels) = target.forward_with_top_k(&rows, &taps, Kind::Float, 1).unwrap();
        let labels = target_labels.ids;
        assert_eq!(target_labels.probabilities, vec![1.0; labels.len()]);
        assert!(hidden.equal(&target.taps(&rows, &taps, Kind::Float).unwrap()), "{name}");
        let logits = tensor(&case.io, "logits");
        let said = logits.argmax(-1, false);
        let mut want = Vec::new();
        for (row, &len) in lengths.iter().enumerate() {
            want.push(ids[row * width]);
            want.extend((1..i64::from(len)).map(|place| said.int64_value(&[row as i64, place - 1]) as i32));
        }
        assert_eq!(labels, want, "{name}");
        let real = lengths.iter().enumerate().flat_map(|(row, &len)| &ids[row * width..][..len as usize]);
        assert!(labels.iter().zip(real).any(|(label, id)| label != id), "{name}: they are not the data");
        assert!(load(Depth::Layers(layers - 1)).forward_with_top_k(&rows, &[0], Kind::Float, 1).is_err());
        assert!(target.forward_with_top_k(&rows, &[0], Kind::Float, case.config.vocab_size + 1).is_err());

        // The first of several is the same one, and their probabilities are a softmax over them.
        let k = case.config.vocab_size.min(5);
        let several = target.forward_with_top_k(&rows, &[0], Kind::Float, k).unwrap().1;
        assert_eq!(several.ids.iter().step_by(k).copied().collect::<Vec<_>>(), labels, "{name}");
        let (best, _) = logits.get(0).get(0).topk(k as i64, -1, true, true);
        let want = Vec::<f32>::try_from(best.softmax(-1, Kind::Float)).unwrap();
        assert!(
            several.probabilities[k..2 * k].iter().zip(&want).all(|(got, want)| (got - want).abs() < 1e-4),
            "{name}"
        );
        let certain: Vec<f32> = (0..k).map(|rank| if rank == 0 { 1.0 } else { 0.0 }).collect();
        assert_eq!(several.probabilities[..k], certain);
    }
}

/// Labels that speculators trains on, from its own code, for blocks within one document.
#[test]
fn speculators_477_labels_are_those_of_speculators() {
    let io = TensorFiles::open_file(&path("speculators_case.safetensors")).unwrap();
    let ids: Vec<i32> = ints(&io, "input_ids").into_iter().map(|id| id as i32).collect();
    let documents = ints(&io, "document_ids");
    let mut rows: Vec<(i64, std::ops::Range<usize>)> = Vec::new();
    for (place, &document) in documents.iter().enumerate().filter(|(_, document)| **document >= 0) {
        match rows.last_mut() {
            Some((last, range)) if *last == document => range.end = place + 1,
            _ => rows.push((document, place..place + 1)),
        }
    }
    let target = load(&target_dir(), Depth::Whole);
    let mut labels = vec![-1; ids.len()];
    for (_, range) in &rows {
        let lengths = [range.len() as u32];
        let row = Rows::new(&ids[range.clone()], &lengths, range.len()).unwrap();
        labels[range.clone()].copy_from_slice(&target.forward_with_top_k(&row, &[1], Kind::Float, 1).unwrap().1.ids);
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
    // The other ones are behind the end of their document.
    let case = json("speculators_case.json");
    let elsewhere = number(&case["supervised_positions_whose_label_is_in_another_document"]);
    assert!(compared > 0, "there is nothing to compare");
    assert_eq!(f64::from(compared), number(&case["supervised_positions"]) - elsewhere);
}

/// speculators' loss `kl_div` over the whole vocabulary, from its own hidden states of drafter and verifier.
#[test]
fn the_divergence_from_the_whole_distribution_is_that_of_speculators() {
    let io = TensorFiles::open_file(&path("speculators_case.safetensors")).unwrap();
    let folder = path(&target_dir());
    let (config, target) = (TargetConfig::load(&folder).unwrap(), TensorFiles::open(&folder).unwrap());
    let head = if config.tie_word_embeddings { "model.embed_tokens.weight" } else { "lm_head.weight" };
    let (norm, head) = (tensor(&target, "model.norm.weight"), tensor(&target, head));
    let hidden = tensor(&io, "output_hidden").get(0);
    close("logits", &hidden.linear(&head, None::<Tensor>), &tensor(&io, "logits").get(0), 2e-5);

    let verifier = rms_norm(&tensor(&io, "verifier_last_hidden_pre_norm").get(0), &norm, config.rms_norm_eps).unwrap();
    let anchors = ints(&io, "anchors");
    let (slots, tokens) = (hidden.size()[0], verifier.size()[0]);
    let size = slots / anchors.len() as i64;
    // The label of a slot's position is at the position before it.
    let before = (0..slots).map(|slot| (anchors[(slot / size) as usize] + slot % size - 1).clamp(0, tokens - 1));
    let before = Tensor::from_slice(&before.collect::<Vec<_>>());
    let (values, ids) =
        verifier.linear(&head, None::<Tensor>).index_select(0, &before).topk(head.size()[0], -1, true, true);
    let by_label = Labels::Tokens { ids, probabilities: values.softmax(-1, Kind::Float) };
    let by_state = Labels::States { states: verifier, index: before };

    let case = json("speculators_case.json");
    let cases = case["cases"].as_object().unwrap().iter();
    let mut cases = cases.filter_map(|(name, case)| {
        let gamma = name.strip_prefix("full_attention_kl_div_fixed-exp-decay_gamma")?;
        Some((gamma.parse::<f64>().unwrap(), number(&case["loss"])))
    });
    let (gamma, want) = cases.next().expect("speculators_case.json has no case of kl_div with a decay");
    let decay: Vec<f64> = (0..slots).map(|slot| (-((slot % size - 1).max(0) as f64) / gamma).exp()).collect();
    let mask = tensor(&io, "aligned_loss_mask").get(0).to_kind(Kind::Double);
    for labels in [by_label, by_state] {
        let loss = head_loss(&hidden, &head, &labels, Tile { slots: 7, tokens: 100 }).unwrap().losses;
        let loss = (loss.to_kind(Kind::Double) * &mask * Tensor::from_slice(&decay)).sum(Kind::Double);
        let got = f64::try_from(loss / (mask.sum(Kind::Double) + 1e-5)).unwrap();
        assert!((got / want - 1.0).abs() < 2e-6, "{got} and {want}");
    }
}

/// The target's states are equivalent to labels with the probability of every token: the same loss and gradient, in rows
/// with padding and holes; in bf16 within its rounding.
#[test]
fn the_targets_states_teach_what_all_of_its_tokens_teach() {
    let case = DraftCase::load();
    let target = load(case.json["target_dir"].as_str().unwrap(), Depth::Whole);
    let padded = batch(&case, &[12, 7, 20]);
    let rows = Rows::new(&padded.ids, &padded.lengths, padded.width).unwrap();
    let drafter = case.drafter(case.config(), case.gamma());
    let real =
        |x: &[i32]| (0..3).flat_map(|row| x[row * 20..][..padded.lengths[row] as usize].to_vec()).collect::<Vec<_>>();
    let ids = real(&padded.ids);
    let loss_mask: Vec<u8> =
        real(&padded.loss_mask.iter().map(|&x| x.into()).collect::<Vec<_>>()).into_iter().map(|x| x as u8).collect();
    // At the second last token, blocks extend past the end; at the first one, there is no context.
    let anchors = Anchors { rows: vec![vec![0, 2, 3, 10], vec![], vec![0, 1, 7, 18]] };
    let taught = |labels, out| {
        let (hidden, target_labels) =
            target.forward_with_labels(&rows, &case.config().target_layer_ids, out, Some(labels)).unwrap();
        let (hidden, target_labels) = (hidden.to_kind(Kind::Float), target_labels.unwrap());
        let packed = Packed {
            hidden: &hidden,
            ids: &ids,
            target_labels: Some(&target_labels),
            loss_mask: &loss_mask,
            lengths: &padded.lengths,
        };
        let (report, gradient) = drafter.loss_and_gradient(&packed, &anchors).unwrap();
        let (held_out, slots) = drafter.held_out(&packed, &anchors, case.gamma()).unwrap();
        assert!((held_out.loss() / report.loss() - 1.0).abs() < 1e-5, "{} and {}", held_out.loss(), report.loss());
        assert_eq!(
            (held_out.correct, slots.iter().map(|s| s.right).sum::<u64>() as f64),
            (report.correct, report.correct)
        );
        (report, gradient.unwrap())
    };
    let vocab = target.config().vocab_size as u32;
    let (want, by_label) = taught(TopK::Tokens(vocab), Kind::Float);
    assert!(want.supervised > 0.0 && want.loss() > 0.0, "{want:?}");
    let (got, by_state) = taught(TopK::All, Kind::Float);
    assert!((got.loss_numerator / want.loss_numerator - 1.0).abs() < 2e-5, "{got:?} and {want:?}");
    assert_eq!(
        (got.supervised, got.correct, got.loss_denominator),
        (want.supervised, want.correct, want.loss_denominator)
    );
    for ((name, got), want) in by_state.iter().zip(by_label.tensors()) {
        close_to_largest(name, got, want, 5e-5);
    }
    let (rounded, _) = taught(TopK::All, Kind::BFloat16);
    assert!((rounded.loss_numerator / want.loss_numerator - 1.0).abs() < 2e-2, "{rounded:?} and {want:?}");
}

/// Parts of a split micro-batch need different states of the same rows, and sum to the whole.
#[test]
fn a_micro_batch_in_pieces_learns_the_same_from_states() {
    let scene = scene(21);
    let drafter = scene.drafter_in(Kind::Double);
    let states = scene.states();
    let packed = Packed { target_labels: Some(&states), ..scene.packed() };
    let compute = |piece: &Anchors| drafter.loss_and_gradient(&packed, piece);
    let (want, whole) = compute(&scene.anchors).unwrap();
    assert!(scene.anchors.count() > 3 && whole.is_some(), "{:?}", scene.anchors);
    let (mut got, mut sum) = (MicroReport::default(), None::<Gradient>);
    for piece in (0..4).map(|number| scene.anchors.chunk(number, 4)) {
        let (report, gradient) = compute(&piece).unwrap();
        got.add(&report);
        let Some(gradient) = gradient else { continue };
        match &mut sum {
            None => sum = Some(gradient),
            Some(sum) => sum.tensors_mut().iter_mut().zip(gradient.tensors()).for_each(|(sum, part)| *sum += part),
        }
    }
    assert!((got.loss_numerator / want.loss_numerator - 1.0).abs() < 1e-10, "{got:?} and {want:?}");
    assert_eq!((got.correct, got.supervised, got.anchors), (want.correct, want.supervised, want.anchors));
    for ((name, got), want) in sum.unwrap().iter().zip(whole.unwrap().tensors()) {
        close_to_largest(name, got, want, 1e-10);
    }
}

#[test]
fn states_that_do_not_fit_their_rows_are_refused() {
    let scene = scene(21);
    let (drafter, tokens, width) = (scene.drafter(), scene.ids.len() as i64, scene.config.hidden_size as i64);
    for size in [[tokens - 1, width], [tokens, width + 8], [tokens * width, 1]] {
        let states = TargetLabels::States(Tensor::zeros(size, (Kind::Float, Device::Cpu)));
        let packed = Packed { target_labels: Some(&states), ..scene.packed() };
        let error = drafter.loss_and_gradient(&packed, &scene.anchors).err().unwrap().to_string();
        assert!(error.contains("last states of shape"), "{error}");
    }
}

#[tokio::test]
async fn labels_travel_with_their_batch_and_are_counted_in_its_bytes() {
    let case = DraftCase::load();
    let mut with = taught_engine(&case, TopK::Tokens(2), FeatureDtype::F32);
    let mut without = engine(&case, FeatureDtype::F32);
    let padded = batch(&case, &[12, 7]);
    let (features, plain) =
        (with.extract(padded.clone()).await.unwrap(), without.extract(padded.clone()).await.unwrap());
    assert_eq!(features.bytes(), plain.bytes() + 2 * 8 * 19);
    assert_eq!(with.feature_bytes(&padded), features.bytes());
    assert_eq!(features.shape(), plain.shape());
    let (one, two): (&Tensor, &Tensor) = (features.packed().hidden, plain.packed().hidden);
    assert!(one.equal(two));
    assert!(plain.packed().target_labels.is_none());
    let Some(TargetLabels::TopK(said)) = features.packed().target_labels else { panic!("no labels came") };
    assert_eq!((said.ids.len(), said.probabilities.len()), (2 * 19, 2 * 19));
    assert_ne!(said.ids.iter().step_by(2).collect::<Vec<_>>(), features.packed().ids.iter().collect::<Vec<_>>());
    // A restarted target also returns them.
    with.restart().await.unwrap();
    assert_eq!(with.extract(padded).await.unwrap().packed().target_labels, features.packed().target_labels);
}

#[tokio::test]
async fn states_have_the_batch_dtype_and_count_in_its_bytes() {
    let case = DraftCase::load();
    let width = case.config().hidden_size;
    for (dtype, kind) in [(FeatureDtype::F32, Kind::Float), (FeatureDtype::Bf16, Kind::BFloat16)] {
        let mut with = taught_engine(&case, TopK::All, dtype);
        let mut without = engine(&case, dtype);
        let padded = batch(&case, &[12, 7]);
        let (features, plain) =
            (with.extract(padded.clone()).await.unwrap(), without.extract(padded.clone()).await.unwrap());
        assert_eq!(features.bytes(), plain.bytes() + (19 * width * kind.elt_size_in_bytes()) as u64);
        assert_eq!(with.feature_bytes(&padded), features.bytes());
        assert_eq!(features.shape(), plain.shape());
        assert!(features.packed().hidden.equal(plain.packed().hidden));
        let Some(TargetLabels::States(states)) = features.packed().target_labels else { panic!("no states came") };
        assert_eq!((states.size(), states.kind()), (vec![19, width as i64], kind));
        with.restart().await.unwrap();
        assert_eq!(with.extract(padded).await.unwrap().packed().target_labels, features.packed().target_labels);
    }
}

/// A NaN in the last state fails its batch as in a tap, whatever part of it is kept.
#[tokio::test]
async fn a_nan_in_the_last_state_is_reported() {
    let case = DraftCase::load();
    let (from, folder) = (path(case.json["target_dir"].as_str().unwrap()), tempfile::tempdir().unwrap());
    std::fs::copy(from.join("config.json"), folder.path().join("config.json")).unwrap();
    let mut weights = std::fs::read(from.join("model.safetensors")).unwrap();
    // The length of the header, the header, and then the values.
    let start = 8 + u64::from_le_bytes(weights[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&weights[8..start]).unwrap();
    let [from_byte, to_byte] =
        [0, 1].map(|end| start + header["model.norm.weight"]["data_offsets"][end].as_u64().unwrap() as usize);
    // Finite, so the load accepts them; the last state overflows.
    for value in weights[from_byte..to_byte].chunks_exact_mut(4) {
        value.copy_from_slice(&f32::MAX.to_le_bytes());
    }
    std::fs::write(folder.path().join("model.safetensors"), weights).unwrap();
    for labels in [TopK::Tokens(1), TopK::Tokens(4), TopK::All] {
        for (from, finite) in [(folder.path(), false), (&from, true)] {
            let mut target = TorchTarget::load(from, taught_options(&case, labels, FeatureDtype::F32)).unwrap();
            assert_eq!(target.extract(batch(&case, &[9])).await.unwrap().all_finite(), finite, "{labels}");
        }
    }
}

/// Folder of the target that both peers' cases were computed with.
fn target_dir() -> String {
    json("specforge_case.json")["target_dir"].as_str().unwrap().to_owned()
}

fn taught_engine(case: &DraftCase, labels: TopK, features: FeatureDtype) -> TorchTarget {
    let options = taught_options(case, labels, features);
    TorchTarget::load(&path(case.json["target_dir"].as_str().unwrap()), options).unwrap()
}

fn taught_options(case: &DraftCase, labels: TopK, features: FeatureDtype) -> TargetOptions {
    TargetOptions {
        device: Device::Cpu,
        compute: FeatureDtype::F32,
        features,
        features_on: Device::Cpu,
        taps: case.config().target_layer_ids,
        labels: Some(labels),
    }
}
