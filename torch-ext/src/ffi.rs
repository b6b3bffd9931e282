//! Declarations of the C functions of `torch_ext.cpp`, `streams.cpp` and `row_kernels.cpp`.

use crate::{Attention, Memory};
use std::ffi::{c_char, c_int, c_void};
use torch_sys::C_tensor;

pub const DONE: c_int = 0;
pub const OUT_OF_MEMORY: c_int = 2;
pub const UNSUITABLE: c_int = 3;

#[repr(C)]
pub struct Update {
    pub learning_rate: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    pub weight_decay: f64,
    pub step: f64,
    pub denominator: f64,
    pub max_norm: f64,
}

/// Stream of a GPU.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stream {
    pub id: i64,
    pub gpu: c_int,
}

/// `c10::Event` of libtorch.
#[repr(C)]
pub struct Event {
    _opaque: [u8; 0],
}

#[repr(C)]
pub struct Rows {
    pub data: *mut f32,
    pub outer: i64,
    pub inner: i64,
    pub outer_stride: i64,
    pub inner_stride: i64,
}

unsafe extern "C" {
    pub fn draftmill_rms_norm(x: &Rows, weight: *const f32, width: i64, eps: f64, y: *mut f32, scale: *mut f32);
    pub fn draftmill_rms_norm_from_scale(x: &Rows, scale: *const f32, weight: *const f32, width: i64, y: *mut f32);
    pub fn draftmill_rms_norm_backward(
        dy: *const f32,
        x: &Rows,
        scale: *const f32,
        weight: *const f32,
        width: i64,
        dx: &Rows,
        dw: *mut f32,
    );
    pub fn draftmill_swiglu(gate_up: &Rows, width: i64, out: *mut f32);
    pub fn draftmill_swiglu_backward(d_out: *const f32, gate_up: &Rows, width: i64, out: *mut f32, d_gate_up: *mut f32);
    pub fn draftmill_online_softmax(
        scores: *mut f32,
        rows: i64,
        width: i64,
        max: *mut f32,
        sum: *mut f32,
        rescale: *mut f32,
    );
    pub fn draftmill_softmax_backward(
        scores: *mut f32,
        d_weights: *mut f32,
        rows: i64,
        width: i64,
        log_sum: *const f32,
        delta: *const f32,
    );
    pub fn draftmill_softmax_entropy(scores: *mut f32, rows: i64, width: i64, entropy: *mut f32);
    pub fn draftmill_compare_rows(
        scores: *mut f32,
        teacher: *const f32,
        index: *const i64,
        rows: i64,
        width: i64,
        max: *mut f32,
        log_total: *mut f32,
        cross: *mut f32,
        shared: *mut f32,
        under: *mut f32,
    );
    pub fn draftmill_slope_rows(
        q: *mut f32,
        teacher: *const f32,
        index: *const i64,
        rows: i64,
        width: i64,
        own: *const f32,
        below: *const f32,
        against: *const f32,
    );
}

unsafe extern "C" {
    pub fn draftmill_last_error() -> *const c_char;
    pub fn draftmill_version() -> *const c_char;
    pub fn draftmill_fused_adamw(
        masters: *const *const C_tensor,
        gradients: *const *const C_tensor,
        exp_avg: *const *const C_tensor,
        exp_avg_sq: *const *const C_tensor,
        count: usize,
        norm: *const C_tensor,
        update: *const Update,
    ) -> c_int;
    pub fn draftmill_norm(tensors: *const *const C_tensor, count: usize, norm: *mut *mut C_tensor) -> c_int;
    pub fn draftmill_parallel_for(count: i64, work: extern "C" fn(*mut c_void, i64), context: *mut c_void) -> c_int;
    pub fn draftmill_empty_cache(index: c_int) -> c_int;
    pub fn draftmill_memory(index: c_int, memory: *mut Memory) -> c_int;
    pub fn draftmill_expand_segments(expand: bool) -> c_int;
    pub fn draftmill_segments_expand(expand: *mut bool) -> c_int;
    pub fn draftmill_allow_tf32(allow: bool) -> c_int;
    pub fn draftmill_tf32_allowed(allowed: *mut bool) -> c_int;
    pub fn draftmill_set_attention(kernels: *const Attention) -> c_int;
    pub fn draftmill_attention(used: *mut Attention) -> c_int;
    pub fn draftmill_attend(
        kernel: c_int,
        queries: *const C_tensor,
        keys: *const C_tensor,
        values: *const C_tensor,
        scale: f64,
        gathered: *mut *mut C_tensor,
    ) -> c_int;
    pub fn draftmill_attend_backward(
        kernel: c_int,
        d_gathered: *const C_tensor,
        queries: *const C_tensor,
        keys: *const C_tensor,
        values: *const C_tensor,
        gathered: *const C_tensor,
        log_sum: *const C_tensor,
        scale: f64,
        gradients: *mut *mut C_tensor,
    ) -> c_int;
    /// Throws the exception that `what` selects: see `torch_ext.cpp`.
    #[cfg(test)]
    pub fn draftmill_throw(what: c_int) -> c_int;
}

unsafe extern "C" {
    pub fn draftmill_stream_current(gpu: c_int, stream: *mut Stream) -> c_int;
    pub fn draftmill_stream_new(gpu: c_int, stream: *mut Stream) -> c_int;
    pub fn draftmill_stream_enter(stream: *const Stream, before: *mut Stream) -> c_int;
    pub fn draftmill_stream_wait(stream: *const Stream, event: *const Event) -> c_int;
    pub fn draftmill_stream_uses(stream: *const Stream, tensor: *const C_tensor) -> c_int;
    pub fn draftmill_event_record(stream: *const Stream, event: *mut *mut Event) -> c_int;
    pub fn draftmill_event_query(event: *const Event, complete: *mut bool) -> c_int;
    pub fn draftmill_event_wait(event: *const Event) -> c_int;
    pub fn draftmill_event_drop(event: *mut Event) -> c_int;
    pub fn draftmill_pinned(bytes: i64, memory: *mut *mut C_tensor) -> c_int;
    pub fn draftmill_copy(to: *const C_tensor, from: *const C_tensor) -> c_int;
    /// See `fake.cpp`.
    #[cfg(test)]
    pub fn draftmill_fake_gpus();
    #[cfg(test)]
    pub fn draftmill_fake_log() -> *const c_char;
}
