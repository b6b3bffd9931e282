//! Fingerprint of a model folder, without reading gigabytes.

use sha2::{Digest, Sha256};
use std::{
    fs::{self, File},
    io::{self, Read, Seek, SeekFrom},
    path::Path,
};

/// Chunks of a weight file that enter its fingerprint, and their size: a whole file of many gigabytes would take minutes.
const CHUNKS: u64 = 64;
const CHUNK: usize = 64 << 10;

/// A fingerprint of a model folder: config.json whole, and of each weight file its length and evenly spaced parts.
pub fn fingerprint(dir: &Path) -> io::Result<String> {
    let mut files: Vec<_> = fs::read_dir(dir)?.collect::<Result<_, _>>()?;
    files.retain(|f| f.path().extension().is_some_and(|e| e == "safetensors"));
    files.sort_by_key(fs::DirEntry::file_name);
    let mut hash = Sha256::new();
    hash.update(fs::read(dir.join("config.json"))?);
    let mut buffer = vec![0; CHUNK];
    for entry in files {
        let mut file = File::open(entry.path())?;
        let length = file.metadata()?.len();
        hash.update(entry.file_name().as_encoded_bytes());
        hash.update(length.to_le_bytes());
        for i in 0..CHUNKS {
            file.seek(SeekFrom::Start(length / CHUNKS * i))?;
            let n = file.read(&mut buffer)?;
            hash.update(&buffer[..n]);
        }
    }
    Ok(hash.finalize().iter().take(8).map(|b| format!("{b:02x}")).collect())
}
