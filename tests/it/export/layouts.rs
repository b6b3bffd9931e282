//! Both layouts of a drafter's folder: round trips are bit-identical, and each broken name is reported.

use super::{Export, checkpoint, draft, only};
use draftmill::{
    export::{ExportError, ExportOptions, export_checkpoint, import_folder},
    hf::{
        Dtype,
        layout::{DraftFolder, Layout},
        validate::{Severity, check, engine_limits},
    },
};
use serde_json::{Value, json};
use std::{
    fs,
    path::{Path, PathBuf},
};

/// The part of the target folder that an export reads.
fn target(root: &Path, vocab: usize) -> PathBuf {
    let folder = root.join("target");
    fs::create_dir_all(&folder).unwrap();
    let config = json!({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 8, "intermediate_size": 12,
        "num_hidden_layers": 6, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "vocab_size": vocab,
        "max_position_embeddings": 64, "rope_theta": 10000.0, "tie_word_embeddings": false,
    });
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let table = |offset: f32| (0..vocab * 8).flat_map(|i| (offset + i as f32 / 8.0).to_le_bytes()).collect::<Vec<u8>>();
    let tables = [("model.embed_tokens.weight", table(0.0)), ("lm_head.weight", table(100.0))];
    let views = tables.iter().map(|(name, bytes)| {
        (*name, safetensors::tensor::TensorView::new(safetensors::Dtype::F32, vec![vocab, 8], bytes).unwrap())
    });
    fs::write(folder.join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
    folder
}

fn options(layout: Layout, target: &Path) -> ExportOptions {
    ExportOptions { layout, target: Some(target.to_owned()), ..ExportOptions::new(Dtype::Bf16) }
}

/// Checkpoint in both layouts.
fn both() -> (Export, Export) {
    let root = tempfile::tempdir().unwrap();
    let (from, target) = (checkpoint(root.path()), target(root.path(), 32));
    let [zlab, speculators] = [Layout::Zlab, Layout::Speculators].map(|layout| {
        let dir = root.path().join(format!("{layout:?}"));
        export_checkpoint(&from, &dir, &options(layout, &target)).unwrap();
        dir
    });
    let root = std::rc::Rc::new(root);
    (Export { root: root.clone(), dir: zlab }, Export { root, dir: speculators })
}

fn bytes(dir: &Path) -> [Vec<u8>; 2] {
    ["config.json", "model.safetensors"].map(|name| fs::read(dir.join(name)).unwrap())
}

#[test]
fn the_way_through_either_layout_is_the_same_bits() {
    let (zlab, speculators) = both();
    assert_eq!((check(&zlab.dir), check(&speculators.dir)), (vec![], vec![]));
    for from in [&zlab, &speculators] {
        let out = from.root.path().join("imported");
        let report = import_folder(&from.dir, Some(&from.root.path().join("target")), &out, true).unwrap();
        assert_eq!((report.tensors, report.dtype, report.step), (25, "bfloat16", None));
        assert_eq!(bytes(&out), bytes(&zlab.dir));
    }
    // The file also has the target's tensors, and the tap indices are one higher.
    let folder = DraftFolder::open(&speculators.dir, None).unwrap();
    assert_eq!(folder.config, draftmill::hf::draft::DraftConfig { dtype: Dtype::Bf16, ..draft() });
    let first = |name: &str| folder.files.weight(name, &[32, 8]).unwrap().to_f32()[0];
    assert_eq!((first("embed_tokens.weight"), first("lm_head.weight")), (0.0, 100.0));
    let json: Value = serde_json::from_slice(&bytes(&speculators.dir)[0]).unwrap();
    assert_eq!(json["aux_hidden_state_layer_ids"], json!([2, 4]));
    assert_eq!(json["speculators_config"]["verifier"]["architectures"], json!(["Qwen3ForCausalLM"]));
}

/// The imported drafter takes both tables from its target, so another head in the file is not ignored (vllm#51665).
#[test]
fn vllm_51665_an_own_head_that_is_not_the_targets_is_refused() {
    let (_, speculators) = both();
    speculators.rewrite("pt", |tensors| {
        let head = tensors.iter_mut().find(|tensor| tensor.0 == "lm_head.weight").unwrap();
        head.2[0] ^= 1;
    });
    let (out, target) = (speculators.root.path().join("imported"), speculators.root.path().join("target"));
    let error = import_folder(&speculators.dir, Some(&target), &out, true).unwrap_err().to_string();
    assert!(error.contains("lm_head.weight") && !out.exists(), "{error}");
}

/// speculators 0.9.0 writes no embedding, no head, only values that differ from a default, and not the target's depth.
#[test]
fn a_file_as_speculators_writes_it_is_read() {
    let (zlab, speculators) = both();
    speculators.rewrite("pt", |tensors| {
        tensors.retain(|t| !["embed_tokens.weight", "lm_head.weight"].contains(&t.0.as_str()))
    });
    let findings = speculators.edit(|config| {
        let config = config.as_object_mut().unwrap();
        config.remove("num_target_layers");
        config["transformer_layer_config"].as_object_mut().unwrap().remove("rope_theta");
    });
    assert!(findings.iter().all(|finding| finding.key == "rope_theta" || finding.key == "(value)"), "{findings:#?}");
    let out = speculators.root.path().join("imported");
    let error = import_folder(&speculators.dir, None, &out, false).unwrap_err().to_string();
    assert!(error.contains("num_target_layers") && !out.exists(), "{error}");
    import_folder(&speculators.dir, Some(&speculators.root.path().join("target")), &out, false).unwrap();
    assert_eq!(bytes(&out), bytes(&zlab.dir));
}

#[test]
fn a_renamed_missing_extra_or_misshaped_tensor_is_refused_by_name() {
    let name = "layers.1.mlp.up_proj.weight";
    type Tensors = Vec<(String, Vec<usize>, Vec<u8>)>;
    let at = move |t: &Tensors| t.iter().position(|t| t.0 == name).unwrap();
    type Change = Box<dyn Fn(&mut Tensors)>;
    let cases: [(&str, Change); 5] = [
        (
            "model.layers.1.mlp.up_proj.weight",
            Box::new(move |t| {
                let at = at(t);
                t[at].0 = format!("model.{name}")
            }),
        ),
        (name, Box::new(move |t| drop(t.remove(at(t))))),
        ("t2d", Box::new(|t| t.push(("t2d".into(), vec![1], vec![0; 2])))),
        (
            name,
            Box::new(move |t| {
                let at = at(t);
                t[at].1.reverse()
            }),
        ),
        (
            "fc.weight",
            Box::new(|t| {
                t[0].2.truncate(8 * 8 * 2);
                t[0].1 = vec![8, 8];
                assert_eq!(t[0].0, "fc.weight")
            }),
        ),
    ];
    for (broken, change) in cases {
        for layout in [Layout::Zlab, Layout::Speculators] {
            let (zlab, speculators) = both();
            let export = if layout == Layout::Zlab { zlab } else { speculators };
            let findings = export.rewrite("pt", |tensors| {
                tensors.sort_by_key(|t| t.0 != "fc.weight");
                change(tensors);
            });
            assert!(findings.iter().any(|f| f.key == broken), "{layout:?}, {broken}: {findings:#?}");
            let out = export.root.path().join("imported");
            let error = import_folder(&export.dir, None, &out, false).unwrap_err().to_string();
            assert!(error.contains(broken) && !out.exists(), "{layout:?}, {broken}: {error}");
        }
    }
    // With an embedding there must be a head.
    let (_, speculators) = both();
    let findings = speculators.rewrite("pt", |t| t.retain(|t| t.0 != "lm_head.weight"));
    only(&findings, "lm_head.weight", "is missing");
}

#[test]
fn each_broken_key_of_the_speculators_layout_is_found_by_name() {
    type Change = fn(&mut Value);
    let cases: [(&str, &str, Change); 8] = [
        ("speculators_config", "missing", |c| drop(c.as_object_mut().unwrap().remove("speculators_config"))),
        // speculators#456: one token too many.
        ("speculative_tokens", "block_size - 1", |c| {
            c["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = json!(4);
        }),
        ("partial_rotary_factor", "0.25", |c| c["transformer_layer_config"]["partial_rotary_factor"] = json!(0.25)),
        ("mrope_section", "[1]", |c| c["transformer_layer_config"]["rope_parameters"]["mrope_section"] = json!([1])),
        ("aux_hidden_state_layer_ids", "embedding", |c| c["aux_hidden_state_layer_ids"] = json!([0, 4])),
        ("target_layer_ids", "[1, 5]", |c| c["aux_hidden_state_layer_ids"] = json!([2, 6])),
        ("mask_token_id", "32", |c| c["mask_token_id"] = json!(32)),
        ("draft_vocab_size", "16", |c| c["draft_vocab_size"] = json!(16)),
    ];
    for (key, part, change) in cases {
        let findings = both().1.edit(change);
        let hit = findings.iter().any(|f| (f.key == key || f.value.contains(key)) && f.to_string().contains(part));
        assert!(hit && findings.len() <= 2, "{key}: {findings:#?}");
    }
}

/// vllm#46435: the drafter's vocabulary was not the target's padded one, so the head was not shared and acceptance was 0.
#[test]
fn vllm_46435_another_padding_of_the_vocabulary_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let (from, target) = (checkpoint(root.path()), target(root.path(), 40));
    for layout in [Layout::Zlab, Layout::Speculators] {
        let refused = export_checkpoint(&from, &root.path().join("export"), &options(layout, &target));
        let error = refused.unwrap_err();
        assert!(matches!(error, ExportError::OtherTarget { .. }), "{error:?}");
        assert!(error.to_string().contains("`vocab_size` is 32, but the target's `vocab_size` is 40"), "{error}");
    }
    assert!(!root.path().join("export").exists());
    let export = options(Layout::Speculators, &target);
    let refused = export_checkpoint(&from, &root.path().join("export"), &ExportOptions { target: None, ..export });
    assert!(refused.unwrap_err().to_string().contains("--target"));
}

/// Issue 17, F2: served without its method, or with another number of tokens than it was trained for, a drafter is accepted
/// less or never, and no engine reports it. The commands that are printed have both.
#[test]
fn an_export_prints_commands_that_serve_it() {
    let root = tempfile::tempdir().unwrap();
    let (run, target) = (root.path().join("it's a run"), target(root.path(), 32));
    fs::create_dir_all(run.join("checkpoints")).unwrap();
    checkpoint(&run.join("checkpoints"));
    let draftmill = |arguments: &[&str]| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_draftmill"));
        let out = command.current_dir(root.path()).arg("export").args(arguments).output().unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        String::from_utf8(out.stdout).unwrap()
    };
    for (layout, sglang) in [("zlab", true), ("speculators", false)] {
        let write = ["--run", "it's a run", "--target", target.to_str().unwrap(), "--format", layout, "--force"];
        let write = [&write[..], &["--out", "ex port", "--no-self-check"]].concat();
        let said = draftmill(&write);
        let config = r#"'{"method": "dflash", "model": "ex port", "num_speculative_tokens": 3}'"#;
        let vllm = format!("  vllm serve {} --speculative-config {config}\n", target.display());
        assert!(said.contains(&vllm), "{said}");
        assert_eq!(said.contains("sglang.launch_server") && said.contains("--speculative-algorithm DFLASH"), sglang);
        let json: Value = serde_json::from_str(&draftmill(&[&write[..], &["--json"]].concat())).unwrap();
        assert_eq!(json["serve"]["vllm"], vllm.trim());
        assert_eq!(json["serve"]["sglang"].is_string(), sglang);

        // Heads of 4 are sound, and no engine serves them.
        let said = draftmill(&["--check", "ex port"]);
        assert!(said.contains("warning: config.json: head_dim = 4") && said.contains("sound"), "{said}");
        let json: Value = serde_json::from_str(&draftmill(&["--check", "ex port", "--json"])).unwrap();
        assert_eq!((&json["sound"], &json["findings"][0]["severity"]), (&json!(true), &json!("warning")));
    }
}

/// vllm#56692: a folder of speculators' own that vLLM would serve with a causal block is read as it was trained, and named.
#[test]
fn vllm_56692_false_for_non_causal_is_read_as_full_attention() {
    let (zlab, speculators) = both();
    let findings = speculators.edit(|config| config["sliding_window_non_causal"] = json!(false));
    only(&findings, "sliding_window_non_causal", "vllm#56692");
    let out = speculators.root.path().join("imported");
    import_folder(&speculators.dir, None, &out, false).unwrap();
    assert_eq!(bytes(&out), bytes(&zlab.dir));
}

/// Head sizes of vLLM 0.32's CPU attention (get_supported_head_sizes), and of flash attention (supports_head_size).
#[test]
fn head_sizes_that_an_engine_cannot_serve_are_warnings() {
    let warned = |head: usize| {
        let export = super::export(Dtype::F32);
        export.edit(|config| config["head_dim"] = json!(head));
        let findings = engine_limits(&export.dir);
        assert!(findings.iter().all(|finding| finding.severity == Severity::Warning && finding.key == "head_dim"));
        findings.first().map(|finding| finding.value.clone())
    };
    assert_eq!([32, 64, 80, 96, 112, 128, 160, 192, 224, 256].map(warned), [const { None }; 10]);
    for (head, part) in [(16, "vLLM does not serve on a CPU"), (512, "on a GPU"), (36, "neither"), (1024, "neither")] {
        assert!(warned(head).is_some_and(|value| value.contains(part)), "{head}: {:?}", warned(head));
    }
}

/// Issue 17, E2 and E3: a checkpoint that state.db does not list is exported by its name, one of another step is not.
#[test]
fn e3_a_checkpoint_that_was_put_aside_is_exported_and_one_of_another_step_refused() {
    let run = tempfile::tempdir().unwrap();
    let (checkpoints, target) = (run.path().join("checkpoints"), target(run.path(), 32));
    fs::create_dir(&checkpoints).unwrap();
    let whole = checkpoint(&checkpoints);
    let export = |checkpoint: &str| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_draftmill"));
        command.args(["export", "--no-self-check", "--checkpoint", checkpoint, "--run"]).arg(run.path());
        command.arg("--out").arg(run.path().join(checkpoint)).arg("--target").arg(&target).output().unwrap()
    };
    fs::rename(&whole, checkpoints.join("step-9")).unwrap();
    let refused = export("step-9");
    let told = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(5), "{told}");
    assert!(told.contains("it is of step 7, but the folder's name says"), "{told}");
    assert!(!run.path().join("step-9").exists());

    fs::rename(checkpoints.join("step-9"), checkpoints.join(checkpoint::aside_name(7))).unwrap();
    let done = export("step-7.later");
    assert_eq!(done.status.code(), Some(0), "{}", String::from_utf8_lossy(&done.stderr));
    assert_eq!(check(&run.path().join("step-7.later")), []);
}
