//! Command line: texts of the binary, exit codes, and the split between stdout and stderr.

use draftmill::{
    check::{Machine, Samples, Stored, examine},
    common::{
        exit::{EXITS, Exit},
        gpu_memory::Memory,
    },
    config,
};
use serde_json::{Value, json};
use std::{
    path::Path,
    process::{Command, Output},
};

/// Runs the binary in an empty folder.
fn draftmill(arguments: &[&str]) -> (i32, String, String) {
    let folder = tempfile::tempdir().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_draftmill")).args(arguments).current_dir(&folder).output().unwrap();
    let Output { status, stdout, stderr } = output;
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (status.code().unwrap(), text(stdout), text(stderr))
}

/// Folder with a complete target: the tiny Qwen3 of the golden data and a tokenizer without a token for row 319.
fn target(folder: &Path) {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/target_qwen3");
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(golden.join(name), folder.join(name)).unwrap();
    }
    let vocab: serde_json::Map<_, _> = (0..319).map(|id| (format!("t{id}"), json!(id))).collect();
    std::fs::write(folder.join("tokenizer.json"), json!({"model": {"vocab": vocab}}).to_string()).unwrap();
}

const LARGE: Machine = Machine {
    torch: true,
    cuda_devices: 0,
    gpus: std::collections::BTreeMap::new(),
    cores: 2,
    memory: Some(1 << 40),
    free_disk: Some(1 << 40),
    check_port: true,
};

fn set(values: &[String]) -> config::Loaded {
    let fixed = ["admin.listen=off", "drafter.layers=2", "data.min_supervised=1"].map(String::from);
    config::load(None, &[&fixed, values].concat()).unwrap()
}

#[test]
fn help_names_every_command_and_exit_code() {
    let (code, help, errors) = draftmill(&["--help"]);
    assert_eq!((code, errors.as_str()), (0, ""));
    for command in
        ["import", "generate", "prepare", "check", "doctor", "simulate", "train", "runs", "ledger", "export", "eval"]
    {
        assert!(help.contains(&format!("  {command} ")), "{help}");
        let (code, help, _) = draftmill(&[command, "--help"]);
        assert_eq!(code, 0);
        assert!(help.contains("Example"), "draftmill {command} --help has no example:\n{help}");
    }
    for (exit, meaning) in EXITS {
        // Long lines are wrapped, so only the beginning is compared.
        assert!(help.contains(&format!("{:>5}  {}", exit.code(), &meaning[..4])), "{exit:?} is not in\n{help}");
    }
}

#[test]
fn a_wrong_command_line_ends_with_its_own_code() {
    for wrong in [&["chek"][..], &["check", "--nothing"], &["train", "--force"], &[]] {
        let (code, out, errors) = draftmill(wrong);
        assert_eq!(code, i32::from(Exit::Usage.code()), "{wrong:?}");
        assert!(out.is_empty() && !errors.is_empty(), "{wrong:?}");
    }
}

#[test]
fn a_bad_configuration_tells_all_problems_whatever_the_command() {
    let sets = ["--set", "pool.min_redy=3", "--set", "run.epochs=0", "--set", "optimizer.beta1=high"];
    for command in ["check", "prepare", "simulate", "train"] {
        let (code, out, errors) = draftmill(&[&[command], &sets[..]].concat());
        assert_eq!((code, out.as_str()), (i32::from(Exit::Config.code()), ""), "{command}");
        for part in [
            "--set: pool.min_redy = 3: there is no such key; did you mean pool.min_ready?",
            "--set: run.epochs = 0: must be at least 1",
            "--set: optimizer.beta1 = \"high\": invalid type",
        ] {
            assert!(errors.contains(part), "{part}\n is not in\n{errors}");
        }
    }
}

#[test]
fn a_configuration_that_is_not_there_is_named() {
    let (code, _, errors) = draftmill(&["check", "--config", "nowhere.toml"]);
    assert_eq!(code, i32::from(Exit::Config.code()));
    assert!(errors.contains("nowhere.toml: the configuration cannot be read"), "{errors}");
}

#[test]
fn check_gives_json_with_file_key_value_and_remedy() {
    let (code, out, _) = draftmill(&["check", "--json", "--set", "run.epochs=0"]);
    assert_eq!(code, i32::from(Exit::Config.code()));
    let report: Value = serde_json::from_str(&out).unwrap();
    let problem = &report["problems"][0];
    assert_eq!((&problem["file"], &problem["key"]), (&json!("--set"), &json!("run.epochs")));
    assert_eq!(problem["value"], json!("0"));
    assert!(!problem["remedy"].as_str().unwrap().is_empty());
    assert_eq!(report["plan"], Value::Null);
}

#[test]
fn check_judges_target_inputs_and_pool_in_one_go() {
    let sets = ["target.dir=nowhere", "data.inputs=[\"gone.jsonl\"]", "target.devices=[\"cuda:3\"]"].map(String::from);
    let report = examine(&set(&sets), &LARGE, &Stored::Absent);
    let keys: Vec<_> = report.problems.iter().map(|problem| problem.key.as_str()).collect();
    assert_eq!(keys, ["target.devices", "target.dir", "data.inputs"]);
    assert_eq!(report.exit(), Exit::Config);
}

#[test]
fn check_tells_what_a_run_would_do() {
    let folder = tempfile::tempdir().unwrap();
    target(folder.path());
    let stored = Stored::Ready(Samples { lengths: vec![10, 20, 30, 40], validation: 3 });
    let report = examine(&set(&[format!("target.dir={}", folder.path().display())]), &LARGE, &stored);
    assert_eq!(report.problems, [], "{:?}", report.problems);
    let plan = report.plan.as_ref().unwrap();
    // The formula gives two taps of 8 layers; 48 values each in f32, an id and a mask.
    assert_eq!(plan.bytes_per_token, 2 * 48 * 4 + 5);
    assert_eq!(report.mask_token.as_ref().unwrap().id, 319);
    let table = report.table();
    for part in ["4 for training, 3 held out", "389 bytes per token", "319, the first embedding row", "cpu "] {
        assert!(table.contains(part), "{part}\n is not in\n{table}");
    }
}

#[test]
fn check_finds_a_damaged_target_and_says_which_tensor() {
    let folder = tempfile::tempdir().unwrap();
    target(folder.path());
    let path = folder.path().join("config.json");
    let mut settings: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    settings["num_hidden_layers"] = json!(9);
    std::fs::write(&path, settings.to_string()).unwrap();
    std::fs::remove_file(folder.path().join("tokenizer.json")).unwrap();
    let sets = [format!("target.dir={}", folder.path().display()), "data.inputs=[\"gone\"]".into()];
    let report = examine(&set(&sets), &LARGE, &Stored::Absent);
    let all = config::Problems(report.problems.clone()).to_string();
    assert!(all.contains("`model.layers.8.mlp.down_proj.weight`") && all.contains("tokenizer.json"), "{all}");
    assert!(all.contains("data.inputs"), "{all}");
    assert_eq!(report.exit(), Exit::Model);
}

#[test]
fn check_refuses_a_pool_that_would_block_and_a_full_disk() {
    let folder = tempfile::tempdir().unwrap();
    target(folder.path());
    let stored = Stored::Ready(Samples { lengths: vec![3000; 40], validation: 0 });
    let sets = [format!("target.dir={}", folder.path().display()), "pool.max_bytes=20 MB".into()];
    let full = Machine { free_disk: Some(1000), ..LARGE };
    let report = examine(&set(&sets), &full, &stored);
    let keys: Vec<_> = report.problems.iter().map(|problem| problem.key.as_str()).collect();
    assert_eq!(keys, ["pool.max_bytes", "run.dir"]);
    assert!(report.problems[0].message.contains("4 x 5835020 B"), "{}", report.problems[0]);
    assert!(report.plan.is_some(), "the forecast is reported in spite of problems");
}

#[test]
fn check_refuses_a_gpu_without_enough_memory() {
    let folder = tempfile::tempdir().unwrap();
    target(folder.path());
    let stored = Stored::Ready(Samples { lengths: vec![10, 20, 30, 40], validation: 0 });
    let sets = [format!("target.dir={}", folder.path().display()), "target.devices=cuda:0".into()];
    let gpu = |free, total| {
        let memory = Memory { free, total, ..Memory::default() };
        let machine = Machine { cuda_devices: 1, gpus: [("cuda:0".into(), memory)].into(), ..LARGE };
        let report = examine(&set(&sets), &machine, &stored);
        let keys = |all: Vec<config::Problem>| all.into_iter().map(|problem| problem.key).collect::<Vec<_>>();
        (report.exit(), keys(report.problems), keys(report.notes))
    };
    assert_eq!(gpu(1000, 1000), (Exit::Config, vec!["target.devices".into()], vec![]));
    assert_eq!(gpu(1000, 1 << 30), (Exit::Done, vec![], vec!["target.devices".into()]));
    assert_eq!(gpu(1 << 30, 1 << 30), (Exit::Done, vec![], vec![]));
}

#[test]
fn check_names_a_store_that_does_not_fit_the_configuration() {
    let broken = Stored::Broken("it is no store".into());
    let too_long = Stored::Ready(Samples { lengths: vec![5000], validation: 0 });
    for (stored, part) in [(broken, "it is no store"), (too_long, "5000 tokens")] {
        let report = examine(&set(&["run.engine=simulated".into()]), &LARGE, &stored);
        assert_eq!(report.exit(), Exit::Data);
        let all = config::Problems(report.problems).to_string();
        assert!(all.contains("data.store") && all.contains(part), "{all}");
    }
}

#[test]
fn doctor_describes_the_machine_and_has_its_own_exit_code() {
    let (code, table, said) = draftmill(&["doctor"]);
    assert_eq!(code, 0, "{table}{said}");
    for part in ["libtorch", "threads", "memory", "open files", "run folder"] {
        assert!(table.lines().any(|line| line.starts_with(part)), "{part} is not in\n{table}");
    }
    assert!(said.contains("all checks passed"), "{said}");
    let (code, out, said) =
        draftmill(&["doctor", "--json", "--set", "run.dir=/proc/nowhere/run", "--set", "admin.listen=off"]);
    assert_eq!(code, i32::from(Exit::Machine.code()), "{out}{said}");
    let report: Value = serde_json::from_str(&out).unwrap();
    let findings = report["findings"].as_array().unwrap();
    let folder = findings.iter().find(|finding| finding["part"] == "run folder").unwrap();
    assert_eq!(folder["state"], "failed");
    assert!(folder["found"].as_str().unwrap().contains("/proc"), "{folder}");
    assert!(folder["remedy"].as_str().unwrap().contains("run.dir"), "{folder}");
    assert!(said.contains("checks failed, see above"), "{said}");
}

/// A machine without a GPU and a build without libtorch are reported and are no failure.
#[test]
fn doctor_says_which_devices_there_are() {
    let (_, table, _) = draftmill(&["doctor"]);
    let line = |part: &str| table.lines().find(|line| line.starts_with(part)).unwrap_or_default();
    if cfg!(not(feature = "torch")) {
        assert!(line("libtorch").contains("  warning  this draftmill was built without libtorch"), "{table}");
    } else if line("cuda:0 ").is_empty() {
        assert!(line("devices").contains("no CUDA device; targets and drafters run on the CPU"), "{table}");
        assert!(line("cpu").ends_with("ok       arithmetic is correct"), "{table}");
    }
}

/// One bad value must not hide other errors.
#[test]
fn check_looks_on_behind_bad_values() {
    let sets = ["optimizer.learning_rate=-1", "target.dir=nope", "data.inputs=nope.jsonl", "run.epochs=two"];
    let arguments: Vec<_> = ["check"].into_iter().chain(sets.iter().flat_map(|set| ["--set", set])).collect();
    let (code, _, errors) = draftmill(&arguments);
    assert_eq!(code, i32::from(Exit::Config.code()));
    for key in ["optimizer.learning_rate", "target.dir", "data.inputs", "run.epochs"] {
        assert_eq!(errors.matches(&format!("--set: {key} = ")).count(), 1, "{key}: {errors}");
    }
    assert!(errors.contains("expected a whole number"), "{errors}");
}
