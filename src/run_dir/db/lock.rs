//! Lock of a run folder for one process. The operating system releases it when the process ends.

use super::error::{Problem, StateError};
use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io::{ErrorKind, Read, Write},
    path::Path,
};

/// Lock on the file `<run>/lock`. The file remains after the process; only the lock counts, so a stale file is harmless.
#[derive(Debug)]
pub struct RunLock {
    _file: File,
}

impl RunLock {
    /// Locks the run folder.
    ///
    /// # Errors
    /// [`Problem::InUse`] with the process that holds the lock, or an I/O error.
    pub fn acquire(run: &Path) -> Result<RunLock, StateError> {
        let path = run.join("lock");
        lock(&path).map(|file| RunLock { _file: file }).map_err(|problem| StateError { action: "lock", path, problem })
    }
}

/// Id of the process that uses a run folder, found without taking the lock; `None` if there is none.
pub fn holder(run: &Path) -> Option<String> {
    let path = fs::canonicalize(run.join("lock")).ok()?;
    let pid = fs::read_to_string(&path).ok()?.trim().parse::<u32>().ok()?.to_string();
    // The id in a stale file may belong to another process now, so the process must have the file open.
    match fs::read_dir(format!("/proc/{pid}/fd")) {
        Ok(open) => open.flatten().any(|fd| fs::read_link(fd.path()).is_ok_and(|file| file == path)).then_some(pid),
        // The files of another user's process are not readable.
        Err(error) => (error.kind() == ErrorKind::PermissionDenied).then_some(pid),
    }
}

fn lock(path: &Path) -> Result<File, Problem> {
    let mut file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let mut holder = String::new();
            // Best effort: the id only helps to find the process.
            let known = file.read_to_string(&mut holder).is_ok() && !holder.trim().is_empty();
            return Err(Problem::InUse { holder: known.then(|| holder.trim().to_owned()) });
        }
        Err(TryLockError::Error(error)) => return Err(Problem::Io(error)),
    }
    file.set_len(0)?;
    writeln!(file, "{}", std::process::id())?;
    Ok(file)
}
