//! Writes the output folder of an import atomically: temporary name, sync, rename.

use super::ImportError;
use crate::common::fs::{AtomicDir, parent};
use crate::hf::read_json;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// Files that an import writes. `force` replaces a folder only if it has no other file.
const FILES: [&str; 6] = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
];

/// Key of config.json that marks an import. Without it every model folder with these files would be one (speculators#690).
pub(super) const MARK: &str = "draftmill_import";

/// True for a folder that an import has written.
fn is_import(folder: &Path) -> bool {
    read_json(&folder.join("config.json")).is_ok_and(|config| config.get(MARK).is_some())
}

/// Output folder under its temporary name. A drop before `finish` removes it.
pub(super) struct NewFolder {
    out: PathBuf,
    dir: AtomicDir,
    force: bool,
}

/// Open file in the output folder.
pub(super) struct NewFile {
    path: PathBuf,
    to: BufWriter<File>,
}

impl NewFolder {
    /// Creates the temporary folder and its missing parents.
    pub(super) fn create(out: &Path, force: bool) -> Result<Self, ImportError> {
        if out.file_name().is_none() && out.canonicalize().is_ok_and(|whole| whole.file_name().is_none()) {
            return Err(refused(out, "it has no folder name; give a path such as models/my-model"));
        }
        check_free(out, force)?;
        fs::create_dir_all(parent(out)).map_err(|e| failed(parent(out), e))?;
        let dir = AtomicDir::create(out, "import").map_err(|e| match e.kind() {
            io::ErrorKind::ResourceBusy => {
                refused(out, "another import is writing it; wait for that import, or give another folder")
            }
            _ => failed(out, e),
        })?;
        Ok(Self { out: out.to_owned(), dir, force })
    }

    pub(super) fn new_file(&self, name: &str) -> Result<NewFile, ImportError> {
        debug_assert!(FILES.contains(&name), "{name} is missing in FILES");
        let path = self.dir.partial_path().join(name);
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

    /// Renames the folder to its final path and returns that path. `out` is unchanged until then.
    pub(super) fn finish(self) -> Result<PathBuf, ImportError> {
        check_free(&self.out, self.force)?;
        self.dir.publish().map_err(|e| failed(&self.out, e))
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

/// Checks that `out` may be written: it is absent, empty, or an earlier import and `force` is set.
fn check_free(out: &Path, force: bool) -> Result<(), ImportError> {
    let entries = match fs::read_dir(out) {
        Ok(found) => found.collect::<Result<Vec<_>, _>>().map_err(|e| failed(out, e))?,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) if e.kind() == io::ErrorKind::NotADirectory => return Err(refused(out, "it is a file; give a folder")),
        Err(e) => return Err(failed(out, e)),
    };
    let foreign =
        entries.iter().map(|e| e.file_name()).filter(|n| !n.to_str().is_some_and(|n| FILES.contains(&n))).min();
    match foreign {
        _ if entries.is_empty() => Ok(()),
        Some(foreign) if force => {
            let foreign = Path::new(&foreign).display();
            Err(refused(
                out,
                format!(
                    "it has {foreign}, which is not a file of an import, and --force replaces imports only; remove it or give another folder"
                ),
            ))
        }
        None if force && is_import(out) => Ok(()),
        None if force => {
            let why = format!(
                "its config.json lacks the mark `{MARK}` of an import, and --force replaces imports only; remove it or give \
                 another folder"
            );
            Err(refused(out, why))
        }
        _ => Err(refused(out, "it is not empty; give another folder, or pass --force to replace an earlier import")),
    }
}

fn failed(path: &Path, source: io::Error) -> ImportError {
    ImportError::Write { path: path.into(), source }
}

fn refused(path: &Path, why: impl Into<String>) -> ImportError {
    ImportError::Out { path: path.into(), why: why.into() }
}
