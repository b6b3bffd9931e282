//! Properties of the machine and the process that measure, and the error style of the bench.

use serde_json::{Value, json};
use std::{fmt::Display, fs};

/// Result with a sentence as its error. The bench stops at the first failure.
pub type Outcome<T> = Result<T, String>;

/// `result.failed("open the ledger")?`
pub trait Failed<T> {
    fn failed(self, what: &str) -> Outcome<T>;
}

impl<T, E: Display> Failed<T> for Result<T, E> {
    fn failed(self, what: &str) -> Outcome<T> {
        self.map_err(|error| format!("could not {what}: {error}"))
    }
}

/// Describes the machine: available cores, name of the CPU, and load.
pub fn describe() -> Value {
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let cpu = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    json!({
        "cores": cores,
        "cpu": cpu.map_or("unknown", |(_, name)| name.trim()),
        "load_before": load.split(' ').next().and_then(|n| n.parse::<f64>().ok()),
    })
}

/// Returns the peak resident memory of this process in bytes, or `None` without /proc.
pub fn peak_rss() -> Option<u64> {
    status("VmHWM:")
}

/// Returns a value of /proc/self/status in bytes.
pub fn status(name: &str) -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
}

/// Returns the CPU time of this thread in seconds, or `None` without /proc. It excludes the time of other processes.
pub fn cpu_seconds() -> Option<f64> {
    let stat = fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    stat.split(' ').next()?.parse::<f64>().ok().map(|ns| ns / 1e9)
}

/// Returns the median, or the lower of the two middle values of an even number.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len().saturating_sub(1) / 2).copied().unwrap_or(f64::NAN)
}
