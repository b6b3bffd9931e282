//! Frozen targets: every hidden state and every logit of real tokens, with both spellings of their configuration.

use super::files::{OUTPUT, close_to_largest, ints, json, open, path, tensor};
use draftmill::hf::config::TargetConfig;
use draftmill::hf::tensors::TensorFiles;
use draftmill::model::batch::{Rows, all_finite};
use draftmill::model::target::{Depth, Target};
use tch::{Device, Kind, Tensor};

/// One target under one spelling of its configuration.
pub struct Case {
    pub name: String,
    pub config: TargetConfig,
    pub weights: TensorFiles,
    pub io: TensorFiles,
}

impl Case {
    pub fn lengths(&self) -> Vec<u32> {
        let mask = tensor(&self.io, "attention_mask");
        Vec::<i64>::try_from(mask.sum_dim_intlist([1i64].as_slice(), false, Kind::Int64))
            .unwrap()
            .into_iter()
            .map(|n| n as u32)
            .collect()
    }

    pub fn ids(&self) -> Vec<i32> {
        ints(&self.io, "input_ids").into_iter().map(|id| id as i32).collect()
    }

    /// Selects the real tokens: `[rows, width, x]` to `[tokens, x]`.
    fn real(&self, x: &Tensor) -> Tensor {
        let mask = tensor(&self.io, "attention_mask").flatten(0, -1);
        x.flatten(0, 1).index_select(0, &mask.nonzero().flatten(0, -1))
    }

    fn want(&self, name: &str) -> Tensor {
        self.real(&tensor(&self.io, name))
    }
}

/// Returns every target of the folder with each of its configurations.
pub fn cases() -> Vec<Case> {
    let listed = json("targets.json");
    let mut cases = Vec::new();
    for entry in listed.as_object().unwrap().values().filter(|entry| !entry["model_dir"].is_null()) {
        let folder = entry["model_dir"].as_str().unwrap();
        for config in [folder.to_string(), format!("{folder}_v4config")] {
            cases.push(Case {
                config: TargetConfig::load(&path(&config)).unwrap(),
                name: config,
                weights: TensorFiles::open(&path(folder)).unwrap(),
                io: open(&format!("{folder}_io.safetensors")),
            });
        }
    }
    assert!(!cases.is_empty(), "targets.json lists no target");
    cases
}

#[test]
fn hidden_states_and_logits_match_transformers() {
    for case in cases() {
        assert!(case.config.check_weights(&case.weights).is_empty());
        let layers = case.config.num_hidden_layers;
        let target = Target::load(case.config.clone(), &case.weights, Depth::Whole, Kind::Float, Device::Cpu).unwrap();
        let (ids, lengths) = (case.ids(), case.lengths());
        let width = ids.len() / lengths.len();
        let trace = target.trace(&Rows::new(&ids, &lengths, width).unwrap()).unwrap();
        let check = |name: &str, got: &Tensor| {
            close_to_largest(&format!("{} {name}", case.name), &case.real(got), &case.want(name), OUTPUT);
        };
        for index in 0..layers {
            check(&format!("hidden_states.{index}"), &trace.hidden[index]);
        }
        // transformers returns its last hidden state after the final norm.
        check("last_hidden_pre_norm", &trace.hidden[layers]);
        check(&format!("hidden_states.{layers}"), &trace.normed);
        check("logits", &trace.logits);
    }
}

/// The configurations of transformers 4 and 5 are the same model.
#[test]
fn both_config_spellings_load_to_the_same_model() {
    for pair in cases().chunks(2) {
        assert_eq!(pair[0].config, pair[1].config, "{} and {}", pair[0].name, pair[1].name);
    }
}

/// A forward without the layers above its last tap returns the same hidden states, packed and without padding.
#[test]
fn taps_are_the_hidden_states_one_further() {
    for case in cases() {
        let layers = case.config.num_hidden_layers;
        let (ids, lengths) = (case.ids(), case.lengths());
        let rows = Rows::new(&ids, &lengths, ids.len() / lengths.len()).unwrap();
        // Unordered and not adjacent: the columns must follow the list.
        let taps = [layers - 2, 0];
        let target =
            Target::load(case.config.clone(), &case.weights, Depth::Layers(layers - 1), Kind::Float, Device::Cpu);
        let got = target.unwrap().taps(&rows, &taps, Kind::Float).unwrap();
        let want: Vec<Tensor> = taps.iter().map(|id| case.want(&format!("hidden_states.{}", id + 1))).collect();
        close_to_largest(&format!("{} taps", case.name), &got, &Tensor::cat(&want, 1), OUTPUT);
        assert!(all_finite(&got).unwrap());
    }
}

/// Padding must not affect real tokens.
#[test]
fn padding_changes_nothing() {
    for case in cases() {
        let load = || Target::load(case.config.clone(), &case.weights, Depth::Whole, Kind::Float, Device::Cpu);
        let (ids, lengths) = (case.ids(), case.lengths());
        let width = ids.len() / lengths.len();
        assert!(lengths.iter().any(|&len| (len as usize) < width), "the case has padding");
        let mut other = ids.clone();
        for (row, &len) in lengths.iter().enumerate() {
            other[row * width + len as usize..(row + 1) * width].fill(case.config.vocab_size as i32 - 1);
        }
        let target = load().unwrap();
        let trace = |ids: &[i32]| target.trace(&Rows::new(ids, &lengths, width).unwrap()).unwrap().logits;
        let (one, two) = (trace(&ids), trace(&other));
        assert!(case.real(&one).equal(&case.real(&two)), "{}", case.name);
        assert!(!one.equal(&two), "the padding itself did change");
    }
}

/// Half precision follows float32 within its own rounding: the loader reads bytes, not slices.
#[test]
fn tch_995_bf16_weights_and_features_are_not_taken_for_f16() {
    for case in cases() {
        let (ids, lengths) = (case.ids(), case.lengths());
        let rows = Rows::new(&ids, &lengths, ids.len() / lengths.len()).unwrap();
        for kind in [Kind::BFloat16, Kind::Half] {
            let target = Target::load(case.config.clone(), &case.weights, Depth::Layers(1), kind, Device::Cpu);
            let got = target.unwrap().taps(&rows, &[0], kind).unwrap();
            assert_eq!(got.kind(), kind);
            close_to_largest(&format!("{} {kind:?}", case.name), &got, &case.want("hidden_states.1"), 0.05);
        }
    }
}
