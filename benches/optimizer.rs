//! The optimizer's update alone, in the fused kernel and in plain operations.
//!
//! `cargo bench --bench dispatch -- --optimizer --layers 2 --steps 20` prints one line of JSON: the medians of both, taken in turn,
//! and the median of their ratios. The shape is that of `--step`; two threads.

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

/// Measures and prints.
pub fn run(arguments: &[&str]) -> Outcome<()> {
    let shape = &shape(arguments)?;
    tch::set_num_threads(THREADS);
    let weights = init_params(&config(shape), SEED).failed("draw weights")?;
    let parameters: usize = weights.tensors().iter().map(|t| t.numel()).sum();
    let copy = || weights.deep_copy(shape.device, Kind::Float).failed("copy weights");
    let hyper = Hyper { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01 };
    let new = || AdamW::new(copy()?, hyper).failed("make an optimizer");
    let mut sides =
        [(new()?, Sampled::begin(shape.device)?), (new()?.unfused(), Sampled::begin(shape.device)?)];
    for _ in 0..=shape.steps {
        for (adamw, sampled) in &mut sides {
            // Any values serve as a gradient, and each update uses one up.
            let gradient = copy()?;
            sampled.step(|| adamw.step(gradient, 3.0, 1e-4, 1.0).failed("take a step").map(drop))?;
        }
    }
    let [(_, fused), (_, plain)] = sides;
    let (fused, plain) = (fused.json()?, plain.json()?);
    let times =
        |side: &Value| side["all"].as_array().into_iter().flatten().filter_map(Value::as_f64).collect::<Vec<_>>();
    // Turn by turn, since what else the machine does at a moment slows both.
    let ratio = median(times(&plain).iter().zip(times(&fused)).map(|(plain, fused)| plain / fused).collect());
    println!("{}", json!({ "parameters": parameters, "plain_over_fused": ratio, "fused": fused, "plain": plain }));
    Ok(())
}
