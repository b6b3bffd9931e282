//! Forward of a target alone, which `benches/peers` compares with transformers.
//!
//! `cargo bench --bench dispatch -- --extract --model DIR --buckets 4 --lengths 256,230,198` prints one line of JSON. It
//! accepts `--device` and `--dtype` as `--step` does. Without `--model` the weights are random, with shapes of `--widths`.

use crate::{
    machine::{Failed, Outcome},
    sampled::{Options, Sampled},
    step::THREADS,
    widths::widths,
};
use draftmill::{
    hf::{config::TargetConfig, tensors::TensorFiles},
    model::{
        ModelError,
        batch::Rows,
        target::{Depth, Target},
    },
};
use draftmill_actors::planner::buckets::optimal_bounds;
use std::path::Path;
use tch::{Device, Kind, Tensor};

/// Measures and prints the line.
pub fn run(arguments: &[&str]) -> Outcome<()> {
    tch::set_num_threads(THREADS);
    let mut given = Options::read(arguments)?;
    let (buckets, steps) = (given.number("buckets", 4)?, given.number("steps", 5)?);
    let (device, kind, widths) = (given.device()?, given.kind()?, widths(given.word("widths", "smollm2"))?);
    let (model, lengths) = (given.word("model", ""), given.text("lengths")?);
    given.done()?;
    let lengths = lengths.split(',').map(|n| n.parse::<u32>()).collect::<Result<Vec<_>, _>>();
    let lengths = lengths.failed("read --lengths")?;

    let taps = widths.taps;
    let depth = Depth::Layers(taps.iter().max().map_or(0, |last| last + 1));
    let target = if model.is_empty() {
        let config = widths.target()?;
        Target::of(config, depth, kind, device, random_weight(kind, device))
    } else {
        let folder = Path::new(model);
        let config = TargetConfig::load(folder).failed("read the target's configuration")?;
        let files = TensorFiles::open(folder).failed("open the target's weights")?;
        Target::load(config, &files, depth, kind, device)
    };
    let target = target.failed("load the target")?;
    let vocab = target.config().vocab_size;
    let batches: Vec<(Vec<i32>, Vec<u32>)> = batches(&lengths, buckets, vocab);

    let mut sampled = Sampled::begin(device)?;
    for _ in 0..=steps {
        sampled.step(|| {
            for (ids, lengths) in &batches {
                let width = ids.len() / lengths.len();
                let rows = Rows::new(ids, lengths, width).failed("make a batch")?;
                let hidden = target.taps(&rows, &taps, kind).failed("extract")?;
                // Copied, as features wait on the host.
                drop(hidden.f_to_device(Device::Cpu).failed("copy features")?);
            }
            Ok(())
        })?;
    }
    let mut line = sampled.json()?;
    line["tokens"] = lengths.iter().sum::<u32>().into();
    println!("{line}");
    Ok(())
}

/// Returns random matrices that preserve the scale of their input, and norms of 1.
pub fn random_weight(kind: Kind, device: Device) -> impl Fn(&str, &[usize]) -> Result<Tensor, ModelError> {
    move |_, shape| match *shape {
        [rows, inner] => {
            let scale = (inner as f64).powf(-0.5);
            Ok(Tensor::f_randn([rows as i64, inner as i64], (kind, device))?.f_mul_scalar_(scale)?)
        }
        _ => {
            let size: Vec<i64> = shape.iter().map(|&n| n as i64).collect();
            Ok(Tensor::f_ones(size, (kind, device))?)
        }
    }
}

/// Returns one batch for each bucket, padded to the width of the bucket.
fn batches(lengths: &[u32], buckets: usize, vocab: usize) -> Vec<(Vec<i32>, Vec<u32>)> {
    let mut below = 0;
    let bounds = optimal_bounds(lengths, buckets);
    let batch = |bound: u32| {
        let rows: Vec<u32> = lengths.iter().copied().filter(|&length| length > below && length <= bound).collect();
        below = bound;
        let ids = (0..rows.len() * bound as usize).map(|i| (i * 7919 % (vocab - 1)) as i32);
        (ids.collect(), rows)
    };
    bounds.into_iter().map(batch).filter(|(_, rows): &(Vec<i32>, Vec<u32>)| !rows.is_empty()).collect()
}
