//! DFlash 2: convolutions and selector, their loss and every gradient, the start without effect, and drafting.

use super::case::*;
use draftmill::config::MissingLabel;
use draftmill::hf::draft::DraftConfig;
use draftmill::hf::head::HeadConfig;
use draftmill::inference::{Proposer, most_likely};
use draftmill::model::drafter::DraftOptions;
use draftmill::model::drafter::head::{LossOptions, propose};
use draftmill::model::loss::weighting::Weighting;
use draftmill::model::loss::{CeLabel, LossTerms};
use draftmill::model::params::{ParamSet, init_params};
use serde_json::Value;
use tch::{Device, Kind, Tensor};

fn options(json: &Value, gamma: Option<f64>) -> DraftOptions {
    let loss = LossOptions {
        terms: LossTerms::KL,
        ce_label: CeLabel::Labels,
        selector_weight: number(&json["selector_loss_weight"]),
        selector_missing: MissingLabel::Skip,
        ..LossOptions::default()
    };
    DraftOptions { weighting: Weighting::Decay(gamma), loss, ..DraftOptions::new(Device::Cpu) }
}

#[test]
fn losses_metrics_and_every_gradient_match() {
    let (case, gradients) = (Case::load("dflash2_case"), open("dflash2_grads.safetensors"));
    for name in ["decay_as_set", "decay_other"] {
        let want = &case.json["cases"][name];
        let (config, weights) = weights("dflash2_drafter");
        let tensors = weights.len();
        let drafter = drafter(config, weights, options(&case.json, want["loss_decay_gamma"].as_f64()));
        let (report, gradient) = case.step(&drafter);
        let metrics = &want["metrics"];
        near(name, report.loss(), number(&metrics["loss"]), LOSS);
        near(name, report.loss_denominator / number(&metrics["loss_weight"]), 1.0, LOSS);
        assert_eq!(report.correct, number(&metrics["correct_tokens"]), "{name}");
        assert_eq!(report.supervised, number(&metrics["valid_tokens"]), "{name}");
        near(name, report.candidate_hits / report.supervised, number(&metrics["candidate_recall"]), LOSS);
        check_norm(name, &gradient, report.loss_denominator, &want["grad_l2_norm"]);
        if name == "decay_as_set" {
            assert_eq!(check_gradients(&gradients, "", &gradient, report.loss_denominator), tensors);
        }
    }
}

#[test]
fn hidden_states_match_and_do_not_depend_on_groups() {
    let case = Case::load("dflash2_case");
    let want = tensor(&case.files, "output_hidden");
    for group_slots in [1, 1 << 20] {
        let (config, weights) = weights("dflash2_drafter");
        let size = config.block_size as i64;
        let drafter = drafter(config, weights, DraftOptions { group_slots, ..options(&case.json, None) });
        let got = drafter.hidden(&case.packed(), &case.anchors).unwrap();
        let want = case.kept(&want.reshape([want.size()[0], -1, size, want.size()[2]])).flatten(0, 1);
        close("hidden states", &got, &want, OUTPUT);
    }
}

/// Fresh convolutions and a fresh selector leave the predictions of the backbone as they are, bit for bit.
#[test]
fn the_start_is_plain_dflash() {
    let case = Case::load("dflash2_case");
    let (plain, plain_weights) = weights("dflash_drafter");
    let head = weights("dflash2_drafter").0.head;
    let config = DraftConfig { head, ..plain.clone() };
    let fresh = init_params(&config, 3).unwrap();
    let identity = open("dflash2_identity.safetensors");
    let pairs = fresh.into_pairs().into_iter().map(|(name, own)| {
        let given = format!("init.{name}");
        let value = match plain_weights.get(&name) {
            Some(backbone) => backbone.copy(),
            None if identity.names().any(|known| known == given) => tensor(&identity, &given),
            None => own,
        };
        (name, value)
    });
    let start = &case.json["identity_start"];
    let gamma = number(&start["loss_decay_gamma"]);
    let with_head = drafter(config, ParamSet::new(pairs.collect()), options(&case.json, Some(gamma)));
    let hidden = with_head.hidden(&case.packed(), &case.anchors).unwrap();
    let (report, gradient) = case.step(&with_head);
    near("loss", report.loss(), number(&start["metrics"]["loss"]), LOSS);
    check_gradients(&identity, "grad.", &gradient, report.loss_denominator);
    for name in start["zero_gradients"].as_array().unwrap() {
        assert_eq!(gradient.get(name.as_str().unwrap()).unwrap().abs().max().double_value(&[]), 0.0, "{name}");
    }
    let plain = drafter(plain, plain_weights, options(&case.json, None));
    assert_eq!(hidden, plain.hidden(&case.packed(), &case.anchors).unwrap());
}

/// Blocks drafted one by one: hidden states, candidates with their scores, and the walk.
#[test]
fn drafting_matches_block_by_block() {
    let _guard = tch::no_grad_guard();
    let (case, files) = (Case::load("dflash2_case"), open("dflash2_inference.safetensors"));
    let (config, weights) = weights("dflash2_drafter");
    let HeadConfig::Dflash2(head) = config.head else { panic!("another head") };
    let drafter = drafter(config.clone(), weights, options(&case.json, None));
    let (rows, anchors, lengths) = (ints(&files, "row"), ints(&files, "anchor"), ints(&files, "length"));
    let context = tensor(&case.files, "context_hidden");
    let input_ids = tensor(&case.files, "input_ids");
    let (path, ids) = (tensor(&files, "path"), tensor(&files, "candidate_ids_ascending"));
    for block in 0..rows.len() {
        let (row, anchor, length) = (rows[block], anchors[block], lengths[block] as usize);
        let last = input_ids.get(row).int64_value(&[anchor]) as u32;
        let before = context.get(row).narrow(0, 0, anchor);
        // A block that is cut to fewer slots is another forward: its convolutions and attention see fewer slots.
        let config = DraftConfig { block_size: length, ..config.clone() };
        let weights = ParamSet::new(drafter.params().iter().map(|(name, x)| (name.into(), x.copy())).collect());
        let drafter = super::case::drafter(config.clone(), weights, options(&case.json, None));
        let hidden = drafter.draft_cached(&mut drafter.begin().unwrap(), &before, last).unwrap();
        let slots = length as i64;
        close("hidden", &hidden, &tensor(&files, "hidden").get(block as i64).narrow(0, 0, slots), OUTPUT);
        let mut draw = |logits: &Tensor| most_likely(logits);
        let got = propose(&config, drafter.params(), drafter.shared(), &hidden, last, length - 1, &mut draw).unwrap();
        let want = Vec::<i64>::try_from(path.get(block as i64).narrow(0, 0, slots - 1)).unwrap();
        assert_eq!(got.tokens.iter().map(|&id| i64::from(id)).collect::<Vec<_>>(), want, "block {block}");
        let possible = got.logits.isfinite();
        assert_eq!(i64::try_from(possible.sum(Kind::Int64)).unwrap(), (slots - 1) * head.selector_top_k as i64);
        let candidates = ids.get(block as i64).narrow(0, 0, slots - 1);
        let scores = got.logits.gather(1, &candidates, false);
        let want = tensor(&files, "realized_scores").get(block as i64).narrow(0, 0, slots - 1);
        close("scores", &scores, &want, OUTPUT);
    }
}

/// speculators: labels are the target's most likely tokens, a missing label replaces the weakest candidate, and both terms
/// are divided by the number of slots.
#[test]
fn speculators_injected_labels_match() {
    let case = Case::packed_rows("dflash2_speculators");
    let want = &case.json["cases"]["ce_decay"];
    let (config, weights) = weights("dflash2_drafter");
    let options = DraftOptions {
        weighting: Weighting::Decay(case.json["gamma"].as_f64()),
        loss: LossOptions {
            terms: LossTerms::only(|terms| terms.ce = 1.0),
            ce_label: CeLabel::Labels,
            selector_weight: number(&want["selector_loss_alpha"]),
            selector_missing: MissingLabel::Inject,
            ..LossOptions::default()
        },
        ..DraftOptions::new(Device::Cpu)
    };
    let drafter = drafter(config, weights, options);
    let (report, gradient) = case.step(&drafter);
    let slots = report.supervised;
    let metrics = &want["metrics"];
    assert_eq!(slots, number(&metrics["full_acc_total"]));
    near("loss", report.loss_numerator / slots, number(&want["loss"]), LOSS);
    let HeadConfig::Dflash2(head) = drafter.config().head else { panic!("another head") };
    let recall = format!("unary_candidate_recall_at_{}_sum", head.selector_top_k);
    assert_eq!(report.candidate_hits, number(&metrics[recall.as_str()]));
    // The folder's sum has the target's own token of each block.
    assert_eq!(report.unary_run_tokens + report.run_blocks, number(&metrics["eal_sum"]));
    assert_eq!(report.run_blocks, number(&metrics["eal_total"]));
    check_norm("speculators", &gradient, slots, &want["grad_l2_norm"]);
    check_gradients(&case.files, "grad.", &gradient, slots);
}
