//! Export and its strict check: a valid folder has no finding, and each single defect has exactly one.

mod layouts;
#[cfg(feature = "torch")]
mod served;

use draftmill::{
    export::{ExportError, ExportOptions, export_checkpoint},
    hf::{
        Dtype,
        draft::DraftConfig,
        tensors::TensorFiles,
        validate::{Finding, Severity, check},
    },
    run_dir::checkpoint::{self, NamedTensor, State},
};
use serde_json::{Value, json};
use std::{
    fs,
    path::{Path, PathBuf},
};

fn draft() -> DraftConfig {
    let json = json!({
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 4, "vocab_size": 32, "num_target_layers": 6, "block_size": 4,
        "max_position_embeddings": 64, "rope_theta": 10000.0, "layer_types": ["full_attention", "full_attention"],
        "dflash_config": { "mask_token_id": 31, "target_layer_ids": [1, 3], "block_size": 4 }
    });
    DraftConfig::from_json(&json).unwrap()
}

/// Checkpoint in which every weight encodes its position.
fn checkpoint(root: &Path) -> PathBuf {
    let draft = draft();
    let tensors = |offset: f32| -> Vec<NamedTensor> {
        let make = |(i, (name, shape)): (usize, (String, Vec<usize>))| {
            let count = shape.iter().product::<usize>();
            let data = (0..count).map(|k| offset + i as f32 + k as f32 / 64.0).collect();
            NamedTensor { name, shape, data }
        };
        draft.tensor_shapes().into_iter().enumerate().map(make).collect()
    };
    let files = [
        (checkpoint::WEIGHTS, tensors(0.0)),
        (checkpoint::FIRST_MOMENTS, tensors(1.0)),
        (checkpoint::SECOND_MOMENTS, tensors(2.0)),
    ];
    let name = checkpoint::write(root, &State::new(7, 1, String::new()), &draft, &files).unwrap();
    root.join(name)
}

struct Export {
    root: std::rc::Rc<tempfile::TempDir>,
    dir: PathBuf,
}

fn export(dtype: Dtype) -> Export {
    let root = tempfile::tempdir().unwrap();
    let from = checkpoint(root.path());
    let dir = root.path().join("export");
    let report = export_checkpoint(&from, &dir, &ExportOptions::new(dtype)).unwrap();
    assert_eq!((report.step, report.tensors), (Some(7), 2 * 11 + 3));
    Export { root: root.into(), dir }
}

impl Export {
    fn edit(&self, change: impl FnOnce(&mut Value)) -> Vec<Finding> {
        let path = self.dir.join("config.json");
        let mut json: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        change(&mut json);
        fs::write(&path, json.to_string()).unwrap();
        check(&self.dir)
    }

    /// Rewrites the tensors with `format` in the metadata.
    fn rewrite(&self, format: &str, change: impl FnOnce(&mut Vec<(String, Vec<usize>, Vec<u8>)>)) -> Vec<Finding> {
        let path = self.dir.join("model.safetensors");
        let files = TensorFiles::open_file(&path).unwrap();
        let mut tensors: Vec<_> = files
            .names()
            .map(|name| {
                let raw = files.get(name).unwrap();
                (name.to_owned(), raw.shape.to_vec(), raw.bytes.to_vec())
            })
            .collect();
        change(&mut tensors);
        let views = tensors.iter().map(|(name, shape, bytes)| {
            let view = safetensors::tensor::TensorView::new(safetensors::Dtype::BF16, shape.clone(), bytes).unwrap();
            (name.as_str(), view)
        });
        let metadata = [("format".to_owned(), format.to_owned())].into();
        let bytes = safetensors::serialize(views, Some(metadata)).unwrap();
        drop(files);
        fs::write(&path, bytes).unwrap();
        check(&self.dir)
    }
}

fn only(findings: &[Finding], key: &str, part: &str) {
    assert!(
        findings.len() == 1 && findings[0].key == key && findings[0].to_string().contains(part),
        "expected one finding on {key} with {part:?}: {findings:#?}"
    );
}

#[test]
fn a_sound_export_has_no_finding_and_the_values_of_the_checkpoint() {
    for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
        let export = export(dtype);
        assert_eq!(check(&export.dir), []);
        let files = TensorFiles::open(&export.dir).unwrap();
        let exported = DraftConfig::load(&export.dir).unwrap();
        assert_eq!(exported, DraftConfig { dtype, ..draft() });
        for (i, (name, shape)) in exported.tensor_shapes().iter().enumerate() {
            let raw = files.weight(name, shape).unwrap();
            let first = match dtype {
                Dtype::F32 => f32::from_le_bytes(raw.bytes[..4].try_into().unwrap()),
                Dtype::F16 => half::f16::from_le_bytes(raw.bytes[..2].try_into().unwrap()).to_f32(),
                Dtype::Bf16 => half::bf16::from_le_bytes(raw.bytes[..2].try_into().unwrap()).to_f32(),
            };
            assert_eq!(first, i as f32, "{name} as {dtype:?}");
        }
    }
}

#[test]
fn automodel_2461_vllm_53063_each_broken_key_is_found_by_name() {
    type Change = fn(&mut Value);
    let cases: [(&str, &str, Change); 18] = [
        ("architectures", "missing", |c| drop(c.as_object_mut().unwrap().remove("architectures"))),
        ("model_type", "missing", |c| drop(c.as_object_mut().unwrap().remove("model_type"))),
        ("layer_types", "missing", |c| drop(c.as_object_mut().unwrap().remove("layer_types"))),
        ("head_dim", "missing", |c| drop(c.as_object_mut().unwrap().remove("head_dim"))),
        ("partial_rotary_factor", "0.25", |c| c["partial_rotary_factor"] = json!(0.25)),
        ("mrope_section", "[1]", |c| c["rope_parameters"]["mrope_section"] = json!([1])),
        ("block_size", "4 at the top level and 8", |c| c["dflash_config"]["block_size"] = json!(8)),
        ("block_size", "one of its two locations", |c| drop(c.as_object_mut().unwrap().remove("block_size"))),
        ("rope_parameters", "missing", |c| drop(c.as_object_mut().unwrap().remove("rope_parameters"))),
        ("rope_theta", "in rope_parameters", |c| c["rope_parameters"]["rope_theta"] = json!(5.0)),
        ("auto_map", "dflash.py", |c| c["auto_map"] = json!({ "AutoModel": "dflash.DFlashDraftModel" })),
        ("target_layer_ids", "[3, 1]", |c| c["dflash_config"]["target_layer_ids"] = json!([3, 1])),
        ("target_layer_ids", "[1, 5]", |c| c["dflash_config"]["target_layer_ids"] = json!([1, 5])),
        ("mask_token_id", "32", |c| c["dflash_config"]["mask_token_id"] = json!(32)),
        // Automodel#2461: the mask token defaulted to the end token.
        ("mask_token_id", "ends a response", |c| c["eos_token_id"] = json!([2, 31])),
        ("mask_token_id", "lacks the key", |c| {
            drop(c["dflash_config"].as_object_mut().unwrap().remove("mask_token_id"))
        }),
        // vllm#53063: rotary halves in the target's order, not the drafter's, gave an acceptance of 1 without a message.
        ("rope_interleaved", "true", |c| c["rope_parameters"]["rope_interleaved"] = json!(true)),
        // vllm#42704: the same taps, counted from another base.
        ("aux_hidden_state_layer_ids", "one higher", |c| c["aux_hidden_state_layer_ids"] = json!([1, 3])),
    ];
    for (key, part, change) in cases {
        let findings = export(Dtype::Bf16).edit(change);
        let hit = findings.iter().any(|f| (f.key == key || f.value.contains(key)) && f.to_string().contains(part));
        assert!(hit, "{key}: {findings:#?}");
        assert!(findings.len() <= 2, "{key}: {findings:#?}");
    }
}

#[test]
fn each_broken_tensor_is_found_by_name() {
    let name = "layers.1.mlp.up_proj.weight";
    let at = move |t: &[(String, Vec<usize>, Vec<u8>)]| t.iter().position(|t| t.0 == name).unwrap();
    let gone = export(Dtype::Bf16).rewrite("pt", |t| drop(t.remove(at(t))));
    only(&gone, name, "is missing");
    let extra = export(Dtype::Bf16).rewrite("pt", |t| t.push(("embed_tokens.weight".into(), vec![1], vec![0; 2])));
    only(&extra, "embed_tokens.weight", "not a tensor of this drafter");
    let shape = export(Dtype::Bf16).rewrite("pt", |t| {
        let at = at(t);
        t[at].1.reverse();
    });
    only(&shape, name, "shape [8, 12]");
    let nan = export(Dtype::Bf16).rewrite("pt", |t| {
        let at = at(t);
        t[at].2[..2].copy_from_slice(&half::bf16::NAN.to_le_bytes());
    });
    only(&nan, name, "NaN");
    only(&export(Dtype::Bf16).rewrite("np", |_| ()), "format", "metadata");
    let renamed = export(Dtype::Bf16).rewrite("pt", |t| {
        let at = at(t);
        t[at].0 = "model.layers.1.mlp.up_proj.weight".into();
    });
    assert_eq!(renamed.len(), 2, "one is missing, one is unknown: {renamed:#?}");
}

#[test]
fn a_folder_of_garbage_gives_findings_and_no_panic() {
    let export = export(Dtype::Bf16);
    let weights = fs::read(export.dir.join("model.safetensors")).unwrap();
    for cut in [0, 1, 7, 8, 9, 100, weights.len() - 1] {
        fs::write(export.dir.join("model.safetensors"), &weights[..cut]).unwrap();
        only(&check(&export.dir), "(file)", "model.safetensors");
    }
    for text in ["", "{", "[]", "null", "{\"dflash_config\": 3}", "\u{0}\u{1}\u{2}", "{\"hidden_size\": -1}"] {
        fs::write(export.dir.join("config.json"), text).unwrap();
        let findings = check(&export.dir);
        assert!(findings.iter().any(|f| f.severity == Severity::Error), "{text:?}: {findings:?}");
    }
    assert!(!check(Path::new("there/is/no/such/folder")).is_empty());
}

#[test]
fn an_export_replaces_only_with_force_and_is_atomic() {
    let export = export(Dtype::Bf16);
    let from = export.root.path().join("step-7");
    let forced = ExportOptions { force: true, ..ExportOptions::new(Dtype::F32) };
    let again = export_checkpoint(&from, &export.dir, &ExportOptions::new(Dtype::F32));
    assert!(matches!(again, Err(ExportError::Occupied(_))), "{again:?}");
    assert_eq!(check(&export.dir), []);
    export_checkpoint(&from, &export.dir, &forced).unwrap();
    assert_eq!(DraftConfig::load(&export.dir).unwrap().dtype, Dtype::F32);
    // Only files of an export are deleted, whatever is requested: no other file, not the run itself, no parent.
    fs::write(export.dir.join("precious.txt"), "hi").unwrap();
    for dir in [&export.dir, &from, &export.root.path().to_owned(), &export.dir.join("..")] {
        let refused = export_checkpoint(&from, dir, &forced);
        assert!(matches!(refused, Err(ExportError::Foreign { .. })), "{}: {refused:?}", dir.display());
    }
    assert_eq!(fs::read_to_string(export.dir.join("precious.txt")).unwrap(), "hi");
    fs::remove_file(export.dir.join("precious.txt")).unwrap();
    let weights = from.join(checkpoint::WEIGHTS);
    fs::write(&weights, [fs::read(&weights).unwrap(), vec![0]].concat()).unwrap();
    assert!(export_checkpoint(&from, &export.dir, &forced).is_err());
    let left: Vec<_> = fs::read_dir(export.root.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(left.len() == 2 && check(&export.dir).is_empty(), "{left:?}");
}
