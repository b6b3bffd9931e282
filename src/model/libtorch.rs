//! Start-up of libtorch: CUDA where it lies beside the libraries, thread counts, and device names.

use super::ModelError;
use crate::config;
use draftmill_torch_ext::Attention;
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use std::{error::Error, path::PathBuf};
use tch::{Cuda, Device};

const CPU_LIBRARY: &str = "libtorch_cpu.so";
const CUDA_LIBRARY: &str = "libtorch_cuda.so";
/// libtorch's own way to choose when cuDNN's attention is taken; who sets it decides.
const AVOID_CUDNN_ATTENTION: &str = "TORCH_CUDNN_SDPA_DEPRIORITIZED";
/// libtorch's own ways to set its allocator up; who sets one decides all of it.
const ALLOCATOR: [&str; 2] = ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"];
/// libtorch's own way to ask for TF32.
const ALLOW_TF32: &str = "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE";

/// Call before the first operation. Opens the CUDA half of libtorch when it lies beside the CPU half, so that one
/// binary serves both, and sets what holds for the whole process. Gives the number of CUDA devices.
pub fn init_libtorch() -> Result<usize, ModelError> {
    if let Some(library) = beside_cpu_library().filter(|path| path.exists()) {
        // SAFETY: libtorch's own library; its initialisers register CUDA with the half that is loaded already.
        let opened = unsafe { Library::open(Some(&library), RTLD_NOW | RTLD_GLOBAL) };
        let opened = opened.map_err(|error| {
            let (path, error) = (library.display(), loaders_words(&error));
            ModelError::Input(format!(
                "{path} is there but cannot be opened ({error}); fetch libtorch again, with CUDA"
            ))
        })?;
        // It must stay open as long as the process lives.
        std::mem::forget(opened);
    }
    if std::env::var_os(AVOID_CUDNN_ATTENTION).is_none() {
        // With an explicit mask it can give NaN gradients on Hopper (pytorch#196678), and it plans anew for every shape.
        draftmill_torch_ext::set_attention(Attention { cudnn: false, ..draftmill_torch_ext::attention()? })?;
    }
    if !allocator_is_set_up() {
        // Hardly two batches have the same shape, and a GPU that is nearly full has no room for gaps.
        draftmill_torch_ext::expand_segments(true)?;
    }
    // Who writes f32 gets f32: TF32 keeps 10 bits of a factor, three digits, which neither the golden data nor a loss
    // that is compared between devices survives. libtorch's default differs by operation (cuDNN's convolutions round).
    draftmill_torch_ext::allow_tf32(std::env::var_os(ALLOW_TF32).is_some_and(|asked| asked == "1"))?;
    Ok(if Cuda::is_available() { Cuda::device_count().max(0) as usize } else { 0 })
}

/// Whether this libtorch has a CUDA half, a device or not.
pub fn has_cuda_half() -> bool {
    beside_cpu_library().is_some_and(|path| path.exists())
}

/// Why a library could not be opened: what the dynamic loader said, which the error itself keeps behind it.
pub(crate) fn loaders_words(error: &libloading::Error) -> String {
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}

fn allocator_is_set_up() -> bool {
    ALLOCATOR.iter().any(|name| std::env::var_os(name).is_some())
}

impl From<draftmill_torch_ext::Error> for ModelError {
    /// The text tells an error of memory from others, as that of tch's does.
    fn from(error: draftmill_torch_ext::Error) -> ModelError {
        ModelError::Torch(error.to_string())
    }
}

/// Bounds the threads of each CPU operation.
pub fn set_threads(threads_per_operation: usize) {
    tch::set_num_threads(i32::try_from(threads_per_operation.max(1)).unwrap_or(i32::MAX));
}

/// Lets the operations of this thread use every core: for work at a time when nothing else computes.
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
            "device `{device}` is not there: this process sees {have} CUDA devices; use cpu, or a libtorch with CUDA"
        ))),
        device => Ok(device.into()),
    }
}

/// Where the CUDA half would be: in the folder from which the CPU half was loaded.
pub(crate) fn beside_cpu_library() -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let line = maps.lines().find(|line| line.ends_with(CPU_LIBRARY))?;
    let path = line.find('/').map(|start| PathBuf::from(&line[start..]))?;
    Some(path.with_file_name(CUDA_LIBRARY))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cuda_half_is_looked_for_beside_the_cpu_half() {
        let path = beside_cpu_library().unwrap();
        assert!(path.with_file_name(CPU_LIBRARY).exists(), "{path:?}");
    }

    /// libloading's own text is only that dlopen failed.
    #[test]
    fn a_library_that_cannot_be_opened_says_what_the_loader_said() {
        // SAFETY: there is nothing to run.
        let error = unsafe { Library::open(Some("/no/such/library.so"), RTLD_NOW) }.map(|_| ()).unwrap_err();
        let words = loaders_words(&error);
        assert!(words.contains("/no/such/library.so: cannot open"), "{words}");
    }

    /// libtorch's defaults are TF32 for convolutions, and cuDNN's attention where there is one.
    #[test]
    fn f32_is_f32_and_cudnn_attention_is_off_unless_asked_otherwise() {
        draftmill_torch_ext::allow_tf32(true).unwrap();
        init_libtorch().unwrap();
        assert_eq!(
            draftmill_torch_ext::tf32_allowed(),
            Ok(std::env::var_os(ALLOW_TF32).is_some_and(|asked| asked == "1"))
        );
        let kernels = draftmill_torch_ext::attention().unwrap();
        assert_eq!(kernels.cudnn, std::env::var_os(AVOID_CUDNN_ATTENTION).is_some());
        assert!(kernels.flash && kernels.efficient && kernels.math);
    }

    #[test]
    fn segments_expand_unless_the_allocator_is_set_up_otherwise() {
        init_libtorch().unwrap();
        assert!(allocator_is_set_up() || draftmill_torch_ext::segments_expand().unwrap());
    }

    #[test]
    fn a_device_that_is_absent_is_refused_by_name() {
        assert_eq!(open_device(config::Device::Cpu).unwrap(), Device::Cpu);
        let text = open_device(config::Device::Cuda(4096)).unwrap_err().to_string();
        assert!(text.contains("`cuda:4096`"), "{text}");
    }
}
