//! What this machine has: devices, memory, disk, ports.

use super::forecast::DeviceMemory;
use crate::common::host::{free_disk, memory_limit};
use crate::{
    common::gpu_memory::Memory,
    config::{ByteSize, Config, Device, Engine, Problem, Written},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    net::TcpListener,
};

/// What the rules below need to know of the machine; tests give their own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machine {
    /// This binary was built with libtorch.
    pub torch: bool,
    pub cuda_devices: usize,
    /// Memory of those that the run computes on, by name, as far as they tell.
    pub gpus: BTreeMap<String, Memory>,
    /// Memory of the host.
    pub memory: Option<u64>,
    /// Room on the disk of run.dir.
    pub free_disk: Option<u64>,
    /// Whether to try the port. A run takes it itself, after it has its folder.
    pub ask_port: bool,
}

impl Machine {
    /// Looks at this machine.
    pub fn detect(config: &Config) -> Machine {
        Machine {
            torch: cfg!(feature = "torch"),
            cuda_devices: cuda_devices(),
            gpus: gpus(config),
            memory: memory_limit(),
            free_disk: free_disk(&config.run.dir),
            ask_port: true,
        }
    }
}

/// Devices that are not there, an engine that was not built in, a port that is taken, a run folder that is a file.
pub fn problems(config: &Config, written: &Written, machine: &Machine) -> Vec<Problem> {
    let mut problems = Vec::new();
    if config.run.engine == Engine::Torch {
        if !machine.torch {
            problems.push(written.problem(
                "run.engine",
                "this draftmill was built without libtorch",
                "build with the default features, or choose \"simulated\"",
            ));
        }
        // "auto" is a target's own device, of which one finding is enough.
        let measures = config.measures(config.data.validation_fraction > 0.0).then_some(config.eval.device);
        let measures: Vec<_> = measures.into_iter().filter(|device| !config.target.devices.contains(device)).collect();
        for (key, devices) in [
            ("target.devices", &config.target.devices),
            ("drafter.devices", &config.drafter.devices),
            ("eval.device", &measures),
        ] {
            let missing: BTreeSet<_> = devices.iter().filter(|device| !exists(**device, machine)).collect();
            if !missing.is_empty() {
                let missing: Vec<_> = missing.into_iter().map(Device::to_string).collect();
                problems.push(written.problem(
                    key,
                    format!("{} is not there: libtorch sees {} CUDA devices", missing.join(", "), machine.cuda_devices),
                    "name devices that exist, or \"cpu\"",
                ));
            }
        }
    }
    if let Some(Err(why)) = config.admin.token() {
        problems.push(written.problem("admin.token_file", why, "make one: openssl rand -hex 32 > FILE"));
    }
    if let Some(address) = config.admin.listen.0.filter(|_| machine.ask_port)
        && let Err(source) = TcpListener::bind(address)
    {
        let message = match source.kind() {
            std::io::ErrorKind::AddrInUse => "another process listens there, perhaps another run".to_owned(),
            _ => format!("it cannot be listened on: {source}"),
        };
        let remedy = "choose another port (--set admin.listen=127.0.0.1:0 takes any), or \"off\"";
        problems.push(written.problem("admin.listen", message, remedy));
    }
    if config.run.dir.exists() && !config.run.dir.is_dir() {
        problems.push(written.problem("run.dir", "this is a file", "name a folder, or one that does not exist yet"));
    }
    problems
}

/// Room that the run needs and the machine does not have.
pub fn room_problems(
    config: &Config,
    written: &Written,
    machine: &Machine,
    disk_needed: u64,
    host_needed: u64,
) -> Vec<Problem> {
    let mut problems = Vec::new();
    if let Some(free) = machine.free_disk.filter(|&free| free < disk_needed) {
        problems.push(written.problem(
            "run.dir",
            format!(
                "checkpoints and export need {}, and its disk has {} free",
                ByteSize(disk_needed).rounded(),
                ByteSize(free).rounded()
            ),
            "choose another disk, lower checkpoint.keep_last, or raise checkpoint.keep_every",
        ));
    }
    if let Some(memory) = machine.memory.filter(|&memory| memory < host_needed) {
        problems.push(written.problem(
            "pool.max_bytes",
            format!(
                "the pool and what runs on the CPU take {}, and this machine has {} of memory",
                ByteSize(host_needed).rounded(),
                ByteSize(memory).rounded()
            ),
            format!("lower it (the pool takes {} of that), or use fewer CPU devices", config.pool.max_bytes),
        ));
    }
    problems
}

/// GPUs whose memory does not hold what is known of it before the run: what keeps the run from beginning, and what may.
pub fn gpu_problems(written: &Written, machine: &Machine, needs: &[DeviceMemory]) -> (Vec<Problem>, Vec<Problem>) {
    let (mut problems, mut notes) = (Vec::new(), Vec::new());
    for need in needs {
        let Some(memory) = machine.gpus.get(&need.device) else { continue };
        let key = match need {
            DeviceMemory { targets: 1.., .. } => "target.devices",
            DeviceMemory { drafters: 1.., .. } => "drafter.devices",
            _ => "eval.device",
        };
        let (device, bytes) = (&need.device, ByteSize(need.total).rounded());
        let [free, total] = [memory.free, memory.total].map(|bytes| ByteSize(bytes).rounded());
        let takes = format!("weights and buffers on {device} take {bytes}, and forward and backward more");
        if need.total > memory.total {
            let remedy = "spread the work over more devices (target.devices, drafter.devices, eval.device), or compute in bf16 \
                          (target.dtype, drafter.dtype)";
            problems.push(written.problem(key, format!("{takes}; it has {total} of memory"), remedy));
        } else if need.total > memory.free {
            let remedy = "end the other programs that use it, or name another device";
            notes.push(written.problem(key, format!("{takes}; of its {total} only {free} are free"), remedy));
        }
    }
    (problems, notes)
}

fn exists(device: Device, machine: &Machine) -> bool {
    match device {
        Device::Cpu => true,
        Device::Cuda(index) => index < machine.cuda_devices,
    }
}

/// Only those of this run are asked: an answer takes a GPU into use.
fn gpus(config: &Config) -> BTreeMap<String, Memory> {
    if config.run.engine != Engine::Torch {
        return BTreeMap::new();
    }
    let used = config.target.devices.iter().chain(&config.drafter.devices).chain([&config.eval.device]);
    let names: BTreeSet<String> = used.map(Device::to_string).collect();
    names.into_iter().filter_map(|name| Memory::of(&name).map(|memory| (name, memory))).collect()
}

#[cfg(feature = "torch")]
fn cuda_devices() -> usize {
    usize::try_from(tch::Cuda::device_count()).unwrap_or(0)
}

#[cfg(not(feature = "torch"))]
fn cuda_devices() -> usize {
    0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::load_text;

    const BARE: Machine = Machine {
        torch: false,
        cuda_devices: 0,
        gpus: BTreeMap::new(),
        memory: Some(1 << 30),
        free_disk: Some(1 << 30),
        ask_port: true,
    };

    fn keys(text: &str, machine: &Machine) -> Vec<String> {
        let loaded = load_text(&format!("{text}\n[admin]\nlisten = \"off\""), "x.toml", &[]).unwrap();
        problems(&loaded.config, &loaded.written, machine).into_iter().map(|problem| problem.key).collect()
    }

    #[test]
    fn devices_have_to_be_there_unless_the_engine_is_simulated() {
        let text = "[target]\ndevices = [\"cuda:0\", \"cuda:1\"]\n[drafter]\ndevices = [\"cpu\", \"cuda:2\"]\n";
        assert_eq!(keys(text, &BARE), ["run.engine", "target.devices", "drafter.devices"]);
        let two = Machine { torch: true, cuda_devices: 2, ..BARE };
        assert_eq!(keys(text, &two), ["drafter.devices"]);
        assert!(keys(&format!("{text}[run]\nengine = \"simulated\""), &BARE).is_empty());
    }

    #[test]
    fn a_taken_port_a_file_without_a_token_and_a_file_in_the_place_of_the_run_are_told() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let file = tempfile::NamedTempFile::new().unwrap();
        let sets = [
            format!("admin.listen={}", taken.local_addr().unwrap()),
            format!("run.dir={}", file.path().display()),
            "run.engine=simulated".into(),
            format!("admin.token_file={}", file.path().display()),
        ];
        let loaded = load_text("", "x.toml", &sets).unwrap();
        let found = problems(&loaded.config, &loaded.written, &BARE);
        let keys: Vec<_> = found.iter().map(|problem| problem.key.as_str()).collect();
        assert_eq!(keys, ["admin.token_file", "admin.listen", "run.dir"], "{found:?}");
    }

    #[test]
    fn room_is_compared_with_what_is_needed() {
        let loaded = load_text("", "x.toml", &[]).unwrap();
        let room = |disk, host| room_problems(&loaded.config, &loaded.written, &BARE, disk, host).len();
        assert_eq!((room(1 << 30, 1 << 30), room(2 << 30, 0), room(2 << 30, 2 << 30)), (0, 1, 2));
    }

    #[test]
    fn a_gpu_is_told_when_it_cannot_hold_the_weights_or_others_hold_it() {
        let written = load_text("[target]\ndevices = [\"cuda:0\"]\n", "x.toml", &[]).unwrap().written;
        let memory = Memory { free: 50 << 30, total: 80 << 30, ..Memory::default() };
        let gpus = ["cuda:0", "cuda:1", "cuda:2"].map(|name| (name.to_owned(), memory));
        let machine = Machine { gpus: gpus.into(), ..BARE };
        let need = |device: &str, targets, drafters, gib: u64| DeviceMemory {
            device: device.into(),
            targets,
            drafters,
            total: gib << 30,
            ..DeviceMemory::default()
        };
        let told = |need: DeviceMemory| gpu_problems(&written, &machine, &[need]);
        assert_eq!(told(need("cuda:0", 1, 1, 50)), (Vec::new(), Vec::new()));
        // Of a device that does not tell nothing is known.
        assert_eq!(told(need("cpu", 1, 1, 500)), (Vec::new(), Vec::new()));
        let (problems, notes) = told(need("cuda:0", 1, 1, 81));
        assert_eq!((problems.len(), notes.len(), problems[0].line), (1, 0, Some(2)));
        assert_eq!(
            problems[0].message,
            "weights and buffers on cuda:0 take 81.0 GiB, and forward and backward more; it has 80.0 GiB of memory"
        );
        let (problems, notes) = told(need("cuda:1", 0, 2, 51));
        assert_eq!((problems.len(), notes[0].key.as_str()), (0, "drafter.devices"));
        assert!(notes[0].message.ends_with("; of its 80.0 GiB only 50.0 GiB are free"), "{}", notes[0].message);
        assert_eq!(told(need("cuda:2", 0, 0, 81)).0[0].key, "eval.device");
    }

    #[test]
    fn this_machine_can_be_looked_at() {
        let config = load_text("", "x.toml", &["run.dir=not/yet/there".into()]).unwrap().config;
        let machine = Machine::detect(&config);
        assert!(machine.memory.is_some_and(|bytes| bytes > 1 << 20), "{machine:?}");
        assert!(machine.free_disk.is_some(), "{machine:?}");
    }
}
