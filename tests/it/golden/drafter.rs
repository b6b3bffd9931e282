//! One training step of SpecForge on fixed anchors. The dense reference implementation and the training path are both
//! checked against all its numbers.

use super::files::{
    GRADIENT, LOSS, OUTPUT, check_gradients, check_norm, close, close_to_largest, ints, json, largest, near, number,
    open, path, same, tensor,
};
use draftmill::hf::config::TargetConfig;
use draftmill::hf::draft::{DraftConfig, LayerType};
use draftmill::hf::tensors::TensorFiles;
use draftmill::model::batch::Packed;
use draftmill::model::drafter::anchors::Anchors;
use draftmill::model::drafter::head::layout;
use draftmill::model::drafter::reference::{Dense, Trace};
use draftmill::model::drafter::{AttentionBackend, DraftOptions, Drafter, Shared};
use draftmill::model::loss::head_loss::{Labels, Tile, head_loss};
use draftmill::model::loss::weighting::Weighting;
use draftmill::model::params::{Gradient, load_params};
use draftmill_actors::messages::engine::MicroReport;
use serde_json::Value;
use tch::{Device, Kind, Tensor};

/// Inputs of the step, packed, with fillers removed.
pub struct Case {
    pub json: Value,
    /// Attention backend of the drafters.
    pub by: AttentionBackend,
    pub group_slots: usize,
    files: TensorFiles,
    hidden: Tensor,
    ids: Vec<i32>,
    loss_mask: Vec<u8>,
    lengths: Vec<u32>,
    anchors: Anchors,
    /// Indices of kept blocks among all blocks.
    kept: Tensor,
}

impl Case {
    pub fn load() -> Case {
        let (json, files) = (json("specforge_case.json"), open("specforge_case.safetensors"));
        let padded = tensor(&files, "context_hidden");
        let (rows, width) = (padded.size()[0], padded.size()[1]);
        let (ids, mask) = (ints(&files, "input_ids"), ints(&files, "loss_mask"));
        // Padding is zero throughout, so a row ends after its last token with any feature.
        let filled = Vec::<i64>::try_from(padded.abs().amax([2i64].as_slice(), false).gt(0.0).flatten(0, -1)).unwrap();
        let mut case = Case {
            by: AttentionBackend::Plain,
            group_slots: 256,
            hidden: Tensor::new(),
            ids: Vec::new(),
            loss_mask: Vec::new(),
            lengths: Vec::new(),
            anchors: Anchors::default(),
            kept: tensor(&files, "block_keep").flatten(0, -1).nonzero().flatten(0, -1),
            json,
            files,
        };
        let mut parts = Vec::new();
        for row in 0..rows {
            let cells = (row * width) as usize..((row + 1) * width) as usize;
            let len = filled[cells.clone()].iter().rposition(|&x| x != 0).unwrap() + 1;
            case.ids.extend(ids[cells.clone()][..len].iter().map(|&id| id as i32));
            case.loss_mask.extend(mask[cells][..len].iter().map(|&x| x as u8));
            case.lengths.push(len as u32);
            parts.push(padded.get(row).narrow(0, 0, len as i64));
        }
        case.hidden = Tensor::cat(&parts, 0);
        let (anchors, keep) = (ints(&case.files, "anchors"), ints(&case.files, "block_keep"));
        let blocks = anchors.len() / rows as usize;
        case.anchors.rows = (anchors.chunks(blocks).zip(keep.chunks(blocks)))
            .map(|(row, keep)| row.iter().zip(keep).filter(|(_, keep)| **keep != 0).map(|(a, _)| *a as u32).collect())
            .collect();
        case
    }

    /// Cases with plain products, and with the kernel: once with all blocks of a row in one group, and once with single
    /// blocks, so that the kernel handles every token of the context.
    fn each_way() -> [Case; 3] {
        let ways = [(AttentionBackend::Plain, 256), (AttentionBackend::Kernel, 256), (AttentionBackend::Kernel, 1)];
        ways.map(|(by, group_slots)| Case { by, group_slots, ..Case::load() })
    }

    fn packed(&self) -> Packed<'_> {
        Packed::of_ids(&self.hidden, &self.ids, &self.loss_mask, &self.lengths)
    }

    /// Tensor of the file, with fillers.
    fn dense(&self) -> Dense {
        let hidden = tensor(&self.files, "context_hidden");
        let anchors = ints(&self.files, "anchors");
        Dense {
            rows: hidden.size()[0] as usize,
            width: hidden.size()[1] as usize,
            blocks: anchors.len() / hidden.size()[0] as usize,
            ids: ints(&self.files, "input_ids"),
            loss_mask: Vec::try_from(tensor(&self.files, "loss_mask").to_kind(Kind::Double).flatten(0, -1)).unwrap(),
            hidden,
            anchors,
            keep: ints(&self.files, "block_keep").into_iter().map(|keep| keep != 0).collect(),
        }
    }

    pub fn config(&self) -> DraftConfig {
        DraftConfig::load(&path(self.json["drafter_dir"].as_str().unwrap())).unwrap()
    }

    pub fn drafter(&self, config: DraftConfig, gamma: Option<f64>) -> Drafter {
        self.drafter_weighing(config, Weighting::Decay(gamma))
    }

    fn drafter_weighing(&self, config: DraftConfig, weighting: Weighting) -> Drafter {
        let files = TensorFiles::open(&path(self.json["drafter_dir"].as_str().unwrap())).unwrap();
        let weights = load_params(&config, &files).unwrap();
        let folder = path(self.json["target_dir"].as_str().unwrap());
        let target = TargetConfig::load(&folder).unwrap();
        let shared = Shared::load(&target, &TensorFiles::open(&folder).unwrap(), Kind::Float, Device::Cpu).unwrap();
        let (attention, group_slots) = (self.by, self.group_slots);
        let options = DraftOptions { weighting, attention, group_slots, ..DraftOptions::new(Device::Cpu) };
        let mut drafter = Drafter::new(config, shared, options).unwrap();
        drafter.load_weights(weights).unwrap();
        drafter
    }

    /// Loss and gradient of one step on the fixed anchors.
    pub fn step(&self, drafter: &Drafter) -> (MicroReport, Gradient) {
        let (report, gradient) = drafter.loss_and_gradient(&self.packed(), &self.anchors).unwrap();
        (report, gradient.unwrap())
    }

    pub fn gamma(&self) -> Option<f64> {
        Some(number(&self.json["loss_decay_gamma"]))
    }

    fn want(&self, name: &str) -> Tensor {
        tensor(&self.files, name)
    }

    /// Slots of kept blocks alone, `[kept blocks, block_size, x]`, from any shape of slots.
    fn kept(&self, x: &Tensor) -> Tensor {
        let blocks = self.dense().keep.len() as i64;
        x.reshape([blocks, self.config().block_size as i64, -1]).index_select(0, &self.kept)
    }
}

/// Compares a step's totals and every gradient in the folder.
fn check_step(what: &str, want: &Value, report: &MicroReport, gradient: &Gradient, files: &TensorFiles, prefix: &str) {
    let denominator = report.loss_denominator;
    near(&format!("{what} loss"), report.loss(), number(&want["loss"]), LOSS);
    near(&format!("{what} accuracy"), report.accuracy(), number(&want["accuracy"]), LOSS);
    if want["loss_denominator"].is_number() {
        let relative = |key: &str, got: f64| near(&format!("{what} {key}"), got / number(&want[key]), 1.0, LOSS);
        relative("loss_numerator", report.loss_numerator);
        relative("loss_denominator", denominator);
        assert_eq!(report.correct, number(&want["correct"]), "{what}");
        assert_eq!(report.supervised, number(&want["supervised_positions"]), "{what}");
    }
    check_norm(what, gradient, denominator, &want["grad_l2_norm"], GRADIENT);
    check_gradients(what, files, prefix, gradient, denominator, GRADIENT);
}

fn report_of(trace: &Trace) -> MicroReport {
    let supervised = f64::try_from(trace.supervised.sum(Kind::Double)).unwrap();
    MicroReport {
        loss_numerator: trace.numerator,
        loss_denominator: trace.denominator,
        correct: trace.correct,
        supervised,
        ..MicroReport::default()
    }
}

#[test]
fn the_oracle_gives_every_intermediate_result() {
    let case = Case::load();
    let (config, dense) = (case.config(), case.dense());
    let trace = case.drafter(config.clone(), case.gamma()).trace(&dense).unwrap();
    same("noise ids", &trace.noise_ids, &case.want("noise_ids"));
    same("positions", &trace.positions, &case.want("position_ids"));
    let want = case.want("attention_mask");
    let allowed = Tensor::from_slice(&dense.allowed(config.block_size, None, true)).reshape(want.size());
    same("mask", &allowed, &want);
    close("context feature", &trace.context, &case.want("context_feature"), OUTPUT);
    for (index, output) in trace.layer_outputs.iter().enumerate() {
        let want = case.want(&format!("layer_output.{index}"));
        close_to_largest(&format!("layer {index}"), &case.kept(output), &case.kept(&want), OUTPUT);
    }
    close("hidden", &case.kept(&trace.hidden), &case.kept(&case.want("output_hidden")), OUTPUT);
    close("logits", &case.kept(&trace.logits), &case.kept(&case.want("logits")), OUTPUT);
    same("labels", &case.kept(&trace.labels), &case.kept(&case.want("label_ids")));
    same("supervised", &case.kept(&trace.supervised), &case.kept(&case.want("weight_binary")));
    close("weights", &case.kept(&trace.weights), &case.kept(&case.want("weight_decay")), LOSS);
    close("token loss", &case.kept(&trace.losses), &case.kept(&case.want("token_loss")), OUTPUT);
    same("predicted", &case.kept(&trace.predicted), &case.kept(&case.want("predicted_ids")));
}

#[test]
fn the_path_that_trains_gives_the_same_hidden_states_and_token_losses() {
    for case in Case::each_way() {
        let (config, batch) = (case.config(), case.packed());
        let drafter = case.drafter(config.clone(), None);
        let got = drafter.hidden(&batch, &case.anchors).unwrap();
        let blocks = [case.anchors.count() as i64, config.block_size as i64, -1];
        close("hidden", &got.reshape(blocks), &case.kept(&case.want("output_hidden")), OUTPUT);

        let slots = case.anchors.slots(&batch, layout(&config), case.gamma());
        let places = Tensor::from_slice(&slots.indices);
        let pick = |name: &str| case.kept(&case.want(name)).flatten(0, 1).index_select(0, &places).squeeze_dim(1);
        let supervised = case.kept(&case.want("weight_binary")).flatten(0, -1).nonzero().flatten(0, -1);
        same("supervised slots", &places, &supervised);
        same("labels", &Tensor::from_slice(&slots.labels), &pick("label_ids"));
        let weights = Tensor::from_slice(&slots.weights);
        close("weights", &weights, &pick("weight_decay"), LOSS);
        let hidden = got.index_select(0, &places);
        let _guard = tch::no_grad_guard();
        let labels = Tensor::from_slice(&slots.labels);
        let taught = Labels::for_slots(&slots, None, &drafter.shared().head).unwrap();
        for (slots, tokens) in [(1, 1), (3, 7), (1000, 1000)] {
            let loss = head_loss(&hidden, &drafter.shared().head, &taught, Tile { slots, tokens }).unwrap();
            close("token loss", &loss.losses, &pick("token_loss"), OUTPUT);
            same("correct", &loss.correct, &pick("predicted_ids").eq_tensor(&labels));
        }
    }
}

#[test]
fn losses_accuracies_and_every_gradient_match_with_and_without_decay() {
    for case in Case::each_way() {
        let files = open("specforge_grads.safetensors");
        for (name, gamma) in [("decay_off", None), ("decay_on", case.gamma())] {
            let (want, prefix) = (&case.json["cases"][name], format!("{name}."));
            let drafter = case.drafter(case.config(), gamma);
            let trace = drafter.trace(&case.dense()).unwrap();
            check_step(&format!("oracle {name}"), want, &report_of(&trace), &trace.gradient, &files, &prefix);
            assert_eq!(trace.gradient.names(), drafter.params().names());

            let (report, gradient) = drafter.loss_and_gradient(&case.packed(), &case.anchors).unwrap();
            check_step(&format!("training {name}"), want, &report, &gradient.unwrap(), &files, &prefix);
            assert_eq!(report.anchors, case.anchors.count() as u64);
            assert_eq!(report.tokens, case.ids.len() as u64);
        }
    }
}

/// The same weights under the other decays for which the folder has a loss.
#[test]
fn other_decays_match() {
    for case in Case::each_way() {
        let others = case.json["other_objectives_same_weights"].as_object().unwrap();
        let mut seen = 0;
        for (name, want) in others {
            let Some(gamma) = name.strip_prefix("decay_gamma_") else { continue };
            let drafter = case.drafter(case.config(), Some(gamma.parse().unwrap()));
            let (report, _) = drafter.loss_and_gradient(&case.packed(), &case.anchors).unwrap();
            near(name, report.loss(), number(&want["loss"]), LOSS);
            seen += 1;
        }
        assert!(seen > 0, "the folder has no other decay");
    }
}

/// SpecForge divides D-PACE's sum by the rows of the batch; we divide it by the trained slots of the whole step. The sums
/// and their gradients are equal.
#[test]
fn d_pace_matches() {
    for case in Case::each_way() {
        let want = &case.json["other_objectives_same_weights"]["dpace"];
        let drafter = case.drafter_weighing(case.config(), Weighting::DPace(number(&want["dpace_alpha"])));
        let (report, gradient) = case.step(&drafter);
        let rows = number(&want["denominator"]);
        near("loss", report.loss_numerator / rows, number(&want["loss"]), LOSS);
        let squares: f64 =
            gradient.tensors().iter().map(|x| f64::try_from(x.square().sum(Kind::Double)).unwrap()).sum();
        near("gradient norm", squares.sqrt() / rows, number(&want["grad_l2_norm"]), GRADIENT);
        assert_eq!(report.loss_denominator, report.supervised);
    }
}

/// Sliding layer and window, from the name of the case: `sliding_layer<L>_window<W>_decay_on`.
#[test]
fn sliding_layers_match() {
    for case in Case::each_way() {
        let files = open("specforge_sliding.safetensors");
        let cases = case.json["cases"].as_object().unwrap();
        let (name, want) = cases.iter().find(|(name, _)| name.starts_with("sliding_layer")).unwrap();
        let parts: Vec<&str> = name.split('_').collect();
        let layer: usize = parts[1].strip_prefix("layer").unwrap().parse().unwrap();
        let window: usize = parts[2].strip_prefix("window").unwrap().parse().unwrap();
        assert_eq!(parts[3..], ["decay", "on"], "{name}");
        let mut config = case.config();
        config.layer_types[layer] = LayerType::Sliding;
        config.sliding_window = Some(window);

        let (drafter, dense) = (case.drafter(config.clone(), case.gamma()), case.dense());
        let mask = tensor(&files, "attention_mask_sliding");
        let allowed = Tensor::from_slice(&dense.allowed(config.block_size, Some(window), true)).reshape(mask.size());
        same("mask", &allowed, &mask);
        let trace = drafter.trace(&dense).unwrap();
        let hidden = case.kept(&tensor(&files, "output_hidden"));
        close("oracle hidden", &case.kept(&trace.hidden), &hidden, OUTPUT);
        check_step("oracle", want, &report_of(&trace), &trace.gradient, &files, "grad.");

        let got = drafter.hidden(&case.packed(), &case.anchors).unwrap();
        close("training hidden", &got.reshape(hidden.size()), &hidden, OUTPUT);
        let (report, gradient) = drafter.loss_and_gradient(&case.packed(), &case.anchors).unwrap();
        check_step("training", want, &report, &gradient.unwrap(), &files, "grad.");
    }
}

/// The drafter's context in the folder equals the target's hidden states at the taps of the configuration.
#[test]
fn the_folder_names_one_drafter() {
    let case = Case::load();
    let config = case.config();
    assert_eq!(config.block_size as f64, number(&case.json["block_size"]));
    assert_eq!(f64::from(config.mask_token_id), number(&case.json["mask_token_id"]));
    let ids: Vec<usize> = serde_json::from_value(case.json["target_layer_ids"].clone()).unwrap();
    assert_eq!(config.target_layer_ids, ids);
    assert_eq!(case.hidden.size()[1] as usize, ids.len() * config.hidden_size);
    assert!(largest(&case.hidden) > 0.0);
}
