//! libtorch and the devices that it sees: whether each computes right, and whether copies between two bring what was sent.

use super::Report;
use super::matmul_check::{is_rounding, product_gap};
use crate::{
    collective::{
        nccl::Communicator,
        nccl_ffi::{NcclError, Table},
        peer_copy::{self, Route},
    },
    config::ByteSize,
    engines::transfer::tried,
    model::{
        ModelError,
        libtorch::{has_cuda_half, init_libtorch},
    },
};
use libloading::os::unix::{Library, Symbol};
use std::ffi::{CStr, c_char, c_int};
use tch::{Device, Kind};

const COMPUTES_WRONG: &str = "look for errors of its memory (nvidia-smi -q) and of its driver (dmesg, \"Xid\"), and leave it out of \
                              target.devices, drafter.devices and eval.device until then";

/// Opens libtorch and tries every device, and every copy from one GPU to another.
pub fn examine(report: &mut Report) {
    let count = match init_libtorch() {
        Ok(count) => count,
        Err(error) => {
            return report.fail(
                "libtorch",
                error.to_string(),
                "fetch libtorch 2.11.0 again, with CUDA where there is a GPU",
            );
        }
    };
    let version = draftmill_torch_ext::version();
    let half = if has_cuda_half() { "with CUDA" } else { "for CPUs only" };
    report.ok("libtorch", format!("{version}, {half}"));
    match count {
        0 if has_cuda_half() => report.warn(
            "devices",
            "no CUDA device; targets and drafters run on the CPU",
            "where there is a GPU: nvidia-smi must list it, with a driver for the CUDA of this libtorch, and CUDA_VISIBLE_DEVICES must not hide it",
        ),
        0 => report.ok("devices", "no CUDA device; targets and drafters run on the CPU"),
        count => report.ok("devices", format!("{count} of CUDA, and the CPU")),
    }
    let gpus: Vec<Device> = (0..count).map(Device::Cuda).collect();
    device(report, Device::Cpu, &[Kind::Float]);
    for &gpu in &gpus {
        device(report, gpu, &[Kind::Float, Kind::BFloat16]);
    }
    for &from in &gpus {
        for &to in gpus.iter().filter(|&&to| to != from) {
            pair(report, from, to, |way| way.copies_right(from, to));
        }
    }
    nccl(report, &gpus, Table::open(), Communicator::open);
}

/// What it is, and whether it computes.
fn device(report: &mut Report, device: Device, kinds: &[Kind]) {
    let name = peer_copy::name(device);
    let (mut about, mut crowded) = (String::new(), false);
    if let Device::Cuda(index) = device {
        about += &gpu_name(index).map_or_else(String::new, |name| format!("{name}, "));
        match draftmill_torch_ext::memory(device) {
            Ok(Some(memory)) => {
                let [free, total] = [memory.free, memory.total].map(|bytes| ByteSize(bytes).rounded());
                about += &format!("{total} of memory, {free} free; ");
                crowded = memory.free < memory.total / 2;
            }
            Ok(None) => {}
            Err(error) => {
                return report.fail(&name, format!("{about}its memory cannot be asked for: {error}"), COMPUTES_WRONG);
            }
        }
    }
    for &kind in kinds {
        let product = format!("a product of matrices in {}", if kind == Kind::Float { "f32" } else { "bf16" });
        match product_gap(device, kind) {
            Ok(gap) if is_rounding(gap, kind) => {}
            Ok(gap) => {
                let found = format!("{about}{product} is off by {gap:.1e} of its largest value");
                return report.fail(&name, found, COMPUTES_WRONG);
            }
            Err(error) => return report.fail(&name, format!("{about}{product} failed: {error}"), COMPUTES_WRONG),
        }
    }
    if let Err(error) = tried(device) {
        let found = format!(
            "{about}computes right, but copies beside its work fail ({error}); a run makes them between, which is slower"
        );
        return report.warn(
            &name,
            found,
            "free memory: it takes 64 MiB of the host's that can be pinned, and 200 MiB of the GPU's; else look at its driver's log (dmesg)",
        );
    }
    let found = format!("{about}computes right");
    match crowded {
        true => report.warn(&name, found, "another program holds most of its memory: nvidia-smi tells which"),
        false => report.ok(&name, found),
    }
}

/// How copies go from one GPU to another, by trial.
fn pair(report: &mut Report, from: Device, to: Device, try_out: impl Fn(Route) -> Result<bool, ModelError>) {
    let part = format!("{} -> {}", peer_copy::name(from), peer_copy::name(to));
    let why = match try_out(Route::Direct) {
        Ok(true) => return report.ok(&part, "direct copies arrive"),
        Ok(false) => "direct copies bring other bits than were sent".to_owned(),
        Err(error) => format!("direct copies fail ({error})"),
    };
    match try_out(Route::ThroughHost) {
        Ok(true) => report.warn(
            &part,
            format!("{why}; those by way of the host arrive, and a run takes that way by itself, which is slower"),
            peer_copy::REMEDY,
        ),
        _ => report.fail(&part, format!("{why}, and so do those by way of the host"), COMPUTES_WRONG),
    }
}

/// Whether `drafter.exchange = "nccl"` would have its way, on all GPUs together.
fn nccl(
    report: &mut Report,
    gpus: &[Device],
    opened: Result<Table, NcclError>,
    start: impl FnOnce(Table, &[Device]) -> Result<Communicator, NcclError>,
) {
    let table = match opened {
        Ok(table) => table,
        Err(error) => return report.ok("nccl", format!("{error}; drafters exchange by copies")),
    };
    let several = gpus.len() > 1;
    let tried = table.version().and_then(|version| {
        if several {
            start(table, gpus)?;
        }
        Ok(version)
    });
    match tried {
        Ok(version) if several => {
            report.ok("nccl", format!("{version}; sums and copies of {} GPUs are right", gpus.len()))
        }
        Ok(version) => report.ok("nccl", format!("{version}; of use with several GPUs")),
        Err(error) => report.warn("nccl", format!("{error}; drafters exchange by copies"), error.remedy()),
    }
}

/// As the driver, which numbers devices as libtorch does, calls it. `None` where it does not tell.
fn gpu_name(index: usize) -> Option<String> {
    let index = c_int::try_from(index).ok()?;
    let mut name = [0 as c_char; 128];
    // SAFETY: the driver's own library, which libtorch has open, and its documented functions: cuInit takes flags that must be 0,
    // cuDeviceGet fills an int, and cuDeviceGetName writes at most so many bytes, the zero at the end included.
    unsafe {
        let driver = Library::new("libcuda.so.1").ok()?;
        let init: Symbol<unsafe extern "C" fn(u32) -> c_int> = driver.get(b"cuInit\0").ok()?;
        let get: Symbol<unsafe extern "C" fn(*mut c_int, c_int) -> c_int> = driver.get(b"cuDeviceGet\0").ok()?;
        let tell: Symbol<unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int> =
            driver.get(b"cuDeviceGetName\0").ok()?;
        let mut device = 0;
        let done = init(0) == 0
            && get(&mut device, index) == 0
            && tell(name.as_mut_ptr(), name.len() as c_int - 1, device) == 0;
        done.then(|| CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{collective::fake_nccl, doctor::State};

    #[test]
    fn a_pair_is_judged_by_what_arrives() {
        let failed = || Err(ModelError::Torch("CUDA error: invalid device".into()));
        for (direct, staged, state, part) in [
            (Ok(true), failed(), State::Ok, "direct copies arrive"),
            (Ok(false), Ok(true), State::Warning, "a run takes that way by itself"),
            (failed(), Ok(true), State::Warning, "invalid device"),
            (Ok(false), Ok(false), State::Failed, "and so do those"),
            (failed(), failed(), State::Failed, "and so do those"),
        ] {
            let mut report = Report::default();
            let answer = |answer: &Result<bool, ModelError>| match answer {
                Ok(right) => Ok(*right),
                Err(error) => Err(ModelError::Torch(error.to_string())),
            };
            pair(&mut report, Device::Cuda(0), Device::Cuda(3), |route| {
                answer(if route == Route::Direct { &direct } else { &staged })
            });
            let [finding] = &report.findings[..] else { panic!("{report:?}") };
            assert_eq!((finding.part.as_str(), finding.state), ("cuda:0 -> cuda:3", state));
            assert!(finding.found.contains(part), "{finding:?}");
            let iommu = finding.remedy.as_ref().is_some_and(|remedy| remedy.contains("IOMMU"));
            assert_eq!(iommu, state == State::Warning, "{finding:?}");
        }
    }

    #[test]
    fn nccl_is_tried_where_there_are_gpus_to_try_it_on() {
        let found = |gpus: usize, opened| {
            let mut report = Report::default();
            nccl(&mut report, &vec![Device::Cpu; gpus], opened, Communicator::start);
            let finding = report.findings.remove(0);
            (finding.state, finding.found, fake_nccl::calls().len())
        };
        let missing = || Err(NcclError::Missing("no such file".into()));
        let sentence = "NCCL is not there (no such file); drafters exchange by copies".to_owned();
        assert_eq!(found(2, missing()), (State::Ok, sentence, 0));
        assert_eq!(found(1, Ok(fake_nccl::table())), (State::Ok, "2.28.9; of use with several GPUs".into(), 1));
        let (state, right, _) = found(2, Ok(fake_nccl::table()));
        assert_eq!((state, right.as_str()), (State::Ok, "2.28.9; sums and copies of 2 GPUs are right"));
        let table = fake_nccl::table();
        fake_nccl::lie_in("ncclReduce");
        let (state, wrong, _) = found(2, Ok(table));
        assert_eq!(state, State::Warning);
        assert!(wrong.contains("other numbers arrived") && wrong.ends_with("drafters exchange by copies"), "{wrong}");
    }

    #[test]
    fn a_device_that_is_not_there_has_failed_and_the_cpu_works() {
        let mut report = Report::default();
        device(&mut report, Device::Cpu, &[Kind::Float, Kind::BFloat16]);
        device(&mut report, Device::Cuda(4096), &[Kind::Float]);
        assert_eq!(report.findings[0].found, "computes right");
        assert_eq!(report.findings.iter().map(|f| f.state).collect::<Vec<_>>(), [State::Ok, State::Failed]);
        assert_eq!(gpu_name(4096), None);
    }
}
