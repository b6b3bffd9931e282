//! The binary.

#[cfg(all(feature = "torch", target_os = "linux", target_env = "gnu"))]
mod openmp;

fn main() {
    draftmill::common::process::ignore_file_size_signal();
    let _points = draftmill::common::failpoint::set_up();
    draftmill::cli::main().leave()
}
