//! One training step of a drafter on the CPU, alone: what `bench/peers` measures beside other trainers.
//!
//! `cargo bench --bench dispatch -- --step --rows 2 --anchors 64 --layers 2` prints one line of JSON: the seconds of each step and
//! how far the peak of memory rose above the weights. Random data and weights, f32, two threads. `--labels data,16,all` takes a step
//! with each of these labels in turn, from the same anchors, and prints a line for each; the peak is then that of all.

use crate::{
    machine::{Failed, Outcome},
    sampled::{Options, Sampled},
};
use draftmill::{
    config::TopK,
    hf::{
        Dtype,
        draft::{DraftConfig, LayerType},
    },
    model::{
        adamw::{AdamW, Hyper},
        anchors::Anchors,
        batch::{Likeliest, Packed, Teacher},
        draft::{DraftOptions, Drafter, Shared},
        loss::Tile,
        params::init_params,
        weighting::Weighting,
    },
};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use tch::{Device, Kind, Tensor};

/// Tokens of a row that are prompt and so not supervised.
const PROMPT: usize = 64;
/// Labels that are the data's own.
const DATA: &str = "data";
pub const SEED: u64 = 1;
/// Layers whose outputs are extracted.
pub const TAPS: [usize; 5] = [1, 7, 14, 20, 27];
/// Threads of libtorch.
pub const THREADS: i32 = 2;

/// What is measured; every field is an option of the same name.
pub struct Shape {
    rows: usize,
    length: usize,
    pub anchors: usize,
    layers: usize,
    vocab: usize,
    pub steps: usize,
    pub tile: Tile,
    pub group_slots: usize,
    /// `None`: the data's own.
    labels: Vec<Option<TopK>>,
}

/// A micro-batch of random features.
pub struct Micro {
    hidden: Tensor,
    ids: Vec<i32>,
    loss_mask: Vec<u8>,
    lengths: Vec<u32>,
    teacher: Option<Teacher>,
}

pub fn shape(arguments: &[&str]) -> Outcome<Shape> {
    let mut given = Options::read(arguments)?;
    let defaults = DraftOptions::new(Device::Cpu);
    let shape = Shape {
        rows: given.number("rows", 2)?,
        length: given.number("length", 512)?,
        anchors: given.number("anchors", 64)?,
        layers: given.number("layers", 2)?,
        vocab: given.number("vocab", 49_152)?,
        steps: given.number("steps", 5)?,
        tile: Tile {
            slots: given.number("tile-slots", defaults.tile.slots)?,
            tokens: given.number("tile-tokens", defaults.tile.tokens)?,
        },
        group_slots: given.number("group-slots", defaults.group_slots)?,
        labels: given.word("labels", DATA).split(',').map(labels).collect::<Outcome<_>>()?,
    };
    given.done().map(|()| shape)
}

fn labels(text: &str) -> Outcome<Option<TopK>> {
    if text == DATA { Ok(None) } else { text.parse().map(Some) }
}

/// SmolLM2's widths.
pub fn config(shape: &Shape) -> DraftConfig {
    DraftConfig {
        hidden_size: 576,
        intermediate_size: 1536,
        num_hidden_layers: shape.layers,
        num_attention_heads: 9,
        num_key_value_heads: 3,
        head_dim: 64,
        rms_norm_eps: 1e-6,
        rope_theta: 1e4,
        vocab_size: shape.vocab,
        block_size: 16,
        mask_token_id: shape.vocab as u32 - 1,
        target_layer_ids: TAPS.to_vec(),
        num_target_layers: 30,
        max_position_embeddings: 8192,
        layer_types: vec![LayerType::Full; shape.layers],
        sliding_window: None,
        bos_token_id: None,
        eos_token_ids: Vec::new(),
        pad_token_id: None,
        dtype: Dtype::F32,
    }
}

impl Micro {
    pub fn new(shape: &Shape, config: &DraftConfig) -> Micro {
        let tokens = shape.rows * shape.length;
        let width = config.target_layer_ids.len() * config.hidden_size;
        Micro {
            hidden: random([tokens as i64, width as i64]),
            ids: (0..tokens).map(|i| (i * 7919 % (shape.vocab - 1)) as i32).collect(),
            loss_mask: (0..tokens).map(|i| u8::from(i % shape.length >= PROMPT)).collect(),
            lengths: vec![shape.length as u32; shape.rows],
            teacher: None,
        }
    }

    /// With what a target could say of its tokens.
    fn taught(self, labels: Option<TopK>, config: &DraftConfig) -> Micro {
        let tokens = self.ids.len();
        let teacher = labels.map(|labels| match labels {
            TopK::Likeliest(each) => {
                let (each, vocab) = (each as usize, config.vocab_size);
                let ids = (0..tokens * each).map(|i| (i * 7919 % vocab) as i32).collect();
                Teacher::Likeliest(Likeliest { each, ids, shares: vec![1.0 / each as f32; tokens * each] })
            }
            TopK::All => Teacher::States(random([tokens as i64, config.hidden_size as i64])),
        });
        Micro { teacher, ..self }
    }

    pub fn batch(&self) -> Packed<'_> {
        let Micro { hidden, ids, loss_mask, lengths, teacher } = self;
        Packed { teacher: teacher.as_ref(), ..Packed::of_ids(hidden, ids, loss_mask, lengths) }
    }
}

fn random(size: [i64; 2]) -> Tensor {
    Tensor::randn(size, (Kind::Float, Device::Cpu))
}

/// Measures and prints.
pub fn run(arguments: &[&str]) -> Outcome<()> {
    let shape = &shape(arguments)?;
    tch::set_num_threads(THREADS);
    tch::manual_seed(SEED as i64);
    let config = config(shape);
    let options = DraftOptions {
        tile: shape.tile,
        group_slots: shape.group_slots,
        weighting: Weighting::Decay(Some(7.0)),
        ..DraftOptions::new(Device::Cpu)
    };
    let table = [shape.vocab as i64, config.hidden_size as i64];
    let shared = Shared { embedding: random(table) * 0.02, head: random(table) * 0.02 };
    let mut drafter = Drafter::new(config.clone(), shared, options).failed("make a drafter")?;
    let weights = init_params(&config, SEED).failed("draw weights")?;
    let hyper = Hyper { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0 };
    let masters = weights.deep_copy(Device::Cpu, Kind::Float).failed("copy weights")?;
    let mut adamw = AdamW::new(masters, hyper).failed("make an optimizer")?;
    drafter.load_weights(weights).failed("load weights")?;

    let new = |&labels| (labels, Micro::new(shape, &config).taught(labels, &config));
    let micros: Vec<_> = shape.labels.iter().map(new).collect();
    let mut rng = ChaCha8Rng::seed_from_u64(SEED);

    let mut sides: Vec<_> = micros.iter().map(|(labels, micro)| (labels, micro.batch(), Sampled::begin())).collect();
    for _ in 0..=shape.steps {
        let Some((_, first, _)) = sides.first() else { break };
        let anchors =
            Anchors::sample(first.loss_mask, first.lengths, shape.anchors, &mut rng).failed("draw anchors")?;
        for (_, batch, sampled) in &mut sides {
            sampled.step(|| {
                let (report, gradient) = drafter.loss_and_gradient(batch, &anchors).failed("compute a gradient")?;
                let gradient = gradient.ok_or("nothing was supervised")?;
                adamw.step(gradient, report.loss_denominator, 1e-4, 1.0).failed("take a step")?;
                let weights = adamw.masters.deep_copy(Device::Cpu, Kind::Float).failed("publish weights")?;
                drafter.load_weights(weights).failed("load weights")
            })?;
        }
    }
    for (labels, _, sampled) in sides {
        let mut line = sampled.json();
        line["labels"] = labels.map_or_else(|| DATA.into(), |labels| labels.to_string().into());
        println!("{line}");
    }
    Ok(())
}
