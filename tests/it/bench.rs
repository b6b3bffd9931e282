//! The Python pipeline of `benches/`, which `make bench` compares with, runs and trains each job exactly once.

use std::{path::Path, process::Command};

fn pipeline(options: &[&str]) -> serde_json::Value {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/pipeline.py");
    let output = Command::new("python3").arg(script).args(["--jobs", "200"]).args(options).output().unwrap();
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{options:?}: {} {complaint}", String::from_utf8_lossy(&output.stdout));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn the_python_pipeline_trains_each_job_once() {
    for options in [
        &[][..],
        &["--leave-interpreter"],
        &["--targets", "1", "--drafters", "1", "--accumulation", "1"],
        &["--targets", "8", "--drafters", "7", "--accumulation", "3", "--max-batches", "2", "--min-ready", "2"],
    ] {
        let report = pipeline(options);
        assert_eq!(report["each_job_trained_once"], true, "{options:?}: {report}");
        let (jobs, steps) = (report["jobs"].as_u64().unwrap(), report["steps"].as_u64().unwrap());
        assert!((100..400).contains(&jobs), "{options:?}: {report}");
        // Every step except the last is full (T1).
        let option = |name, default| {
            let at = options.iter().position(|option| *option == name);
            at.map_or(default, |at| options[at + 1].parse::<u64>().unwrap())
        };
        let micro_batches = option("--drafters", 3) * option("--accumulation", 4);
        assert_eq!(steps, jobs.div_ceil(micro_batches), "{options:?}: {report}");
    }
}

/// Runs `benches/gpu.sh` with a libtorch of these files and a program that prints its arguments.
fn gpu(program: Option<&str>, version: &str, variables: &[(&str, &str)]) -> (bool, String) {
    let folder = tempfile::tempdir().unwrap();
    let place = |name: &str| folder.path().join(name);
    std::fs::create_dir(place("lib")).unwrap();
    std::fs::write(place("lib/libtorch_cpu.so"), "").unwrap();
    std::fs::write(place("version.py"), format!("__version__ = '{version}'\n")).unwrap();
    std::fs::write(place("program"), "#!/bin/sh\necho \"$@\"\necho \"libraries $LD_LIBRARY_PATH\"\n").unwrap();
    std::fs::set_permissions(place("program"), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/gpu.sh");
    let mut command = Command::new(script);
    command.env_clear().env("PATH", "/usr/bin:/bin").env("LIBTORCH", folder.path()).envs(variables.iter().copied());
    let output = command.args(program.map(place)).output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8(text).unwrap().replace(folder.path().to_str().unwrap(), "DIR"))
}

#[test]
fn gpu_script_runs_the_program_or_reports_what_is_missing() {
    let (done, text) = gpu(Some("program"), "2.11.0+cu130", &[("SIZE", "qwen3-8b"), ("OUT", "here")]);
    assert!(done && text.starts_with("--gpu --device cuda:0 --date 20"), "{text}");
    assert!(text.contains(" --out here --size qwen3-8b\nlibraries DIR/lib\n"), "{text}");
    let (done, text) = gpu(Some("program"), "2.11.0", &[("DEVICE", "cpu"), ("LD_LIBRARY_PATH", "/more")]);
    assert!(done && text.contains("--device cpu ") && !text.contains("--size"), "{text}");
    assert!(text.contains("libraries DIR/lib:/more\n"), "{text}");

    let (done, text) = gpu(Some("absent"), "2.11.0", &[]);
    assert!(!done && text.contains("DIR/absent is no program; build one"), "{text}");
    let (done, text) = gpu(Some("program"), "2.12.0", &[]);
    assert!(!done && text.contains("DIR is another version than 2.11"), "{text}");
    let (done, text) = gpu(Some("program"), "2.11.0", &[("LIBTORCH", "/nowhere")]);
    assert!(!done && text.contains("libtorch 2.11.0 is not at '/nowhere'"), "{text}");
}
