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
    io::{self, Read, Write},
    os::unix::{
        ffi::OsStrExt,
        fs::{MetadataExt, OpenOptionsExt},
    },
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

/// Opens a file to read it. Never waits for a writer: a pipe or a device is refused.
///
/// # Errors
/// `InvalidInput` if it is no regular file, or an I/O error.
pub fn open_input(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    match file.metadata()?.file_type() {
        kind if kind.is_file() => Ok(file),
        kind if kind.is_dir() => {
            Err(io::Error::new(io::ErrorKind::IsADirectory, "it is a folder and not a regular file"))
        }
        _ => Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file")),
    }
}

/// Reads a regular file of at most `limit` bytes.
///
/// # Errors
/// As [`open_input`]; `FileTooLarge` beyond the limit.
pub fn read_input(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open_input(path)?.take(limit.saturating_add(1)).read_to_end(&mut bytes)?;
    match bytes.len() as u64 > limit {
        true => Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("it has more than {limit} bytes"))),
        false => Ok(bytes),
    }
}

/// Reads a regular file of at most `limit` bytes as UTF-8.
///
/// # Errors
/// As [`read_input`]; `InvalidData` if it is not UTF-8.
pub fn read_input_text(path: &Path, limit: u64) -> io::Result<String> {
    String::from_utf8(read_input(path, limit)?)
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, format!("it is not UTF-8: {error}")))
}

/// True if something has this name. Other than `Path::exists`, an error is not an absence.
///
/// # Errors
/// An I/O error, for example a folder that may not be searched.
pub fn exists(path: &Path) -> io::Result<bool> {
    match fs::metadata(path) {
        Ok(_) => Ok(true),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Checks that this user can create files in the folder `path`, or create the folder. Changes nothing.
///
/// # Errors
/// The folder that refuses, and the reason.
pub fn creatable(path: &Path) -> Result<(), (PathBuf, io::Error)> {
    let whole = std::path::absolute(path).map_err(|error| (path.to_owned(), error))?;
    for folder in whole.ancestors() {
        match exists(folder) {
            Ok(false) => continue,
            Err(error) => return Err((folder.to_owned(), error)),
            Ok(true) => {}
        }
        let checked = CString::new(folder.as_os_str().as_bytes()).map_err(io::Error::other).and_then(|name| {
            // SAFETY: the name is NUL-terminated and outlives the call.
            match unsafe { libc::access(name.as_ptr(), libc::W_OK | libc::X_OK) } {
                0 if folder.is_dir() => Ok(()),
                0 => Err(io::ErrorKind::NotADirectory.into()),
                _ => Err(io::Error::last_os_error()),
            }
        });
        return checked.map_err(|error| (folder.to_owned(), error));
    }
    Ok(())
}

/// Remedy for an error of reading or opening a file.
pub fn read_remedy(error: &io::Error) -> &'static str {
    match (error.kind(), error.raw_os_error()) {
        (_, Some(libc::EMFILE)) => "raise the limit of open files (ulimit -n), and run the command again",
        (_, Some(libc::ENFILE)) => "the machine has too many open files; close programs, or raise fs.file-max",
        (_, Some(libc::EIO | libc::ESTALE)) => "check the disk or the network file system, and run the command again",
        (_, Some(libc::EFBIG)) => "raise the limit of file sizes (ulimit -f)",
        (io::ErrorKind::PermissionDenied, _) => "make it readable for this user, with all folders above it",
        (io::ErrorKind::OutOfMemory, _) => "free memory, and run the command again",
        _ => "check the path and its permissions",
    }
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
