//! One training step of a drafter on the CPU, alone: what `bench/peers` measures beside other trainers.
//!
//! `cargo bench --bench dispatch -- --step --rows 2 --anchors 64 --layers 2` prints one line of JSON: the seconds of each step and
//! how far the peak of memory rose above the weights. Random data and weights, f32, two threads.

use crate::machine::{Failed, Outcome, median, peak_rss, process_cpu_seconds, resident};
use draftmill::{
    hf::{
        Dtype,
        draft::{DraftConfig, LayerType},
    },
    model::{
        adamw::{AdamW, Hyper},
        anchors::Anchors,
        batch::Packed,
        draft::{DraftOptions, Drafter, Shared},
        params::init_params,
    },
};

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use serde_json::json;
use std::{collections::BTreeMap, time::Instant};
use tch::{Device, Kind, Tensor};

/// Tokens of a row that are prompt and so not supervised.
const PROMPT: usize = 64;
const SEED: u64 = 1;

/// What is measured; every field is an option of the same name.
struct Shape {
    rows: usize,
    length: usize,
    anchors: usize,
    layers: usize,
    vocab: usize,
    steps: usize,
    head_rows: usize,
    group_slots: usize,
}

fn shape(options: &[&str]) -> Outcome<Shape> {
    let mut given: BTreeMap<&str, usize> = BTreeMap::new();
    for pair in options.chunks(2) {
        let name = pair[0].strip_prefix("--").filter(|_| pair.len() == 2);
        let name = name.ok_or_else(|| format!("{pair:?} is not an option with a number, such as --rows 2"))?;
        given.insert(name, pair[1].parse().failed(&format!("read --{name}"))?);
    }
    let defaults = DraftOptions::new(Device::Cpu);
    let mut take = |name, default| given.remove(name).unwrap_or(default);
    let shape = Shape {
        rows: take("rows", 2),
        length: take("length", 512),
        anchors: take("anchors", 64),
        layers: take("layers", 2),
        vocab: take("vocab", 49_152),
        steps: take("steps", 5),
        head_rows: take("head-rows", defaults.head_rows),
        group_slots: take("group-slots", defaults.group_slots),
    };
    match given.keys().next() {
        Some(name) => Err(format!("there is no option --{name}")),
        None => Ok(shape),
    }
}

/// SmolLM2's widths.
fn config(shape: &Shape) -> DraftConfig {
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
        target_layer_ids: vec![1, 7, 14, 20, 27],
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

/// Measures and prints.
pub fn run(options: &[&str]) -> Outcome<()> {
    let shape = &shape(options)?;
    tch::set_num_threads(2);
    tch::manual_seed(SEED as i64);
    let config = config(shape);
    let options = DraftOptions {
        head_rows: shape.head_rows,
        group_slots: shape.group_slots,
        loss_decay_gamma: Some(7.0),
        ..DraftOptions::new(Device::Cpu)
    };
    let random = |size: [i64; 2]| Tensor::randn(size, (Kind::Float, Device::Cpu));
    let table = [shape.vocab as i64, config.hidden_size as i64];
    let shared = Shared { embedding: random(table) * 0.02, head: random(table) * 0.02 };
    let mut drafter = Drafter::new(config.clone(), shared, options).failed("make a drafter")?;
    let weights = init_params(&config, SEED).failed("draw weights")?;
    let hyper = Hyper { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0 };
    let masters = weights.deep_copy(Device::Cpu, Kind::Float).failed("copy weights")?;
    let mut adamw = AdamW::new(masters, hyper).failed("make an optimizer")?;
    drafter.load_weights(weights).failed("load weights")?;

    let tokens = shape.rows * shape.length;
    let hidden = random([tokens as i64, (config.target_layer_ids.len() * config.hidden_size) as i64]);
    let ids: Vec<i32> = (0..tokens).map(|i| (i * 7919 % (shape.vocab - 1)) as i32).collect();
    let loss_mask: Vec<u8> = (0..tokens).map(|i| u8::from(i % shape.length >= PROMPT)).collect();
    let lengths = vec![shape.length as u32; shape.rows];
    let batch = Packed { hidden: &hidden, ids: &ids, loss_mask: &loss_mask, lengths: &lengths };
    let mut rng = ChaCha8Rng::seed_from_u64(SEED);

    let base = resident();
    let (mut seconds, mut cpu, mut gradients) = (Vec::new(), Vec::new(), Vec::new());
    // The first is the warm-up.
    for step in 0..=shape.steps {
        let anchors = Anchors::sample(&loss_mask, &lengths, shape.anchors, &mut rng).failed("draw anchors")?;
        let (born, began) = (Instant::now(), process_cpu_seconds());
        let (report, gradient) = drafter.loss_and_gradient(&batch, &anchors).failed("compute a gradient")?;
        let computed = born.elapsed().as_secs_f64();
        let gradient = gradient.ok_or("nothing was supervised")?;
        adamw.step(&gradient, report.loss_denominator, 1e-4, 1.0).failed("take a step")?;
        let weights = adamw.masters.deep_copy(Device::Cpu, Kind::Float).failed("publish weights")?;
        drafter.load_weights(weights).failed("load weights")?;
        if step > 0 {
            gradients.push(computed);
            seconds.push(born.elapsed().as_secs_f64());
            cpu.push(process_cpu_seconds() - began);
        }
    }
    let over = peak_rss().zip(base).map(|(peak, base)| peak.saturating_sub(base));
    let all = json!(seconds);
    let line = json!({
        "seconds": median(seconds), "cpu_seconds": median(cpu), "gradient_seconds": median(gradients), "all": all,
        "peak_over_weights": over,
    });
    println!("{line}");
    Ok(())
}
