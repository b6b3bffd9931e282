//! Efficiency in the simulator: the actors in virtual time, on the node of `configs/sim-8gpu.toml` and on a large one.

use crate::machine::{Failed, Outcome, cpu_seconds, peak_rss};
use draftmill::{
    config,
    simulate::{Policy, Report, Scenario, run},
};
use serde::{Deserialize, Serialize};
use std::{path::Path, process::Command};

/// Jobs of the large node's runs.
pub const SIZES: [u32; 3] = [1_000, 10_000, 200_000];

fn node() -> Outcome<Scenario> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/sim-8gpu.toml");
    Ok(Scenario::new(config::load(Some(&file), &[]).failed("load configs/sim-8gpu.toml")?))
}

fn report(scenario: &Scenario) -> Outcome<Report> {
    run(scenario).failed("simulate")
}

/// Runs the unchanged node under a policy.
pub fn policy(policy: Policy) -> Outcome<Report> {
    report(&node()?.policy(policy))
}

/// Runs the node with its first target at half speed, relative to its new bound.
pub fn slow_target(policy: Policy) -> Outcome<Report> {
    report(&node()?.policy(policy).target_speed(0, 0.5))
}

/// Cost of one run of the large node.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Scale {
    pub jobs: u64,
    pub efficiency: f64,
    pub wall_seconds: f64,
    /// CPU time.
    pub cpu_seconds: f64,
    /// Peak resident memory before the run and in total.
    pub rss_before: u64,
    pub rss_peak: u64,
}

/// Runs 64 targets and 32 drafters in a separate process, so that the memory peak is that of this run.
pub fn scale_in_child(jobs: u32) -> Outcome<Scale> {
    let program = std::env::current_exe().failed("find the bench")?;
    let output = Command::new(program).args(["--scale", &jobs.to_string()]).output().failed("start a process")?;
    if !output.status.success() {
        return Err(format!("the run of {jobs} jobs failed: {}", String::from_utf8_lossy(&output.stderr)));
    }
    serde_json::from_slice(&output.stdout).failed("read the run's figures")
}

/// Runs in the child process.
pub fn scale(jobs: u32) -> Outcome<Scale> {
    let mut scenario = node()?.targets(64).drafters(32).jobs(jobs);
    // The pool of the small node, scaled to the larger numbers of targets and drafters.
    let pool = &mut scenario.loaded.config.pool;
    pool.max_bytes.0 *= 12;
    (pool.max_batches, pool.min_ready) = (pool.max_batches * 12, pool.min_ready * 2);
    // As balanced as the small node: 64 to 32 instead of 5 to 3.
    let balance = (32.0 / 64.0) / (3.0 / 5.0);
    let micro_batch = &mut scenario.loaded.config.simulate.micro_batch;
    micro_batch.0 = micro_batch.0.mul_f64(balance);
    let before = peak_rss().unwrap_or(0);
    let began = cpu_seconds().unwrap_or(0.0);
    let report = report(&scenario)?;
    Ok(Scale {
        jobs: report.jobs.trained,
        efficiency: report.efficiency,
        wall_seconds: report.wall_seconds,
        cpu_seconds: cpu_seconds().unwrap_or(0.0) - began,
        rss_before: before,
        rss_peak: peak_rss().unwrap_or(0),
    })
}
