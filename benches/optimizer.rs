//! Update of the optimizer alone, in the fused kernel and in plain operations.
//!
//! `cargo bench --bench dispatch -- --optimizer --layers 2 --steps 20` prints one line of JSON: the medians of both,
//! measured in turns, and the median of their ratios. Shapes are those of `--step`, with two threads.

use crate::{
    machine::{Failed, Outcome, median},
    sampled::Sampled,
    step::{SEED, THREADS, config, shape},
};
use draftmill::model::{
    adamw::{AdamW, Hyper},
    params::init_params,
};
use serde_json::{Value, json};
use tch::Kind;

/// Measures and prints the line.
pub fn run(arguments: &[&str]) -> Outcome<()> {
    let shape = &shape(arguments)?;
    tch::set_num_threads(THREADS);
    let weights = init_params(&config(shape), SEED).failed("draw weights")?;
    let parameters: usize = weights.tensors().iter().map(|t| t.numel()).sum();
    let copy = || weights.deep_copy(shape.device, Kind::Float).failed("copy weights");
    let hyper = Hyper { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01 };
    let new = || AdamW::new(copy()?, hyper).failed("make an optimizer");
    let mut sides = [(new()?, Sampled::begin(shape.device)?), (new()?.unfused(), Sampled::begin(shape.device)?)];
    for _ in 0..=shape.steps {
        for (adamw, sampled) in &mut sides {
            // The gradient's values do not matter, and each update consumes one gradient.
            let gradient = copy()?;
            sampled.step(|| adamw.step(gradient, 3.0, 1e-4, 1.0).failed("take a step").map(drop))?;
        }
    }
    let [(_, fused), (_, plain)] = sides;
    let (fused, plain) = (fused.json()?, plain.json()?);
    let times =
        |side: &Value| side["all"].as_array().into_iter().flatten().filter_map(Value::as_f64).collect::<Vec<_>>();
    // Alternating, so that other load on the machine slows both.
    let ratio = median(times(&plain).iter().zip(times(&fused)).map(|(plain, fused)| plain / fused).collect());
    println!("{}", json!({ "parameters": parameters, "plain_over_fused": ratio, "fused": fused, "plain": plain }));
    Ok(())
}
