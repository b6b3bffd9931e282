//! Draft heads and losses relative to DFlash with the Kullback-Leibler divergence, at the same labels and anchors.
//!
//! `cargo bench --bench dispatch -- --heads --rows 2 --anchors 64 --layers 2 --steps 5` prints a table: the median of the
//! seconds of forward and backward, and the median of the ratios to the first line, measured in turns. Labels are the
//! target's whole distribution. Data and weights are random. Shapes are those of `--step`, with two threads.

use crate::{
    machine::{Failed, Outcome, median},
    sampled::Sampled,
    step::{Micro, SEED, THREADS, config, random, shape},
};
use draftmill::{
    config::{CeLabel, LossTerms, TopK},
    hf::{
        draft::DraftConfig,
        head::{ConfidenceInput, Dflash2Config, DsparkConfig, HeadConfig, MarkovKind},
    },
    model::{
        drafter::{DraftOptions, Drafter, Shared, anchors::Anchors, head::LossOptions},
        loss::weighting::Weighting,
        params::init_params,
    },
};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use serde_json::Value;
use tch::Tensor;

/// Rank of Markov head and selector.
const RANK: usize = 64;

/// Measures and prints the table.
pub fn run(arguments: &[&str]) -> Outcome<()> {
    let shape = &shape(arguments)?;
    tch::set_num_threads(THREADS);
    tch::manual_seed(SEED as i64);
    let base = config(shape);
    let size = [base.vocab_size as i64, base.hidden_size as i64];
    let table = (random(size, shape.device) * 0.02).to_kind(shape.kind);
    let micro = Micro::new(shape, &base).with_labels(Some(TopK::All), &base);
    let mut sides = Vec::new();
    for (name, head, terms, ce_label) in cases() {
        let config = DraftConfig { head, ..base.clone() };
        let options = DraftOptions {
            tile: shape.tile,
            group_slots: shape.group_slots,
            weighting: Weighting::Decay(Some(7.0)),
            loss: LossOptions { terms, ce_label, ..LossOptions::default() },
            kind: shape.kind,
            ..DraftOptions::new(shape.device)
        };
        let shared = Shared { embedding: table.shallow_clone(), head: table.shallow_clone() };
        let mut drafter = Drafter::new(config.clone(), shared, options).failed("make a drafter")?;
        let weights = init_params(&config, SEED).failed("draw weights")?;
        // Zeros at the start would spare work that training has.
        for tensor in weights.tensors() {
            let _ = tensor.shallow_clone().f_add_(&(Tensor::randn_like(tensor) * 0.01)).failed("draw weights")?;
        }
        drafter.load_weights(weights).failed("load weights")?;
        sides.push((name, drafter, Sampled::begin(shape.device)?));
    }
    let mut rng = ChaCha8Rng::seed_from_u64(SEED);
    let batch = micro.batch();
    for _ in 0..=shape.steps {
        let anchors =
            Anchors::sample(batch.loss_mask, batch.lengths, shape.anchors, &mut rng).failed("draw anchors")?;
        for (_, drafter, sampled) in &mut sides {
            sampled.step(|| drafter.loss_and_gradient(&batch, &anchors).failed("compute a gradient").map(drop))?;
        }
    }
    let mut lines = Vec::new();
    for (name, _, sampled) in sides {
        let line = sampled.json()?;
        let all: Vec<f64> = line["all"].as_array().into_iter().flatten().filter_map(Value::as_f64).collect();
        lines.push((name, all));
    }
    println!("| head and loss | seconds | ratio |\n| --- | ---: | ---: |");
    let first = lines.first().map(|(_, all)| all.clone()).unwrap_or_default();
    for (name, all) in lines {
        let ratio = median(all.iter().zip(&first).map(|(one, first)| one / first).collect());
        println!("| {name} | {:.3} | {ratio:.2} |", median(all));
    }
    Ok(())
}

type Case = (&'static str, HeadConfig, LossTerms, CeLabel);

fn cases() -> Vec<Case> {
    let only = |set: fn(&mut LossTerms)| LossTerms::only(set);
    let dspark = |markov, confidence| HeadConfig::Dspark(DsparkConfig { markov, rank: RANK, confidence });
    let selector = Dflash2Config { conv_taps: 2, conv_group: 16, selector_rank: RANK, selector_top_k: 16 };
    let markov = Some(ConfidenceInput::HiddenAndMarkov);
    vec![
        ("dflash, kl", HeadConfig::Dflash, LossTerms::KL, CeLabel::Labels),
        ("dflash, tv", HeadConfig::Dflash, only(|t| t.tv = 1.0), CeLabel::Labels),
        ("dflash, lk", HeadConfig::Dflash, only(|t| t.lk = 1.0), CeLabel::Labels),
        ("dflash, e2e-tv", HeadConfig::Dflash, only(|t| t.e2e_tv = 1.0), CeLabel::Labels),
        ("dflash, reverse-kl", HeadConfig::Dflash, only(|t| t.reverse_kl = 1.0), CeLabel::Labels),
        ("dspark vanilla, kl", dspark(MarkovKind::Vanilla, None), LossTerms::KL, CeLabel::Labels),
        ("dspark vanilla, recipe", dspark(MarkovKind::Vanilla, markov), LossTerms::DSPARK, CeLabel::Data),
        (
            "dspark rnn, recipe",
            dspark(MarkovKind::Rnn, Some(ConfidenceInput::Hidden)),
            LossTerms::DSPARK,
            CeLabel::Data,
        ),
        ("dflash2, kl", HeadConfig::Dflash2(selector), LossTerms::KL, CeLabel::Labels),
    ]
}
