//! Strict check of a target's weights: missing, unknown, and ignored tensors.

use super::{
    HfError,
    config::{EMBEDDING, HEAD, RopeScaling, TargetConfig},
    layout::{self, DraftFolder},
    tensors::{RawDtype, RawTensor, TensorFiles},
};
use std::path::Path;

impl TargetConfig {
    /// All defects of a model's weights: missing, of another shape or dtype, unknown, or ignored in favour of other values.
    pub fn check_weights(&self, files: &TensorFiles) -> Vec<HfError> {
        let mut errors = files.check(&self.tensor_shapes());
        errors.extend(self.unexpected(files));
        errors
    }

    /// First weight that this configuration does not use, such as a bias: ignoring it would silently compute another model.
    /// Copies of what is used are allowed: the head of a tied model, and tables of rotary frequencies in old files.
    pub fn unexpected(&self, files: &TensorFiles) -> Option<HfError> {
        let shapes = self.tensor_shapes();
        files.names().filter(|name| !shapes.contains_key(*name)).find_map(|name| self.ignored(files, name))
    }

    /// Error for a tensor outside of [`TargetConfig::tensor_shapes`], unless it is a copy of what is used.
    fn ignored(&self, files: &TensorFiles, name: &str) -> Option<HfError> {
        let file = || files.label().to_owned();
        let differs = |instead: &str, remedy: &str| HfError::OtherValues {
            file: file(),
            name: name.into(),
            instead: instead.into(),
            remedy: remedy.into(),
        };
        match name {
            HEAD => {
                let same = files.get(name).ok().zip(files.get(EMBEDDING).ok()).is_some_and(|(a, b)| a.equals(&b));
                // transformers 5 uses such a head, vLLM the embedding (vllm#51665).
                let remedy = "set `tie_word_embeddings` to false in config.json, or remove the tensor";
                (!same).then(|| differs("the embedding, since `tie_word_embeddings` is true", remedy))
            }
            _ if name.ends_with("rotary_emb.inv_freq") => {
                let table = files.get(name).ok()?;
                let remedy = "correct `rope_theta` in config.json, or remove the tensor";
                (!self.is_rotary_table(&table)).then(|| differs("the frequencies of `rope_theta`", remedy))
            }
            _ => Some(HfError::UnknownTensor { file: file(), name: name.into() }),
        }
    }

    /// True for a table of the rotary frequencies, up to the rounding of half precision. Scaled tables are not compared.
    fn is_rotary_table(&self, table: &RawTensor<'_>) -> bool {
        let pairs = self.head_dim / 2;
        let is_real = matches!(table.dtype, RawDtype::F32 | RawDtype::F16 | RawDtype::BF16);
        if self.rope_scaling != RopeScaling::None || !is_real {
            return true;
        }
        let expected = (0..pairs).map(|i| self.rope_theta.powf(-(i as f64) / pairs as f64));
        let values = table.to_f32();
        values.len() == pairs && values.iter().zip(expected).all(|(v, e)| (f64::from(*v) - e).abs() <= 0.02 * e + 1e-3)
    }
}

impl DraftFolder {
    /// Refuses a drafter whose own embedding or head differs from those of `target`, the model in the folder `of`. For
    /// uses that take both from the target.
    ///
    /// # Errors
    /// A differing tensor, or an unreadable target.
    pub fn check_shared(&self, of: &Path, target: &TargetConfig) -> Result<(), HfError> {
        let names: Vec<_> =
            self.files.names().filter(|name| [layout::EMBEDDING, layout::HEAD].contains(name)).collect();
        if names.is_empty() {
            return Ok(());
        }
        let files = TensorFiles::open(of)?;
        for name in names {
            let used = if name == layout::HEAD && !target.tie_word_embeddings { HEAD } else { EMBEDDING };
            if !self.files.get(name)?.equals(&files.get(used)?) {
                return Err(HfError::OtherValues {
                    file: self.files.label().into(),
                    name: name.into(),
                    instead: format!("`{used}` of {}", of.display()),
                    remedy: "give the drafter's own target".into(),
                });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::tensor::{Dtype, TensorView};
    use serde_json::json;
    use std::fs;

    type Tensor = (String, Vec<usize>, Vec<f32>);

    fn config(tied: bool) -> TargetConfig {
        let json = json!({
            "model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
            "num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 4, "max_position_embeddings": 16,
            "rope_theta": 1e6, "tie_word_embeddings": tied,
        });
        TargetConfig::from_json(&json).unwrap()
    }

    fn tensors(config: &TargetConfig) -> Vec<Tensor> {
        let tensor = |(name, shape): (String, Vec<usize>)| {
            let count = shape.iter().product();
            (name, shape, (0..count).map(|i| i as f32 / 8.0).collect())
        };
        config.tensor_shapes().into_iter().map(tensor).collect()
    }

    fn write(folder: &Path, tensors: &[Tensor], half: &str) {
        let encoded: Vec<_> = tensors
            .iter()
            .map(|(name, shape, values)| {
                let bytes: Vec<u8> = match name == half {
                    true => values.iter().flat_map(|v| half::bf16::from_f32(*v).to_le_bytes()).collect(),
                    false => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
                };
                (name, shape, bytes, if name == half { Dtype::BF16 } else { Dtype::F32 })
            })
            .collect();
        let views = encoded.iter().map(|(name, shape, bytes, dtype)| {
            (name.as_str(), TensorView::new(*dtype, (*shape).clone(), bytes).unwrap())
        });
        fs::write(folder.join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
    }

    fn errors(config: &TargetConfig, tensors: &[Tensor], half: &str) -> Vec<String> {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), tensors, half);
        let files = TensorFiles::open(folder.path()).unwrap();
        config.check_weights(&files).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn vllm_51665_a_tied_model_with_another_head_is_refused() {
        let config = config(true);
        let mut all = tensors(&config);
        assert_eq!(errors(&config, &all, ""), [""; 0]);
        let embedding = all.iter().find(|(name, ..)| name == EMBEDDING).unwrap().clone();
        all.push((HEAD.into(), embedding.1, embedding.2));
        assert_eq!(errors(&config, &all, ""), [""; 0], "a copy of the embedding");
        assert_eq!(errors(&config, &all, HEAD), [""; 0], "a copy in another dtype");
        all.last_mut().unwrap().2[5] = 9.0;
        for half in ["", HEAD] {
            let found = errors(&config, &all, half);
            assert!(
                found.len() == 1 && found[0].contains(HEAD) && found[0].contains("tie_word_embeddings"),
                "{found:?}"
            );
        }
    }

    #[test]
    fn every_ignored_tensor_is_a_copy_or_refused() {
        let config = config(false);
        let with = |name: &str, shape: Vec<usize>, values: Vec<f32>| {
            let mut all = tensors(&config);
            all.push((name.into(), shape, values));
            errors(&config, &all, "")
        };
        for name in
            ["lm_head.bias", "model.norm.bias", "model.layers.0.mlp.up_proj.bias", "model.layers.7.x", "v_head.weight"]
        {
            let found = with(name, vec![1], vec![0.0]);
            assert!(found.len() == 1 && found[0].contains(name), "{found:?}");
        }
        let table = |theta: f32| (0..4).map(|i| theta.powf(-(i as f32) / 4.0)).collect::<Vec<_>>();
        for name in ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"] {
            assert_eq!(with(name, vec![4], table(1e6)), [""; 0]);
            let found = with(name, vec![4], table(1e4));
            assert!(found.len() == 1 && found[0].contains("rope_theta"), "{found:?}");
        }
    }

    #[test]
    fn two_models_in_one_folder_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        write(folder.path(), &[("a".into(), vec![2], vec![1.0, 2.0])], "");
        fs::copy(path("model.safetensors"), path("one.safetensors")).unwrap();
        let index =
            |map: &str| fs::write(path("model.safetensors.index.json"), format!("{{\"weight_map\": {map}}}")).unwrap();
        index(r#"{"a": "one.safetensors"}"#);
        let text = TensorFiles::open(folder.path()).err().unwrap().to_string();
        assert!(text.contains("remove one of them"), "{text}");
        fs::rename(path("model.safetensors"), path("two.safetensors")).unwrap();
        index(r#"{"a": "one.safetensors", "b": "two.safetensors"}"#);
        write(folder.path(), &[("a".into(), vec![2], vec![1.0, 3.0]), ("b".into(), vec![1], vec![0.0])], "");
        fs::rename(path("model.safetensors"), path("two.safetensors")).unwrap();
        let text = TensorFiles::open(folder.path()).err().unwrap().to_string();
        assert!(text.contains("two.safetensors") && text.contains("`a`"), "{text}");
    }

    #[test]
    fn one_value_that_is_not_finite_is_found_in_every_dtype() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for at in [0, 1, 299_999] {
                let mut values = vec![f32::MAX; 300_000];
                let finite = |values: &[f32]| {
                    let whole: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
                    let half: Vec<u8> =
                        values.iter().flat_map(|v| half::bf16::from_f32(v * 0.5).to_le_bytes()).collect();
                    let f16: Vec<u8> =
                        values.iter().flat_map(|v| half::f16::from_f32(v * 1e-37).to_le_bytes()).collect();
                    let of = |dtype, bytes: &[u8]| RawTensor { dtype, shape: &[300_000], bytes }.all_finite();
                    [of(RawDtype::F32, &whole), of(RawDtype::BF16, &half), of(RawDtype::F16, &f16)]
                };
                assert_eq!(finite(&values), [true; 3]);
                values[at] = bad;
                assert_eq!(finite(&values), [false; 3], "{bad} at {at}");
            }
        }
    }
}
