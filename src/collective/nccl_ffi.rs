//! The functions of NCCL that Draftmill calls, as `nccl.h` declares them, and the library that they come from.

use crate::model::{ModelError, libtorch};
use libloading::os::unix::Library;
use std::{
    ffi::{CStr, c_char, c_int, c_void},
    path::PathBuf,
    time::Duration,
};
use thiserror::Error;

/// The ABI of all NCCL 2.
const LIBRARY: &str = "libnccl.so.2";

/// `ncclComm_t`: one GPU's part of a communicator.
pub type Comm = *mut c_void;
/// `cudaStream_t`.
pub type Stream = *mut c_void;

/// `ncclSuccess`.
pub const SUCCESS: c_int = 0;
/// `ncclFloat32`.
pub const FLOAT: c_int = 7;
/// `ncclSum`.
pub const SUM: c_int = 0;

/// Why NCCL does not do what was asked.
#[derive(Debug, Error)]
pub enum NcclError {
    /// No library, or one that lacks a function.
    #[error("NCCL is not there ({0})")]
    Missing(String),
    #[error("{call} failed: {text}")]
    Failed { call: &'static str, text: String },
    #[error("in its trial other numbers arrived than those that were sent")]
    Wrong,
    #[error("NCCL did not come to an end within {} s", .0.as_secs())]
    Hangs(Duration),
    /// Something in the caller's hands.
    #[error("{0}")]
    Unsuitable(String),
    #[error(transparent)]
    Model(#[from] ModelError),
}

/// Declares the table and the lookup of each name in it.
macro_rules! functions {
    ($($field:ident: $name:literal, fn($($argument:ty),*) -> $result:ty;)*) => {
        /// Where each function is. Tests put functions of their own here.
        #[derive(Clone, Copy, Debug)]
        pub struct Table { $(pub $field: unsafe extern "C" fn($($argument),*) -> $result,)* }

        impl Table {
            fn of(library: &Library) -> Result<Table, libloading::Error> {
                // SAFETY: NCCL's own names, with the types of its header.
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
    // From, to, values, their type, operation, root.
    reduce: "ncclReduce", fn(*const c_void, *mut c_void, usize, c_int, c_int, c_int, Comm, Stream) -> c_int;
    // From, to, values, their type, root.
    broadcast: "ncclBroadcast", fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, Stream) -> c_int;
}

impl Table {
    /// Of the library that lies beside libtorch, which is the one that libtorch's CUDA half has open, else of the machine's.
    pub fn open() -> Result<Table, NcclError> {
        let beside = beside_libtorch().filter(|path| path.exists());
        let path = beside.unwrap_or_else(|| LIBRARY.into());
        let missing = |error: libloading::Error| NcclError::Missing(libtorch::loaders_words(&error));
        // SAFETY: NVIDIA's library, whose initialisers only set it up.
        let library = unsafe { Library::new(&path) }.map_err(missing)?;
        let table = Table::of(&library).map_err(missing)?;
        // It has threads of its own, and must stay open as long as the process lives.
        std::mem::forget(library);
        Ok(table)
    }

    /// As it is written: "2.28.9".
    pub fn version(&self) -> Result<String, NcclError> {
        let mut version = 0;
        // SAFETY: fills an int.
        self.done("ncclGetVersion", unsafe { (self.get_version)(&mut version) })?;
        Ok(format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100))
    }

    /// What a call gave, with NCCL's own words where it failed.
    pub fn done(&self, call: &'static str, code: c_int) -> Result<(), NcclError> {
        if code == SUCCESS {
            return Ok(());
        }
        // SAFETY: a constant text that ends with a zero, for every number.
        let text = unsafe { CStr::from_ptr((self.get_error_string)(code)) };
        Err(NcclError::Failed { call, text: text.to_string_lossy().into_owned() })
    }
}

/// In `nvidia/nccl/lib` beside `torch/lib`: so pip lays it out, and so does scripts/fetch.py.
fn beside_libtorch() -> Option<PathBuf> {
    let half = libtorch::beside_cpu_library()?;
    half.ancestors().nth(3).map(|packages| packages.join("nvidia/nccl/lib").join(LIBRARY))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::{fake_nccl, nccl::Communicator};
    use tch::Device;

    #[test]
    fn a_version_is_read_as_it_is_written() {
        let table = fake_nccl::table();
        assert_eq!(table.version().unwrap(), "2.28.9");
        fake_nccl::fail_at(1);
        assert_eq!(table.version().unwrap_err().to_string(), "ncclGetVersion failed: internal error");
    }

    #[test]
    fn it_is_looked_for_beside_the_folder_of_libtorch() {
        let path = beside_libtorch().unwrap();
        assert!(path.ends_with("nvidia/nccl/lib/libnccl.so.2"), "{path:?}");
        let packages = path.ancestors().nth(4).unwrap();
        assert!(libtorch::beside_cpu_library().unwrap().starts_with(packages), "{path:?}");
    }

    /// Whatever this machine has: no library, no GPU, or no GPU of that number.
    #[test]
    fn without_a_gpu_the_real_library_gives_a_sentence() {
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
