//! Timing of single units of work, and the command-line options of the modes that use it.

use crate::machine::{Failed, Outcome, median, peak_rss, status};
use draftmill::model::libtorch::{init_libtorch, open_device};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use tch::{Cuda, Device, Kind};
use tokio::time::Instant;

/// Options of the form `--name value`, each taken once.
pub struct Options<'a>(BTreeMap<&'a str, &'a str>);

impl<'a> Options<'a> {
    pub fn read(arguments: &[&'a str]) -> Outcome<Options<'a>> {
        let pair = |pair: &[&'a str]| match pair {
            [name, value] if name.starts_with("--") => Ok((&name[2..], *value)),
            _ => Err(format!("{pair:?} is not an option with a value, such as --rows 2")),
        };
        arguments.chunks(2).map(pair).collect::<Outcome<_>>().map(Options)
    }

    pub fn text(&mut self, name: &str) -> Outcome<&'a str> {
        self.0.remove(name).ok_or_else(|| format!("--{name} is missing"))
    }

    pub fn word(&mut self, name: &str, default: &'a str) -> &'a str {
        self.0.remove(name).unwrap_or(default)
    }

    pub fn number(&mut self, name: &str, default: usize) -> Outcome<usize> {
        self.0.remove(name).map_or(Ok(default), |text| text.parse().failed(&format!("read --{name}")))
    }

    /// Device of `--device cpu` or `--device cuda:0`. Loads libtorch's GPU library.
    pub fn device(&mut self) -> Outcome<Device> {
        init_libtorch().failed("open libtorch")?;
        open_device(self.word("device", "cpu").parse()?).failed("read --device")
    }

    /// Dtype of `--dtype f32` or `--dtype bf16`.
    pub fn kind(&mut self) -> Outcome<Kind> {
        match self.word("dtype", "f32") {
            "f32" => Ok(Kind::Float),
            "bf16" => Ok(Kind::BFloat16),
            other => Err(format!("--dtype is f32 or bf16, not {other}")),
        }
    }

    /// Fails if an option is unknown.
    pub fn done(self) -> Outcome<()> {
        self.0.keys().next().map_or(Ok(()), |name| Err(format!("there is no option --{name}")))
    }
}

/// Units of work on a device, each timed until the device has finished. The first is a warm-up and does not count.
pub struct Sampled {
    device: Device,
    resident: Option<u64>,
    warm: bool,
    seconds: Vec<f64>,
    cpu: Vec<f64>,
}

impl Sampled {
    pub fn begin(device: Device) -> Outcome<Sampled> {
        let resident = match memory(device)? {
            Some(memory) => Some(memory.allocated),
            None => status("VmRSS:"),
        };
        Ok(Sampled { device, resident, warm: false, seconds: Vec::new(), cpu: Vec::new() })
    }

    pub fn step(&mut self, work: impl FnOnce() -> Outcome<()>) -> Outcome<()> {
        let (born, began) = (Instant::now(), process_cpu_seconds());
        work()?;
        wait_for(self.device);
        if std::mem::replace(&mut self.warm, true) {
            self.seconds.push(born.elapsed().as_secs_f64());
            self.cpu.push(process_cpu_seconds() - began);
        }
        Ok(())
    }

    /// Medians, all times, and the rise of the memory peak above the start in bytes: of the process, or of the tensors on a
    /// GPU.
    pub fn json(self) -> Outcome<Value> {
        let memory = memory(self.device)?;
        let peak = memory.map_or_else(peak_rss, |memory| Some(memory.peak));
        let over = peak.zip(self.resident).map(|(peak, resident)| peak.saturating_sub(resident));
        let all = json!(self.seconds);
        let mut line = json!({
            "seconds": median(self.seconds), "cpu_seconds": median(self.cpu), "all": all, "peak_over_weights": over,
        });
        if let Some(draftmill_torch_ext::Memory { allocated, reserved, peak, free, total }) = memory {
            line["memory"] = json!({
                "allocated": allocated, "reserved": reserved, "peak": peak, "free": free, "total": total,
            });
        }
        Ok(line)
    }
}

/// Returns when all queued work of a GPU is done.
pub fn wait_for(device: Device) {
    if let Device::Cuda(index) = device {
        Cuda::synchronize(index as i64);
    }
}

/// Memory statistics of a GPU; `None` on a CPU.
fn memory(device: Device) -> Outcome<Option<draftmill_torch_ext::Memory>> {
    draftmill_torch_ext::memory(device).failed("ask for the device's memory")
}

/// Returns the CPU seconds of all threads of this process, in user and kernel. Other load disturbs them less.
fn process_cpu_seconds() -> f64 {
    // SAFETY: fills the structure behind the pointer, and cannot fail for this process.
    let usage = unsafe {
        let mut usage = std::mem::zeroed::<libc::rusage>();
        libc::getrusage(libc::RUSAGE_SELF, &mut usage);
        usage
    };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}
