//! What the process takes of the machine, and how busy the runtime is: sampled every few seconds into metrics.

use super::{gpu_memory::Memory, host::memory_limit};
use draftmill_actors::runtime::metrics as m;
use metrics::{Gauge, counter, gauge};
use std::{fs, io, path::Path, time::Duration};
use tokio::{
    runtime::{Handle, RuntimeMetrics},
    time::{Instant, interval},
};

/// Time between samples. [`m::RUNTIME_BUSY`] names it.
const EVERY: Duration = Duration::from_secs(5);

/// Samples until it is dropped; the first sample is taken before it returns. Of the GPUs the first one comes at once after that.
pub fn watch(gpus: Vec<String>) -> impl Future<Output = ()> + Send {
    let mut sampler = Sampler::new();
    async move {
        let mut ticks = interval(EVERY);
        let mut first = true;
        loop {
            ticks.tick().await;
            // Otherwise the first tick would be a second sample.
            if !std::mem::take(&mut first) {
                sampler.sample();
            }
            sample(&gpus).await;
        }
    }
}

/// A driver that is busy answers late, so it is asked on a thread of its own.
async fn sample(gpus: &[String]) {
    if gpus.is_empty() {
        return;
    }
    let gpus = gpus.to_vec();
    let asked = tokio::task::spawn_blocking(move || {
        for gpu in &gpus {
            if let Some(memory) = Memory::of(gpu) {
                memory.publish(gpu);
            }
        }
    });
    if let Err(error) = asked.await {
        tracing::warn!(%error, "GPUs could not be asked for their memory");
    }
}

/// Files, sockets and the like that this process has open, and how many it may.
pub fn open_files() -> io::Result<(u64, u64)> {
    Usage::of_this_process().map(|usage| (usage.open_files, usage.max_files))
}

struct Sampler {
    runtime: RuntimeMetrics,
    busy_ratio: Gauge,
    tasks: Gauge,
    busy: Duration,
    at: Instant,
    /// The machine does not tell; said once.
    silent: bool,
}

impl Sampler {
    fn new() -> Self {
        let runtime = Handle::current().metrics();
        gauge!(m::RUNTIME_WORKERS).set(runtime.num_workers() as f64);
        gauge!(m::MEMORY_LIMIT).set(memory_limit().unwrap_or(0) as f64);
        let mut sampler = Sampler {
            busy_ratio: gauge!(m::RUNTIME_BUSY),
            tasks: gauge!(m::RUNTIME_TASKS),
            busy: busy(&runtime),
            at: Instant::now(),
            silent: false,
            runtime,
        };
        sampler.sample();
        sampler
    }

    fn sample(&mut self) {
        let (busy, now) = (busy(&self.runtime), Instant::now());
        let whole = (now - self.at).as_secs_f64() * self.runtime.num_workers() as f64;
        if whole > 0.0 {
            self.busy_ratio.set((busy.saturating_sub(self.busy).as_secs_f64() / whole).min(1.0));
        }
        (self.busy, self.at) = (busy, now);
        self.tasks.set(self.runtime.num_alive_tasks() as f64);
        match Usage::of_this_process() {
            Ok(usage) => usage.publish(),
            Err(error) if !self.silent => {
                self.silent = true;
                tracing::warn!(%error, "/proc does not tell what this process takes; the process_ metrics stay as they are");
            }
            Err(_) => {}
        }
    }
}

fn busy(runtime: &RuntimeMetrics) -> Duration {
    (0..runtime.num_workers()).map(|worker| runtime.worker_total_busy_duration(worker)).sum()
}

/// What a process takes, as Linux tells it.
#[derive(Debug, PartialEq)]
struct Usage {
    resident_bytes: u64,
    virtual_bytes: u64,
    cpu_seconds: f64,
    threads: u64,
    open_files: u64,
    max_files: u64,
    /// Seconds since 1970.
    started: f64,
}

impl Usage {
    fn of_this_process() -> io::Result<Usage> {
        let process = Path::new("/proc/self");
        let files = fs::read_dir(process.join("fd"))?.count() as u64;
        let read = |name| fs::read_to_string(process.join(name));
        let (stat, status, limits) = (read("stat")?, read("status")?, read("limits")?);
        let machine = fs::read_to_string("/proc/stat")?;
        // One of them is the folder that was just read.
        Usage::parse(&stat, &status, &limits, &machine, ticks_per_second(), files.saturating_sub(1))
            .ok_or_else(|| io::Error::other("its files are not as proc(5) describes them"))
    }

    /// `stat`, `status` and `limits` of a process, and `/proc/stat`.
    fn parse(stat: &str, status: &str, limits: &str, machine: &str, ticks: f64, open_files: u64) -> Option<Usage> {
        // The name of the program is in brackets, and may have spaces and brackets itself. The field after it is the third.
        let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
        let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
        let limit = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?.split_whitespace().next()?;
        let booted: f64 = machine.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()?;
        Some(Usage {
            resident_bytes: kib_of(status, "VmRSS:")?,
            virtual_bytes: field(23)?,
            cpu_seconds: (field(14)? + field(15)?) as f64 / ticks,
            threads: field(20)?,
            open_files,
            max_files: limit.parse().unwrap_or(u64::MAX),
            started: booted + field(22)? as f64 / ticks,
        })
    }

    fn publish(&self) {
        gauge!(m::PROCESS_MEMORY).set(self.resident_bytes as f64);
        gauge!(m::PROCESS_VIRTUAL_MEMORY).set(self.virtual_bytes as f64);
        counter!(m::PROCESS_CPU_SECONDS).absolute(self.cpu_seconds as u64);
        gauge!(m::PROCESS_THREADS).set(self.threads as f64);
        gauge!(m::PROCESS_OPEN_FDS).set(self.open_files as f64);
        gauge!(m::PROCESS_MAX_FDS).set(self.max_files as f64);
        gauge!(m::PROCESS_START_TIME).set(self.started);
    }
}

/// Of a line such as `VmRSS:  1024 kB`, in bytes.
fn kib_of(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

fn ticks_per_second() -> f64 {
    // SAFETY: sysconf takes a number and touches no memory of ours.
    let ticks = unsafe { libc::sysconf(libc::_SC_CLK_TCK) };
    if ticks > 0 { ticks as f64 } else { 100.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proc_is_read_as_its_manual_says() {
        let stat = "77 (a (b) c) S 1 77 77 0 -1 4194560 100 0 0 0 250 130 0 0 20 0 9 0 5000 123456789 42 1844 1 1 0";
        let status = "Name:\ta (b) c\nVmRSS:\t    1024 kB\nThreads:\t9\n";
        let limits = "Limit                     Soft Limit           Hard Limit           Units\n\
                      Max open files            1024                 524288               files\n";
        let machine = "cpu 1 2 3\nbtime 1700000000\n";
        let usage = Usage::parse(stat, status, limits, machine, 100.0, 12).unwrap();
        assert_eq!(
            usage,
            Usage {
                resident_bytes: 1 << 20,
                virtual_bytes: 123_456_789,
                cpu_seconds: 3.8,
                threads: 9,
                open_files: 12,
                max_files: 1024,
                started: 1_700_000_050.0,
            }
        );
        assert_eq!(Usage::parse("77 (a) S 1", status, limits, machine, 100.0, 12), None);
    }

    #[test]
    fn this_process_has_memory_threads_files_and_began_before_now() {
        let usage = Usage::of_this_process().unwrap();
        assert!(usage.resident_bytes > 1 << 20 && usage.virtual_bytes > usage.resident_bytes, "{usage:?}");
        assert!(usage.threads >= 1 && usage.open_files >= 3 && usage.open_files < usage.max_files, "{usage:?}");
        assert!(usage.started > 1.6e9 && usage.started <= crate::common::clock::now(), "{usage:?}");
        assert!(memory_limit().unwrap() > usage.resident_bytes);
    }

    /// Four actors' worth of tasks, one of which burns half of the time.
    #[tokio::test]
    async fn tasks_are_counted_while_they_live() {
        let mut sampler = Sampler::new();
        let before = sampler.runtime.num_alive_tasks();
        let tasks: Vec<_> = (0..4).map(|_| tokio::spawn(std::future::pending::<()>())).collect();
        assert_eq!(sampler.runtime.num_alive_tasks(), before + 4);
        tasks.iter().for_each(|task| task.abort());
        for task in tasks {
            assert!(task.await.unwrap_err().is_cancelled());
        }
        assert_eq!(sampler.runtime.num_alive_tasks(), before);
        sampler.sample();
        assert!(!sampler.silent);
    }
}
