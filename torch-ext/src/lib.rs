//! What tch lacks of libtorch and Draftmill calls: fused AdamW, the norm of many tensors, attention kernels that tell their sums,
//! work shared out over an operation's threads, streams, events and copies that nobody waits for, a GPU's memory, and switches.
//!
//! `torch_ext.cpp` and `streams.cpp` beside this file do the work, against the libtorch that tch links and without any CUDA header: what
//! only a GPU has answers with a sentence where there is none. Errors have a slot of their own, so nothing is left
//! in tch's, and no exception leaves C++. Without the feature `torch` this package is empty.

#![cfg(feature = "torch")]

mod attend;
mod ffi;
mod pinned_transfer;
pub mod row_kernels;
mod streams;
#[cfg(test)]
mod tests;

pub use attend::{attend, attend_backward, attends};
pub use pinned_transfer::{Arrival, Ferry};
pub use streams::{Event, Reading, Stream};

use std::ffi::{CStr, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread;
use tch::{Device, Tensor};
use torch_sys::C_tensor;

/// Why a call did not do what was asked, told apart by kind and not by text. Each carries the first line of the message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A device or the host has no room; what the call had begun is freed again.
    #[error("out of memory: {0}")]
    OutOfMemory(String),
    /// This shim or this process cannot do that, and nothing was changed.
    #[error("{0}")]
    Unsuitable(String),
    /// Any other failure of libtorch.
    #[error("{0}")]
    Failed(String),
}

/// One update by AdamW (Loshchilov and Hutter, "Decoupled weight decay regularization", algorithm 2).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Update {
    pub learning_rate: f64,
    pub beta1: f64,
    pub beta2: f64,
    /// Added to the corrected root of the second moment.
    pub eps: f64,
    /// Decoupled: a master shrinks by `learning_rate * weight_decay` of itself.
    pub weight_decay: f64,
    /// Number of this update, from 1: it corrects the moments' bias.
    pub step: u64,
    /// Each gradient is divided by this first, and so is the norm.
    pub denominator: f64,
    /// What is divided is then scaled to a norm of at most this, by `min(1, max_norm / (norm + 1e-6))`.
    pub max_norm: f64,
}

/// A GPU's memory as its caching allocator and its driver tell it, in bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Held by tensors.
    pub allocated: u64,
    /// Held by the allocator, tensors included; [`empty_cache`] gives back what no tensor touches.
    pub reserved: u64,
    /// Most that tensors ever held.
    pub peak: u64,
    /// What the driver has left for anyone.
    pub free: u64,
    pub total: u64,
}

/// The kernels that attention may choose from; process-wide.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Attention {
    pub flash: bool,
    pub efficient: bool,
    pub math: bool,
    pub cudnn: bool,
}

/// Updates masters and both moments in place, in one kernel per device (a few for long lists). Waits neither for it nor for
/// the norm.
///
/// Item `i` of the four lists belongs together; all are f32, contiguous, of one size per item and on one device, the
/// CPU or a GPU. A gradient may lie in any order, and holds the divided gradient or the given one afterwards: it is used up.
/// `norm` is what [`norm`] gives of all gradients. Where the update does not fit it ([`Update::fits`]) nothing is
/// changed, and nothing says so: only the device knows by then.
///
/// Whatever the kernel would refuse, or would take silently and get wrong, is [`Error::Unsuitable`]; nothing is changed then.
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
        return Err(Error::Unsuitable("fused AdamW takes a gradient and two moments for each master".into()));
    }
    let Update { learning_rate, beta1, beta2, eps, weight_decay, step, denominator, max_norm } = *update;
    // Inexact past 2^53, and f32 in the kernel: by then no bias is left to correct.
    let step = step as f64;
    let update = ffi::Update { learning_rate, beta1, beta2, eps, weight_decay, step, denominator, max_norm };
    let [masters, gradients] = [pointers(masters), pointers(gradients)];
    let [exp_avg, exp_avg_sq] = [pointers(exp_avg), pointers(exp_avg_sq)];
    // SAFETY: four lists of `count` live tensors, borrowed for the call; sizes, kinds and devices are checked inside.
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
    /// What gradients are divided by in all, where their norm is `norm`. The kernel has it in f32.
    pub fn divisor(&self, norm: f64) -> f64 {
        let clip = self.max_norm / (norm / self.denominator + 1e-6);
        // Not by `min`, which takes NaN for no number at all.
        self.denominator / if clip > 1.0 { 1.0 } else { clip }
    }

    /// Whether that is finite for the kernel, too: else nothing is updated.
    pub fn fits(&self, norm: f64) -> bool {
        (self.divisor(norm) as f32).is_finite()
    }
}

/// The L2 norm of all values of all tensors, 0 of none: one f64 beside them, for which the host does not wait. [`Reading`] brings it.
pub fn norm(tensors: &[Tensor]) -> Result<Tensor, Error> {
    let mut norm = ptr::null_mut();
    let tensors = pointers(tensors);
    // SAFETY: a list of live tensors, borrowed for the call, which gives one tensor.
    done(unsafe { ffi::draftmill_norm(tensors.as_ptr(), tensors.len(), &mut norm) })?;
    Ok(owned(norm))
}

/// What `work` gives of each of `0..count`, shared out over the threads that an operation of the CPU may use. Operations inside stay
/// on the thread that calls them. Threads have grad mode as its last user left it. A panic goes on in the caller.
pub fn each<T: Send>(count: usize, work: impl Fn(usize) -> T + Sync) -> Result<Vec<T>, Error> {
    let (results, done_with) = sync_channel(count);
    let call = Call { work, results };
    // SAFETY: the call lives until all numbers are done, `run_one` is made for its type, and threads only share it.
    done(unsafe { ffi::draftmill_each(count as i64, run_one(&call), (&raw const call).cast_mut().cast()) })?;
    drop(call);
    let mut all = done_with.into_iter().collect::<Vec<_>>();
    all.sort_by_key(|(number, _)| *number);
    if all.len() != count {
        return Err(Error::Failed("libtorch left a share of the work out".into()));
    }
    Ok(all.into_iter().map(|(_, result)| result.unwrap_or_else(|panic| resume_unwind(panic))).collect())
}

struct Call<T, W> {
    work: W,
    /// Has room for all.
    results: SyncSender<(usize, thread::Result<T>)>,
}

/// The function that runs one number of such a call. No panic leaves it.
fn run_one<T: Send, W: Fn(usize) -> T + Sync>(_: &Call<T, W>) -> extern "C" fn(*mut c_void, i64) {
    extern "C" fn run<T: Send, W: Fn(usize) -> T + Sync>(context: *mut c_void, number: i64) {
        // SAFETY: what `each` passes.
        let call = unsafe { &*context.cast_const().cast::<Call<T, W>>() };
        let result = catch_unwind(AssertUnwindSafe(|| (call.work)(number as usize)));
        // One that is lost is missed at the end.
        let _ = call.results.try_send((number as usize, result));
    }
    run::<T, W>
}

/// Gives memory back that the allocator keeps and no tensor touches: that of all GPUs, as libtorch knows no finer
/// call. Where `device` is no GPU nothing is kept and nothing happens.
pub fn empty_cache(device: Device) -> Result<(), Error> {
    match device {
        // SAFETY: takes a number; one that names no GPU is an error.
        Device::Cuda(index) => done(unsafe { ffi::draftmill_empty_cache(number(index)) }),
        _ => Ok(()),
    }
}

/// The memory of a GPU; `None` for any other device.
pub fn memory(device: Device) -> Result<Option<Memory>, Error> {
    let Device::Cuda(index) = device else { return Ok(None) };
    let mut memory = Memory::default();
    // SAFETY: takes a number and fills a struct of the same layout; a number that names no GPU is an error.
    done(unsafe { ffi::draftmill_memory(number(index), &mut memory) })?;
    Ok(Some(memory))
}

/// The libtorch that this shim was compiled for: "2.11.0".
pub fn version() -> String {
    // SAFETY: a constant text that ends with a zero.
    unsafe { CStr::from_ptr(ffi::draftmill_version()) }.to_string_lossy().into_owned()
}

/// Whether the allocator of GPUs takes one range of addresses and maps memory into it as need grows, so that what one shape gave
/// back serves a larger one; else it takes each segment for itself, and sizes that differ from batch to batch leave gaps between
/// them. Process-wide, for memory that is taken from now on.
pub fn expand_segments(expand: bool) -> Result<(), Error> {
    // SAFETY: sets a flag.
    done(unsafe { ffi::draftmill_expand_segments(expand) })
}

/// Whether it does, as far as the machine's driver can.
pub fn segments_expand() -> Result<bool, Error> {
    let mut expand = false;
    // SAFETY: fills a bool.
    done(unsafe { ffi::draftmill_segments_expand(&mut expand) })?;
    Ok(expand)
}

/// Whether products and convolutions of f32 on a GPU may round their operands to TF32 (10 bits of mantissa);
/// process-wide, from the next operation on.
pub fn allow_tf32(allow: bool) -> Result<(), Error> {
    // SAFETY: sets flags.
    done(unsafe { ffi::draftmill_allow_tf32(allow) })
}

/// Whether any of them may.
pub fn tf32_allowed() -> Result<bool, Error> {
    let mut allowed = false;
    // SAFETY: fills a bool.
    done(unsafe { ffi::draftmill_tf32_allowed(&mut allowed) })?;
    Ok(allowed)
}

/// Sets the kernels that attention may choose from, from the next call of it on.
pub fn set_attention(kernels: Attention) -> Result<(), Error> {
    // SAFETY: reads a struct of the same layout.
    done(unsafe { ffi::draftmill_set_attention(&kernels) })
}

/// Those in force.
pub fn attention() -> Result<Attention, Error> {
    let mut used = Attention::default();
    // SAFETY: fills a struct of the same layout.
    done(unsafe { ffi::draftmill_attention(&mut used) })?;
    Ok(used)
}

/// As libtorch's C++ takes them: tch's tensor is a pointer to libtorch's.
fn pointers(tensors: &[Tensor]) -> Vec<*const C_tensor> {
    tensors.iter().map(Tensor::as_ptr).collect()
}

/// A tensor that the shim made for us.
fn owned(tensor: *mut C_tensor) -> Tensor {
    // SAFETY: after success each pointer is a tensor of libtorch on the heap that nobody else holds.
    unsafe { Tensor::from_ptr(tensor) }
}

/// One that is too large for libtorch is none of its devices, and refused as such.
fn number(index: usize) -> c_int {
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
    // SAFETY: the slot is this thread's, ends with a zero, and is not written again before the text is copied.
    let text = unsafe { CStr::from_ptr(ffi::draftmill_last_error()) }.to_string_lossy();
    let line = text.lines().next().unwrap_or_default().to_owned();
    Err(match code {
        ffi::OUT_OF_MEMORY => Error::OutOfMemory(line),
        ffi::UNSUITABLE => Error::Unsuitable(line),
        _ => Error::Failed(line),
    })
}
