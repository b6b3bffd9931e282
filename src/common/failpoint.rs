//! Fail points at which a test kills the process or fails a write. Without the feature `failpoints` they do nothing.
//!
//! A point is named `operation:object`, such as `sync:weights.safetensors` or `commit:record outcomes in`. The environment
//! variable `FAILPOINTS` sets its action in the syntax of the crate `fail`: `commit:record outcomes in=2*off->return(kill)`.
//!
//! Arguments of `return`:
//! - `kill`: the process dies at once.
//! - `enospc`, `erofs`: the operation fails with that error.
//! - `short`: half of the file that was just written remains, and the write fails with a full disk.
//! - `torn`: half of the file remains, and the process dies.

use std::{io, path::Path};

/// Activates the points in `FAILPOINTS` until the returned guard is dropped.
#[cfg(feature = "failpoints")]
pub fn set_up() -> impl Sized {
    fail::FailScenario::setup()
}

#[cfg(not(feature = "failpoints"))]
pub fn set_up() -> impl Sized {}

/// Point before or after an operation that has no file.
///
/// # Errors
/// The error that `FAILPOINTS` sets for this point.
#[inline]
pub fn point(operation: &str, object: &str) -> io::Result<()> {
    reached(operation, object, None)
}

/// Point after a file is written and before it is synced.
///
/// # Errors
/// As [`point`].
#[inline]
pub fn written(path: &Path) -> io::Result<()> {
    file_written(path, name(path))
}

/// [`written`] for a file at `path` that will be renamed to `name`.
///
/// # Errors
/// As [`point`].
#[inline]
pub fn file_written(path: &Path, name: &str) -> io::Result<()> {
    reached("write", name, Some(path))
}

/// Point before a file is synced.
///
/// # Errors
/// As [`point`].
#[inline]
pub fn syncing(path: &Path) -> io::Result<()> {
    reached("sync", name(path), None)
}

#[inline]
fn name(path: &Path) -> &str {
    path.file_name().and_then(|name| name.to_str()).unwrap_or_default()
}

#[cfg(not(feature = "failpoints"))]
#[inline(always)]
fn reached(_operation: &str, _object: &str, _file: Option<&Path>) -> io::Result<()> {
    Ok(())
}

#[cfg(feature = "failpoints")]
fn reached(operation: &str, object: &str, file: Option<&Path>) -> io::Result<()> {
    use std::fs::OpenOptions;
    let point = format!("{operation}:{object}");
    tracing::trace!(target: "failpoint", "{point}");
    let halve = || -> io::Result<()> {
        let Some(path) = file else { return Ok(()) };
        let file = OpenOptions::new().write(true).open(path)?;
        file.set_len(file.metadata()?.len() / 2)
    };
    fail::fail_point!(&point, |action: Option<String>| match action.as_deref() {
        Some("kill") => std::process::abort(),
        Some("torn") => halve().and_then(|()| std::process::abort()),
        Some("short") => halve().and(Err(io::ErrorKind::StorageFull.into())),
        Some("enospc") => Err(io::Error::from_raw_os_error(libc::ENOSPC)),
        Some("erofs") => Err(io::Error::from_raw_os_error(libc::EROFS)),
        other => Err(io::Error::other(format!("fail point {point} has no action {other:?}"))),
    });
    Ok(())
}
