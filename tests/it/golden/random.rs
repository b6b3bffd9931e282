//! Random drafters with ragged rows, holes in the loss mask, and anchors in awkward places, each from one seed.

use draftmill::hf::Dtype;
use draftmill::hf::draft::{DraftConfig, LayerType};
use draftmill::model::batch::{Packed, TargetLabels};
use draftmill::model::drafter::anchors::Anchors;
use draftmill::model::drafter::{DraftOptions, Drafter, Shared};
use draftmill::model::loss::weighting::Weighting;
use draftmill::model::params::{ParamSet, init_params};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;
use tch::{Device, Kind, Tensor};

/// Drafter and one micro-batch for it.
pub struct Scene {
    pub config: DraftConfig,
    pub gamma: Option<f64>,
    pub hidden: Tensor,
    pub ids: Vec<i32>,
    pub loss_mask: Vec<u8>,
    pub lengths: Vec<u32>,
    pub anchors: Anchors,
    /// Scale of the weights relative to the initial one: large enough that every path through the layers contributes.
    scale: f64,
    embedding: Tensor,
    head: Tensor,
    seed: u64,
}

pub fn scene(seed: u64) -> Scene {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let kv_heads = rng.random_range(1..3);
    let layers = rng.random_range(1..4);
    let slides = rng.random_bool(0.4);
    let layer_types: Vec<LayerType> = (0..layers)
        .map(|_| if slides && rng.random_bool(0.5) { LayerType::Sliding } else { LayerType::Full })
        .collect();
    let window = layer_types.contains(&LayerType::Sliding).then(|| rng.random_range(1..9));
    let vocab_size = rng.random_range(60..150);
    let config = DraftConfig {
        head: Default::default(),
        hidden_size: 8 * rng.random_range(1..5),
        intermediate_size: rng.random_range(5..40),
        num_hidden_layers: layers,
        num_attention_heads: kv_heads * rng.random_range(1..4),
        num_key_value_heads: kv_heads,
        head_dim: 8 * rng.random_range(1..3),
        rms_norm_eps: 1e-6,
        rope_theta: 1e4,
        vocab_size,
        block_size: rng.random_range(2..9),
        mask_token_id: vocab_size as u32 - 1,
        target_layer_ids: (0..rng.random_range(1..4)).collect(),
        num_target_layers: 6,
        max_position_embeddings: 512,
        layer_types,
        sliding_window: window,
        sliding_causal: window.is_none() || !seed.is_multiple_of(3),
        bos_token_id: None,
        eos_token_ids: Vec::new(),
        pad_token_id: None,
        dtype: Dtype::Bf16,
    };
    let lengths: Vec<u32> = (0..rng.random_range(1..5)).map(|_| rng.random_range(1..40)).collect();
    let tokens: usize = lengths.iter().map(|&len| len as usize).sum();
    let ids = (0..tokens).map(|_| rng.random_range(0..vocab_size as i32 / 2)).collect();
    let loss_mask: Vec<u8> = (0..tokens).map(|_| u8::from(rng.random_bool(0.75))).collect();
    let rows = lengths.iter().map(|&len| anchors(&mut rng, len)).collect();
    let width = config.target_layer_ids.len() * config.hidden_size;
    let size = [vocab_size as i64, config.hidden_size as i64];
    Scene {
        gamma: rng.random_bool(0.5).then(|| rng.random_range(1.0..8.0)),
        hidden: uniform(&mut rng, &[tokens as i64, width as i64], 2.0),
        embedding: uniform(&mut rng, &size, 1.0),
        head: uniform(&mut rng, &size, 0.7),
        ids,
        loss_mask,
        lengths,
        anchors: Anchors { rows },
        scale: 12.0,
        config,
        seed,
    }
}

/// No anchor, or some positions, often the first, the second last and the last, whose block extends past the end.
fn anchors(rng: &mut ChaCha8Rng, len: u32) -> Vec<u32> {
    if rng.random_bool(0.2) {
        return Vec::new();
    }
    let mut chosen: Vec<u32> = (0..len).filter(|_| rng.random_bool(0.3)).collect();
    for edge in [0, len.saturating_sub(2), len - 1] {
        if rng.random_bool(0.4) {
            chosen.push(edge);
        }
    }
    chosen.sort_unstable();
    chosen.dedup();
    chosen
}

fn uniform(rng: &mut ChaCha8Rng, size: &[i64], scale: f32) -> Tensor {
    let count: i64 = size.iter().product();
    let values: Vec<f32> = (0..count).map(|_| rng.random_range(-scale..scale)).collect();
    Tensor::from_slice(&values).reshape(size)
}

impl Scene {
    pub fn packed(&self) -> Packed<'_> {
        Packed::of_ids(&self.hidden, &self.ids, &self.loss_mask, &self.lengths)
    }

    /// Random states of the target's last layer at each token.
    pub fn states(&self) -> TargetLabels {
        let size = [self.ids.len() as i64, self.config.hidden_size as i64];
        TargetLabels::States(uniform(&mut ChaCha8Rng::seed_from_u64(self.seed ^ 2), &size, 1.5))
    }

    pub fn drafter(&self) -> Drafter {
        self.drafter_with(|_| ())
    }

    pub fn drafter_in(&self, kind: Kind) -> Drafter {
        self.drafter_with(|options| options.kind = kind)
    }

    pub fn drafter_with(&self, change: impl FnOnce(&mut DraftOptions)) -> Drafter {
        let mut options = DraftOptions { weighting: Weighting::Decay(self.gamma), ..DraftOptions::new(Device::Cpu) };
        change(&mut options);
        let own = |x: &Tensor| x.copy().to_kind(options.kind);
        let shared = Shared { embedding: own(&self.embedding), head: own(&self.head) };
        let mut drafter = Drafter::new(self.config.clone(), shared, options).unwrap();
        drafter.load_weights(self.weights()).unwrap();
        drafter
    }

    /// Scaled initial weights; norms deviate from one.
    fn weights(&self) -> ParamSet {
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed ^ 1);
        let pairs = init_params(&self.config, self.seed).unwrap().into_pairs().into_iter().map(|(name, x)| {
            let spread = if self.scale == 1.0 { 0.0 } else { 0.4 };
            let x = match x.size().as_slice() {
                [len] => &x + spread * uniform(&mut rng, &[*len], 1.0),
                _ => x * self.scale,
            };
            (name, x)
        });
        ParamSet::new(pairs.collect())
    }

    /// Initial weights, and a head of small scale that favours no token.
    pub fn fresh(&mut self, seed: u64) {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        self.scale = 1.0;
        self.loss_mask.fill(1);
        self.head = uniform(&mut rng, &self.head.size(), 0.02);
        for (row, &len) in self.anchors.rows.iter_mut().zip(&self.lengths) {
            *row = (0..len.saturating_sub(1)).collect();
        }
    }

    pub fn clone_with(&self, change: impl FnOnce(&mut DraftConfig)) -> Scene {
        let mut config = self.config.clone();
        change(&mut config);
        Scene {
            config,
            gamma: self.gamma,
            hidden: self.hidden.copy(),
            ids: self.ids.clone(),
            loss_mask: self.loss_mask.clone(),
            lengths: self.lengths.clone(),
            anchors: self.anchors.clone(),
            scale: self.scale,
            embedding: self.embedding.copy(),
            head: self.head.copy(),
            seed: self.seed,
        }
    }
}
