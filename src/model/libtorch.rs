//! Initialisation of libtorch: CUDA libraries, numerical switches, thread counts and devices.

use super::ModelError;
use crate::config;
use draftmill_torch_ext::Attention;
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use std::{error::Error, path::PathBuf};
use tch::{Cuda, Device};

const CPU_LIBRARY: &str = "libtorch_cpu.so";
const CUDA_LIBRARY: &str = "libtorch_cuda.so";
/// Environment variable of libtorch that ranks cuDNN attention last; if it is set, Draftmill leaves the kernels alone.
const AVOID_CUDNN_ATTENTION: &str = "TORCH_CUDNN_SDPA_DEPRIORITIZED";
/// Environment variables of libtorch that configure its allocator; if one is set, Draftmill leaves the allocator alone.
const ALLOCATOR: [&str; 2] = ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"];
/// Environment variable of libtorch that allows TF32.
const ALLOW_TF32: &str = "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE";

/// Initialises libtorch before the first operation and returns the number of CUDA devices. Loads the CUDA half of
/// libtorch if it is installed next to the CPU half, so one binary serves both. Sets process-wide numerical switches.
///
/// # Errors
/// `ModelError::Input` if the CUDA library exists but cannot be loaded; otherwise if a switch cannot be set.
pub fn init_libtorch() -> Result<usize, ModelError> {
    if let Some(library) = cuda_library_path().filter(|path| path.exists()) {
        // SAFETY: libtorch's own library; its initialisers register CUDA with the CPU half, which is loaded already.
        let opened = unsafe { Library::open(Some(&library), RTLD_NOW | RTLD_GLOBAL) };
        let opened = opened.map_err(|error| {
            let (path, error) = (library.display(), loader_message(&error));
            ModelError::Input(format!("{path} exists but cannot be opened ({error}); fetch libtorch again, with CUDA"))
        })?;
        // The library must stay open until the process exits.
        std::mem::forget(opened);
    }
    if std::env::var_os(AVOID_CUDNN_ATTENTION).is_none() {
        // With an explicit mask cuDNN can give NaN gradients on Hopper (pytorch#196678), and it plans again for every
        // shape.
        draftmill_torch_ext::set_attention(Attention { cudnn: false, ..draftmill_torch_ext::attention()? })?;
    }
    if !allocator_is_configured() {
        // Shapes differ from batch to batch, and fragmentation would exhaust a nearly full GPU.
        draftmill_torch_ext::expand_segments(true)?;
    }
    // f32 means f32: TF32 keeps 10 bits of mantissa, too few for the golden data and for losses compared between
    // devices. libtorch's default differs by operation (cuDNN convolutions use TF32).
    draftmill_torch_ext::allow_tf32(std::env::var_os(ALLOW_TF32).is_some_and(|value| value == "1"))?;
    Ok(if Cuda::is_available() { Cuda::device_count().max(0) as usize } else { 0 })
}

/// True if this libtorch has a CUDA half, even without a device.
pub fn has_cuda_half() -> bool {
    cuda_library_path().is_some_and(|path| path.exists())
}

/// Message of the dynamic loader for a library that cannot be opened, which is only the source of `error`.
pub(crate) fn loader_message(error: &libloading::Error) -> String {
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}

fn allocator_is_configured() -> bool {
    ALLOCATOR.iter().any(|name| std::env::var_os(name).is_some())
}

impl From<draftmill_torch_ext::Error> for ModelError {
    /// Keeps the text, by which [`ModelError::is_out_of_memory`] detects memory errors, as for errors of tch.
    fn from(error: draftmill_torch_ext::Error) -> ModelError {
        ModelError::Torch(error.to_string())
    }
}

/// Sets the number of threads of each CPU operation.
pub fn set_threads(threads_per_operation: usize) {
    tch::set_num_threads(i32::try_from(threads_per_operation.max(1)).unwrap_or(i32::MAX));
}

/// Lets CPU operations use every core, for work that nothing else competes with.
pub fn use_all_cores() {
    set_threads(std::thread::available_parallelism().map_or(1, usize::from));
}

/// Opens a device for tensors.
///
/// # Errors
/// `ModelError::Input` if this process does not see the device.
pub fn open_device(device: config::Device) -> Result<Device, ModelError> {
    let have = if Cuda::is_available() { Cuda::device_count().max(0) as usize } else { 0 };
    match device {
        config::Device::Cuda(index) if index >= have => Err(ModelError::Input(format!(
            "device `{device}` is not available: this process sees {have} CUDA devices; use cpu, or a libtorch with CUDA"
        ))),
        device => Ok(device.into()),
    }
}

/// Path at which the CUDA half is expected: the folder of the loaded CPU half.
pub(crate) fn cuda_library_path() -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let line = maps.lines().find(|line| line.ends_with(CPU_LIBRARY))?;
    let path = line.find('/').map(|start| PathBuf::from(&line[start..]))?;
    Some(path.with_file_name(CUDA_LIBRARY))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuda_half_is_searched_next_to_the_cpu_half() {
        let path = cuda_library_path().unwrap();
        assert!(path.with_file_name(CPU_LIBRARY).exists(), "{path:?}");
    }

    /// libloading's own text only reports that dlopen failed.
    #[test]
    fn loader_message_is_reported() {
        // SAFETY: the file does not exist, so nothing runs.
        let error = unsafe { Library::open(Some("/no/such/library.so"), RTLD_NOW) }.map(|_| ()).unwrap_err();
        let message = loader_message(&error);
        assert!(message.contains("/no/such/library.so: cannot open"), "{message}");
    }

    /// libtorch's defaults are TF32 for convolutions, and cuDNN attention if available.
    #[test]
    fn tf32_and_cudnn_attention_are_off_by_default() {
        draftmill_torch_ext::allow_tf32(true).unwrap();
        init_libtorch().unwrap();
        assert_eq!(
            draftmill_torch_ext::tf32_allowed(),
            Ok(std::env::var_os(ALLOW_TF32).is_some_and(|value| value == "1"))
        );
        let kernels = draftmill_torch_ext::attention().unwrap();
        assert_eq!(kernels.cudnn, std::env::var_os(AVOID_CUDNN_ATTENTION).is_some());
        assert!(kernels.flash && kernels.efficient && kernels.math);
    }

    #[test]
    fn segments_expand_unless_the_allocator_is_configured() {
        init_libtorch().unwrap();
        assert!(allocator_is_configured() || draftmill_torch_ext::segments_expand().unwrap());
    }

    #[test]
    fn absent_device_is_rejected_by_name() {
        assert_eq!(open_device(config::Device::Cpu).unwrap(), Device::Cpu);
        let text = open_device(config::Device::Cuda(4096)).unwrap_err().to_string();
        assert!(text.contains("`cuda:4096`"), "{text}");
    }
}
