//! Targets with biases, compared with a forward in plain f64 loops: no golden file covers Qwen2 or the bias settings.

use super::files::close_to_largest;
use draftmill::hf::config::TargetConfig;
use draftmill::hf::tensors::{RawDtype, TensorFiles};
use draftmill::model::batch::Rows;
use draftmill::model::target::{Depth, Target};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use tch::{Device, Kind, Tensor};

type Weights = BTreeMap<String, Vec<f64>>;
type Vector = Vec<f64>;

/// Folder with random weights for every tensor of the configuration, and the same weights in f64.
fn folder(config: &TargetConfig, seed: u64) -> (tempfile::TempDir, Weights) {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let shapes = config.tensor_shapes();
    let values: BTreeMap<String, Vec<f32>> = shapes
        .iter()
        .map(|(name, shape)| (name.clone(), (0..shape.iter().product()).map(|_| rng.random_range(-0.5..0.5)).collect()))
        .collect();
    let bytes: BTreeMap<&String, Vec<u8>> =
        values.iter().map(|(name, values)| (name, values.iter().flat_map(|x| x.to_le_bytes()).collect())).collect();
    let views = bytes
        .iter()
        .map(|(name, bytes)| ((*name).clone(), TensorView::new(RawDtype::F32, shapes[*name].clone(), bytes).unwrap()));
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
    (folder, values.into_iter().map(|(name, x)| (name, x.into_iter().map(f64::from).collect())).collect())
}

fn project(weights: &Weights, name: &str, x: &[f64]) -> Vector {
    let rows = weights[&format!("{name}.weight")].chunks(x.len());
    let dots = rows.map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum::<f64>());
    match weights.get(&format!("{name}.bias")) {
        Some(bias) => dots.zip(bias).map(|(dot, bias)| dot + bias).collect(),
        None => dots.collect(),
    }
}

fn norm(weight: &[f64], x: &[f64], eps: f64) -> Vector {
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    x.iter().zip(weight).map(|(x, w)| x * w / (mean + eps).sqrt()).collect()
}

fn add(x: &[f64], y: &[f64]) -> Vector {
    x.iter().zip(y).map(|(x, y)| x + y).collect()
}

/// Applies the norm of heads if the family has one, then the rotation by position: element `i` with `i + dim / 2`.
fn turn(config: &TargetConfig, head: &[f64], weight: Option<&Vector>, position: usize) -> Vector {
    let head = weight.map_or(head.to_vec(), |weight| norm(weight, head, config.rms_norm_eps));
    let (dim, half) = (head.len(), head.len() / 2);
    let angle = |i: usize| position as f64 * config.rope_theta.powf(-(2.0 * (i % half) as f64) / dim as f64);
    let other = |i: usize| if i < half { -head[i + half] } else { head[i - half] };
    (0..dim).map(|i| head[i] * angle(i).cos() + other(i) * angle(i).sin()).collect()
}

/// Returns the residual stream after the last layer.
fn forward(config: &TargetConfig, weights: &Weights, ids: &[i32]) -> Vec<Vector> {
    let (dim, eps) = (config.head_dim, config.rms_norm_eps);
    let group = config.num_attention_heads / config.num_key_value_heads;
    let embedding = &weights["model.embed_tokens.weight"];
    let row = |id: i32| embedding[id as usize * config.hidden_size..][..config.hidden_size].to_vec();
    let mut stream: Vec<Vector> = ids.iter().map(|&id| row(id)).collect();
    for layer in 0..config.num_hidden_layers {
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        let inner: Vec<Vector> =
            stream.iter().map(|x| norm(&weights[&name("input_layernorm.weight")], x, eps)).collect();
        let all = |part: &str| inner.iter().map(|x| project(weights, &name(part), x)).collect::<Vec<_>>();
        let (q, k, v) = (all("self_attn.q_proj"), all("self_attn.k_proj"), all("self_attn.v_proj"));
        let (q_norm, k_norm) =
            (weights.get(&name("self_attn.q_norm.weight")), weights.get(&name("self_attn.k_norm.weight")));
        for place in 0..ids.len() {
            let mut mixed = Vec::new();
            for head in 0..config.num_attention_heads {
                let part = |x: &Vector, head: usize| x[head * dim..][..dim].to_vec();
                let query = turn(config, &part(&q[place], head), q_norm, place);
                let scores: Vector = (0..=place)
                    .map(|key| turn(config, &part(&k[key], head / group), k_norm, key))
                    .map(|key| query.iter().zip(&key).map(|(q, k)| q * k).sum::<f64>() / (dim as f64).sqrt())
                    .map(f64::exp)
                    .collect();
                let total: f64 = scores.iter().sum();
                mixed.extend((0..dim).map(|i| {
                    let values = v.iter().map(|v| v[head / group * dim + i]);
                    scores.iter().zip(values).map(|(score, value)| score / total * value).sum::<f64>()
                }));
            }
            let x = add(&stream[place], &project(weights, &name("self_attn.o_proj"), &mixed));
            let inner = norm(&weights[&name("post_attention_layernorm.weight")], &x, eps);
            let (gate, up) =
                (project(weights, &name("mlp.gate_proj"), &inner), project(weights, &name("mlp.up_proj"), &inner));
            let gated: Vector = gate.iter().zip(&up).map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up).collect();
            stream[place] = add(&x, &project(weights, &name("mlp.down_proj"), &gated));
        }
    }
    stream
}

#[test]
fn every_family_with_every_bias_matches_plain_loops() {
    for (seed, (family, extra)) in [
        ("qwen2", json!({})),
        ("llama", json!({ "attention_bias": true, "mlp_bias": true })),
        ("llama", json!({ "tie_word_embeddings": true })),
        ("qwen3", json!({ "attention_bias": true })),
    ]
    .into_iter()
    .enumerate()
    {
        let mut value = json!({
            "model_type": family, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 3, "head_dim": 6,
            "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 40, "max_position_embeddings": 64,
            "rope_theta": 100.0,
        });
        let extra: Vec<(String, Value)> = extra.as_object().unwrap().clone().into_iter().collect();
        value.as_object_mut().unwrap().extend(extra);
        let config = TargetConfig::from_json(&value).unwrap();
        let (folder, weights) = folder(&config, seed as u64);
        let files = TensorFiles::open(folder.path()).unwrap();
        let ids = [3, 17, 39, 0, 8, 8, 21];
        let target = Target::load(config.clone(), &files, Depth::Whole, Kind::Float, Device::Cpu).unwrap();
        let got = target.trace(&Rows::new(&ids, &[7], 7).unwrap()).unwrap().hidden.pop().unwrap();
        let want = forward(&config, &weights, &ids);
        let want = Tensor::from_slice(&want.concat()).reshape([1, 7, config.hidden_size as i64]);
        close_to_largest(&format!("{family} {value}"), &got, &want, 1e-5);
    }
}

/// A bias that the configuration does not mention must not be dropped silently.
#[test]
fn weights_that_the_config_does_not_speak_of_are_refused() {
    let mut value = json!({
        "model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 2, "vocab_size": 10, "max_position_embeddings": 16, "attention_bias": true,
    });
    let (folder, _) = folder(&TargetConfig::from_json(&value).unwrap(), 0);
    let files = TensorFiles::open(folder.path()).unwrap();
    value["attention_bias"] = json!(false);
    let config = TargetConfig::from_json(&value).unwrap();
    assert_eq!(config.check_weights(&files).len(), 1);
    let error = Target::load(config, &files, Depth::Whole, Kind::Float, Device::Cpu).err().unwrap().to_string();
    assert!(error.contains("model.layers.0.self_attn") && error.contains(".bias"), "{error}");
}
