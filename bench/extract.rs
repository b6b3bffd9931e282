//! The forward of a target on the CPU, alone: what `bench/peers` measures beside transformers.
//!
//! `cargo bench --bench dispatch -- --extract --model DIR --buckets 4 --lengths 256,230,198` prints one line of JSON, like `--step`.

use crate::{
    machine::{Failed, Outcome},
    sampled::{Options, Sampled},
    step::{TAPS, THREADS},
};
use draftmill::{
    hf::{config::TargetConfig, tensors::TensorFiles},
    model::{
        batch::Rows,
        target::{Depth, Target},
    },
};
use draftmill_actors::buckets::optimal_bounds;
use std::path::Path;
use tch::{Device, Kind};

/// Measures and prints.
pub fn run(arguments: &[&str]) -> Outcome<()> {
    tch::set_num_threads(THREADS);
    let mut given = Options::read(arguments)?;
    let (buckets, steps) = (given.number("buckets", 4)?, given.number("steps", 5)?);
    let (model, lengths) = (given.text("model")?, given.text("lengths")?);
    given.done()?;
    let lengths = lengths.split(',').map(|n| n.parse::<u32>()).collect::<Result<Vec<_>, _>>();
    let lengths = lengths.failed("read --lengths")?;

    let folder = Path::new(model);
    let config = TargetConfig::load(folder).failed("read the target's configuration")?;
    let files = TensorFiles::open(folder).failed("open the target's weights")?;
    let vocab = config.vocab_size;
    let depth = Depth::Layers(TAPS.iter().max().map_or(0, |last| last + 1));
    let target = Target::load(config, &files, depth, Kind::Float, Device::Cpu).failed("load the target")?;
    let batches: Vec<(Vec<i32>, Vec<u32>)> = batches(&lengths, buckets, vocab);

    let mut sampled = Sampled::begin();
    for _ in 0..=steps {
        sampled.step(|| {
            for (ids, lengths) in &batches {
                let width = ids.len() / lengths.len();
                let rows = Rows::new(ids, lengths, width).failed("make a batch")?;
                drop(target.taps(&rows, &TAPS, Kind::Float).failed("extract")?);
            }
            Ok(())
        })?;
    }
    println!("{}", sampled.json());
    Ok(())
}

/// The rows by bucket, each batch as wide as its bucket.
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
