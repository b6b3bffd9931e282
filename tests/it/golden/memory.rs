//! Memory of a training step, measured in a separate process so that other tests do not count.

use draftmill::hf::config::TargetConfig;
use draftmill::hf::draft::DraftConfig;
use draftmill::model::batch::Packed;
use draftmill::model::drafter::anchors::Anchors;
use draftmill::model::drafter::{DraftOptions, Drafter, Shared};
use draftmill::model::ops::linear;
use draftmill::model::params::init_params;
use std::process::Command;
use tch::{Device, Kind, Tensor};

/// Set in the process that measures.
const MEASURES: &str = "DRAFTMILL_TEST_MEASURES";
const VOCAB: i64 = 248_320;
const BLOCKS: u32 = 32;
const BLOCK: usize = 16;
const WIDTH: i64 = 16;
/// Bytes of the f32 logits of all slots over the whole vocabulary.
const LOGITS: u64 = BLOCKS as u64 * BLOCK as u64 * VOCAB as u64 * 4;

/// Returns a memory statistic of this process in bytes.
fn status(name: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.trim().strip_suffix(" kB").unwrap().trim().parse::<u64>().unwrap() * 1024
}

fn config() -> DraftConfig {
    let target = serde_json::json!({
        "model_type": "llama", "hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": VOCAB, "max_position_embeddings": 512,
    });
    DraftConfig::for_target(&TargetConfig::from_json(&target).unwrap(), 1, vec![0], BLOCK, VOCAB as u32 - 1)
}

/// Prints the rise of the memory peak in a step, and the rise with all logits in memory.
fn measure() {
    tch::set_num_threads(2);
    let config = config();
    let random = |rows: i64| Tensor::randn([rows, WIDTH], (Kind::Float, Device::Cpu));
    let shared = Shared { embedding: random(VOCAB), head: random(VOCAB) };
    let head = shared.head.shallow_clone();
    let mut drafter = Drafter::new(config.clone(), shared, DraftOptions::new(Device::Cpu)).unwrap();
    drafter.load_weights(init_params(&config, 1).unwrap()).unwrap();
    let length = BLOCKS * BLOCK as u32;
    let (hidden, ids) = (random(length.into()), (0..length as i32).collect::<Vec<_>>());
    let (mask, lengths) = (vec![1; length as usize], [length]);
    let batch = Packed::of_ids(&hidden, &ids, &mask, &lengths);
    let anchors = Anchors { rows: vec![(0..BLOCKS).map(|block| block * BLOCK as u32).collect()] };

    let before = status("VmRSS:");
    let (report, gradient) = drafter.loss_and_gradient(&batch, &anchors).unwrap();
    let step = status("VmHWM:").saturating_sub(before);
    assert!(report.loss().is_finite() && gradient.is_some());
    assert_eq!(report.supervised, f64::from(BLOCKS * (BLOCK as u32 - 1)));
    drop(linear(&random(length.into()), &head, None).unwrap());
    println!("rose by {step} {}", status("VmHWM:").saturating_sub(before));
}

/// Automodel#3673: the logits of all slots over 248 320 tokens ran out of memory. The limit on anchors is the other half
/// of the remedy.
#[test]
fn automodel_3673_the_logits_of_a_large_vocabulary_are_never_all_there() {
    if std::env::var_os(MEASURES).is_some() {
        return measure();
    }
    let name = "golden::memory::automodel_3673_the_logits_of_a_large_vocabulary_are_never_all_there";
    let mut child = Command::new(std::env::current_exe().unwrap());
    let output = child.args(["--exact", name, "--nocapture"]).env(MEASURES, "1").output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    let told = text.split_once("rose by ").unwrap().1.lines().next().unwrap();
    let (step, all) = told.split_once(' ').unwrap();
    let (step, all): (u64, u64) = (step.parse().unwrap(), all.parse().unwrap());
    println!("{step} bytes of {LOGITS}");
    assert!(step < LOGITS / 8, "a step took {step} bytes, and all logits {LOGITS}");
    assert!(all >= LOGITS, "all logits were there, and only {all} bytes were seen");
}
