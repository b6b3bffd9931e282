//! `draftmill eval`: a tiny target, the golden drafter, prompts of every kind, and refusals.

#[cfg(feature = "torch")]
use serde_json::Value;
use serde_json::json;
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

/// Target and matching drafter, with a tokenizer of words and a template that only joins them.
pub struct Scene(pub tempfile::TempDir);

impl Scene {
    pub fn new() -> Scene {
        let scene = Scene(tempfile::tempdir().unwrap());
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
        for (from, to) in [("target_qwen3", "target"), ("drafter", "draft")] {
            fs::create_dir(scene.path(to)).unwrap();
            for name in ["config.json", "model.safetensors"] {
                fs::copy(golden.join(from).join(name), scene.path(to).join(name)).unwrap();
            }
        }
        let vocab: serde_json::Map<_, _> = (0..319).map(|id| (format!("t{id}"), json!(id))).collect();
        let tokenizer = json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
            "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": null, "decoder": null,
            "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "t0"},
        });
        scene.write("target/tokenizer.json", &tokenizer.to_string());
        scene.write("target/chat_template.jinja", "{% for m in messages %}{{ m.content }} {% endfor %}t9");
        scene.write(
            "prompts.jsonl",
            concat!(
                "{\"turns\": [\"t5 t6 t7\", \"t30 t31\"], \"category\": \"writing\"}\n",
                "{\"prompt\": \"t40\"}\n",
                "{\"messages\": [{\"role\": \"user\", \"content\": \"t50 t51\"}], \"category\": \"chat\"}\n",
            ),
        );
        scene
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub fn write(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).unwrap();
    }

    /// Changes one key of a config.json.
    #[cfg(feature = "torch")]
    pub fn set(&self, folder: &str, key: &str, value: Value) {
        let path = self.path(folder).join("config.json");
        let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        config[key] = value;
        fs::write(path, config.to_string()).unwrap();
    }

    pub fn eval(&self, more: &[&str]) -> Output {
        let mut run = Command::new(env!("CARGO_BIN_EXE_draftmill"));
        run.current_dir(&self.0).args(["eval", "--target", "target", "--draft", "draft", "--prompts", "prompts.jsonl"]);
        run.env("OMP_NUM_THREADS", "1").args(["--max-new-tokens", "24"]).args(more).output().unwrap()
    }

    fn refused(&self, more: &[&str], code: i32) -> String {
        let output = self.eval(more);
        let errors = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), output.stdout.len()), (Some(code), 0), "{errors}");
        errors
    }
}

#[cfg(not(feature = "torch"))]
#[test]
fn a_build_without_libtorch_says_so() {
    let errors = Scene::new().refused(&[], 2);
    assert!(errors.contains("built without libtorch"), "{errors}");
}

#[test]
fn a_row_that_is_no_prompt_is_named_by_its_line() {
    let scene = Scene::new();
    scene.write("prompts.jsonl", "{\"prompt\": \"t4\"}\n{\"question\": \"t4\"}\n");
    let errors = scene.refused(&[], 4);
    assert!(errors.contains("prompts.jsonl, line 2: ") && errors.contains("question"), "{errors}");
    fs::remove_file(scene.path("prompts.jsonl")).unwrap();
    assert!(scene.refused(&[], 4).contains("prompts.jsonl cannot be read"));
}

#[cfg(feature = "torch")]
mod torch {
    use super::*;
    use crate::block::dump_block;

    #[test]
    fn json_and_plot_hold_every_figure() {
        let scene = Scene::new();
        let output = scene.eval(&["--json", "--plot", "plot.svg"]);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{errors}");
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        let number = |key: &str| report[key].as_f64().unwrap_or_else(|| panic!("{key} is missing: {report}"));
        for key in ["acceptance_mean", "acceptance_pooled", "predicted_acceptance"] {
            assert!((1.0..=8.0).contains(&number(key)), "{key}: {report}");
        }
        assert_eq!(report["greedy_identical"], true);
        // Two turns, one, and one; 23 tokens of each come from steps, unless it stopped before.
        assert_eq!((number("responses"), number("block_size"), number("differing")), (4.0, 8.0, 0.0));
        assert!(number("tokens_per_second") > 0.0 && number("plain_tokens_per_second") > 0.0);
        let list = |key: &str| report[key].as_array().unwrap().iter().map(|x| x.as_f64()).collect::<Vec<_>>();
        assert_eq!((list("acceptance_by_position").len(), list("accuracy_by_position").len()), (7, 7));
        let steps = list("tokens_per_step");
        assert_eq!(steps.iter().flatten().sum::<f64>(), number("steps"));
        let tokens: f64 = (1..).zip(steps.iter().flatten()).map(|(tokens, steps)| f64::from(tokens) * steps).sum();
        assert_eq!(tokens, number("tokens"));
        assert!((number("acceptance_pooled") - tokens / number("steps")).abs() < 1e-12);
        let off = number("acceptance_pooled") - number("predicted_acceptance");
        assert!((number("measured_minus_predicted") - off).abs() < 1e-12);
        let mut product = 1.0;
        let sum: f64 = list("accuracy_by_position")
            .into_iter()
            .flatten()
            .map(|share| {
                product *= share;
                product
            })
            .sum();
        assert!((number("predicted_acceptance") - 1.0 - sum).abs() < 1e-12, "{report}");
        let names: Vec<_> = report["categories"].as_array().unwrap().iter().map(|c| &c["category"]).collect();
        assert_eq!(names, ["chat", "writing"]);
        assert_eq!(report["categories"][1]["responses"], 2);
        let svg = fs::read_to_string(scene.path("plot.svg")).unwrap();
        assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n"));
        assert_eq!(svg.matches("<rect x=").count(), 7 + 8);
    }

    #[test]
    fn the_table_tells_what_a_person_asks_and_seeds_decide_on_samples() {
        let scene = Scene::new();
        let run = |more: &[&str]| {
            let output = scene.eval(more);
            assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
            String::from_utf8(output.stdout).unwrap()
        };
        let table = run(&["--limit", "1"]);
        for part in ["2 responses", "tokens per step pooled", "identical to plain decoding", "writing", "predicted"] {
            assert!(table.contains(part), "{part} is not in\n{table}");
        }
        let shown = run(&["--limit", "1", "--show", "1"]);
        let (report, text) = shown.split_once("\n\nt5 t6 t7\n").unwrap_or_else(|| panic!("no prompt in\n{shown}"));
        assert!(report.contains("category") && text.starts_with("  t") && text.matches('\n').count() == 1, "{shown}");
        // The target's tokens are its own; the drafted ones are in brackets.
        assert_eq!(text.replace(['[', ']'], "").split_whitespace().count(), 24, "{shown}");

        let sampled = |seed: &str| {
            let report: Value = serde_json::from_str(&run(&["--json", "--temperature", "1", "--seed", seed])).unwrap();
            assert_eq!(report["greedy_identical"], Value::Null);
            (report["tokens_per_step"].clone(), report["accuracy_by_position"].clone())
        };
        assert_eq!(sampled("1"), sampled("1"));
        assert_ne!(sampled("1"), sampled("2"));
    }

    #[test]
    fn prompts_without_room_are_counted_and_none_at_all_is_an_error() {
        let scene = Scene::new();
        let long = "t1 ".repeat(600);
        scene.write("prompts.jsonl", &format!("{{\"turns\": [\"{long}\", \"t1\"]}}\n{{\"turns\": [\"t4\"]}}\n"));
        let report: Value = serde_json::from_slice(&scene.eval(&["--json"]).stdout).unwrap();
        assert_eq!((&report["skipped_too_long"], &report["responses"]), (&json!(2), &json!(1)));
        assert!(scene.refused(&["--limit", "1"], 4).contains("512 positions"));
    }

    /// vllm#46435: a drafter whose vocabulary was padded to another size was served with acceptance 0, without a message.
    #[test]
    fn vllm_46435_a_drafter_of_another_vocabulary_is_refused() {
        let scene = Scene::new();
        scene.set("draft", "vocab_size", json!(384));
        let errors = scene.refused(&[], 5);
        assert!(errors.contains("`vocab_size` is 384") && errors.contains("320"), "{errors}");
    }

    /// speculators#613, Automodel#2461: settings that change the numbers silently, and a mask token that was not configured.
    #[test]
    fn speculators_613_automodel_2461_config_traps_are_refused_by_name() {
        for (key, value, part) in [
            ("partial_rotary_factor", json!(0.25), "partial_rotary_factor"),
            ("dflash_config", json!({"target_layer_ids": [1, 5], "block_size": 8}), "mask_token_id"),
            ("num_target_layers", json!(9), "num_target_layers"),
            (
                "dflash_config",
                json!({"target_layer_ids": [1, 5], "mask_token_id": 319, "block_size": 16}),
                "block_size",
            ),
        ] {
            let scene = Scene::new();
            scene.set("draft", key, value);
            let errors = scene.refused(&[], 5);
            assert!(errors.contains(part), "{key}: {errors}");
        }
    }

    /// Writes the block that benches/conformance compares with other implementations.
    #[test]
    fn a_block_is_written_with_everything_that_it_follows_from() {
        let scene = Scene::new();
        let block = |ids: &[u32]| {
            dump_block(&scene.path("target"), &scene.path("draft"), ids, &scene.path("block.safetensors"))
        };
        assert_eq!(block(&[5, 6, 7, 8]).unwrap(), 7);
        let files = draftmill::hf::tensors::TensorFiles::open_file(&scene.path("block.safetensors")).unwrap();
        let values = |name: &str, shape: &[usize]| files.weight(name, shape).unwrap().to_f32();
        assert_eq!(values("ids", &[4]), [5.0, 6.0, 7.0, 8.0]);
        let (anchor, context, logits) =
            (values("anchor", &[1])[0], values("context", &[4, 96]), values("logits", &[7, 320]));
        assert!((0.0..320.0).contains(&anchor) && context.iter().chain(&logits).all(|x| x.is_finite()));
        assert!(block(&[5, 400]).unwrap_err().to_string().contains("token id 400"));
    }

    #[test]
    fn folders_that_are_no_models_are_named() {
        let scene = Scene::new();
        fs::remove_file(scene.path("draft/model.safetensors")).unwrap();
        assert!(scene.refused(&[], 5).contains("model.safetensors"));
        let scene = Scene::new();
        fs::remove_file(scene.path("target/chat_template.jinja")).unwrap();
        assert!(scene.refused(&[], 5).contains("chat template"));
        assert!(scene.refused(&["--device", "tpu"], 2).contains("`tpu`"));
    }
}
