//! Sliding layers in training, by SpecForge's definition: a window that each slot measures from its own position, causal in
//! the block. speculators measures it from the anchor, which Draftmill does not train.

use super::case::*;
use draftmill::hf::draft::DraftConfig;
use draftmill::model::drafter::DraftOptions;
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
