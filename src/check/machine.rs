//! Checks of the machine: devices, memory, disk and ports.

use super::forecast::DeviceMemory;
use crate::{
    common::{
        fs::creatable,
        gpu_memory::Memory,
        host::{cores, free_disk, memory_limit},
        text::counted,
    },
    config::{ByteSize, Config, Device, Engine, Problem, Written},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    net::TcpListener,
};

/// Properties of the machine that the checks use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machine {
    /// True if this binary was built with libtorch.
    pub torch: bool,
    pub cuda_devices: usize,
    /// Memory of the run's GPUs by name, if known.
    pub gpus: BTreeMap<String, Memory>,
    /// Cores that this process may use.
    pub cores: usize,
    /// Memory limit of the host, in bytes.
    pub memory: Option<u64>,
    /// Free bytes on the disk of run.dir.
    pub free_disk: Option<u64>,
    /// True to test the admin port. A start of a run binds the port itself.
    pub check_port: bool,
}

impl Machine {
    /// Detects the properties of this machine.
    pub fn detect(config: &Config) -> Machine {
        Machine {
            torch: cfg!(feature = "torch"),
            cuda_devices: cuda_devices(),
            gpus: gpus(config),
            cores: cores(),
            memory: memory_limit(),
            free_disk: free_disk(&config.run.dir),
            check_port: true,
        }
    }
}

/// Returns problems of missing devices, a missing engine, the admin port, the token file and the run folder.
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
        // With "auto" it is a target's device, which target.devices reports already.
        let evaluation = config.evaluates(config.data.validation_fraction > 0.0).then_some(config.eval.device);
        let evaluation: Vec<_> =
            evaluation.into_iter().filter(|device| !config.target.devices.contains(device)).collect();
        for (key, devices) in [
            ("target.devices", &config.target.devices),
            ("drafter.devices", &config.drafter.devices),
            ("eval.device", &evaluation),
        ] {
            let missing: BTreeSet<_> = devices.iter().filter(|device| !exists(**device, machine)).collect();
            if !missing.is_empty() {
                let missing: Vec<_> = missing.into_iter().map(Device::to_string).collect();
                problems.push(written.problem(
                    key,
                    format!(
                        "{} {} not exist: libtorch sees {}",
                        missing.join(", "),
                        if missing.len() == 1 { "does" } else { "do" },
                        counted(machine.cuda_devices as u64, "CUDA device")
                    ),
                    "name existing devices, or \"cpu\"",
                ));
            }
        }
    }
    if let Some(Err(why)) = config.admin.token() {
        problems.push(written.problem("admin.token_file", why, "create one: openssl rand -hex 32 > FILE"));
    }
    if let Some(address) = config.admin.listen.0.filter(|_| machine.check_port)
        && let Err(source) = TcpListener::bind(address)
    {
        let message = match source.kind() {
            std::io::ErrorKind::AddrInUse => "another process, perhaps another run, listens on this address".to_owned(),
            _ => format!("this address cannot be bound: {source}"),
        };
        let remedy = "choose another port (127.0.0.1:0 takes a free one), or \"off\"";
        problems.push(written.problem("admin.listen", message, remedy));
    }
    if config.run.dir.exists() && !config.run.dir.is_dir() {
        problems.push(written.problem("run.dir", "is a file", "name a folder, or a path that does not exist yet"));
    } else if machine.check_port
        && let Err((path, error)) = creatable(&config.run.dir)
    {
        let remedy = "make it writable for this user, or choose another run.dir";
        problems.push(written.problem("run.dir", format!("{} cannot be written: {error}", path.display()), remedy));
    }
    problems
}

/// Returns a note if one operation has more threads than there are cores.
pub fn thread_note(config: &Config, written: &Written, machine: &Machine) -> Option<Problem> {
    (config.run.threads > machine.cores).then(|| {
        let Machine { cores, .. } = machine;
        let message =
            format!("{} threads per operation exceed the cores of this machine ({cores})", config.run.threads);
        written.problem("run.threads", message, "set it to \"auto\", or lower it")
    })
}

/// Returns problems of the run's needs for disk and host memory.
pub fn capacity_problems(
    config: &Config,
    written: &Written,
    machine: &Machine,
    disk_needed: u64,
    host: &DeviceMemory,
) -> Vec<Problem> {
    let mut problems = Vec::new();
    if let Some(free) = machine.free_disk.filter(|&free| free < disk_needed) {
        problems.push(written.problem(
            "run.dir",
            format!(
                "checkpoints and export need {}, and the disk of this folder has {} free",
                ByteSize(disk_needed).rounded(),
                ByteSize(free).rounded()
            ),
            "choose another disk, lower checkpoint.keep_last, or raise checkpoint.keep_every",
        ));
    }
    if let Some(memory) = machine.memory.filter(|&memory| memory < host.total) {
        problems.push(written.problem(
            "pool.max_bytes",
            format!(
                "the pool and the CPU devices take {}, of which {} are activations, and this machine has {} of memory",
                ByteSize(host.total).rounded(),
                ByteSize(host.activations).rounded(),
                ByteSize(memory).rounded()
            ),
            format!(
                "lower it (the pool takes {}), drafter.anchors or plan.job_tokens, set drafter.recompute_layers, or use \
                 a smaller drafter or fewer CPU devices",
                config.pool.max_bytes
            ),
        ));
    }
    problems
}

/// Compares the known needs of each GPU with its memory. Returns problems (more than the total) and notes (more than is
/// free now).
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
        let takes = format!("weights, buffers and activations on {device} take {bytes}");
        // A micro-batch that does not fit is split, so its activations refuse nothing.
        if need.total - need.activations > memory.total {
            let remedy = "use more devices (target.devices, drafter.devices, eval.device), or bf16 (target.dtype, \
                          drafter.dtype)";
            problems.push(written.problem(key, format!("{takes}; this GPU has {total} of memory"), remedy));
        } else if need.total > memory.free {
            let remedy = "end other programs on this GPU, or name another device";
            notes.push(written.problem(key, format!("{takes}; {free} of {total} are free"), remedy));
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

/// Returns the memory of the run's GPUs. Other GPUs are not queried, because a query creates a context on the GPU.
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
        cores: 2,
        memory: Some(1 << 30),
        free_disk: Some(1 << 30),
        check_port: true,
    };

    fn keys(text: &str, machine: &Machine) -> Vec<String> {
        let loaded = load_text(&format!("{text}\n[admin]\nlisten = \"off\""), "x.toml", &[]).unwrap();
        problems(&loaded.config, &loaded.written, machine).into_iter().map(|problem| problem.key).collect()
    }

    #[test]
    fn missing_devices_are_reported_unless_simulated() {
        let text = "[target]\ndevices = [\"cuda:0\", \"cuda:1\"]\n[drafter]\ndevices = [\"cpu\", \"cuda:2\"]\n";
        assert_eq!(keys(text, &BARE), ["run.engine", "target.devices", "drafter.devices"]);
        let two = Machine { torch: true, cuda_devices: 2, ..BARE };
        assert_eq!(keys(text, &two), ["drafter.devices"]);
        assert!(keys(&format!("{text}[run]\nengine = \"simulated\""), &BARE).is_empty());
    }

    #[test]
    fn missing_devices_are_counted_in_good_grammar() {
        let message = |devices: &str, cuda_devices| {
            let sets = [format!("target.devices={devices}"), "admin.listen=off".into()];
            let loaded = load_text("", "x.toml", &sets).unwrap();
            let machine = Machine { torch: true, cuda_devices, ..BARE };
            problems(&loaded.config, &loaded.written, &machine)[0].message.clone()
        };
        assert_eq!(message("cuda:1", 1), "cuda:1 does not exist: libtorch sees 1 CUDA device");
        let two = message("[\"cuda:0\", \"cuda:1\"]", 0);
        assert_eq!(two, "cuda:0, cuda:1 do not exist: libtorch sees 0 CUDA devices");
    }

    #[test]
    fn port_token_and_run_folder_are_checked() {
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
    fn disk_and_memory_are_compared_with_the_needs() {
        let loaded = load_text("", "x.toml", &[]).unwrap();
        let count = |disk, total| {
            let host = DeviceMemory { total, ..DeviceMemory::default() };
            capacity_problems(&loaded.config, &loaded.written, &BARE, disk, &host).len()
        };
        assert_eq!((count(1 << 30, 1 << 30), count(2 << 30, 0), count(2 << 30, 2 << 30)), (0, 1, 2));
    }

    /// Issue 17, C7.
    #[test]
    fn threads_above_the_cores_are_a_note() {
        let note = |threads: u32| {
            let loaded = load_text("", "x.toml", &[format!("run.threads={threads}")]).unwrap();
            thread_note(&loaded.config, &loaded.written, &BARE).map(|note| (note.key, note.message))
        };
        assert_eq!(note(2), None);
        let message = "1024 threads per operation exceed the cores of this machine (2)";
        assert_eq!(note(1024), Some(("run.threads".into(), message.into())));
    }

    #[test]
    fn gpu_memory_is_compared_with_the_needs() {
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
        let check = |need: DeviceMemory| gpu_problems(&written, &machine, &[need]);
        assert_eq!(check(need("cuda:0", 1, 1, 50)), (Vec::new(), Vec::new()));
        // The memory of other devices is unknown.
        assert_eq!(check(need("cpu", 1, 1, 500)), (Vec::new(), Vec::new()));
        let (problems, notes) = check(need("cuda:0", 1, 1, 81));
        assert_eq!((problems.len(), notes.len(), problems[0].line), (1, 0, Some(2)));
        assert_eq!(
            problems[0].message,
            "weights, buffers and activations on cuda:0 take 81.0 GiB; this GPU has 80.0 GiB of memory"
        );
        // A GPU splits its micro-batches, so activations alone refuse nothing.
        let (problems, notes) = check(DeviceMemory { activations: 2 << 30, ..need("cuda:0", 1, 1, 81) });
        assert_eq!((problems.len(), notes.len()), (0, 1));
        let (problems, notes) = check(need("cuda:1", 0, 2, 51));
        assert_eq!((problems.len(), notes[0].key.as_str()), (0, "drafter.devices"));
        assert!(notes[0].message.ends_with("; 50.0 GiB of 80.0 GiB are free"), "{}", notes[0].message);
        assert_eq!(check(need("cuda:2", 0, 0, 81)).0[0].key, "eval.device");
    }

    #[test]
    fn this_machine_is_detected() {
        let config = load_text("", "x.toml", &["run.dir=not/yet/there".into()]).unwrap().config;
        let machine = Machine::detect(&config);
        assert!(machine.memory.is_some_and(|bytes| bytes > 1 << 20), "{machine:?}");
        assert!(machine.free_disk.is_some(), "{machine:?}");
    }
}
