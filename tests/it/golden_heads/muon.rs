//! Muon with AdamW: five steps on given gradients, and the orthogonal matrix of each momentum.

use super::case::*;
use draftmill::config::MuonScale;
use draftmill::model::adamw::{AdamW, Hyper};
use draftmill::model::muon::{Muon, is_matrix, orthogonal};
use draftmill::model::params::ParamSet;
use serde_json::Value;
use tch::{Kind, Tensor};

/// Limit of the golden README for a bf16 Newton-Schulz in torch's order.
const WEIGHTS: f64 = 1e-6;

fn set(files: &draftmill::hf::tensors::TensorFiles, prefix: &str) -> ParamSet {
    let names = files.names().filter_map(|name| name.strip_prefix(prefix));
    ParamSet::new(names.map(|name| (name.to_owned(), tensor(files, &format!("{prefix}{name}")))).collect())
}

fn optimizer(json: &Value, masters: ParamSet, scale: MuonScale) -> AdamW {
    let settings = &json["settings"];
    let of = |key: &str| number(&settings[key]);
    let muon = Muon {
        momentum: of("momentum"),
        weight_decay: of("muon_wd"),
        iterations: settings["ns"].as_u64().unwrap() as u32,
        rate: of("muon_lr") / of("lr"),
        scale,
    };
    let betas = [0, 1].map(|index| number(&settings["adamw_betas"][index]));
    let hyper = Hyper { beta1: betas[0], beta2: betas[1], eps: of("adamw_eps"), weight_decay: of("wd") };
    AdamW::new(masters, hyper).unwrap().with_muon(Some(muon)).unwrap()
}

#[test]
fn five_steps_of_both_scales_match() {
    let (json, files) = (json("muon_steps.json"), open("muon_steps.safetensors"));
    let (lr, clip) = (number(&json["settings"]["lr"]), number(&json["settings"]["clip"]));
    let mut compared = 0;
    for (name, scale) in [("match_rms_adamw", MuonScale::MatchRmsAdamw), ("original", MuonScale::Original)] {
        let mut optimizer = optimizer(&json, set(&files, "init."), scale);
        for want in json["runs"][name].as_array().unwrap() {
            let step = want["step"].as_u64().unwrap();
            let norm = optimizer.step(set(&files, &format!("grad{step}.")), 1.0, lr, clip).unwrap();
            near(&format!("{name}, norm of step {step}"), norm / number(&want["grad_l2_norm_before_clip"]), 1.0, 1e-5);
            let prefix = format!("{name}.step{step}.");
            for (weight, want) in set(&files, &prefix).iter() {
                close(&format!("{prefix}{weight}"), optimizer.masters.get(weight).unwrap(), want, WEIGHTS);
                compared += 1;
            }
        }
        for (weight, want) in set(&files, &format!("{name}.momentum5.")).iter() {
            close(&format!("{name} momentum of {weight}"), optimizer.exp_avg.get(weight).unwrap(), want, WEIGHTS);
        }
    }
    assert!(compared > 0);
}

#[test]
fn each_tensor_is_updated_by_the_optimizer_of_the_folder() {
    let (json, files) = (json("muon_steps.json"), open("muon_steps.safetensors"));
    let weights = set(&files, "init.");
    let names = |key: &str| json[key].as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect::<Vec<_>>();
    let (muons, adamws) = (names("muon_parameters"), names("adamw_parameters"));
    assert_eq!(muons.len() + adamws.len(), weights.len());
    for (name, weight) in weights.iter() {
        assert_eq!(is_matrix(name, &weight.size()), muons.contains(&name), "{name}");
    }
    // Second moments exist for the tensors of AdamW alone.
    let optimizer = optimizer(&json, weights, MuonScale::Original);
    assert!(optimizer.exp_avg_sq.names().iter().all(|name| adamws.contains(&name.as_str())));
    assert_eq!(optimizer.exp_avg_sq.len(), adamws.len());
}

/// The result has singular values around 1, also for tall and for rank-deficient matrices.
#[test]
fn the_update_is_nearly_orthogonal() {
    tch::manual_seed(5);
    for [rows, columns] in [[12i64, 12], [40, 9], [9, 40]] {
        let matrix = Tensor::randn([rows, columns], (Kind::Float, tch::Device::Cpu));
        let values = orthogonal(&matrix, 5).unwrap().to_kind(Kind::Double).svd(true, true).1;
        let bounds = [values.min(), values.max()].map(|x| x.double_value(&[]));
        assert!(bounds[0] > 0.3 && bounds[1] < 1.4, "{rows} x {columns}: {bounds:?}");
    }
    let one = Tensor::randn([8, 1], (Kind::Float, tch::Device::Cpu));
    let rank_one = one.mm(&Tensor::randn([1, 6], (Kind::Float, tch::Device::Cpu)));
    assert_eq!(i64::try_from(orthogonal(&rank_one, 5).unwrap().isfinite().all()).unwrap(), 1);
    assert_eq!(
        i64::try_from(orthogonal(&Tensor::zeros([4, 4], (Kind::Float, tch::Device::Cpu)), 5).unwrap().isfinite().all())
            .unwrap(),
        1
    );
}
