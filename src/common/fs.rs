//! Files and folders that appear whole or not at all.
//!
//! Both are written under a hidden name next to their destination, `.{name}.draftmill-partial`, which is locked against a
//! second writer and removed by the next one after a kill. Publishing syncs the content, renames it, and syncs the parent.
//! A folder that is replaced is exchanged with the new one in one system call where the file system can, else moved aside as
//! `.{name}.draftmill-old`, from where the next writer restores it if a kill came between the two renames.

use super::failpoint;
use serde::Serialize;
use std::{
    ffi::CString,
    fs::{self, File, OpenOptions, TryLockError},
    io::{self, Write},
    os::unix::{ffi::OsStrExt, fs::MetadataExt},
    path::{Path, PathBuf},
};

const PARTIAL: &str = "draftmill-partial";
const OLD: &str = "draftmill-old";

/// A file that is being written. Dropped before [`AtomicFile::publish`], it leaves nothing behind.
#[derive(Debug)]
pub struct AtomicFile {
    path: PathBuf,
    partial: PathBuf,
    file: File,
    published: bool,
}

impl AtomicFile {
    /// Starts a file that will stand at `path`, and creates its folder.
    ///
    /// # Errors
    /// `IsADirectory` if a folder stands there, `ResourceBusy` if another process is writing it, or an I/O error.
    pub fn create(path: &Path) -> io::Result<AtomicFile> {
        let path = destination(path)?;
        if path.is_dir() {
            return Err(io::Error::new(io::ErrorKind::IsADirectory, "a folder has this name"));
        }
        fs::create_dir_all(parent(&path))?;
        let partial = hidden(&path, PARTIAL);
        let file = lock_file(&partial)?;
        file.set_len(0)?;
        Ok(AtomicFile { path, partial, file, published: false })
    }

    /// The file to write to.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Syncs the file and renames it to its destination.
    ///
    /// # Errors
    /// An I/O error. The destination is then as it was.
    pub fn publish(mut self) -> io::Result<()> {
        let name = self.path.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_owned();
        failpoint::file_written(&self.partial, &name)?;
        failpoint::point("sync", &name)?;
        self.file.sync_all()?;
        failpoint::point("rename", &name)?;
        fs::rename(&self.partial, &self.path)?;
        self.published = true;
        sync_parent(&self.path)
    }
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        if !self.published {
            // Best effort: the next writer removes what stays.
            let _ = fs::remove_file(&self.partial);
        }
    }
}

/// Writes `bytes` to `path` as one [`AtomicFile`].
///
/// # Errors
/// As [`AtomicFile::create`] and [`AtomicFile::publish`].
pub fn write_atomic(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let file = AtomicFile::create(path)?;
    file.file().write_all(bytes)?;
    file.publish()
}

/// Writes `value` as indented JSON to `path` as one [`AtomicFile`].
///
/// # Errors
/// As [`AtomicFile::create`] and [`AtomicFile::publish`].
pub fn write_json_atomic(path: &Path, value: &impl Serialize) -> io::Result<()> {
    let mut text = serde_json::to_vec_pretty(value)?;
    text.push(b'\n');
    write_atomic(path, &text)
}

/// A folder that is being written. Dropped before [`AtomicDir::publish`], it leaves nothing behind.
#[derive(Debug)]
pub struct AtomicDir {
    path: PathBuf,
    partial: PathBuf,
    label: &'static str,
    /// Held against a second writer; a kill releases it.
    _lock: File,
    published: bool,
}

impl AtomicDir {
    /// Starts a folder that will stand at `path`. Its parent must exist. `label` names its fail points.
    ///
    /// # Errors
    /// `ResourceBusy` if another process is writing it, `NotADirectory` if a file stands there, or an I/O error.
    pub fn create(path: &Path, label: &'static str) -> io::Result<AtomicDir> {
        let path = destination(path)?;
        if path.exists() && !path.is_dir() {
            return Err(io::Error::new(io::ErrorKind::NotADirectory, "a file has this name"));
        }
        failpoint::point("create", label)?;
        let partial = hidden(&path, PARTIAL);
        let lock = lock_dir(&partial)?;
        for entry in fs::read_dir(&partial)? {
            let entry = entry?.path();
            if entry.is_dir() { fs::remove_dir_all(entry)? } else { fs::remove_file(entry)? }
        }
        let old = hidden(&path, OLD);
        if path.exists() {
            remove_dir(&old)?
        } else if old.exists() {
            fs::rename(&old, &path)?
        }
        Ok(AtomicDir { path, partial, label, _lock: lock, published: false })
    }

    /// Hidden folder to write into.
    pub fn partial_path(&self) -> &Path {
        &self.partial
    }

    /// Syncs the folder and gives it its name; a folder that stands there is replaced. Its files must be synced already.
    ///
    /// # Errors
    /// An I/O error. Until the rename has happened the destination is as it was.
    pub fn publish(mut self) -> io::Result<PathBuf> {
        failpoint::point("sync", self.label)?;
        sync(&self.partial)?;
        failpoint::point("rename", self.label)?;
        let replaced = self.path.exists().then(|| self.replace()).transpose()?;
        if replaced.is_none() {
            fs::rename(&self.partial, &self.path)?;
        }
        self.published = true;
        failpoint::point("sync", &format!("parent of {}", self.label))?;
        sync_parent(&self.path)?;
        if let Some(old) = replaced {
            failpoint::point("delete", &format!("replaced {}", self.label))?;
            remove_dir(&old)?;
        }
        Ok(self.path.clone())
    }

    /// Replaces the present folder by the new one. Returns the new path of the present one.
    fn replace(&self) -> io::Result<PathBuf> {
        match exchange(&self.partial, &self.path) {
            Ok(()) => return Ok(self.partial.clone()),
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOSYS | libc::ENOTSUP)) => {}
            Err(error) => return Err(error),
        }
        let old = hidden(&self.path, OLD);
        fs::rename(&self.path, &old)?;
        if let Err(error) = fs::rename(&self.partial, &self.path) {
            fs::rename(&old, &self.path)?;
            return Err(error);
        }
        Ok(old)
    }
}

impl Drop for AtomicDir {
    fn drop(&mut self) {
        if !self.published {
            // Best effort: the next writer removes what stays.
            let _ = fs::remove_dir_all(&self.partial);
        }
    }
}

/// Removes the unpublished folders that a killed process left in `parent`. Returns their number. Folders that a live process
/// holds stay.
///
/// # Errors
/// An I/O error.
pub fn remove_partial_dirs(parent: &Path) -> io::Result<usize> {
    let mut removed = 0;
    for entry in fs::read_dir(parent)? {
        let path = entry?.path();
        let ours = path.file_name().and_then(|name| name.to_str()).is_some_and(|name| {
            name.starts_with('.') && (name.ends_with(&format!(".{PARTIAL}")) || name.ends_with(&format!(".{OLD}")))
        });
        if ours && path.is_dir() && File::open(&path)?.try_lock().is_ok() {
            fs::remove_dir_all(&path)?;
            removed += 1;
        }
    }
    Ok(removed)
}

/// Writes one synced JSON file, for example inside an [`AtomicDir`].
///
/// # Errors
/// An I/O error.
pub fn write_json(path: &Path, value: &impl Serialize) -> io::Result<()> {
    let mut file = File::create(path)?;
    serde_json::to_writer_pretty(&mut file, value)?;
    file.write_all(b"\n")?;
    failpoint::written(path)?;
    failpoint::syncing(path)?;
    file.sync_all()
}

/// Opens a file for reading and writing, or creates it and its folder, with a lock against a second writer.
///
/// # Errors
/// `ResourceBusy` if another process holds the lock, or an I/O error.
pub fn lock_file(path: &Path) -> io::Result<File> {
    fs::create_dir_all(parent(path))?;
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
    locked(file, path)
}

/// Syncs a file or folder.
///
/// # Errors
/// An I/O error.
pub fn sync(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

/// Syncs the folder that holds `path`, which makes a rename durable.
///
/// # Errors
/// An I/O error.
pub fn sync_parent(path: &Path) -> io::Result<()> {
    sync(parent(path))
}

/// Removes a folder and its content; an absent one is no error.
///
/// # Errors
/// An I/O error.
pub fn remove_dir(path: &Path) -> io::Result<()> {
    unless_absent(fs::remove_dir_all(path))
}

/// Removes a file; an absent one is no error.
///
/// # Errors
/// An I/O error.
pub fn remove_file(path: &Path) -> io::Result<()> {
    unless_absent(fs::remove_file(path))
}

/// `path` with `ending` appended to its whole name.
pub fn with_suffix(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(ending);
    name.into()
}

/// The folder that holds `path`; the working directory for a bare name.
pub fn parent(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn unless_absent(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// The path without links and `..`, so that a rename replaces the file or folder itself and not a link to it.
fn destination(path: &Path) -> io::Result<PathBuf> {
    let whole = match path.canonicalize() {
        Ok(whole) => whole,
        Err(error) if error.kind() == io::ErrorKind::NotFound => std::path::absolute(path)?,
        Err(error) => return Err(error),
    };
    match whole.file_name() {
        Some(_) => Ok(whole),
        None => Err(io::Error::new(io::ErrorKind::InvalidInput, "the path has no last name")),
    }
}

/// Hidden sibling of `path` with this ending. It contains the whole name, so that different names have different siblings.
fn hidden(path: &Path, ending: &str) -> PathBuf {
    let mut name = std::ffi::OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(".");
    name.push(ending);
    path.with_file_name(name)
}

fn lock_dir(path: &Path) -> io::Result<File> {
    match fs::create_dir(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    locked(File::open(path)?, path)
}

fn locked(file: File, path: &Path) -> io::Result<File> {
    let busy = || io::Error::new(io::ErrorKind::ResourceBusy, "another process is writing it");
    file.try_lock().map_err(|error| match error {
        TryLockError::WouldBlock => busy(),
        TryLockError::Error(error) => error,
    })?;
    // Another process may have published or removed it between our opening and our lock.
    let ours = file.metadata()?;
    match fs::metadata(path) {
        Ok(named) if (named.dev(), named.ino()) == (ours.dev(), ours.ino()) => Ok(file),
        _ => Err(busy()),
    }
}

/// Exchanges two paths in one system call.
fn exchange(a: &Path, b: &Path) -> io::Result<()> {
    let [a, b] = [a, b].map(|path| CString::new(path.as_os_str().as_bytes()));
    let (a, b) = (a.map_err(io::Error::other)?, b.map_err(io::Error::other)?);
    // SAFETY: both are strings that end in NUL and outlive the call.
    let result =
        unsafe { libc::renameat2(libc::AT_FDCWD, a.as_ptr(), libc::AT_FDCWD, b.as_ptr(), libc::RENAME_EXCHANGE) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests;
