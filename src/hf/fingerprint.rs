//! Fingerprint of a model folder that samples the weight files.

use crate::common::fs::{open_input, read_input};
use crate::common::hash::hex;
use sha2::{Digest, Sha256};
use std::{
    fs,
    io::{self, Read, Seek, SeekFrom},
    path::Path,
};

/// Number and size of the chunks of a weight file in its fingerprint; a complete file of many gigabytes would take minutes.
const CHUNKS: u64 = 64;
const CHUNK: usize = 64 << 10;

/// Fingerprint of a model folder: SHA-256 of config.json and of each weight file's length and evenly spaced chunks, shortened
/// to 16 hexadecimal digits.
///
/// # Errors
/// An I/O error.
pub fn fingerprint(dir: &Path) -> io::Result<String> {
    let mut files: Vec<_> = fs::read_dir(dir)?.collect::<Result<_, _>>()?;
    files.retain(|f| f.path().extension().is_some_and(|e| e == "safetensors"));
    files.sort_by_key(fs::DirEntry::file_name);
    let mut hash = Sha256::new();
    hash.update(read_input(&dir.join("config.json"), 1 << 30)?);
    let mut buffer = vec![0; CHUNK];
    for entry in files {
        let mut file = open_input(&entry.path())?;
        let length = file.metadata()?.len();
        hash.update(entry.file_name().as_encoded_bytes());
        hash.update(length.to_le_bytes());
        for i in 0..CHUNKS {
            file.seek(SeekFrom::Start(length / CHUNKS * i))?;
            let n = file.read(&mut buffer)?;
            hash.update(&buffer[..n]);
        }
    }
    Ok(hex(&hash.finalize()[..8]))
}
