//! Guard of everything that a command writes: an output replaces only what draftmill wrote, is never an input, and is never
//! inside the folder of a model (speculators#690).

use std::{
    fs::{self, File},
    io::{self, ErrorKind, Read},
    os::unix::fs::MetadataExt,
    path::{Component, Path, PathBuf},
};
use thiserror::Error;

/// Bytes from the start of a file by which [`Protected::file`] recognises it.
const HEAD: u64 = 4 << 20;

/// Reason why an output is refused. Nothing is changed then.
#[derive(Debug, Error)]
pub enum Refusal {
    #[error("{} is also an input; give another path for the output", .0.display())]
    Input(PathBuf),
    #[error("{} is inside the model folder {}; give another path for the output", path.display(), folder.display())]
    Inside { path: PathBuf, folder: PathBuf },
    #[error("{} exists and is {found}, not {expected}; move or remove it, or give another path", path.display())]
    Foreign { path: PathBuf, found: &'static str, expected: &'static str },
    #[error("{} exists and cannot be read ({source}); correct its permissions, or give another path", path.display())]
    Read { path: PathBuf, source: io::Error },
}

/// Inputs and model folders of a command, which none of its outputs may touch.
#[derive(Clone, Debug, Default)]
pub struct Protected {
    inputs: Vec<PathBuf>,
    folders: Vec<PathBuf>,
}

impl Protected {
    /// Protects files that the command reads.
    pub fn inputs<P: AsRef<Path>>(mut self, paths: impl IntoIterator<Item = P>) -> Protected {
        self.inputs.extend(paths.into_iter().map(|path| path.as_ref().to_owned()));
        self
    }

    /// Protects folders that the command reads, with everything inside.
    pub fn folders<P: AsRef<Path>>(mut self, paths: impl IntoIterator<Item = P>) -> Protected {
        self.folders.extend(paths.into_iter().map(|path| path.as_ref().to_owned()));
        self
    }

    /// Checks that `path` is no input and not inside a protected folder. Links are followed.
    ///
    /// # Errors
    /// A [`Refusal`].
    pub fn path(&self, path: &Path) -> Result<(), Refusal> {
        if self.inputs.iter().any(|input| same(input, path)) {
            return Err(Refusal::Input(path.into()));
        }
        let whole = resolved(path);
        let folder = self.folders.iter().find(|folder| {
            let folder = folder.canonicalize();
            folder.is_ok_and(|folder| whole.starts_with(folder))
        });
        folder.map_or(Ok(()), |folder| Err(Refusal::Inside { path: path.into(), folder: folder.clone() }))
    }

    /// Checks that the file `path` may be written: as [`Protected::path`], and it is absent, empty, or recognised by `ours`
    /// from its first bytes. `expected` names such a file.
    ///
    /// # Errors
    /// A [`Refusal`].
    pub fn file(&self, path: &Path, expected: &'static str, ours: impl FnOnce(&[u8]) -> bool) -> Result<(), Refusal> {
        self.path(path)?;
        let read = |source| Refusal::Read { path: path.into(), source };
        let foreign = |found| Err(Refusal::Foreign { path: path.into(), found, expected });
        let metadata = match fs::metadata(path) {
            Ok(metadata) => metadata,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(read(error)),
        };
        if metadata.is_dir() {
            return foreign("a folder");
        }
        if !metadata.is_file() {
            return foreign("a device, pipe or socket");
        }
        let mut head = Vec::new();
        File::open(path).and_then(|file| file.take(HEAD).read_to_end(&mut head)).map_err(read)?;
        if head.is_empty() || ours(&head) { Ok(()) } else { foreign("another file") }
    }
}

/// True if every whole line of a file's head satisfies `ours`. A last line without its end must begin with `start`.
pub fn lines_are(head: &[u8], start: &[u8], ours: impl Fn(&[u8]) -> bool) -> bool {
    head.split_inclusive(|&byte| byte == b'\n').all(|line| match line.strip_suffix(b"\n") {
        Some(line) => ours(line),
        None => line.starts_with(&start[..start.len().min(line.len())]),
    })
}

/// True if both paths are one file, through links or by the same name.
fn same(a: &Path, b: &Path) -> bool {
    match (fs::metadata(a), fs::metadata(b)) {
        (Ok(a), Ok(b)) => (a.dev(), a.ino()) == (b.dev(), b.ino()),
        _ => resolved(a) == resolved(b),
    }
}

/// Absolute path with all links of its existing part followed.
fn resolved(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.into());
    let existing = path.ancestors().find_map(|ancestor| Some((ancestor, ancestor.canonicalize().ok()?)));
    match existing {
        Some((ancestor, whole)) => match path.strip_prefix(ancestor) {
            // A folder that is still absent may be left again by `..`.
            Ok(rest) => rest.components().fold(whole, |mut whole, part| {
                match part {
                    Component::ParentDir => drop(whole.pop()),
                    part => whole.push(part),
                }
                whole
            }),
            Err(_) => whole,
        },
        None => path,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn ours(head: &[u8]) -> bool {
        head.starts_with(b"ours")
    }

    #[test]
    fn speculators_690_an_output_replaces_only_our_files() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::create_dir(path("model")).unwrap();
        fs::create_dir(path("elsewhere")).unwrap();
        for (name, text) in
            [("input", "x"), ("ours", "ours 1"), ("foreign", "theirs"), ("empty", ""), ("model/w", "ours")]
        {
            fs::write(path(name), text).unwrap();
        }
        symlink(path("input"), path("to-input")).unwrap();
        symlink(path("model"), path("to-model")).unwrap();
        fs::hard_link(path("input"), path("twin")).unwrap();
        let protected = Protected::default().inputs([path("input")]).folders([path("model"), path("absent")]);
        let file = |name: &str| protected.file(&path(name), "a test file", ours);
        for name in ["ours", "empty", "new", "new/deeper", "elsewhere/new"] {
            assert!(file(name).is_ok(), "{name}");
        }
        for name in ["input", "to-input", "twin", "elsewhere/../input"] {
            assert!(matches!(file(name), Err(Refusal::Input(_))), "{name}");
        }
        for name in [
            "model",
            "model/w",
            "model/new",
            "model/new/deeper",
            "to-model/new",
            "elsewhere/../model/new",
            "new/../model/new",
        ] {
            assert!(matches!(file(name), Err(Refusal::Inside { .. })), "{name}");
        }
        for name in ["foreign", "elsewhere"] {
            let text = file(name).unwrap_err().to_string();
            assert!(text.contains(name) && text.contains("not a test file"), "{text}");
        }
        assert!(matches!(protected.file(Path::new("/dev/null"), "", ours), Err(Refusal::Foreign { .. })));
    }

    #[test]
    fn a_torn_last_line_is_judged_by_its_start() {
        let all = |head: &str| lines_are(head.as_bytes(), b"{\"a\":", |line| line == b"{\"a\":1}");
        assert!(all("") && all("{\"a\":1}\n") && all("{\"a\":1}\n{\"a") && all("{\"a\":1}\n{\"a\":22"));
        assert!(!all("{\"b\":1}\n") && !all("{\"a\":1}\nx") && !all("\n"));
    }
}
