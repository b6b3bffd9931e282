//! Linear targets whose next token a fit predicts, by head, and rows without data.

use super::*;
use crate::hf::config::TargetConfig;
use crate::hf::head::{Dflash2Config, DsparkConfig};
use crate::model::batch::Packed;
use crate::model::drafter::anchors::Anchors;
use crate::model::drafter::head::predict;
use crate::model::drafter::{DraftOptions, Drafter};
use crate::model::ops::argmax;
use crate::model::params::init_params;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

const WIDTH: i64 = 48;
const VOCAB: i64 = 200;

fn config() -> DraftConfig {
    let target = serde_json::json!({
        "model_type": "llama", "hidden_size": WIDTH, "intermediate_size": 96, "num_hidden_layers": 9, "head_dim": 16,
        "num_attention_heads": 12, "num_key_value_heads": 6, "vocab_size": VOCAB, "max_position_embeddings": 128,
        "rope_theta": 10000.0,
    });
    DraftConfig::for_target(&TargetConfig::from_json(&target).unwrap(), 2, vec![1, 7], 4, 199)
}

/// Values of mean 0 and variance 1. (libtorch's generator is shared by all tests of the process.)
fn noise(rng: &mut ChaCha8Rng, size: &[i64]) -> Tensor {
    let count: i64 = size.iter().product();
    let values: Vec<f64> = (0..count).map(|_| rng.random_range(-1.0..1.0) * 3f64.sqrt()).collect();
    Tensor::from_slice(&values).reshape(size)
}

fn unit(x: &Tensor) -> Tensor {
    rms_norm(x, &Tensor::ones([x.size()[1]], (Kind::Double, Device::Cpu)), 1e-6).unwrap()
}

/// Target whose last hidden state is linear in the last token and in the newest tap, up to its length. Vectors of
/// one class share a direction, as in real models.
struct Linear {
    embedding: Tensor,
    norm: Tensor,
    of_anchor: Tensor,
    of_context: Tensor,
    shared: [Tensor; 2],
}

impl Linear {
    fn new(rng: &mut ChaCha8Rng) -> Linear {
        let mut normal = |size: &[i64]| noise(rng, size);
        let embedding = (normal(&[VOCAB, WIDTH]) + normal(&[1, WIDTH])) * 0.1;
        Linear {
            embedding,
            norm: normal(&[WIDTH]).abs() + 0.5,
            of_anchor: normal(&[WIDTH, WIDTH]) * 0.1,
            of_context: normal(&[WIDTH, WIDTH]) * 0.1,
            shared: [normal(&[1, WIDTH]), normal(&[1, WIDTH])],
        }
    }

    /// Ids, taps and last hidden states of one row.
    fn row(&self, rng: &mut ChaCha8Rng, tokens: i64) -> (Vec<i32>, Tensor, Tensor) {
        let ids: Vec<i64> = (0..tokens).map(|_| rng.random_range(0..VOCAB - 1)).collect();
        let ids = Tensor::from_slice(&ids);
        let [first, second] = [0, 1].map(|tap| noise(rng, &[tokens, WIDTH]) + &self.shared[tap]);
        let anchor = unit(&self.embedding.index_select(0, &ids)).mm(&self.of_anchor.transpose(0, 1));
        let context = unit(&second).mm(&self.of_context.transpose(0, 1)).roll([1], [0]);
        let last = unit(&(anchor + context + self.embedding.get(199))) * &self.norm;
        let ids = Vec::<i64>::try_from(ids).unwrap().into_iter().map(|id| id as i32).collect();
        (ids, Tensor::cat(&[first, second], 1).to_kind(Kind::Float), last.to_kind(Kind::Float))
    }
}

/// Fractions of anchors whose first and second predictions are the target's, given the true token before each.
fn accuracies(config: &DraftConfig, target: &Linear, rng: &mut ChaCha8Rng, params: ParamSet) -> [f64; 2] {
    let table = target.embedding.to_kind(Kind::Float);
    let shared = || Shared { embedding: table.copy(), head: table.copy() };
    let mut drafter = Drafter::new(config.clone(), shared(), DraftOptions::new(Device::Cpu)).unwrap();
    drafter.load_weights(params).unwrap();
    let (ids, taps, last) = target.row(rng, 120);
    let anchors: Vec<u32> = (1..118).collect();
    let (mask, lengths) = ([1; 120], [120]);
    let batch = Packed::of_ids(&taps, &ids, &mask, &lengths);
    let hidden = drafter.hidden(&batch, &Anchors { rows: vec![anchors.clone()] }).unwrap();
    let first = config.head.first_slot();
    // The token before the label of slot `k` is that of position `anchor + k - first`.
    let known = |anchor: u32, slot: usize| i64::from(ids[(anchor as usize + slot.saturating_sub(first)).min(119)]);
    let slots = config.block_size;
    let previous: Vec<i64> =
        anchors.iter().flat_map(|&anchor| (0..slots).map(move |slot| known(anchor, slot))).collect();
    let predicted = predict(config, drafter.params(), &shared(), &hidden, &previous).unwrap();
    let right = argmax(&last.mm(&table.transpose(0, 1))).unwrap();
    let right = Vec::<i64>::try_from(right).unwrap();
    [0, 1].map(|ahead| {
        let same = anchors.iter().enumerate().filter(|&(block, &anchor)| {
            i64::from(predicted[block * slots + first + ahead]) == right[anchor as usize + ahead]
        });
        same.count() as f64 / anchors.len() as f64
    })
}

fn fitted(config: &DraftConfig, target: &Linear, rng: &mut ChaCha8Rng) -> ParamSet {
    let embedding = target.embedding.to_kind(Kind::Float);
    let shared = Shared { head: embedding.copy(), embedding };
    let start = init_params(config, 3).unwrap();
    let names = start.names().to_vec();
    let mut init = LeastSquaresInit::new(config, &shared, start, &target.norm).unwrap();
    for _ in 0..20 {
        let (ids, taps, last) = target.row(rng, 120);
        init.add(&ids, &[1; 120], &taps, &last).unwrap();
    }
    // The first token has no context before it, and nothing is supervised after the last one.
    assert_eq!(init.anchors(), 20 * 118);
    let fitted = init.finish().unwrap();
    assert_eq!(fitted.names(), names);
    fitted
}

#[test]
fn a_linear_target_is_predicted_before_the_first_step() {
    let dspark = |rank| HeadConfig::Dspark(DsparkConfig { markov: MarkovKind::Vanilla, rank, confidence: None });
    let dflash2 = Dflash2Config { conv_taps: 2, conv_group: 16, selector_rank: 8, selector_top_k: 4 };
    let mut second = Vec::new();
    for head in [HeadConfig::Dflash, HeadConfig::Dflash2(dflash2), dspark(0), dspark(32)] {
        let rng = &mut ChaCha8Rng::seed_from_u64(5);
        let (config, target) = (DraftConfig { head, ..config() }, Linear::new(rng));
        let random = accuracies(&config, &target, rng, init_params(&config, 3).unwrap());
        let weights = fitted(&config, &target, rng);
        let fitted = accuracies(&config, &target, rng, weights);
        assert!(random[0] < 0.1 && fitted[0] > 0.65, "{head:?}: random weights {random:?}, fitted weights {fitted:?}");
        second.push(fitted[1]);
    }
    // The second token depends on the first one, which only a Markov head knows.
    let [dflash, dflash2, without, with] = second[..] else { panic!("{second:?}") };
    assert!(dflash == dflash2 && with > without + 0.05, "accuracies of the second token: {second:?}");
}

#[test]
fn one_layer_or_no_anchor_is_an_error() {
    let rng = &mut ChaCha8Rng::seed_from_u64(6);
    let (one, target) = (DraftConfig { num_hidden_layers: 1, ..config() }, Linear::new(rng));
    let shared = Shared { head: target.embedding.copy(), embedding: target.embedding.copy() };
    let start = || init_params(&config(), 3).unwrap();
    let error = LeastSquaresInit::new(&one, &shared, start(), &target.norm).err().unwrap().to_string();
    assert!(error.contains("two layers"), "{error}");
    let config = config();
    let mut init = LeastSquaresInit::new(&config, &shared, start(), &target.norm).unwrap();
    let (ids, taps, last) = target.row(rng, 3);
    init.add(&ids, &[0, 1, 0], &taps, &last).unwrap();
    assert!(init.finish().err().unwrap().to_string().contains("has no data"));
}
