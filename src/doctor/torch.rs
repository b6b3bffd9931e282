//! Tests of libtorch and its devices: arithmetic of each device, copies between two, and NCCL.

use super::Report;
use super::matmul_check::{is_rounding, product_error};
use crate::{
    collective::{
        nccl::Communicator,
        nccl_ffi::{NcclError, Table},
        peer_copy::{self, PeerCopy},
    },
    common::text::counted,
    config::ByteSize,
    engines::transfer::self_tested,
    model::{
        ModelError,
        libtorch::{has_cuda_half, init_libtorch},
    },
};
use libloading::os::unix::{Library, Symbol};
use std::ffi::{CStr, c_char, c_int};
use tch::{Device, Kind};

const REPAIR: &str = "look for errors of its memory (nvidia-smi -q) and of its driver (dmesg, \"Xid\"), and remove it from \
                      target.devices, drafter.devices and eval.device until it is repaired";

/// Opens libtorch and tests every device, every pair of GPUs, and NCCL.
pub fn examine(report: &mut Report) {
    let count = match init_libtorch() {
        Ok(count) => count,
        Err(error) => {
            return report.fail(
                "libtorch",
                error.to_string(),
                "fetch libtorch 2.11.0 again, with CUDA if the machine has a GPU",
            );
        }
    };
    let version = draftmill_torch_ext::version();
    let build = if has_cuda_half() { "with CUDA" } else { "for CPUs only" };
    report.ok("libtorch", format!("{version}, {build}"));
    match count {
        0 if has_cuda_half() => report.warn(
            "devices",
            "no CUDA device; targets and drafters run on the CPU",
            "if the machine has a GPU: nvidia-smi must list it, with a driver for this libtorch's CUDA, and CUDA_VISIBLE_DEVICES must include it",
        ),
        0 => report.ok("devices", "no CUDA device; targets and drafters run on the CPU"),
        count => report.ok("devices", format!("{} and the CPU", counted(count as u64, "CUDA device"))),
    }
    let gpus: Vec<Device> = (0..count).map(Device::Cuda).collect();
    device(report, Device::Cpu, &[Kind::Float]);
    for &gpu in &gpus {
        device(report, gpu, &[Kind::Float, Kind::BFloat16]);
    }
    for &from in &gpus {
        for &to in gpus.iter().filter(|&&to| to != from) {
            pair(report, from, to, |route| route.self_test(from, to));
        }
    }
    nccl(report, &gpus, Table::open(), Communicator::open);
}

/// Reports name and memory of a device, and tests its arithmetic and its pinned transfers.
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
                return report.fail(&name, format!("{about}memory query failed: {error}"), REPAIR);
            }
        }
    }
    for &kind in kinds {
        let product = format!("a matrix product in {}", if kind == Kind::Float { "f32" } else { "bf16" });
        match product_error(device, kind) {
            Ok(error) if is_rounding(error, kind) => {}
            Ok(error) => {
                let found = format!("{about}{product} has a relative error of {error:.1e}");
                return report.fail(&name, found, REPAIR);
            }
            Err(error) => return report.fail(&name, format!("{about}{product} failed: {error}"), REPAIR),
        }
    }
    if let Err(error) = self_tested(device) {
        let found = format!(
            "{about}arithmetic is correct, but asynchronous copies fail ({error}); a run uses slower blocking copies"
        );
        return report.warn(
            &name,
            found,
            "free memory: the test needs 64 MiB of pinned host memory and 200 MiB of GPU memory; otherwise read the driver's log (dmesg)",
        );
    }
    let found = format!("{about}arithmetic is correct");
    match crowded {
        true => report.warn(&name, found, "another program uses most of its memory: nvidia-smi names it"),
        false => report.ok(&name, found),
    }
}

/// Tests copies from one GPU to another, first direct, then via the host.
fn pair(report: &mut Report, from: Device, to: Device, test: impl Fn(PeerCopy) -> Result<bool, ModelError>) {
    let part = format!("{} -> {}", peer_copy::name(from), peer_copy::name(to));
    let fault = match test(PeerCopy::Direct) {
        Ok(true) => return report.ok(&part, "direct copies are correct"),
        Ok(false) => "direct copies return other bits than were sent".to_owned(),
        Err(error) => format!("direct copies fail ({error})"),
    };
    match test(PeerCopy::ThroughHost) {
        Ok(true) => report.warn(
            &part,
            format!("{fault}; copies via the host are correct, and a run uses these, which are slower"),
            peer_copy::REMEDY,
        ),
        _ => report.fail(&part, format!("{fault}, and copies via the host fail too"), REPAIR),
    }
}

/// Tests NCCL on all GPUs together, as `drafter.collectives = "nccl"` would use it.
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
    let tested = table.version().and_then(|version| {
        if several {
            start(table, gpus)?;
        }
        Ok(version)
    });
    match tested {
        Ok(version) if several => {
            report.ok("nccl", format!("{version}; sums and copies of {} GPUs are correct", gpus.len()))
        }
        Ok(version) => report.ok("nccl", format!("{version}; needs at least 2 GPUs")),
        Err(error) => report.warn("nccl", format!("{error}; drafters exchange by copies"), error.remedy()),
    }
}

/// Driver's name of a GPU; `None` if the driver does not report one. Driver and libtorch use the same device indices.
fn gpu_name(index: usize) -> Option<String> {
    let index = c_int::try_from(index).ok()?;
    let mut name = [0 as c_char; 128];
    // SAFETY: these are documented functions of the driver's library, which libtorch has already opened. cuInit takes flags
    // that must be 0, cuDeviceGet fills an int, and cuDeviceGetName writes at most the given number of bytes, NUL included.
    unsafe {
        let driver = Library::new("libcuda.so.1").ok()?;
        let init: Symbol<unsafe extern "C" fn(u32) -> c_int> = driver.get(b"cuInit\0").ok()?;
        let get: Symbol<unsafe extern "C" fn(*mut c_int, c_int) -> c_int> = driver.get(b"cuDeviceGet\0").ok()?;
        let read_name: Symbol<unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int> =
            driver.get(b"cuDeviceGetName\0").ok()?;
        let mut device = 0;
        let done = init(0) == 0
            && get(&mut device, index) == 0
            && read_name(name.as_mut_ptr(), name.len() as c_int - 1, device) == 0;
        done.then(|| CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{collective::fake_nccl, doctor::State};

    #[test]
    fn a_pair_is_judged_by_the_copied_bits() {
        let failed = || Err(ModelError::Torch("CUDA error: invalid device".into()));
        for (direct, staged, state, part) in [
            (Ok(true), failed(), State::Ok, "direct copies are correct"),
            (Ok(false), Ok(true), State::Warning, "a run uses these"),
            (failed(), Ok(true), State::Warning, "invalid device"),
            (Ok(false), Ok(false), State::Failed, "via the host fail too"),
            (failed(), failed(), State::Failed, "via the host fail too"),
        ] {
            let mut report = Report::default();
            let answer = |answer: &Result<bool, ModelError>| match answer {
                Ok(right) => Ok(*right),
                Err(error) => Err(ModelError::Torch(error.to_string())),
            };
            pair(&mut report, Device::Cuda(0), Device::Cuda(3), |route| {
                answer(if route == PeerCopy::Direct { &direct } else { &staged })
            });
            let [finding] = &report.findings[..] else { panic!("{report:?}") };
            assert_eq!((finding.part.as_str(), finding.state), ("cuda:0 -> cuda:3", state));
            assert!(finding.found.contains(part), "{finding:?}");
            let iommu = finding.remedy.as_ref().is_some_and(|remedy| remedy.contains("IOMMU"));
            assert_eq!(iommu, state == State::Warning, "{finding:?}");
        }
    }

    #[test]
    fn nccl_is_tested_if_there_are_several_gpus() {
        let found = |gpus: usize, opened| {
            let mut report = Report::default();
            nccl(&mut report, &vec![Device::Cpu; gpus], opened, Communicator::start);
            let finding = report.findings.remove(0);
            (finding.state, finding.found, fake_nccl::calls().len())
        };
        let missing = || Err(NcclError::Missing("no such file".into()));
        let sentence = format!("{}; drafters exchange by copies", NcclError::Missing("no such file".into()));
        assert_eq!(found(2, missing()), (State::Ok, sentence, 0));
        assert_eq!(found(1, Ok(fake_nccl::table())), (State::Ok, "2.28.9; needs at least 2 GPUs".into(), 1));
        let (state, correct, _) = found(2, Ok(fake_nccl::table()));
        assert_eq!((state, correct.as_str()), (State::Ok, "2.28.9; sums and copies of 2 GPUs are correct"));
        let table = fake_nccl::table();
        fake_nccl::corrupt("ncclReduce");
        let (state, wrong, _) = found(2, Ok(table));
        assert_eq!(state, State::Warning);
        assert!(wrong.ends_with("; drafters exchange by copies"), "{wrong}");
    }

    #[test]
    fn an_absent_device_fails_and_the_cpu_passes() {
        let mut report = Report::default();
        device(&mut report, Device::Cpu, &[Kind::Float, Kind::BFloat16]);
        device(&mut report, Device::Cuda(4096), &[Kind::Float]);
        assert_eq!(report.findings[0].found, "arithmetic is correct");
        assert_eq!(report.findings.iter().map(|f| f.state).collect::<Vec<_>>(), [State::Ok, State::Failed]);
        assert_eq!(gpu_name(4096), None);
    }
}
