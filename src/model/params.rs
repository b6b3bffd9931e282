//! A named list of tensors in one fixed order: weights and gradients as they travel between drafters and the optimizer.

use super::{ModelError, load::weight};
use crate::hf::HfError;
use crate::hf::draft::DraftConfig;
use crate::hf::layout::DraftFolder;
use crate::hf::tensors::TensorFiles;
use draftmill_actors::plan::stream_seed;
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;
use tch::{Device, Kind, Tensor};

/// Tensors with their names, sorted by name. Moved between owners, never shared: whoever holds a set holds the only
/// alias of its storage, so that it may be written in place.
pub struct ParamSet {
    names: Vec<String>,
    tensors: Vec<Tensor>,
}

/// What a drafter computes with.
pub type Weights = ParamSet;
/// The summed gradient of loss numerators, one tensor for each weight.
pub type Gradient = ParamSet;

impl ParamSet {
    /// Sorts by name; the names must differ.
    pub fn new(mut pairs: Vec<(String, Tensor)>) -> ParamSet {
        pairs.sort_by(|a, b| a.0.cmp(&b.0));
        debug_assert!(pairs.windows(2).all(|pair| pair[0].0 < pair[1].0), "parameter names must differ");
        let (names, tensors) = pairs.into_iter().unzip();
        ParamSet { names, tensors }
    }

    pub fn len(&self) -> usize {
        self.names.len()
    }

    pub fn is_empty(&self) -> bool {
        self.names.is_empty()
    }

    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// In the order of [`ParamSet::names`].
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    pub fn tensors_mut(&mut self) -> &mut [Tensor] {
        &mut self.tensors
    }

    pub fn iter(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.names.iter().map(String::as_str).zip(&self.tensors)
    }

    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.names.binary_search_by(|known| known.as_str().cmp(name)).ok().map(|index| &self.tensors[index])
    }

    /// The same where it has to be there.
    pub fn need(&self, name: &str) -> Result<&Tensor, ModelError> {
        self.get(name).ok_or_else(|| ModelError::Input(format!("the drafter's weights lack `{name}`")))
    }

    pub fn need_mut(&mut self, name: &str) -> Result<&mut Tensor, ModelError> {
        match self.names.binary_search_by(|known| known.as_str().cmp(name)) {
            Ok(index) => Ok(&mut self.tensors[index]),
            Err(_) => Err(ModelError::Input(format!("the drafter's weights lack `{name}`"))),
        }
    }

    pub fn into_pairs(self) -> Vec<(String, Tensor)> {
        self.names.into_iter().zip(self.tensors).collect()
    }

    /// A copy that shares no storage with this set, on `device` as `kind`.
    pub fn deep_copy(&self, device: Device, kind: Kind) -> Result<ParamSet, ModelError> {
        let _no_grad = tch::no_grad_guard();
        let tensors = self.tensors.iter().map(|t| t.detach().f_to_device_(device, kind, false, true));
        Ok(ParamSet { names: self.names.clone(), tensors: tensors.collect::<Result<_, _>>()? })
    }

    /// Zeros of the same names and shapes, in fp32 on the same devices.
    pub fn zeros_like(&self) -> Result<ParamSet, ModelError> {
        let zeros = self.tensors.iter().map(|t| Tensor::f_zeros(t.size(), (Kind::Float, t.device())));
        Ok(ParamSet { names: self.names.clone(), tensors: zeros.collect::<Result<_, _>>()? })
    }
}

/// Fresh weights in fp32 on the CPU: N(0, 0.02) for matrices and ones for norms, as transformers initialises Qwen3.
/// A function of (config, seed) alone: every tensor has its own stream, so neither threads nor order matter.
pub fn init_params(config: &DraftConfig, seed: u64) -> Result<ParamSet, ModelError> {
    let mut pairs = Vec::new();
    for (stream, (name, shape)) in config.tensor_shapes().into_iter().enumerate() {
        let sizes: Vec<i64> = shape.iter().map(|&n| n as i64).collect();
        let values = if shape.len() == 1 {
            vec![1.0; shape[0]]
        } else {
            let mut rng = ChaCha8Rng::from_seed(stream_seed(seed, "weights", &[stream as u64]));
            normal(&mut rng, shape.iter().product(), 0.02)
        };
        pairs.push((name, Tensor::f_from_slice(&values)?.f_reshape(sizes)?));
    }
    Ok(ParamSet::new(pairs))
}

/// The weights of a drafter folder, in fp32 on the CPU: exactly the tensors of its configuration, no more and no fewer.
pub fn load_params(config: &DraftConfig, files: &TensorFiles) -> Result<ParamSet, ModelError> {
    let shapes = config.tensor_shapes();
    if let Some(name) = files.names().find(|name| !shapes.contains_key(*name)) {
        return Err(HfError::UnknownTensor { file: files.label().into(), name: name.into() }.into());
    }
    read_params(config, files)
}

/// The weights of a drafter's folder in either layout, in fp32 on the CPU.
pub fn folder_params(folder: &DraftFolder) -> Result<ParamSet, ModelError> {
    read_params(&folder.config, &folder.files)
}

fn read_params(config: &DraftConfig, files: &TensorFiles) -> Result<ParamSet, ModelError> {
    let read = |(name, shape): (String, Vec<usize>)| -> Result<(String, Tensor), ModelError> {
        let tensor = weight(files, &name, &shape, Kind::Float, Device::Cpu)?;
        Ok((name, tensor))
    };
    Ok(ParamSet::new(config.tensor_shapes().into_iter().map(read).collect::<Result<_, _>>()?))
}

/// Normal values by Box and Muller's method, which needs nothing but uniform ones.
fn normal(rng: &mut ChaCha8Rng, count: usize, deviation: f64) -> Vec<f32> {
    let mut values = Vec::with_capacity(count + 1);
    while values.len() < count {
        let (u, v): (f64, f64) = (rng.random(), rng.random());
        // 1 - u lies in (0, 1], so the logarithm is finite.
        let radius = deviation * (-2.0 * (1.0 - u).ln()).sqrt();
        let (sin, cos) = (std::f64::consts::TAU * v).sin_cos();
        values.push((radius * cos) as f32);
        values.push((radius * sin) as f32);
    }
    values.truncate(count);
    values
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hf::config::TargetConfig;

    fn config() -> DraftConfig {
        let target = serde_json::json!({
            "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 9,
            "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50, "max_position_embeddings": 128,
        });
        DraftConfig::for_target(&TargetConfig::from_json(&target).unwrap(), 2, vec![1, 3, 5], 4, 49)
    }

    #[test]
    fn initial_weights_follow_from_the_seed_and_have_the_published_spread() {
        let config = config();
        let (one, again, other) = (init_params(&config, 3), init_params(&config, 3), init_params(&config, 4));
        let (one, again, other) = (one.unwrap(), again.unwrap(), other.unwrap());
        assert_eq!(one.names().to_vec(), config.tensor_shapes().into_keys().collect::<Vec<_>>());
        let mut seen: Vec<Tensor> = Vec::new();
        for ((name, x), (again, other)) in one.iter().zip(again.tensors().iter().zip(other.tensors())) {
            assert!(x.equal(again), "{name}");
            if x.dim() == 1 {
                assert!(x.equal(&x.ones_like()), "{name}");
                continue;
            }
            assert!(!x.equal(other), "{name}");
            assert!(seen.iter().all(|former| former.size() != x.size() || !former.equal(x)), "{name} repeats another");
            let (mean, deviation) = (x.mean(Kind::Double), x.std(true));
            let (mean, deviation) = (f64::try_from(mean).unwrap(), f64::try_from(deviation).unwrap());
            assert!(mean.abs() < 0.002 && (deviation - 0.02).abs() < 0.002, "{name}: {mean} {deviation}");
            seen.push(x.shallow_clone());
        }
    }

    #[test]
    fn a_deep_copy_shares_nothing() {
        let one = init_params(&config(), 0).unwrap();
        let mut two = one.deep_copy(Device::Cpu, Kind::Float).unwrap();
        let _ = two.tensors_mut()[0].fill_(7.0);
        assert!(!one.tensors()[0].equal(&two.tensors()[0]));
        assert!(one.tensors()[1].equal(&two.tensors()[1]));
        assert!(one.get("norm.weight").is_some() && one.get("norm").is_none());
    }
}
