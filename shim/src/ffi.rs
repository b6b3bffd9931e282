//! The C functions of `shim.cpp`, as they are declared there.

use crate::{Attention, Memory};
use std::ffi::{c_char, c_int};
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
    pub divisor: f64,
}

unsafe extern "C" {
    pub fn draftmill_last_error() -> *const c_char;
    pub fn draftmill_fused_adamw(
        masters: *const *const C_tensor,
        gradients: *const *const C_tensor,
        exp_avg: *const *const C_tensor,
        exp_avg_sq: *const *const C_tensor,
        count: usize,
        update: *const Update,
    ) -> c_int;
    pub fn draftmill_norm(tensors: *const *const C_tensor, count: usize, norm: *mut f64) -> c_int;
    pub fn draftmill_empty_cache(index: c_int) -> c_int;
    pub fn draftmill_memory(index: c_int, memory: *mut Memory) -> c_int;
    pub fn draftmill_expand_segments(expand: bool) -> c_int;
    pub fn draftmill_segments_expand(expand: *mut bool) -> c_int;
    pub fn draftmill_allow_tf32(allow: bool) -> c_int;
    pub fn draftmill_tf32_allowed(allowed: *mut bool) -> c_int;
    pub fn draftmill_set_attention(kernels: *const Attention) -> c_int;
    pub fn draftmill_attention(used: *mut Attention) -> c_int;
    /// Throws inside what its number says: see `shim.cpp`.
    #[cfg(test)]
    pub fn draftmill_throw(what: c_int) -> c_int;
}
