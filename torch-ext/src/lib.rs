//! Extensions of tch: fused AdamW, norm over many tensors, attention kernels with log-sums, parallel map, CUDA streams
//! and events, asynchronous copies, GPU memory statistics, and global switches.
//!
//! `torch_ext.cpp` and `streams.cpp` implement them against the libtorch that tch links, without CUDA headers. GPU-only
//! functions return an error without a GPU. Errors have their own slot, so tch's stays clean, and no exception leaves
//! C++. Without the feature `torch` this package is empty.

#![cfg(feature = "torch")]

mod attend;
pub mod distributions;
mod ffi;
mod pinned_transfer;
pub mod row_kernels;
mod streams;
#[cfg(test)]
mod tests;

pub use attend::{attend, attend_backward, has_kernel};
pub use pinned_transfer::{PendingCopy, PinnedTransfer};
pub use streams::{Event, PendingScalar, Stream};

use std::ffi::{CStr, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread;
use tch::{Device, Tensor};
use torch_sys::C_tensor;

/// Failure of a call, with the first line of its message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The device or the host is out of memory; memory of the failed call is freed.
    #[error("out of memory: {0}")]
    OutOfMemory(String),
    /// This library or process cannot do what was requested; nothing was changed.
    #[error("{0}")]
    Unsuitable(String),
    /// Any other failure of libtorch.
    #[error("{0}")]
    Failed(String),
}

/// Parameters of one AdamW update (Loshchilov and Hutter, "Decoupled weight decay regularization", algorithm 2).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Update {
    pub learning_rate: f64,
    pub beta1: f64,
    pub beta2: f64,
    /// Added to the bias-corrected root of the second moment.
    pub eps: f64,
    /// Decoupled: a master weight shrinks by `learning_rate * weight_decay` of itself.
    pub weight_decay: f64,
    /// Number of this update, from 1, for bias correction.
    pub step: u64,
    /// Divisor of gradients and norm.
    pub denominator: f64,
    /// Limit on the divided norm: gradients are scaled by `min(1, max_norm / (norm + 1e-6))`.
    pub max_norm: f64,
}

/// Memory of a GPU in bytes, from its caching allocator and its driver.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Used by tensors.
    pub allocated: u64,
    /// Held by the allocator, including tensors; [`empty_cache`] releases what no tensor uses.
    pub reserved: u64,
    /// Maximum of `allocated` so far.
    pub peak: u64,
    /// Free memory according to the driver.
    pub free: u64,
    pub total: u64,
}

/// Attention kernels that libtorch may choose; process-wide.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Attention {
    pub flash: bool,
    pub efficient: bool,
    pub math: bool,
    pub cudnn: bool,
}

/// Updates masters and both moments in place, in one kernel per device (several for long lists), without waiting for it
/// or for the norm.
///
/// The four lists have matching items: f32, contiguous, of one size per item, all on one device, the CPU or a GPU. A
/// gradient may have any memory order and is overwritten. `norm` is the result of [`norm`] over all gradients. If the
/// update is not applicable to it ([`Update::is_applicable`]), the device changes nothing and the call still succeeds,
/// as only the device knows the norm.
///
/// # Errors
/// [`Error::Unsuitable`] for inputs that the kernel would reject or misread; nothing is changed then. Otherwise if
/// libtorch fails.
pub fn fused_adamw(
    masters: &mut [Tensor],
    gradients: &mut [Tensor],
    exp_avg: &mut [Tensor],
    exp_avg_sq: &mut [Tensor],
    norm: &Tensor,
    update: &Update,
) -> Result<(), Error> {
    let count = masters.len();
    if [gradients.len(), exp_avg.len(), exp_avg_sq.len()] != [count; 3] {
        return Err(Error::Unsuitable("fused AdamW requires a gradient and two moments for each master".into()));
    }
    let Update { learning_rate, beta1, beta2, eps, weight_decay, step, denominator, max_norm } = *update;
    // Inexact past 2^53, and f32 in the kernel; bias correction is 1 by then.
    let step = step as f64;
    let update = ffi::Update { learning_rate, beta1, beta2, eps, weight_decay, step, denominator, max_norm };
    let [masters, gradients] = [pointers(masters), pointers(gradients)];
    let [exp_avg, exp_avg_sq] = [pointers(exp_avg), pointers(exp_avg_sq)];
    // SAFETY: four lists of `count` live tensors, borrowed for the call; C++ checks sizes, dtypes and devices.
    done(unsafe {
        ffi::draftmill_fused_adamw(
            masters.as_ptr(),
            gradients.as_ptr(),
            exp_avg.as_ptr(),
            exp_avg_sq.as_ptr(),
            count,
            norm.as_ptr(),
            &update,
        )
    })
}

impl Update {
    /// Total divisor of gradients with norm `norm`: mean and clipping. The kernel uses it in f32.
    pub fn divisor(&self, norm: f64) -> f64 {
        let clip = self.max_norm / (norm / self.denominator + 1e-6);
        // `min` would ignore a NaN.
        self.denominator / if clip > 1.0 { 1.0 } else { clip }
    }

    /// True if the divisor is finite in f32; otherwise the kernel updates nothing.
    pub fn is_applicable(&self, norm: f64) -> bool {
        (self.divisor(norm) as f32).is_finite()
    }
}

/// L2 norm over all values of all tensors, 0 for none, as one f64 on their device. Does not wait for the device;
/// [`PendingScalar`] reads the result.
///
/// # Errors
/// Returns an error if libtorch fails.
pub fn norm(tensors: &[Tensor]) -> Result<Tensor, Error> {
    let mut norm = ptr::null_mut();
    let tensors = pointers(tensors);
    // SAFETY: a list of live tensors, borrowed for the call, which returns one tensor.
    done(unsafe { ffi::draftmill_norm(tensors.as_ptr(), tensors.len(), &mut norm) })?;
    Ok(owned(norm))
}

/// Returns `work` of each of `0..count`, computed in parallel on libtorch's CPU threads. Operations inside run on the
/// thread of their item. Threads keep the grad mode of their last user. A panic resumes in the caller.
///
/// # Errors
/// Returns an error if libtorch fails or skips an item.
pub fn parallel_map<T: Send>(count: usize, work: impl Fn(usize) -> T + Sync) -> Result<Vec<T>, Error> {
    let (results, receiver) = sync_channel(count);
    let call = Call { work, results };
    // SAFETY: `call` outlives the call, `run_one` matches its type, and threads only share it.
    done(unsafe { ffi::draftmill_parallel_for(count as i64, run_one(&call), (&raw const call).cast_mut().cast()) })?;
    drop(call);
    let mut all = receiver.into_iter().collect::<Vec<_>>();
    all.sort_by_key(|(number, _)| *number);
    if all.len() != count {
        return Err(Error::Failed("libtorch skipped an item of a parallel map".into()));
    }
    Ok(all.into_iter().map(|(_, result)| result.unwrap_or_else(|panic| resume_unwind(panic))).collect())
}

struct Call<T, W> {
    work: W,
    /// Has capacity for all results.
    results: SyncSender<(usize, thread::Result<T>)>,
}

/// Returns the C function that runs one item of a call of this type. No panic leaves it.
fn run_one<T: Send, W: Fn(usize) -> T + Sync>(_: &Call<T, W>) -> extern "C" fn(*mut c_void, i64) {
    extern "C" fn run<T: Send, W: Fn(usize) -> T + Sync>(context: *mut c_void, number: i64) {
        // SAFETY: the pointer that `parallel_map` passes.
        let call = unsafe { &*context.cast_const().cast::<Call<T, W>>() };
        let result = catch_unwind(AssertUnwindSafe(|| (call.work)(number as usize)));
        // A lost result is detected at the end.
        let _ = call.results.try_send((number as usize, result));
    }
    run::<T, W>
}

/// Releases memory that the allocator holds and no tensor uses, on all GPUs: libtorch has no call for one. Does nothing
/// if `device` is not a GPU.
///
/// # Errors
/// [`Error::Unsuitable`] if the GPU does not exist.
pub fn empty_cache(device: Device) -> Result<(), Error> {
    match device {
        // SAFETY: takes an index; an unknown GPU is an error.
        Device::Cuda(index) => done(unsafe { ffi::draftmill_empty_cache(gpu_index(index)) }),
        _ => Ok(()),
    }
}

/// Memory of a GPU; `None` for other devices.
///
/// # Errors
/// [`Error::Unsuitable`] if the GPU does not exist.
pub fn memory(device: Device) -> Result<Option<Memory>, Error> {
    let Device::Cuda(index) = device else { return Ok(None) };
    let mut memory = Memory::default();
    // SAFETY: takes an index and fills a struct of the same layout; an unknown GPU is an error.
    done(unsafe { ffi::draftmill_memory(gpu_index(index), &mut memory) })?;
    Ok(Some(memory))
}

/// Version of libtorch that this library was compiled for: "2.11.0".
pub fn version() -> String {
    // SAFETY: a constant C string.
    unsafe { CStr::from_ptr(ffi::draftmill_version()) }.to_string_lossy().into_owned()
}

/// Sets if the CUDA allocator uses expandable segments: one address range that grows, so that freed memory serves
/// larger shapes. Without them, varying sizes fragment memory. Process-wide, for later allocations.
///
/// # Errors
/// Returns an error if libtorch rejects the setting.
pub fn expand_segments(expand: bool) -> Result<(), Error> {
    // SAFETY: sets a flag.
    done(unsafe { ffi::draftmill_expand_segments(expand) })
}

/// True if the CUDA allocator uses expandable segments, as far as the driver supports them.
///
/// # Errors
/// Returns an error if libtorch fails.
pub fn segments_expand() -> Result<bool, Error> {
    let mut expand = false;
    // SAFETY: fills a bool.
    done(unsafe { ffi::draftmill_segments_expand(&mut expand) })?;
    Ok(expand)
}

/// Sets if f32 products and convolutions on a GPU may use TF32 (10 bits of mantissa); process-wide, for later
/// operations.
///
/// # Errors
/// Returns an error if libtorch fails.
pub fn allow_tf32(allow: bool) -> Result<(), Error> {
    // SAFETY: sets flags.
    done(unsafe { ffi::draftmill_allow_tf32(allow) })
}

/// True if any f32 operation may use TF32.
///
/// # Errors
/// Returns an error if libtorch fails.
pub fn tf32_allowed() -> Result<bool, Error> {
    let mut allowed = false;
    // SAFETY: fills a bool.
    done(unsafe { ffi::draftmill_tf32_allowed(&mut allowed) })?;
    Ok(allowed)
}

/// Sets the attention kernels that libtorch may choose; process-wide, for later calls.
///
/// # Errors
/// Returns an error if libtorch fails.
pub fn set_attention(kernels: Attention) -> Result<(), Error> {
    // SAFETY: reads a struct of the same layout.
    done(unsafe { ffi::draftmill_set_attention(&kernels) })
}

/// Attention kernels that libtorch may choose now.
///
/// # Errors
/// Returns an error if libtorch fails.
pub fn attention() -> Result<Attention, Error> {
    let mut used = Attention::default();
    // SAFETY: fills a struct of the same layout.
    done(unsafe { ffi::draftmill_attention(&mut used) })?;
    Ok(used)
}

/// Pointers to libtorch's tensors, which tch's tensors wrap.
fn pointers(tensors: &[Tensor]) -> Vec<*const C_tensor> {
    tensors.iter().map(Tensor::as_ptr).collect()
}

/// Takes ownership of a tensor that C++ returned.
fn owned(tensor: *mut C_tensor) -> Tensor {
    // SAFETY: after success each pointer is a heap tensor of libtorch without another owner.
    unsafe { Tensor::from_ptr(tensor) }
}

/// Converts a GPU index; libtorch rejects one that is too large.
fn gpu_index(index: usize) -> c_int {
    c_int::try_from(index).unwrap_or(c_int::MAX)
}

impl From<tch::TchError> for Error {
    fn from(error: tch::TchError) -> Error {
        Error::Failed(error.to_string().lines().next().unwrap_or_default().to_owned())
    }
}

fn done(code: c_int) -> Result<(), Error> {
    if code == ffi::DONE {
        return Ok(());
    }
    // SAFETY: the slot is thread-local, zero-terminated, and not written again before the text is copied.
    let text = unsafe { CStr::from_ptr(ffi::draftmill_last_error()) }.to_string_lossy();
    let line = text.lines().next().unwrap_or_default().to_owned();
    Err(match code {
        ffi::OUT_OF_MEMORY => Error::OutOfMemory(line),
        ffi::UNSUITABLE => Error::Unsuitable(line),
        _ => Error::Failed(line),
    })
}
