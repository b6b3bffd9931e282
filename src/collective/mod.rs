//! Collectives between GPUs: NCCL and peer copies.

#[cfg(test)]
pub(crate) mod fake_nccl;
pub mod nccl;
pub mod nccl_ffi;
pub mod peer_copy;
