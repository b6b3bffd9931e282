//! Named points at which a test stops the program, or fails a write as a full disk would; nothing at all without the feature
//! `failpoints`.
//!
//! A point is named `operation:object`, such as `sync:weights.safetensors` or `commit:record outcomes in`. What happens there
//! is said by the environment variable `FAILPOINTS` in the language of the crate `fail`: `commit:record outcomes in=2*off->return(kill)`.
//! What `return` may hold: `kill` (the process dies at once), `enospc` and `erofs` (the operation fails with that error), and
//! for a file that was just written `short` (half of it is there, and the disk is full) and `torn` (half, and the process dies).

use std::{io, path::Path};

/// Sets the points as the environment says, for as long as what it gives is held.
#[cfg(feature = "failpoints")]
pub fn set_up() -> impl Sized {
    fail::FailScenario::setup()
}

#[cfg(not(feature = "failpoints"))]
pub fn set_up() -> impl Sized {}

/// A point before or after an operation on what has no file of its own.
#[inline]
pub fn point(operation: &str, object: &str) -> io::Result<()> {
    reached(operation, object, None)
}

/// The point right after a file was written, before it is synced.
#[inline]
pub fn written(path: &Path) -> io::Result<()> {
    file_written(path, name(path))
}

/// The same for a file at `path` that will be called `name`.
#[inline]
pub fn file_written(path: &Path, name: &str) -> io::Result<()> {
    reached("write", name, Some(path))
}

/// The point before a file is synced.
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
    fail::fail_point!(&point, |what: Option<String>| match what.as_deref() {
        Some("kill") => std::process::abort(),
        Some("torn") => halve().and_then(|()| std::process::abort()),
        Some("short") => halve().and(Err(io::ErrorKind::StorageFull.into())),
        Some("enospc") => Err(io::Error::from_raw_os_error(libc::ENOSPC)),
        Some("erofs") => Err(io::Error::from_raw_os_error(libc::EROFS)),
        other => Err(io::Error::other(format!("the failpoint {point} knows no {other:?}"))),
    });
    Ok(())
}
