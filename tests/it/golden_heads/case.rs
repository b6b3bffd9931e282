//! Step of the golden folder: packed rows, anchors of kept blocks, the target's last states, and a drafter.

use crate::golden::files;
pub use crate::golden::files::{close, close_to_largest, ints, near, number, tensor};
use draftmill::hf::config::TargetConfig;
use draftmill::hf::draft::DraftConfig;
use draftmill::hf::tensors::TensorFiles;
use draftmill::model::batch::{Packed, TargetLabels};
use draftmill::model::drafter::anchors::Anchors;
use draftmill::model::drafter::{DraftOptions, Drafter, Shared};
use draftmill::model::ops::rms_norm;
use draftmill::model::params::{Gradient, ParamSet, load_params};
use draftmill_actors::messages::engine::MicroReport;
use serde_json::Value;
use std::path::PathBuf;
use tch::{Device, Kind, Tensor};

/// Limits of the golden README.
pub const LOSS: f64 = 3e-6;
pub const OUTPUT: f64 = 3e-5;
pub const SLOT: f64 = 2e-5;
pub const GRADIENT: f64 = 3e-5;

pub fn path(name: &str) -> PathBuf {
    files::folder("DRAFTMILL_GOLDEN_HEADS", "tests/golden-heads").join(name)
}

pub fn open(name: &str) -> TensorFiles {
    TensorFiles::open_file(&path(name)).unwrap()
}

pub fn json(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(path(name)).unwrap()).unwrap()
}

/// Inputs of a step without padding.
pub struct Case {
    pub json: Value,
    pub files: TensorFiles,
    pub anchors: Anchors,
    /// Kept blocks among all blocks of the file.
    pub kept: Tensor,
    hidden: Tensor,
    ids: Vec<i32>,
    loss_mask: Vec<u8>,
    lengths: Vec<u32>,
    labels: Option<TargetLabels>,
}

impl Case {
    /// Reads `<name>.json` and `<name>.safetensors`. The rows have the lengths of the target's inputs.
    pub fn load(name: &str) -> Case {
        let (json, files) = (json(&format!("{name}.json")), open(&format!("{name}.safetensors")));
        let attended = ints(&open("target_io.safetensors"), "attention_mask");
        let padded = tensor(&files, "context_hidden");
        let states =
            files.names().any(|name| name == "target_last_hidden").then(|| tensor(&files, "target_last_hidden"));
        let (rows, width) = (padded.size()[0], padded.size()[1]);
        let (ids, mask) = (ints(&files, "input_ids"), ints(&files, "loss_mask"));
        let (anchors, keep) = (ints(&files, "anchors"), ints(&files, "block_keep"));
        let kept = tensor(&files, "block_keep").flatten(0, -1).nonzero().flatten(0, -1);
        let mut case = Case {
            json,
            files,
            anchors: Anchors::default(),
            kept,
            hidden: Tensor::new(),
            ids: Vec::new(),
            loss_mask: Vec::new(),
            lengths: Vec::new(),
            labels: None,
        };
        let (mut features, mut last) = (Vec::new(), Vec::new());
        for row in 0..rows {
            let cells = (row * width) as usize..((row + 1) * width) as usize;
            let len = attended[cells.clone()].iter().filter(|&&x| x != 0).count();
            case.ids.extend(ids[cells.clone()][..len].iter().map(|&id| id as i32));
            case.loss_mask.extend(mask[cells][..len].iter().map(|&x| x as u8));
            case.lengths.push(len as u32);
            features.push(padded.get(row).narrow(0, 0, len as i64));
            last.extend(states.as_ref().map(|states| states.get(row).narrow(0, 0, len as i64)));
        }
        case.hidden = Tensor::cat(&features, 0);
        case.labels = states.is_some().then(|| TargetLabels::States(Tensor::cat(&last, 0)));
        let blocks = anchors.len() / rows as usize;
        case.anchors.rows = (anchors.chunks(blocks).zip(keep.chunks(blocks)))
            .map(|(row, keep)| row.iter().zip(keep).filter(|(_, keep)| **keep != 0).map(|(a, _)| *a as u32).collect())
            .collect();
        case
    }

    /// Reads a case of speculators: rows packed one after another, and states of the target before its final norm.
    pub fn packed_rows(name: &str) -> Case {
        Case::packed_rows_of(name, "")
    }

    /// As [`Case::packed_rows`], with `prefix` before the names of the inputs.
    pub fn packed_rows_of(name: &str, prefix: &str) -> Case {
        let (json, files) = (json(&format!("{name}.json")), open(&format!("{name}.safetensors")));
        let of = |input: &str| format!("{prefix}{input}");
        let documents = ints(&files, &of("document_ids"));
        let real = documents.iter().filter(|&&document| document >= 0).count();
        let lengths: Vec<u32> = documents[..real].chunk_by(|a, b| a == b).map(|row| row.len() as u32).collect();
        let rows = |name: &str| tensor(&files, &of(name)).squeeze_dim(0).narrow(0, 0, real as i64);
        let target = TensorFiles::open(&path("target")).unwrap();
        let eps = TargetConfig::load(&path("target")).unwrap().rms_norm_eps;
        let norm = tensor(&target, "model.norm.weight");
        let states = rms_norm(&rows("verifier_last_hidden_pre_norm"), &norm, eps).unwrap();
        let kept: Vec<i64> = (0i64..)
            .zip(ints(&files, &of("anchor_valid")))
            .filter(|(_, valid)| *valid != 0)
            .map(|(at, _)| at)
            .collect();
        let anchors = ints(&files, &of("anchors"));
        let mut starts = vec![0];
        starts.extend(lengths.iter().scan(0, |end, &len| {
            *end += i64::from(len);
            Some(*end)
        }));
        let of_row = |row: usize| {
            let inside =
                kept.iter().map(|&at| anchors[at as usize]).filter(|a| (starts[row]..starts[row + 1]).contains(a));
            inside.map(|anchor| (anchor - starts[row]) as u32).collect::<Vec<u32>>()
        };
        let anchors = Anchors { rows: (0..lengths.len()).map(of_row).collect() };
        Case {
            hidden: rows("context_hidden"),
            ids: ints(&files, &of("input_ids"))[..real].iter().map(|&id| id as i32).collect(),
            loss_mask: ints(&files, &of("loss_mask"))[..real].iter().map(|&x| x as u8).collect(),
            labels: Some(TargetLabels::States(states)),
            kept: Tensor::from_slice(&kept),
            anchors,
            lengths,
            json,
            files,
        }
    }

    pub fn packed(&self) -> Packed<'_> {
        Packed {
            target_labels: self.labels.as_ref(),
            ..Packed::of_ids(&self.hidden, &self.ids, &self.loss_mask, &self.lengths)
        }
    }

    /// Slots of kept blocks alone, `[kept blocks, slots, ..]`, from `[rows, blocks, slots, ..]`.
    pub fn kept(&self, x: &Tensor) -> Tensor {
        x.flatten(0, 1).index_select(0, &self.kept)
    }

    /// Values of the file for kept blocks, flat over their slots.
    pub fn want(&self, name: &str) -> Tensor {
        self.kept(&tensor(&self.files, name)).flatten(0, 1)
    }

    pub fn step(&self, drafter: &Drafter) -> (MicroReport, Gradient) {
        let (report, gradient) = drafter.loss_and_gradient(&self.packed(), &self.anchors).unwrap();
        (report, gradient.unwrap())
    }
}

/// Weights of a drafter folder.
pub fn weights(folder: &str) -> (DraftConfig, ParamSet) {
    let config = DraftConfig::load(&path(folder)).unwrap();
    let weights = load_params(&config, &TensorFiles::open(&path(folder)).unwrap()).unwrap();
    (config, weights)
}

pub fn shared() -> Shared {
    let target = TargetConfig::load(&path("target")).unwrap();
    Shared::load(&target, &TensorFiles::open(&path("target")).unwrap(), Kind::Float, Device::Cpu).unwrap()
}

pub fn drafter(config: DraftConfig, weights: ParamSet, options: DraftOptions) -> Drafter {
    let mut drafter = Drafter::new(config, shared(), options).unwrap();
    drafter.load_weights(weights).unwrap();
    drafter
}

/// Compares every gradient whose name begins with `prefix`; returns their number.
pub fn check_gradients(files: &TensorFiles, prefix: &str, gradient: &Gradient, denominator: f64) -> usize {
    files::check_gradients(prefix, files, prefix, gradient, denominator, GRADIENT)
}

/// Compares the norm of the whole gradient.
pub fn check_norm(what: &str, gradient: &Gradient, denominator: f64, want: &Value) {
    files::check_norm(what, gradient, denominator, want, GRADIENT);
}
