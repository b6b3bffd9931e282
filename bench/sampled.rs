//! Units of work that are timed one by one, and the options of the modes that time them.

use crate::machine::{Failed, Outcome, median, peak_rss, status};
use serde_json::{Value, json};
use std::collections::BTreeMap;
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

    /// Refuses what nobody asked for.
    pub fn done(self) -> Outcome<()> {
        self.0.keys().next().map_or(Ok(()), |name| Err(format!("there is no option --{name}")))
    }
}

/// Units of work, each timed; the first is the warm-up and does not count.
pub struct Sampled {
    resident: Option<u64>,
    warm: bool,
    seconds: Vec<f64>,
    cpu: Vec<f64>,
}

impl Sampled {
    pub fn begin() -> Sampled {
        Sampled { resident: status("VmRSS:"), warm: false, seconds: Vec::new(), cpu: Vec::new() }
    }

    pub fn step(&mut self, work: impl FnOnce() -> Outcome<()>) -> Outcome<()> {
        let (born, began) = (Instant::now(), process_cpu_seconds());
        work()?;
        if std::mem::replace(&mut self.warm, true) {
            self.seconds.push(born.elapsed().as_secs_f64());
            self.cpu.push(process_cpu_seconds() - began);
        }
        Ok(())
    }

    /// Medians, every time, and how far the peak of memory rose above that at the beginning, in bytes.
    pub fn json(self) -> Value {
        let over = peak_rss().zip(self.resident).map(|(peak, resident)| peak.saturating_sub(resident));
        let all = json!(self.seconds);
        json!({
            "seconds": median(self.seconds), "cpu_seconds": median(self.cpu), "all": all, "peak_over_weights": over,
        })
    }
}

/// Seconds that all threads of this process have run on a core, in user and kernel: what a busy machine disturbs less.
fn process_cpu_seconds() -> f64 {
    // SAFETY: fills the structure that it is given, and cannot fail for this process.
    let usage = unsafe {
        let mut usage = std::mem::zeroed::<libc::rusage>();
        libc::getrusage(libc::RUSAGE_SELF, &mut usage);
        usage
    };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}
