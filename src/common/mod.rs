//! Ground floor: files, the machine, time, exit codes and number formats. It imports no other folder.

pub mod clock;
pub mod device;
pub mod exit;
pub mod failpoint;
pub mod fs;
pub mod gpu_memory;
pub mod guard;
pub mod hash;
pub mod host;
pub mod jsonl;
pub mod process;
pub mod text;
pub mod token;
