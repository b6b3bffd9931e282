//! Losses with a soft teacher on plain DFlash logits: values, gradients and totals.

use super::case::*;
use draftmill::model::drafter::head::{LossOptions, layout};
use draftmill::model::drafter::{DraftOptions, Drafter};
use draftmill::model::loss::head_loss::{Labels, Tile};
use draftmill::model::loss::soft_loss::{LossInput, LossSettings, Projection, WeightedLoss, weighted_loss};
use draftmill::model::loss::weighting::Weighting;
use draftmill::model::loss::{CeLabel, LossTerms};
use serde_json::Value;
use tch::{Device, Kind, Tensor};

/// Names of the folder's losses that Draftmill has, with their terms and the token of the cross-entropy.
fn known(json: &Value, name: &str) -> Option<(LossTerms, CeLabel)> {
    let eta = number(&json["lk_eta"]);
    let terms = match name {
        "ce" | "ce_teacher_argmax" => LossTerms::only(|terms| terms.ce = 1.0),
        "kl" => LossTerms::KL,
        "rkl" => LossTerms::only(|terms| terms.reverse_kl = 1.0),
        "tv" => LossTerms::only(|terms| terms.tv = 1.0),
        "l1" => LossTerms::only(|terms| terms.tv = 2.0),
        "lk_hybrid" => LossTerms::only(|terms| (terms.lk, terms.lk_eta) = (1.0, eta)),
        "e2e_tv" => LossTerms::only(|terms| terms.e2e_tv = 1.0),
        _ => return None,
    };
    let label = if name == "ce_teacher_argmax" { CeLabel::Labels } else { CeLabel::Data };
    Some((terms, label))
}

/// Terms of a name such as `mix_ce0.1_tv0.9_decay_weighted_mean`.
fn mixture(name: &str) -> Option<LossTerms> {
    let parts = name.strip_prefix("mix_")?.strip_suffix("_decay_weighted_mean")?.split('_');
    let mut terms = LossTerms::only(|_| ());
    for part in parts {
        let at = part.find(|c: char| c.is_ascii_digit())?;
        let weight = part[at..].parse().ok()?;
        match &part[..at] {
            "ce" => terms.ce = weight,
            "kl" => terms.kl = weight,
            "tv" => terms.tv = weight,
            _ => return None,
        }
    }
    Some(terms)
}

/// Loss of the folder's own hidden states, so that nothing before it differs.
fn of_states(case: &Case, terms: LossTerms, ce_label: CeLabel, weighting: Weighting, tile: Tile) -> WeightedLoss {
    let _guard = tch::no_grad_guard();
    let (config, _) = weights("dflash_drafter");
    let packed = case.packed();
    let slots = case.anchors.slots(&packed, layout(&config), weighting.gamma());
    let size = config.block_size as i64;
    let hidden = tensor(&case.files, "output_hidden");
    let hidden = case.kept(&hidden.reshape([hidden.size()[0], -1, size, hidden.size()[2]]));
    let hidden = hidden.flatten(0, 1).index_select(0, &Tensor::from_slice(&slots.indices));
    let head = shared().head;
    let labels = Labels::for_slots(&slots, packed.target_labels, &head).unwrap();
    let input = LossInput {
        hidden: &hidden,
        projection: Projection { head: &head, bias: None },
        labels: &labels,
        slots: &slots,
        block_size: config.block_size,
    };
    weighted_loss(&input, &LossSettings { terms, ce_label, weighting }, tile, true).unwrap()
}

/// Tiles that hold all blocks at once, some, and one.
fn tiles() -> [Tile; 3] {
    [Tile { slots: 1024, tokens: 2048 }, Tile { slots: 20, tokens: 100 }, Tile { slots: 1, tokens: 1 }]
}

#[test]
fn every_loss_of_the_folder_has_its_values_and_slopes() {
    let case = Case::load("losses_case");
    let cases = case.json["cases"].as_object().unwrap();
    let head = shared().head;
    let gamma = case.json["loss_decay_gamma"].as_f64();
    let mut seen = Vec::new();
    for (name, want) in cases {
        let Some((terms, label)) = known(&case.json, name) else {
            if let Some(terms) = mixture(name) {
                let got = of_states(&case, terms, CeLabel::Data, Weighting::Decay(gamma), tiles()[1]);
                near(name, got.numerator / got.denominator, number(want), LOSS);
                continue;
            }
            // jsd, nla and kl_topk are losses that Draftmill does not have.
            continue;
        };
        seen.push(name.as_str());
        for tile in tiles() {
            let got = of_states(&case, terms, label, Weighting::Decay(gamma), tile);
            let total = got.numerator / got.denominator;
            if name == "e2e_tv" {
                near(name, total, number(&want["loss"]), LOSS);
                assert_eq!(got.denominator, number(&want["blocks"]));
            } else {
                near(name, total, number(&want["decay"]["weighted_mean"]), LOSS);
                near(name, got.denominator / number(&want["decay"]["denominator"]), 1.0, LOSS);
                let values = case.want(&format!("value.{name}"));
                let supervised = case.want("mask").gt(0.5).nonzero().flatten(0, -1);
                close(name, &got.losses, &values.index_select(0, &supervised), SLOT);
                let dpace = Weighting::DPace(number(&case.json["dpace_alpha"]));
                let got = of_states(&case, terms, label, dpace, tile);
                let weights = f64::try_from(got.weights.sum(Kind::Double)).unwrap();
                // The folder's weights follow the cross-entropy of the data's token.
                if name != "ce_teacher_argmax" {
                    near(name, got.numerator / weights, number(&want["dpace"]["weighted_mean"]), LOSS);
                    let want = case.want("weight_dpace").index_select(0, &supervised);
                    close("D-PACE's weights", &got.weights, &want, SLOT);
                }
            }
            let slopes = tensor(&case.files, &format!("grad_logits.{name}")).mm(&head);
            close_to_largest(name, &(&got.gradient / got.denominator), &slopes, GRADIENT);
        }
    }
    assert!(["ce", "kl", "rkl", "tv", "lk_hybrid", "e2e_tv"].iter().all(|name| seen.contains(name)), "{seen:?}");
}

#[test]
fn every_gradient_of_the_folder_is_reached_through_the_drafter() {
    let case = Case::load("losses_case");
    let gradients = open("losses_grads.safetensors");
    let gamma = case.json["loss_decay_gamma"].as_f64();
    let mut compared = 0;
    for (name, want) in case.json["cases"].as_object().unwrap() {
        let Some((terms, ce_label)) = known(&case.json, name) else { continue };
        let (config, weights) = weights("dflash_drafter");
        let options = DraftOptions {
            weighting: Weighting::Decay(gamma),
            loss: LossOptions { terms, ce_label, ..LossOptions::default() },
            ..DraftOptions::new(Device::Cpu)
        };
        let drafter: Drafter = drafter(config, weights, options);
        let (report, gradient) = case.step(&drafter);
        compared += check_gradients(&gradients, &format!("{name}."), &gradient, report.loss_denominator);
        let norm = if name == "e2e_tv" { &want["grad_l2_norm"] } else { &want["decay"]["grad_l2_norm"] };
        check_norm(name, &gradient, report.loss_denominator, norm);
    }
    assert!(compared > 0);
}

#[test]
fn the_acceptance_of_each_slot_and_block_matches() {
    let case = Case::load("losses_case");
    let terms = LossTerms::only(|terms| terms.e2e_tv = 1.0);
    let got = of_states(&case, terms, CeLabel::Data, Weighting::Decay(None), tiles()[1]);
    let supervised = case.want("mask").gt(0.5).nonzero().flatten(0, -1);
    let want = case.want("e2e_tv.alpha").index_select(0, &supervised);
    close("alpha", &got.acceptance.unwrap(), &want, SLOT);
}
