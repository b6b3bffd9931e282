//! Reader of the input files, plain or gzipped: yields their rows in chunks of bounded size.

use super::{
    format,
    split::{RawRow, Splitter},
};
use crate::common::fs::open_input;
use crate::common::hash::hex;
use flate2::bufread::GzDecoder;
use serde::de::IgnoredAny;
use sha2::{Digest, Sha256};
use std::{
    fmt,
    fs::File,
    io::{self, BufRead, BufReader, ErrorKind, Read},
    path::{Path, PathBuf},
};

/// Limits of a chunk in bytes and rows; they bound memory.
const CHUNK_BYTES: usize = 2 << 20;
const CHUNK_ROWS: usize = 512;
const BUFFER: usize = 1 << 16;
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// A row with its position in the inputs.
#[derive(Debug)]
pub struct InputRow {
    /// Index of its file.
    pub file: usize,
    /// Position among the rows of its file, from 1.
    pub number: u64,
    pub row: RawRow,
}

/// Size and hash of a file that was read to its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileRead {
    pub bytes: u64,
    /// SHA-256 of the file on disk, before decompression, in hexadecimal.
    pub sha256: String,
}

/// Reason and remedy for a file that was read and holds no rows, or not all of them. The error of [`ReadError`] carries it.
#[derive(Debug)]
pub struct Unusable {
    /// Predicate of the file: "is a Parquet file".
    pub why: String,
    /// The file is cut, and its whole rows may be read.
    pub cut: bool,
}

impl fmt::Display for Unusable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "it {}", self.why)
    }
}

impl std::error::Error for Unusable {}

fn unusable(why: String, cut: bool) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, Unusable { why, cut })
}

/// I/O error of one input file.
#[derive(Debug)]
pub struct ReadError {
    pub path: PathBuf,
    pub source: io::Error,
}

/// Reads all inputs in order.
pub struct Inputs {
    paths: Vec<PathBuf>,
    max_row_bytes: u64,
    allow_truncated: bool,
    open: Option<Input>,
    /// Files that were read to their end, in order.
    pub done: Vec<FileRead>,
    /// Number of files that are known to be cut.
    pub truncated: u64,
}

impl Inputs {
    pub fn new(paths: Vec<PathBuf>, max_row_bytes: u64) -> Inputs {
        Inputs { paths, max_row_bytes, allow_truncated: false, open: None, done: Vec::new(), truncated: 0 }
    }

    /// Reads files that are known to be cut up to their cut, instead of an error.
    pub fn allow_truncated(self, allow_truncated: bool) -> Inputs {
        Inputs { allow_truncated, ..self }
    }

    pub fn path(&self, file: usize) -> &Path {
        &self.paths[file]
    }

    /// Bytes read so far.
    pub fn bytes_read(&self) -> u64 {
        self.done.iter().map(|file| file.bytes).sum::<u64>() + self.open.as_ref().map_or(0, |input| input.bytes_read())
    }

    /// Reads the next chunk; an empty chunk means that all files were read.
    ///
    /// # Errors
    /// An I/O error with the path of the file.
    pub fn read_chunk(&mut self) -> Result<Vec<InputRow>, ReadError> {
        let (mut chunk, mut bytes) = (Vec::new(), 0);
        while chunk.len() < CHUNK_ROWS && bytes < CHUNK_BYTES && self.done.len() < self.paths.len() {
            let file = self.done.len();
            let failed = |source| ReadError { path: self.paths[file].clone(), source };
            let mut input = match self.open.take() {
                Some(input) => input,
                None => Input::open(&self.paths[file], self.max_row_bytes).map_err(failed)?,
            };
            let row = input.next_row().map_err(failed)?;
            if let Some(cut) = input.cut.take() {
                if !self.allow_truncated {
                    return Err(failed(unusable(cut, true)));
                }
                self.truncated += 1;
            }
            match row {
                Some(row) => {
                    bytes += row.content.kept_bytes();
                    chunk.push(InputRow { file, number: input.rows, row });
                    self.open = Some(input);
                }
                None => self.done.push(input.close().map_err(failed)?),
            }
        }
        Ok(chunk)
    }
}

/// One open file.
struct Input {
    source: Source,
    splitter: Splitter,
    buffer: Vec<u8>,
    /// Range of `buffer` that the splitter has not consumed.
    unseen: std::ops::Range<usize>,
    rows: u64,
    /// The source has no more bytes.
    ended: bool,
    /// The last row was returned.
    finished: bool,
    /// The gzip data ended without their end.
    gzip_cut: bool,
    /// Sentence about a cut, set with the last row.
    cut: Option<String>,
}

/// Decoder of a file, chosen by the file's first bytes.
enum Source {
    Plain(BufReader<Hashed>),
    /// One member of a gzip file; `None` only while the next member is opened.
    Gzip(Option<GzDecoder<BufReader<Hashed>>>),
}

/// File that counts and hashes the bytes read from it.
struct Hashed {
    file: File,
    hash: Sha256,
    bytes: u64,
}

impl Input {
    fn open(path: &Path, max_row_bytes: u64) -> io::Result<Input> {
        let mut plain =
            BufReader::with_capacity(BUFFER, Hashed { file: open_input(path)?, hash: Sha256::new(), bytes: 0 });
        let gzip = plain.fill_buf()?.starts_with(&GZIP_MAGIC);
        let source = if gzip { Source::Gzip(Some(GzDecoder::new(plain))) } else { Source::Plain(plain) };
        let mut input = Input {
            source,
            splitter: Splitter::new(max_row_bytes),
            buffer: vec![0; BUFFER],
            unseen: 0..0,
            rows: 0,
            ended: false,
            finished: false,
            gzip_cut: false,
            cut: None,
        };
        // Short reads at the start of the file are joined, so that its format shows.
        let mut head = 0;
        while head < format::HEAD && !input.ended {
            head += input.read_into(head)?;
        }
        input.unseen = 0..head;
        match format::foreign(&input.buffer[..head]) {
            Some(sentence) => Err(unusable(sentence, false)),
            None => Ok(input),
        }
    }

    fn next_row(&mut self) -> io::Result<Option<RawRow>> {
        loop {
            let (used, row) = self.splitter.feed(&self.buffer[self.unseen.clone()]);
            self.unseen.start += used;
            if row.is_some() {
                self.rows += 1;
                return Ok(row);
            }
            if self.ended {
                return Ok(self.finish());
            }
            let read = self.read_into(0)?;
            self.unseen = 0..read;
        }
    }

    /// Reads into the buffer from index `at`, and notes the end of the file.
    fn read_into(&mut self, at: usize) -> io::Result<usize> {
        loop {
            match self.source.read(&mut self.buffer[at..]) {
                // Only the decompressor reports a missing end.
                Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
                    self.gzip_cut = true;
                    self.ended = true;
                    return Ok(0);
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                other => {
                    let read = other?;
                    self.ended = read == 0;
                    return Ok(read);
                }
            }
        }
    }

    /// Last row of the file. A second call returns `None`.
    fn finish(&mut self) -> Option<RawRow> {
        if std::mem::replace(&mut self.finished, true) {
            return None;
        }
        let (array, line, bytes) = (self.splitter.in_array(), self.splitter.current_line(), self.bytes_read());
        let row = self.splitter.finish(self.gzip_cut);
        self.rows += u64::from(row.is_some());
        let half = row.as_ref().filter(|row| row.truncated && row.content.bytes().is_some_and(is_half));
        let at = format!("the file ends at byte {bytes}");
        self.cut = match (self.gzip_cut, array, half) {
            (true, ..) => Some(format!("is cut: its gzip data have no end, {at}; fetch it again")),
            (_, true, _) => Some(format!("is cut: its array has no `]`, {at} in line {line}; fetch it again")),
            (.., Some(row)) => Some(format!("is cut: the row of line {} has no end, {at}; fetch it again", row.line)),
            (.., None) => None,
        };
        row
    }

    /// Bytes read from the file on disk.
    fn bytes_read(&self) -> u64 {
        match &self.source {
            Source::Plain(reader) => reader.get_ref().bytes,
            Source::Gzip(member) => member.as_ref().map_or(0, |member| member.get_ref().get_ref().bytes),
        }
    }

    fn close(self) -> io::Result<FileRead> {
        let reader = match self.source {
            Source::Plain(reader) => reader,
            Source::Gzip(member) => member.ok_or(ErrorKind::UnexpectedEof)?.into_inner(),
        };
        let mut hashed = reader.into_inner();
        io::copy(&mut hashed, &mut io::sink())?;
        Ok(FileRead { bytes: hashed.bytes, sha256: hex(&hashed.hash.finalize()) })
    }
}

impl Read for Source {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let slot = match self {
            Source::Plain(reader) => return reader.read(buffer),
            Source::Gzip(slot) => slot,
        };
        while let Some(member) = slot {
            let read = member.read(buffer)?;
            if read > 0 || !next_member(member.get_mut())? {
                return Ok(read);
            }
            *slot = slot.take().map(|member| GzDecoder::new(member.into_inner()));
        }
        Ok(0)
    }
}

/// True if another gzip member begins at the reader's position. Zeros and white space after a member are padding.
fn next_member(reader: &mut BufReader<Hashed>) -> io::Result<bool> {
    loop {
        let bytes = reader.fill_buf()?;
        if bytes.is_empty() {
            return Ok(false);
        }
        let padding = bytes.iter().take_while(|&&byte| byte == 0 || byte.is_ascii_whitespace()).count();
        if padding > 0 {
            reader.consume(padding);
            continue;
        }
        if bytes[0] == GZIP_MAGIC[0] {
            return Ok(true);
        }
        let at = reader.get_ref().bytes - reader.buffer().len() as u64;
        let why = format!("has other data after its gzip data, from byte {at}; remove them, or fetch the file again");
        return Err(unusable(why, false));
    }
}

impl Read for Hashed {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read(buffer)?;
        self.hash.update(&buffer[..read]);
        self.bytes += read as u64;
        Ok(read)
    }
}

/// True for the beginning of a row: JSON that ends too early.
fn is_half(row: &[u8]) -> bool {
    match std::str::from_utf8(row) {
        Ok(text) => {
            serde_json::from_str::<IgnoredAny>(text.trim_start_matches('\u{feff}')).is_err_and(|error| error.is_eof())
        }
        Err(error) => error.error_len().is_none(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flate2::{Compression, write::GzEncoder};
    use std::io::Write;

    type Short = (usize, u64, u64, bool, String);

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    /// Rows as (file, number, line, truncated, text), and the files.
    fn all(paths: Vec<PathBuf>) -> (Vec<Short>, Vec<FileRead>) {
        let mut inputs = Inputs::new(paths, 1000).allow_truncated(true);
        let mut rows = Vec::new();
        loop {
            let chunk = inputs.read_chunk().unwrap();
            if chunk.is_empty() {
                return (rows, inputs.done);
            }
            rows.extend(chunk.into_iter().map(|input_row| {
                let text = String::from_utf8(input_row.row.content.bytes().unwrap().to_vec()).unwrap();
                (input_row.file, input_row.number, input_row.row.line, input_row.row.truncated, text)
            }));
        }
    }

    #[test]
    fn files_are_read_in_order_plain_or_gzipped_whatever_their_names() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        std::fs::write(path("a.json"), "1\n2\n").unwrap();
        std::fs::write(path("b.jsonl"), gzip(b"[3,\n4]")).unwrap();
        // Two members, as `cat a.gz b.gz` makes them.
        std::fs::write(path("c.gz"), [gzip(b"5\n"), gzip(b"6")].concat()).unwrap();
        std::fs::write(path("empty"), "").unwrap();
        let (rows, done) = all(vec![path("a.json"), path("empty"), path("b.jsonl"), path("c.gz")]);
        let short: Vec<_> = rows.iter().map(|row| (row.0, row.1, row.2, &row.4[..])).collect();
        assert_eq!(
            short,
            [(0, 1, 1, "1"), (0, 2, 2, "2"), (2, 1, 1, "3"), (2, 2, 2, "4"), (3, 1, 1, "5"), (3, 2, 2, "6")]
        );
        assert_eq!(done[2].sha256, hex(&Sha256::digest(std::fs::read(path("b.jsonl")).unwrap())));
        assert_eq!(done[3].bytes, std::fs::metadata(path("c.gz")).unwrap().len());
    }

    #[test]
    fn a_cut_gzip_file_gives_its_rows_and_an_open_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.gz");
        let whole = gzip(b"1\n2\n");
        std::fs::write(&path, &whole[..whole.len() - 4]).unwrap();
        let (rows, _) = all(vec![path]);
        assert_eq!(rows.last().map(|row| (row.3, row.4.clone())), Some((true, String::new())));
        assert_eq!(rows.len(), 3);
    }

    #[test]
    fn a_broken_gzip_file_is_an_error_that_names_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.gz");
        let mut bytes = gzip(b"1\n2\n");
        let end = bytes.len() - 6;
        bytes[end] ^= 1;
        std::fs::write(&path, bytes).unwrap();
        assert_eq!(Inputs::new(vec![path.clone()], 10).read_chunk().unwrap_err().path, path);
    }
}
