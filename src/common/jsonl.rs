//! Append-only logs with one JSON value a line.

use super::fs::{AtomicFile, read_input};
use serde::{Serialize, de::DeserializeOwned};
use std::{
    fs::{File, OpenOptions},
    io::{self, BufWriter, Write},
    path::{Path, PathBuf},
};

/// A log that is open for appending.
#[derive(Debug)]
pub struct JsonlLog {
    path: PathBuf,
    file: File,
}

/// The lines of a log.
#[derive(Debug)]
pub struct Lines<T> {
    pub values: Vec<T>,
    /// Whole lines that are no value of this type. They stay in the file.
    pub damaged: usize,
}

impl JsonlLog {
    /// Opens the log at `path` and passes each value to `found`, oldest first. Lines for which `found` returns false are
    /// removed, and so is a last line that was cut short; all other lines keep their bytes. Returns the log and the number
    /// of damaged lines.
    ///
    /// # Errors
    /// An I/O error.
    pub fn open<T: DeserializeOwned>(path: &Path, mut found: impl FnMut(T) -> bool) -> io::Result<(JsonlLog, usize)> {
        let bytes = read_or_empty(path)?;
        let (mut kept, mut damaged) = (Vec::new(), 0);
        for line in whole_lines(&bytes) {
            let keep = match serde_json::from_slice::<T>(line) {
                Ok(value) => found(value),
                Err(_) => {
                    damaged += 1;
                    true
                }
            };
            if keep {
                kept.push(line);
            }
        }
        if kept.iter().map(|line| line.len()).sum::<usize>() != bytes.len() {
            let fresh = AtomicFile::create(path)?;
            let mut out = BufWriter::new(fresh.file());
            kept.iter().try_for_each(|line| out.write_all(line))?;
            out.flush()?;
            drop(out);
            fresh.publish()?;
        }
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        Ok((JsonlLog { path: path.to_owned(), file }, damaged))
    }

    /// Appends one line.
    ///
    /// # Errors
    /// An I/O error.
    pub fn push(&mut self, value: &impl Serialize) -> io::Result<()> {
        let mut line = serde_json::to_vec(value)?;
        line.push(b'\n');
        self.file.write_all(&line)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Reads a log without changing it. An absent file has no lines.
///
/// # Errors
/// An I/O error.
pub fn read<T: DeserializeOwned>(path: &Path) -> io::Result<Lines<T>> {
    let bytes = read_or_empty(path)?;
    let mut lines = Lines { values: Vec::new(), damaged: 0 };
    for line in whole_lines(&bytes) {
        match serde_json::from_slice(line) {
            Ok(value) => lines.values.push(value),
            Err(_) => lines.damaged += 1,
        }
    }
    Ok(lines)
}

fn read_or_empty(path: &Path) -> io::Result<Vec<u8>> {
    match read_input(path, u64::MAX) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        read => read,
    }
}

/// The lines that end in a line feed, with it.
fn whole_lines(bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    bytes.split_inclusive(|&byte| byte == b'\n').filter(|line| line.ends_with(b"\n"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn damaged_lines_are_counted_and_kept_and_the_rest_keeps_its_bytes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log.jsonl");
        let mut seen = Vec::new();
        let mut open = |limit: f64| {
            seen.clear();
            let (log, damaged) = JsonlLog::open::<f64>(&path, |value| {
                seen.push(value);
                value <= limit
            })
            .unwrap();
            (log, damaged, seen.clone())
        };
        let (mut log, damaged, _) = open(9.0);
        assert_eq!(damaged, 0);
        for value in [0.1, 0.30000000000000004, 8.0] {
            log.push(&value).unwrap();
        }
        let mut bytes = fs::read(&path).unwrap();
        bytes.splice(0..0, b"1.000e0\n\xff\xfe\n{\n".iter().copied());
        bytes.extend(b"7.5");
        fs::write(&path, &bytes).unwrap();
        let (_, damaged, values) = open(1.0);
        assert_eq!((damaged, values), (2, vec![1.0, 0.1, 0.30000000000000004, 8.0]));
        assert_eq!(fs::read(&path).unwrap(), b"1.000e0\n\xff\xfe\n{\n0.1\n0.30000000000000004\n");
        let lines = read::<f64>(&path).unwrap();
        assert_eq!((lines.values, lines.damaged), (vec![1.0, 0.1, 0.30000000000000004], 2));
        assert!(read::<f64>(&folder.path().join("none")).unwrap().values.is_empty());
    }
}
