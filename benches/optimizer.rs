//! Update of the optimizer alone, in the fused kernel and in plain operations.
//!
//! `cargo bench --bench dispatch -- --optimizer --layers 2 --steps 20` prints one line of JSON: the medians of
//! both and of Muon, measured in turns, and the medians of their ratios. Shapes are those of `--step`, with two threads.

use crate::{
    machine::{Failed, Outcome, median},
    sampled::Sampled,
    step::{SEED, THREADS, config, shape},
};
use draftmill::config::MuonScale;
use draftmill::model::{
    adamw::{AdamW, Hyper},
    muon::Muon,
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
    let muon = Muon { momentum: 0.95, weight_decay: 0.1, iterations: 5, rate: 1.0, scale: MuonScale::MatchRmsAdamw };
    let with_muon = new()?.with_muon(Some(muon)).failed("make an optimizer")?;
    let begin = || Sampled::begin(shape.device);
    let mut sides = [(new()?, begin()?), (new()?.unfused(), begin()?), (with_muon, begin()?)];
    for _ in 0..=shape.steps {
        for (adamw, sampled) in &mut sides {
            // The gradient's values do not matter, and each update consumes one gradient.
            let gradient = copy()?;
            sampled.step(|| adamw.step(gradient, 3.0, 1e-4, 1.0).failed("take a step").map(drop))?;
        }
    }
    let [(_, fused), (_, plain), (_, muon)] = sides;
    let (fused, plain, muon) = (fused.json()?, plain.json()?, muon.json()?);
    let times =
        |side: &Value| side["all"].as_array().into_iter().flatten().filter_map(Value::as_f64).collect::<Vec<_>>();
    // Alternating, so that other load on the machine slows both.
    let ratio =
        |side: &Value| median(times(side).iter().zip(times(&fused)).map(|(side, fused)| side / fused).collect());
    let ratios = json!({ "plain_over_fused": ratio(&plain), "muon_over_fused": ratio(&muon) });
    println!("{}", json!({ "parameters": parameters, "ratios": ratios, "fused": fused, "plain": plain, "muon": muon }));
    Ok(())
}
