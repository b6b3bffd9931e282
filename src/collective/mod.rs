//! Collectives between GPUs: NCCL, and copies between two devices.

#[cfg(test)]
pub(crate) mod fake_nccl;
pub mod nccl;
pub mod nccl_ffi;
pub mod peer_copy;
