//! What a measurement needs to know of its machine and process, and the error style of the bench.

use serde_json::{Value, json};
use std::{fmt::Display, fs};

/// The bench stops at the first thing that goes wrong, with a sentence.
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

/// Cores that this process may use, and the CPU's name from /proc/cpuinfo.
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

/// Most memory that this process ever had resident, in bytes; `None` where /proc does not tell.
pub fn peak_rss() -> Option<u64> {
    status("VmHWM:")
}

/// A figure of /proc/self/status, in bytes.
pub fn status(name: &str) -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
}

/// Seconds that this thread has run on a core; `None` where /proc does not tell. Unlike wall time it does not count what others took.
pub fn cpu_seconds() -> Option<f64> {
    let stat = fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    stat.split(' ').next()?.parse::<f64>().ok().map(|ns| ns / 1e9)
}

/// The middle of several measurements; of an even number, the lower one of the two.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len().saturating_sub(1) / 2).copied().unwrap_or(f64::NAN)
}
