//! One process per run folder: a lock that the operating system gives back when its holder ends, however it ends.

use super::error::{Problem, StateError};
use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io::{ErrorKind, Read, Write},
    path::Path,
};

/// Holds `<run>/lock` locked. The file stays behind when the process ends; only the lock on it counts, so a stale file is
/// no obstacle.
#[derive(Debug)]
pub struct RunLock {
    _file: File,
}

impl RunLock {
    /// Locks the run folder, or names the process that has it.
    pub fn acquire(run: &Path) -> Result<RunLock, StateError> {
        let path = run.join("lock");
        lock(&path).map(|file| RunLock { _file: file }).map_err(|problem| StateError { action: "lock", path, problem })
    }
}

/// The process that works in a run folder, found without touching the lock; `None` where none does.
pub fn holder(run: &Path) -> Option<String> {
    let path = fs::canonicalize(run.join("lock")).ok()?;
    let pid = fs::read_to_string(&path).ok()?.trim().parse::<u32>().ok()?.to_string();
    // The number in a stale file may by now be another process's, so the process must have the file open.
    match fs::read_dir(format!("/proc/{pid}/fd")) {
        Ok(open) => open.flatten().any(|fd| fs::read_link(fd.path()).is_ok_and(|file| file == path)).then_some(pid),
        // Another user's process may not be looked into.
        Err(error) => (error.kind() == ErrorKind::PermissionDenied).then_some(pid),
    }
}

fn lock(path: &Path) -> Result<File, Problem> {
    let mut file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let mut holder = String::new();
            // Best effort: the number only helps a person to find the process.
            let known = file.read_to_string(&mut holder).is_ok() && !holder.trim().is_empty();
            return Err(Problem::InUse { holder: known.then(|| holder.trim().to_owned()) });
        }
        Err(TryLockError::Error(error)) => return Err(Problem::Io(error)),
    }
    file.set_len(0)?;
    writeln!(file, "{}", std::process::id())?;
    Ok(file)
}
