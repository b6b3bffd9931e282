//! Bindings to the NCCL functions that Draftmill calls, as declared in `nccl.h`, loaded at run time.

use crate::model::{ModelError, libtorch};
use libloading::os::unix::Library;
use std::{
    ffi::{CStr, c_char, c_int, c_void},
    path::PathBuf,
    time::Duration,
};
use thiserror::Error;

/// Library name of every NCCL 2 release.
const LIBRARY: &str = "libnccl.so.2";

/// `ncclComm_t`: one rank of a communicator.
pub type Comm = *mut c_void;
/// `cudaStream_t`.
pub type Stream = *mut c_void;

/// `ncclSuccess`.
pub const SUCCESS: c_int = 0;
/// `ncclFloat32`.
pub const FLOAT: c_int = 7;
/// `ncclSum`.
pub const SUM: c_int = 0;

/// Failure of NCCL or of its use.
#[derive(Debug, Error)]
pub enum NcclError {
    /// Library that is absent or lacks a function.
    #[error("NCCL is not available ({0})")]
    Missing(String),
    #[error("{call} failed: {text}")]
    Failed { call: &'static str, text: String },
    #[error("the NCCL self-test received other values than were sent")]
    SelfTest,
    #[error("NCCL did not finish within {} s", .0.as_secs())]
    Timeout(Duration),
    /// Arguments that NCCL cannot take.
    #[error("{0}")]
    Unsuitable(String),
    #[error(transparent)]
    Model(#[from] ModelError),
}

/// Declares the function table and the symbol lookup of each entry.
macro_rules! functions {
    ($($field:ident: $name:literal, fn($($argument:ty),*) -> $result:ty;)*) => {
        /// Table of NCCL function pointers. Tests fill it with a fake.
        #[derive(Clone, Copy, Debug)]
        pub struct Table { $(pub $field: unsafe extern "C" fn($($argument),*) -> $result,)* }

        impl Table {
            fn load(library: &Library) -> Result<Table, libloading::Error> {
                // SAFETY: names and types as in NCCL's header.
                Ok(unsafe { Table { $($field: *library.get($name)?,)* } })
            }
        }
    };
}

functions! {
    get_version: "ncclGetVersion", fn(*mut c_int) -> c_int;
    get_error_string: "ncclGetErrorString", fn(c_int) -> *const c_char;
    comm_init_all: "ncclCommInitAll", fn(*mut Comm, c_int, *const c_int) -> c_int;
    comm_destroy: "ncclCommDestroy", fn(Comm) -> c_int;
    comm_abort: "ncclCommAbort", fn(Comm) -> c_int;
    group_start: "ncclGroupStart", fn() -> c_int;
    group_end: "ncclGroupEnd", fn() -> c_int;
    // Send buffer, receive buffer, count, dtype, operation, root.
    reduce: "ncclReduce", fn(*const c_void, *mut c_void, usize, c_int, c_int, c_int, Comm, Stream) -> c_int;
    // Send buffer, receive buffer, count, dtype, root.
    broadcast: "ncclBroadcast", fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, Stream) -> c_int;
}

impl Table {
    /// Opens the library next to libtorch, which libtorch's CUDA half has loaded already, else the system's.
    ///
    /// # Errors
    /// `NcclError::Missing` if no library is found or it lacks a function.
    pub fn open() -> Result<Table, NcclError> {
        let bundled = next_to_libtorch().filter(|path| path.exists());
        let path = bundled.unwrap_or_else(|| LIBRARY.into());
        let missing = |error: libloading::Error| NcclError::Missing(libtorch::loader_message(&error));
        // SAFETY: NVIDIA's library, whose initialisers have no effect outside it.
        let library = unsafe { Library::new(&path) }.map_err(missing)?;
        let table = Table::load(&library).map_err(missing)?;
        // The library starts its own threads, so it must stay open until the process exits.
        std::mem::forget(library);
        Ok(table)
    }

    /// Version text, for example "2.28.9".
    ///
    /// # Errors
    /// `NcclError::Failed` if NCCL does not report its version.
    pub fn version(&self) -> Result<String, NcclError> {
        let mut version = 0;
        // SAFETY: writes one int.
        self.check("ncclGetVersion", unsafe { (self.get_version)(&mut version) })?;
        Ok(format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100))
    }

    /// Converts the return code of `call` to a result.
    ///
    /// # Errors
    /// `NcclError::Failed` with NCCL's own text for the code.
    pub fn check(&self, call: &'static str, code: c_int) -> Result<(), NcclError> {
        if code == SUCCESS {
            return Ok(());
        }
        // SAFETY: NCCL returns a constant C string for every code.
        let text = unsafe { CStr::from_ptr((self.get_error_string)(code)) };
        Err(NcclError::Failed { call, text: text.to_string_lossy().into_owned() })
    }
}

/// Path of NCCL in `nvidia/nccl/lib` next to `torch/lib`: the layout of pip and of scripts/fetch.py.
fn next_to_libtorch() -> Option<PathBuf> {
    let cuda_library = libtorch::cuda_library_path()?;
    cuda_library.ancestors().nth(3).map(|packages| packages.join("nvidia/nccl/lib").join(LIBRARY))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::{fake_nccl, nccl::Communicator};
    use tch::Device;

    #[test]
    fn version_number_is_formatted() {
        let table = fake_nccl::table();
        assert_eq!(table.version().unwrap(), "2.28.9");
        fake_nccl::fail_at(1);
        assert_eq!(table.version().unwrap_err().to_string(), "ncclGetVersion failed: internal error");
    }

    #[test]
    fn library_is_searched_next_to_libtorch() {
        let path = next_to_libtorch().unwrap();
        assert!(path.ends_with("nvidia/nccl/lib/libnccl.so.2"), "{path:?}");
        let packages = path.ancestors().nth(4).unwrap();
        assert!(libtorch::cuda_library_path().unwrap().starts_with(packages), "{path:?}");
    }

    /// Covers machines without the library, without a GPU, or without a GPU of that index.
    #[test]
    fn real_library_without_the_gpu_returns_an_error() {
        let error = match Table::open() {
            Ok(table) => {
                assert!(table.version().unwrap().starts_with("2."));
                Communicator::new(table, &[Device::Cuda(4096)]).err().unwrap().to_string()
            }
            Err(error) => error.to_string(),
        };
        assert!(error.contains(LIBRARY) || error.starts_with("ncclCommInitAll failed: "), "{error}");
    }
}
