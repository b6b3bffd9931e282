//! The binary.

#[cfg(all(feature = "torch", target_os = "linux", target_env = "gnu"))]
mod openmp;

fn main() {
    let _points = draftmill::common::failpoint::set_up();
    draftmill::cli::main().leave()
}
