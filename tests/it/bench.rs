//! The Python pipeline of `bench/` still runs, and trains each job exactly once: what `make bench` compares with must not rot.

use std::{path::Path, process::Command};

fn pipeline(options: &[&str]) -> serde_json::Value {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("bench/pipeline.py");
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
        // Every step is full but the last: the protocol's T1.
        let option = |name, default| {
            let at = options.iter().position(|option| *option == name);
            at.map_or(default, |at| options[at + 1].parse::<u64>().unwrap())
        };
        let micro_batches = option("--drafters", 3) * option("--accumulation", 4);
        assert_eq!(steps, jobs.div_ceil(micro_batches), "{options:?}: {report}");
    }
}
