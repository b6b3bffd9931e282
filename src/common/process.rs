//! Resource usage of the process and load of the runtime, sampled into metrics every 5 s.

use super::{gpu_memory::Memory, host::memory_limit};
use draftmill_actors::runtime::metrics as m;
use metrics::{Gauge, counter, gauge};
use std::{fs, io, path::Path, time::Duration};
use tokio::{
    runtime::{Handle, RuntimeMetrics},
    time::{Instant, interval},
};

/// Sampling interval, which the help of [`m::RUNTIME_BUSY`] quotes.
const INTERVAL: Duration = Duration::from_secs(5);

/// Samples until the returned future is dropped. The first sample of the process is taken before the function returns, the
/// first one of `gpus` at the future's first poll.
pub fn watch(gpus: Vec<String>) -> impl Future<Output = ()> + Send {
    let mut sampler = Sampler::new();
    async move {
        let mut ticks = interval(INTERVAL);
        let mut first = true;
        loop {
            ticks.tick().await;
            // The first tick is immediate, and `new` has just sampled.
            if !std::mem::take(&mut first) {
                sampler.sample();
            }
            sample_gpus(&gpus).await;
        }
    }
}

/// Samples GPU memory on a blocking thread, because a busy driver answers late.
async fn sample_gpus(gpus: &[String]) {
    if gpus.is_empty() {
        return;
    }
    let gpus = gpus.to_vec();
    let sampled = tokio::task::spawn_blocking(move || {
        for gpu in &gpus {
            if let Some(memory) = Memory::of(gpu) {
                memory.publish(gpu);
            }
        }
    });
    if let Err(error) = sampled.await {
        tracing::warn!(%error, "GPU memory not sampled");
    }
}

/// Number of open file descriptors of this process, and their limit.
///
/// # Errors
/// A `/proc` that is not mounted or not as proc(5) describes it.
pub fn open_files() -> io::Result<(u64, u64)> {
    Usage::of_this_process().map(|usage| (usage.open_files, usage.max_files))
}

struct Sampler {
    runtime: RuntimeMetrics,
    busy_ratio: Gauge,
    tasks: Gauge,
    busy: Duration,
    at: Instant,
    /// A failed sample was logged; later ones are not.
    warned: bool,
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
            warned: false,
            runtime,
        };
        sampler.sample();
        sampler
    }

    fn sample(&mut self) {
        let (busy, now) = (busy(&self.runtime), Instant::now());
        let available = (now - self.at).as_secs_f64() * self.runtime.num_workers() as f64;
        if available > 0.0 {
            self.busy_ratio.set((busy.saturating_sub(self.busy).as_secs_f64() / available).min(1.0));
        }
        (self.busy, self.at) = (busy, now);
        self.tasks.set(self.runtime.num_alive_tasks() as f64);
        match Usage::of_this_process() {
            Ok(usage) => usage.publish(),
            Err(error) if !self.warned => {
                self.warned = true;
                tracing::warn!(%error, "/proc unreadable; the process_ metrics are not updated");
            }
            Err(_) => {}
        }
    }
}

fn busy(runtime: &RuntimeMetrics) -> Duration {
    (0..runtime.num_workers()).map(|worker| runtime.worker_total_busy_duration(worker)).sum()
}

/// Resource usage of a process, from Linux's `/proc`.
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
        // One descriptor is that of the folder itself.
        Usage::parse(&stat, &status, &limits, &machine, ticks_per_second(), files.saturating_sub(1))
            .ok_or_else(|| io::Error::other("unexpected format, see proc(5)"))
    }

    /// Parses `stat`, `status` and `limits` of a process, and `/proc/stat`.
    fn parse(stat: &str, status: &str, limits: &str, machine: &str, ticks: f64, open_files: u64) -> Option<Usage> {
        // The program name is in brackets and may contain spaces and brackets. The field after it is number 3.
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

/// Value of a line such as `VmRSS:  1024 kB`, in bytes.
fn kib_of(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

fn ticks_per_second() -> f64 {
    // SAFETY: sysconf takes an integer and accesses no memory of this program.
    let ticks = unsafe { libc::sysconf(libc::_SC_CLK_TCK) };
    if ticks > 0 { ticks as f64 } else { 100.0 }
}

/// Ignores SIGXFSZ, so that a write beyond the limit of file sizes fails with a sentence.
pub fn ignore_file_size_signal() {
    // SAFETY: the disposition is a constant, and no handler runs.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

/// Blocks or unblocks SIGINT and SIGTERM for this thread and the threads that it starts. A blocked signal waits.
pub fn hold_stop_signals(hold: bool) {
    let how = if hold { libc::SIG_BLOCK } else { libc::SIG_UNBLOCK };
    // SAFETY: a zeroed set is a valid value for `sigemptyset` to overwrite, and all pointers outlive the calls.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, libc::SIGINT);
        libc::sigaddset(&raw mut set, libc::SIGTERM);
        libc::pthread_sigmask(how, &raw const set, std::ptr::null_mut());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proc_files_are_parsed_as_in_proc_5() {
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
    fn usage_of_this_process_is_plausible() {
        let usage = Usage::of_this_process().unwrap();
        assert!(usage.resident_bytes > 1 << 20 && usage.virtual_bytes > usage.resident_bytes, "{usage:?}");
        assert!(usage.threads >= 1 && usage.open_files >= 3 && usage.open_files < usage.max_files, "{usage:?}");
        assert!(usage.started > 1.6e9 && usage.started <= crate::common::clock::now(), "{usage:?}");
        assert!(memory_limit().unwrap() > usage.resident_bytes);
    }

    #[tokio::test]
    async fn live_tasks_are_counted() {
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
        assert!(!sampler.warned);
    }
}
