//! DSpark: logits, loss terms, every gradient, and greedy drafting of each form of the head.

use super::case::*;
use draftmill::hf::draft::DraftConfig;
use draftmill::hf::head::{ConfidenceInput, DsparkConfig, HeadConfig, MarkovKind};
use draftmill::hf::layout::DraftFolder;
use draftmill::inference::most_likely;
use draftmill::model::drafter::head::{LossOptions, predict, propose};
use draftmill::model::drafter::{DraftOptions, Drafter};
use draftmill::model::loss::weighting::Weighting;
use draftmill::model::loss::{CeLabel, LossTerms};
use draftmill::model::params::{ParamSet, folder_params};
use serde_json::Value;
use tch::{Device, Kind, Tensor};

fn head(variant: &Value) -> DsparkConfig {
    let confidence =
        match (variant["confidence"].as_bool().unwrap(), variant["confidence_with_markov"].as_bool().unwrap()) {
            (false, _) => None,
            (true, false) => Some(ConfidenceInput::Hidden),
            (true, true) => Some(ConfidenceInput::HiddenAndMarkov),
        };
    let markov = match variant["markov_head_type"].as_str().unwrap() {
        "gated" => MarkovKind::Gated,
        "rnn" => MarkovKind::Rnn,
        _ => MarkovKind::Vanilla,
    };
    DsparkConfig { markov, rank: variant["markov_rank"].as_u64().unwrap() as usize, confidence }
}

/// Configuration and weights of a variant: the backbone of the folder with the heads of their own file.
fn variant(case: &Case, name: &str) -> (DraftConfig, ParamSet) {
    let folder = DraftFolder::open(&path("dspark_drafter"), None).unwrap();
    let all = folder_params(&folder).unwrap();
    let config = DraftConfig { head: HeadConfig::Dspark(head(&case.json["variants"][name])), ..folder.config };
    let heads = open("dspark_heads.safetensors");
    let take = |tensor_name: &String| {
        let own = format!("{name}.{tensor_name}");
        let value = match heads.names().any(|known| known == own) {
            true => tensor(&heads, &own),
            false => all.need(tensor_name).unwrap().shallow_clone(),
        };
        (tensor_name.clone(), value)
    };
    let pairs = config.tensor_shapes().keys().map(take).collect();
    (config, ParamSet::new(pairs))
}

fn options(json: &Value, gamma: Option<f64>) -> DraftOptions {
    let weights = &json["weights"];
    let (ce, l1) = (number(&weights["ce"]), number(&weights["l1"]));
    let terms = LossTerms::only(|terms| (terms.ce, terms.tv) = (ce, 2.0 * l1));
    DraftOptions {
        weighting: Weighting::Decay(gamma),
        loss: LossOptions {
            terms,
            ce_label: CeLabel::Data,
            confidence_weight: number(&weights["confidence"]),
            ..LossOptions::default()
        },
        ..DraftOptions::new(Device::Cpu)
    }
}

#[test]
fn losses_and_every_gradient_of_each_variant_match() {
    let (case, gradients) = (Case::load("dspark_case"), open("dspark_grads.safetensors"));
    for (name, want) in case.json["cases"].as_object().unwrap() {
        for (gamma, want) in [(case.json["loss_decay_gamma"].as_f64(), want), (None, &want["decay_off"])] {
            let (config, weights) = variant(&case, name);
            let tensors = weights.len();
            let drafter = drafter(config, weights, options(&case.json, gamma));
            let (report, gradient) = case.step(&drafter);
            near(name, report.loss(), number(&want["loss"]), LOSS);
            check_norm(name, &gradient, report.loss_denominator, &want["grad_l2_norm"]);
            if gamma.is_some() {
                let relative = report.loss_denominator / number(&want["denominator_sum_of_weights"]);
                near(name, relative, 1.0, LOSS);
                near(name, report.accuracy(), number(&want["accuracy"]), LOSS);
                let compared = check_gradients(&gradients, &format!("{name}."), &gradient, report.loss_denominator);
                assert_eq!(compared, tensors, "{name}: some tensor has no golden gradient");
            }
        }
    }
}

/// Chunks on threads, recomputed layers, and groups of single blocks give the same sums.
#[test]
fn losses_do_not_depend_on_chunks_and_groups() {
    let case = Case::load("dspark_case");
    for name in case.json["variants"].as_object().unwrap().keys() {
        let step = |group_slots: usize, recompute: bool| {
            let (config, weights) = variant(&case, name);
            let options = DraftOptions { group_slots, recompute, ..options(&case.json, Some(3.0)) };
            case.step(&drafter(config, weights, options))
        };
        let (whole, expected) = step(1 << 20, false);
        let (parts, gradient) = step(1, true);
        near(name, parts.loss(), whole.loss(), LOSS);
        assert_eq!(
            (parts.correct, parts.run_tokens, parts.run_blocks),
            (whole.correct, whole.run_tokens, whole.run_blocks)
        );
        for (tensor_name, want) in expected.iter() {
            close_to_largest(&format!("{name} {tensor_name}"), gradient.get(tensor_name).unwrap(), want, GRADIENT);
        }
    }
}

#[test]
fn greedy_drafting_of_each_variant_matches() {
    let _guard = tch::no_grad_guard();
    let (case, decode) = (Case::load("dspark_case"), open("dspark_decode.safetensors"));
    let anchors = ints(&decode, "anchor_ids");
    let hidden = case.kept(&tensor(&case.files, "output_hidden"));
    let size = hidden.size()[1];
    for name in case.json["variants"].as_object().unwrap().keys() {
        let (config, weights) = variant(&case, name);
        let drafter = drafter(config.clone(), weights, DraftOptions::new(Device::Cpu));
        let (tokens, margins) =
            (ints(&decode, &format!("{name}.tokens")), tensor(&decode, &format!("{name}.smallest_margin")));
        let margins = Vec::<f64>::try_from(margins.to_kind(Kind::Double)).unwrap();
        let mut compared = 0;
        let confidence = format!("{name}.confidence");
        let confidence = decode.names().any(|known| known == confidence).then(|| tensor(&decode, &confidence));
        // A block with a tie within the limit of logits may be drafted either way.
        let clear = anchors.iter().enumerate().filter(|(block, _)| margins[*block] > OUTPUT);
        for (block, &anchor) in clear {
            compared += 1;
            let hidden = hidden.get(block as i64);
            let mut draw = |logits: &Tensor| most_likely(logits);
            let got =
                propose(&config, drafter.params(), drafter.shared(), &hidden, anchor as u32, 99, &mut draw).unwrap();
            let want: Vec<u32> = tokens.chunks(size as usize).nth(block).unwrap().iter().map(|&id| id as u32).collect();
            assert_eq!(got.tokens, want, "{name}, block {block}");
            match (&confidence, got.confidence) {
                (Some(want), Some(got)) => {
                    close(name, &Tensor::from_slice(&got), &want.get(block as i64).to_kind(Kind::Double), SLOT);
                }
                (None, None) => {}
                _ => panic!("{name}: one has a confidence and the other has none"),
            }
        }
        assert!(2 * compared > anchors.len(), "{name}: most blocks have a tie");
    }
}

/// With the true tokens before each slot, predictions are the most likely tokens of the folder's logits.
#[test]
fn teacher_forced_predictions_match_the_logits() {
    let _guard = tch::no_grad_guard();
    let case = Case::load("dspark_case");
    let hidden = case.want("output_hidden");
    let previous = ints_of(&case.want("prev_ids"));
    for name in case.json["variants"].as_object().unwrap().keys() {
        let (config, weights) = variant(&case, name);
        let logits = format!("{name}.logits");
        let logits = if case.files.names().any(|known| known == logits) { logits } else { "base_logits".into() };
        let logits = case.want(&logits);
        let got = predict(&config, &weights, &shared(), &hidden, &previous).unwrap();
        let got = Tensor::from_slice(&got.into_iter().map(i64::from).collect::<Vec<_>>()).unsqueeze(1);
        let lost = logits.amax([1i64].as_slice(), true) - logits.gather(1, &got, false);
        let lost = f64::try_from(lost.max()).unwrap();
        assert!(lost <= OUTPUT, "{name}: a predicted token is {lost} below the most likely one");
    }
}

fn ints_of(x: &Tensor) -> Vec<i64> {
    Vec::try_from(x.to_kind(Kind::Int64).flatten(0, -1)).unwrap()
}

/// Rank 0 without confidence trains as DFlash on labels one position later.
#[test]
fn rank_zero_is_a_shifted_dflash_bit_for_bit() {
    let case = Case::load("dspark_case");
    let (config, weights) = variant(&case, "none");
    let options = DraftOptions { weighting: Weighting::Decay(None), ..DraftOptions::new(Device::Cpu) };
    let shifted: Drafter = drafter(config.clone(), weights.deep_copy(Device::Cpu, Kind::Float).unwrap(), options);
    let plain = DraftConfig { head: HeadConfig::Dflash, ..config };
    let plain: Drafter = drafter(plain, weights, options);
    let hidden = [&shifted, &plain].map(|drafter| drafter.hidden(&case.packed(), &case.anchors).unwrap());
    assert_eq!(hidden[0], hidden[1]);
}
