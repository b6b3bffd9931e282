//! Sliding layers in training. SpecForge counts the window from each slot, causal in the block. speculators counts it from
//! the anchor, causal or not.

use super::case::*;
use draftmill::config::{CeLabel, LossTerms, WindowStart};
use draftmill::hf::draft::DraftConfig;
use draftmill::model::drafter::DraftOptions;
use draftmill::model::drafter::head::LossOptions;
use draftmill::model::loss::weighting::Weighting;
use tch::Device;

#[test]
fn hidden_states_loss_and_gradients_match() {
    let case = Case::load("sliding_case");
    let want = &case.json["specforge"];
    for group_slots in [1, 1 << 20] {
        let (config, weights) = weights("sliding_drafter");
        let window = want["window"].as_u64().map(|window| window as usize);
        assert!(config.slides() && config.sliding_window.is_some());
        let config = DraftConfig { sliding_window: window, ..config };
        let size = config.block_size as i64;
        let options = DraftOptions {
            weighting: Weighting::Decay(case.json["loss_decay_gamma"].as_f64()),
            group_slots,
            ..DraftOptions::new(Device::Cpu)
        };
        let drafter = drafter(config, weights, options);
        let hidden = tensor(&case.files, "specforge.output_hidden");
        let hidden = case.kept(&hidden.reshape([hidden.size()[0], -1, size, hidden.size()[2]])).flatten(0, 1);
        close("hidden states", &drafter.hidden(&case.packed(), &case.anchors).unwrap(), &hidden, OUTPUT);
        let (report, gradient) = case.step(&drafter);
        near("loss", report.loss(), number(&want["loss"]), LOSS);
        near("accuracy", report.accuracy(), number(&want["accuracy"]), LOSS);
        check_norm("sliding", &gradient, report.loss_denominator, &want["grad_l2_norm"]);
        check_gradients(&case.files, "specforge.grad.", &gradient, report.loss_denominator);
    }
}

/// speculators: labels are the target's most likely tokens, and the loss is divided by the number of slots.
#[test]
fn speculators_windows_match_causal_and_bidirectional() {
    let case = Case::packed_rows_of("sliding_case", "speculators.");
    let common = &case.json["speculators"];
    for (name, sliding_causal) in [("causal", true), ("non_causal", false)] {
        let want = &common[name];
        assert_eq!(want["sliding_window_non_causal"].as_bool(), Some(!sliding_causal));
        for group_slots in [1, 1 << 20] {
            let (config, weights) = weights("sliding_drafter");
            let window = common["window"].as_u64().map(|window| window as usize);
            let config = DraftConfig { sliding_window: window, sliding_causal, ..config };
            let size = config.block_size as i64;
            let options = DraftOptions {
                weighting: Weighting::Decay(case.json["loss_decay_gamma"].as_f64()),
                loss: LossOptions {
                    terms: LossTerms::only(|terms| terms.ce = 1.0),
                    ce_label: CeLabel::Labels,
                    ..LossOptions::default()
                },
                group_slots,
                window_start: WindowStart::Anchor,
                ..DraftOptions::new(Device::Cpu)
            };
            let drafter = drafter(config, weights, options);
            let hidden = tensor(&case.files, &format!("speculators.{name}.output_hidden"));
            let hidden = hidden.reshape([1, -1, size, hidden.size()[2]]);
            let hidden = case.kept(&hidden).flatten(0, 1);
            close(name, &drafter.hidden(&case.packed(), &case.anchors).unwrap(), &hidden, OUTPUT);
            let (report, gradient) = case.step(&drafter);
            near("loss", report.loss_numerator / report.supervised, number(&want["loss"]), LOSS);
            assert_eq!(report.run_blocks, number(&want["eal_total"]));
            check_norm(name, &gradient, report.supervised, &want["grad_l2_norm"]);
            check_gradients(&case.files, &format!("speculators.{name}.grad."), &gradient, report.supervised);
        }
    }
}
