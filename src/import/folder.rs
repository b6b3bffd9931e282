//! Makes a folder whole or not at all: written under a temporary name, synced, renamed into place.

use super::ImportError;
use std::fs::{self, File, TryLockError};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Every file that an import writes. `force` replaces a folder only if it holds nothing else.
const FILES: [&str; 6] = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
];

/// A folder in the making. Dropped before `finish`, it vanishes.
pub(super) struct NewFolder {
    out: PathBuf,
    partial: PathBuf,
    force: bool,
    /// Locked while we write: a second import into the same folder is told so, and a killed one leaves no lock.
    _lock: File,
}

/// A file in the making.
pub(super) struct NewFile {
    path: PathBuf,
    to: BufWriter<File>,
}

impl NewFolder {
    pub(super) fn create(out: &Path, force: bool) -> Result<Self, ImportError> {
        let (parent, name) = place(out)?;
        let out = parent.join(&name);
        check_free(&out, force)?;
        fs::create_dir_all(&parent).map_err(|e| failed(&parent, e))?;
        let partial = parent.join(format!(".{name}.partial"));
        let lock = lock(&out, &partial)?;
        let folder = Self { out, partial, force, _lock: lock };
        // What an import left that was killed; the lock says that nobody writes it.
        for name in FILES {
            remove_if_there(&folder.partial.join(name), |path| fs::remove_file(path))?;
        }
        Ok(folder)
    }

    pub(super) fn new_file(&self, name: &str) -> Result<NewFile, ImportError> {
        debug_assert!(FILES.contains(&name), "{name} is missing in FILES");
        let path = self.partial.join(name);
        let file = File::create(&path).map_err(|e| failed(&path, e))?;
        Ok(NewFile { path, to: BufWriter::with_capacity(1 << 20, file) })
    }

    pub(super) fn bytes(&self, name: &str, bytes: &[u8]) -> Result<(), ImportError> {
        let mut file = self.new_file(name)?;
        file.write(bytes)?;
        file.finish().map(|_| ())
    }

    pub(super) fn json(&self, name: &str, value: &serde_json::Value) -> Result<(), ImportError> {
        self.bytes(name, format!("{value:#}\n").as_bytes())
    }

    /// Puts the folder in its place and returns its path. Until here `out` is as it was.
    pub(super) fn finish(self) -> Result<PathBuf, ImportError> {
        let sync = |path: &Path| File::open(path).and_then(|f| f.sync_all()).map_err(|e| failed(path, e));
        sync(&self.partial)?;
        check_free(&self.out, self.force)?;
        // A rename takes the place of an empty folder, but not of a full one.
        let old = self.partial.with_extension("old");
        let replaces = is_filled(&self.out)?;
        if replaces {
            remove_if_there(&old, |path| fs::remove_dir_all(path))?;
            fs::rename(&self.out, &old).map_err(|e| failed(&self.out, e))?;
        }
        if let Err(e) = fs::rename(&self.partial, &self.out) {
            if replaces {
                fs::rename(&old, &self.out).map_err(|e| failed(&self.out, e))?;
            }
            return Err(failed(&self.out, e));
        }
        if let Some(parent) = self.out.parent() {
            sync(parent)?;
        }
        remove_if_there(&old, |path| fs::remove_dir_all(path))?;
        Ok(self.out.clone())
    }
}

impl Drop for NewFolder {
    fn drop(&mut self) {
        // After `finish` there is nothing under this name. A failure here leaves what the next import clears away.
        let _ = fs::remove_dir_all(&self.partial);
    }
}

impl NewFile {
    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<(), ImportError> {
        self.to.write_all(bytes).map_err(|e| failed(&self.path, e))
    }

    /// Syncs the file and returns its size in bytes.
    pub(super) fn finish(mut self) -> Result<u64, ImportError> {
        let path = &self.path;
        self.to.flush().map_err(|e| failed(path, e))?;
        let file = self.to.get_ref();
        file.sync_all().and_then(|()| file.metadata()).map(|m| m.len()).map_err(|e| failed(path, e))
    }
}

/// The parent and the name of the folder to make. A link or `..` in the path is followed first, so that the rename
/// replaces the folder itself.
fn place(out: &Path) -> Result<(PathBuf, String), ImportError> {
    let whole = match out.canonicalize() {
        Ok(whole) => whole,
        Err(e) if e.kind() == io::ErrorKind::NotFound => std::path::absolute(out).map_err(|e| failed(out, e))?,
        Err(e) => return Err(failed(out, e)),
    };
    match (whole.parent(), whole.file_name().and_then(|n| n.to_str())) {
        (Some(parent), Some(name)) => Ok((parent.into(), name.into())),
        _ => Err(refused(out, "it has no name that a new folder could take; name a folder such as models/my-model")),
    }
}

/// `out` may be made: absent, empty, or an earlier import that `force` gives up.
fn check_free(out: &Path, force: bool) -> Result<(), ImportError> {
    let inside = match fs::read_dir(out) {
        Ok(entries) => entries.collect::<Result<Vec<_>, _>>().map_err(|e| failed(out, e))?,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) if e.kind() == io::ErrorKind::NotADirectory => return Err(refused(out, "it is a file; name a folder")),
        Err(e) => return Err(failed(out, e)),
    };
    let foreign =
        inside.iter().map(|e| e.file_name()).filter(|n| !n.to_str().is_some_and(|n| FILES.contains(&n))).min();
    match foreign {
        _ if inside.is_empty() => Ok(()),
        Some(foreign) if force => {
            let foreign = Path::new(&foreign).display();
            Err(refused(
                out,
                format!(
                    "it holds {foreign}, which no import wrote, and --force replaces imports only; remove it yourself or name another folder"
                ),
            ))
        }
        None if force => Ok(()),
        _ => Err(refused(out, "it is not empty; name another folder, or pass --force to replace an earlier import")),
    }
}

fn is_filled(path: &Path) -> Result<bool, ImportError> {
    match fs::read_dir(path) {
        Ok(mut entries) => Ok(entries.next().is_some()),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(failed(path, e)),
    }
}

/// Makes the temporary folder, or takes over one that a killed import left, and locks it.
fn lock(out: &Path, partial: &Path) -> Result<File, ImportError> {
    let busy = || refused(out, "another import is writing it; wait for that one, or name another folder");
    match fs::create_dir(partial) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(failed(partial, e)),
        _ => {}
    }
    let lock = File::open(partial).map_err(|e| failed(partial, e))?;
    match lock.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => return Err(busy()),
        Err(TryLockError::Error(e)) => return Err(failed(partial, e)),
    }
    // Between opening and locking, another import may have finished and renamed the folder that we now hold.
    let ours = lock.metadata().map_err(|e| failed(partial, e))?;
    match fs::metadata(partial) {
        Ok(there) if (there.dev(), there.ino()) == (ours.dev(), ours.ino()) => Ok(lock),
        _ => Err(busy()),
    }
}

fn remove_if_there(path: &Path, remove: impl Fn(&Path) -> io::Result<()>) -> Result<(), ImportError> {
    match remove(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(failed(path, e)),
        _ => Ok(()),
    }
}

fn failed(path: &Path, source: io::Error) -> ImportError {
    ImportError::Write { path: path.into(), source }
}

fn refused(path: &Path, why: impl Into<String>) -> ImportError {
    ImportError::Out { path: path.into(), why: why.into() }
}
