//! Matrix products of a training step alone: the lower bound for `--step`.
//!
//! `cargo bench --bench dispatch -- --products --rows 2 --anchors 64 --layers 2` accepts the options of `--step` and
//! prints its line of JSON for products of the same shapes, each with separate operands. The tiny products of a block
//! with itself are omitted.

use crate::{
    machine::{Failed, Outcome},
    sampled::Sampled,
    step::{Micro, SEED, THREADS, config, random, shape},
};
use draftmill::{hf::draft::DraftConfig, model::drafter::anchors::Anchors, model::drafter::head::layout};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use tch::{Device, Kind, Tensor};

/// Product `[rows, inner] x [inner, columns]`, and its number of uses in a step.
struct Product {
    rows: usize,
    inner: usize,
    columns: usize,
    times: usize,
}

/// Measures and prints the line.
pub fn run(arguments: &[&str]) -> Outcome<()> {
    let shape = &shape(arguments)?;
    tch::set_num_threads(THREADS);
    let config = config(shape);
    let micro = Micro::new(shape, &config);
    let mut rng = ChaCha8Rng::seed_from_u64(SEED);
    let mut products = Vec::new();
    let mut sampled = Sampled::begin(shape.device)?;
    for _ in 0..=shape.steps {
        let batch = micro.batch();
        let anchors =
            Anchors::sample(batch.loss_mask, batch.lengths, shape.anchors, &mut rng).failed("draw anchors")?;
        let trained = anchors.slots(&batch, layout(&config), None).indices.len();
        let context = anchors.rows.iter().filter_map(|row| row.last()).map(|&last| last as usize).sum();
        products.clear();
        layers(&config, anchors.count(), trained, context, &mut products);
        attention(&config, &anchors, shape.group_slots, &mut products);
        for start in (0..trained).step_by(shape.tile.slots) {
            let (rows, words) = (shape.tile.slots.min(trained - start), shape.tile.tokens);
            let times = config.vocab_size / words;
            products.push(Product { rows, inner: config.hidden_size, columns: words, times });
            products.push(Product { rows, inner: words, columns: config.hidden_size, times });
        }
        let operands = products.iter().map(|product| product.operands(shape.device, shape.kind)).collect::<Vec<_>>();
        sampled.step(|| {
            for (product, (left, right, out)) in products.iter().zip(&operands) {
                for _ in 0..product.times {
                    let _ = left.f_mm_out(out, right).failed("multiply")?;
                }
            }
            Ok(())
        })?;
    }
    let flops: usize = products.iter().map(|p| 2 * p.rows * p.inner * p.columns * p.times).sum();
    let mut line = sampled.json()?;
    line["flops"] = flops.into();
    println!("{line}");
    Ok(())
}

/// Forward, input gradient and weight gradient for each trained matrix. Before the first layer's attention all slots
/// except the anchors' are equal and count as one; after the last layer's attention only trained slots count.
fn layers(config: &DraftConfig, blocks: usize, trained: usize, context: usize, products: &mut Vec<Product>) {
    let width = config.hidden_size;
    let kv = 2 * config.num_key_value_heads * config.head_dim;
    let heads = config.num_attention_heads * config.head_dim;
    let slots = blocks * config.block_size;
    let mut three = |rows, inner, columns| {
        products.push(Product { rows, inner, columns, times: 1 });
        products.push(Product { rows, inner: columns, columns: inner, times: 1 });
        products.push(Product { rows: columns, inner: rows, columns: inner, times: 1 });
    };
    for layer in 0..config.num_hidden_layers {
        three(if layer == 0 { blocks + 1 } else { slots }, width, heads + kv);
        let slots = if layer + 1 == config.num_hidden_layers { trained } else { slots };
        three(slots, heads, width);
        three(slots, width, 2 * config.intermediate_size);
        three(slots, config.intermediate_size, width);
    }
    three(context, width, config.num_hidden_layers * kv);
    // The taps receive no gradient.
    let taps = config.target_layer_ids.len() * width;
    products.push(Product { rows: context, inner: taps, columns: width, times: 1 });
    products.push(Product { rows: width, inner: context, columns: taps, times: 1 });
}

/// Scores, weighted values, and the four products of their gradients, for each group of blocks and its context.
fn attention(config: &DraftConfig, anchors: &Anchors, group_slots: usize, products: &mut Vec<Product>) {
    let dim = config.head_dim;
    let times = 2 * config.num_hidden_layers * config.num_key_value_heads;
    let group_heads = config.num_attention_heads / config.num_key_value_heads;
    for group in anchors.rows.iter().flat_map(|row| row.chunks((group_slots / config.block_size).max(1))) {
        let rows = group.len() * config.block_size * group_heads;
        let seen = group.last().map_or(0, |&last| last as usize);
        products.push(Product { rows, inner: dim, columns: seen, times });
        products.push(Product { rows, inner: seen, columns: dim, times });
        products.push(Product { rows: seen, inner: rows, columns: dim, times });
    }
}

impl Product {
    fn operands(&self, device: Device, kind: Kind) -> (Tensor, Tensor, Tensor) {
        let new = |rows: usize, columns: usize| random([rows as i64, columns as i64], device).to_kind(kind);
        (new(self.rows, self.inner), new(self.inner, self.columns), new(self.rows, self.columns))
    }
}
