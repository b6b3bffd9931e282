//! Prepared store: one memory-mapped safetensors file with the ids and loss masks of all samples.
//!
//! | tensor | dtype, shape | content |
//! | --- | --- | --- |
//! | `offsets` | I64 `[samples + 1]` | start of each sample; the last entry is the number of tokens |
//! | `ids` | I32 `[tokens]` | token ids of the samples, concatenated |
//! | `loss_mask` | U8 `[tokens]` | 1 for a supervised token, else 0 |
//!
//! The training samples come first (`train_samples` of the metadata), then those for validation.

use crate::common::fs::open_input;
use crate::common::hash::hex;
use memmap2::Mmap;
use rayon::{
    iter::{IndexedParallelIterator, IntoParallelRefIterator, ParallelIterator},
    slice::ParallelSlice,
};
use safetensors::tensor::{Dtype, SafeTensors};
use sha2::{Digest, Sha256};
use std::{
    collections::BTreeMap,
    ops::Range,
    path::{Path, PathBuf},
};
use thiserror::Error;

/// Value of `format` in the metadata. Another layout gets another number.
pub const FORMAT: &str = "draftmill-store-1";
pub(super) const IDS: &str = "ids";
pub(super) const LOSS_MASK: &str = "loss_mask";
pub(super) const OFFSETS: &str = "offsets";
pub(super) const FORMAT_KEY: &str = "format";
pub(super) const FINGERPRINT_KEY: &str = "fingerprint";
pub(super) const TRAIN_KEY: &str = "train_samples";
pub(super) const VALIDATION_KEY: &str = "validation_samples";
const REMEDY: &str = "run draftmill prepare again";

/// Part of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Split {
    Train,
    /// Held-out samples, never trained.
    Validation,
}

/// Failure to open or verify a store.
#[derive(Debug, Error)]
pub enum StoreError {
    #[error("{} does not exist; run draftmill prepare with the same configuration first, or name a prepared store in data.store", .0.display())]
    Absent(PathBuf),
    #[error("{} cannot be read ({source}); {REMEDY}, or give the path of a prepared store", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{} is not a complete store of prepared data: {reason}; {REMEDY}", path.display())]
    Damaged { path: PathBuf, reason: String },
}

/// Memory-mapped store. Opening it reads only header and offsets.
#[derive(Debug)]
pub struct Store {
    path: PathBuf,
    map: Mmap,
    /// Byte ranges of the three tensors in the file.
    ids: Range<usize>,
    loss_mask: Range<usize>,
    offsets: Range<usize>,
    train: usize,
    validation: usize,
    metadata: BTreeMap<String, String>,
    fingerprint: String,
}

impl Store {
    /// Maps a store and checks its layout: tensors, dtypes, shapes, offsets, counts. The time grows with the number of samples,
    /// not of tokens; [`Store::verify`] reads everything.
    ///
    /// # Errors
    /// A missing, unreadable or damaged file.
    pub fn open(path: &Path) -> Result<Store, StoreError> {
        let read = |source: std::io::Error| match source.kind() {
            std::io::ErrorKind::NotFound => StoreError::Absent(path.into()),
            _ => StoreError::Read { path: path.into(), source },
        };
        let damaged = |reason: String| StoreError::Damaged { path: path.into(), reason };
        let file = open_input(path).map_err(read)?;
        // SAFETY: the map is only read. A store is written under another name and renamed, so no writer changes its bytes.
        // A file truncated by hand ends this process with SIGBUS, as it would any reader of maps.
        let map = unsafe { Mmap::map(&file) }.map_err(read)?;
        let (_, header) = SafeTensors::read_metadata(&map).map_err(|error| damaged(error.to_string()))?;
        let metadata: BTreeMap<_, _> =
            header.metadata().iter().flatten().map(|(k, v)| (k.clone(), v.clone())).collect();
        let text = |key: &str| metadata.get(key).ok_or_else(|| damaged(format!("its metadata lacks `{key}`")));
        let count = |key: &str| {
            let value = text(key)?;
            value.parse::<u32>().map(|n| n as usize).map_err(|_| damaged(format!("{key} = {value:?} is not a count")))
        };
        if text(FORMAT_KEY)? != FORMAT {
            return Err(damaged(format!("its format is {:?}; this version reads {FORMAT:?}", text(FORMAT_KEY)?)));
        }
        let start = map.len() - header.data_len();
        let tensor = |name: &str, dtype: Dtype| {
            let info = header.info(name).ok_or_else(|| damaged(format!("it has no tensor `{name}`")))?;
            let range = start + info.data_offsets.0..start + info.data_offsets.1;
            let width = dtype.bitsize() / 8;
            if info.dtype != dtype || info.shape.len() != 1 || !range.start.is_multiple_of(width) {
                return Err(damaged(format!(
                    "tensor `{name}` is {:?} {:?} at byte {}, expected an aligned vector of {dtype:?}",
                    info.dtype, info.shape, range.start
                )));
            }
            Ok((range, info.shape[0]))
        };
        let ((ids, tokens), (loss_mask, masks)) = (tensor(IDS, Dtype::I32)?, tensor(LOSS_MASK, Dtype::U8)?);
        let (offsets, bounds) = tensor(OFFSETS, Dtype::I64)?;
        let (train, validation) = (count(TRAIN_KEY)?, count(VALIDATION_KEY)?);
        if masks != tokens || bounds != train + validation + 1 {
            return Err(damaged(format!(
                "{tokens} ids, {masks} mask values, {bounds} offsets and {train} + {validation} samples contradict \
                 each other"
            )));
        }
        let fingerprint = text(FINGERPRINT_KEY)?.clone();
        let store = Store { path: path.into(), map, ids, loss_mask, offsets, train, validation, metadata, fingerprint };
        store.check_offsets(tokens).map_err(damaged)?;
        Ok(store)
    }

    /// Number of samples of a split.
    pub fn len(&self, split: Split) -> usize {
        match split {
            Split::Train => self.train,
            Split::Validation => self.validation,
        }
    }

    /// True if a split has no sample.
    pub fn is_empty(&self, split: Split) -> bool {
        self.len(split) == 0
    }

    /// Number of tokens of each sample of a split, by sample id.
    pub fn lengths(&self, split: Split) -> Vec<u32> {
        // `open` has checked that each length is a u32.
        (0..self.len(split)).map(|i| self.token_range(split, i).len() as u32).collect()
    }

    /// Token ids and loss mask of a sample, of equal length.
    ///
    /// # Panics
    /// If the split has no sample `i`.
    pub fn sample(&self, split: Split, i: usize) -> (&[i32], &[u8]) {
        let range = self.token_range(split, i);
        (&self.all_ids()[range.clone()], &self.map[self.loss_mask.clone()][range])
    }

    /// SHA-256 of ids, masks, offsets and metadata, in hexadecimal. Stores with the same fingerprint train the same.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// Origin of the store: fingerprints of inputs, template and tokenizer, policies, counts.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// Path of the store.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads the whole store once, in parallel, and compares it with the fingerprint.
    ///
    /// # Errors
    /// [`StoreError::Damaged`], if the content differs, or holds a value that no store has.
    pub fn verify(&self) -> Result<Contents, StoreError> {
        let (ids, masks, cut) =
            (&self.map[self.ids.clone()], &self.map[self.loss_mask.clone()], self.offset(self.train));
        let parts = [&ids[..cut * 4], &ids[cut * 4..], &masks[..cut], &masks[cut..]];
        let hash = || parts.par_iter().map(Sha256::new_with_prefix).collect::<Vec<_>>();
        let (hashes, contents) = rayon::join(hash, || Contents::of(self.all_ids(), masks, cut));
        let hashes = Hashes(hashes.try_into().unwrap_or_default());
        let lengths = [Split::Train, Split::Validation].map(|split| self.lengths(split));
        let found = hashes.fingerprint(&self.metadata, lengths.iter().flatten().copied());
        let reason = if found != self.fingerprint {
            format!("its content has the fingerprint {found}, not {}", self.fingerprint)
        } else if contents.smallest_id < 0 {
            format!("it holds the id {}, which is not a token", contents.smallest_id)
        } else if contents.largest_mask > 1 {
            format!("it holds {} in its loss mask, expected 0 or 1", contents.largest_mask)
        } else {
            return Ok(contents);
        };
        Err(StoreError::Damaged { path: self.path.clone(), reason })
    }

    fn check_offsets(&self, tokens: usize) -> Result<(), String> {
        let samples = self.train + self.validation;
        if self.offset(0) != 0 || self.offset(samples) != tokens {
            return Err(format!(
                "its offsets run from {} to {}, not from 0 to {tokens}",
                self.offset(0),
                self.offset(samples)
            ));
        }
        for i in 0..samples {
            let (from, to) = (self.offset(i), self.offset(i + 1));
            if to <= from || to - from > u32::MAX as usize {
                return Err(format!("sample {i} has the offsets {from} to {to}"));
            }
        }
        Ok(())
    }

    /// Range of a sample's tokens among all tokens.
    fn token_range(&self, split: Split, i: usize) -> Range<usize> {
        assert!(i < self.len(split), "the {split:?} split has {} samples, so none has the id {i}", self.len(split));
        let i = if split == Split::Train { i } else { self.train + i };
        self.offset(i)..self.offset(i + 1)
    }

    /// Offset `i`. A negative one, which no complete store has, becomes a number that every check rejects.
    fn offset(&self, i: usize) -> usize {
        let (all, _) = self.map[self.offsets.clone()].as_chunks::<8>();
        i64::from_le_bytes(all[i]).try_into().unwrap_or(usize::MAX)
    }

    fn all_ids(&self) -> &[i32] {
        const { assert!(cfg!(target_endian = "little"), "the file is little endian") };
        // SAFETY: any four bytes are a valid i32. `open` has checked the alignment, so `ids` covers the whole range.
        let (_, ids, _) = unsafe { self.map[self.ids.clone()].align_to::<i32>() };
        ids
    }
}

/// Facts about the content of a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Contents {
    pub tokens: u64,
    /// Supervised tokens of the training samples and of the held-out ones.
    pub supervised: [u64; 2],
    pub largest_id: i32,
    smallest_id: i32,
    largest_mask: u8,
    /// Occurrences of each id below [`COUNTED_IDS`].
    counts: Vec<u64>,
}

/// Ids that are counted: more than any vocabulary has rows.
const COUNTED_IDS: usize = 1 << 22;
/// Tokens that one thread examines at a time.
const EXAMINED: usize = 1 << 20;

impl Contents {
    /// Occurrences of a token id in all samples.
    pub fn count(&self, id: u32) -> u64 {
        self.counts.get(id as usize).copied().unwrap_or(0)
    }

    /// Examines all ids and masks. The first `train` tokens are those of the training samples.
    fn of(ids: &[i32], masks: &[u8], train: usize) -> Contents {
        let chunks = ids.par_chunks(EXAMINED).zip(masks.par_chunks(EXAMINED)).enumerate();
        let examined = chunks.fold(Contents::none, |mut all, (chunk, (ids, masks))| {
            all.examine(ids, masks, train.saturating_sub(chunk * EXAMINED).min(ids.len()));
            all
        });
        examined.reduce(Contents::none, Contents::joined)
    }

    fn none() -> Contents {
        Contents { tokens: 0, supervised: [0; 2], largest_id: 0, smallest_id: 0, largest_mask: 0, counts: Vec::new() }
    }

    fn examine(&mut self, ids: &[i32], masks: &[u8], train: usize) {
        let largest = ids.iter().copied().max().unwrap_or(0);
        self.largest_id = self.largest_id.max(largest);
        self.smallest_id = self.smallest_id.min(ids.iter().copied().min().unwrap_or(0));
        self.largest_mask = self.largest_mask.max(masks.iter().copied().max().unwrap_or(0));
        let supervised = |masks: &[u8]| masks.iter().map(|&mask| u64::from(mask != 0)).sum::<u64>();
        self.supervised[0] += supervised(&masks[..train]);
        self.supervised[1] += supervised(&masks[train..]);
        self.tokens += ids.len() as u64;
        let wanted = (usize::try_from(largest).unwrap_or(0) + 1).min(COUNTED_IDS);
        self.counts.resize(wanted.max(self.counts.len()), 0);
        for id in ids {
            if let Some(count) = usize::try_from(*id).ok().and_then(|id| self.counts.get_mut(id)) {
                *count += 1;
            }
        }
    }

    fn joined(mut self, mut other: Contents) -> Contents {
        if self.counts.len() < other.counts.len() {
            std::mem::swap(&mut self, &mut other);
        }
        self.counts.iter_mut().zip(&other.counts).for_each(|(count, more)| *count += more);
        self.tokens += other.tokens;
        self.supervised = [self.supervised[0] + other.supervised[0], self.supervised[1] + other.supervised[1]];
        self.largest_id = self.largest_id.max(other.largest_id);
        self.smallest_id = self.smallest_id.min(other.smallest_id);
        self.largest_mask = self.largest_mask.max(other.largest_mask);
        self
    }
}

/// True for the first bytes of a store, of any version and also of a damaged one. Its header begins with the metadata.
pub(super) fn is_store(head: &[u8]) -> bool {
    let header = head.get(8..).unwrap_or_default();
    let header = &header[..header.len().min(64 << 10)];
    let format = format!("\"{FORMAT_KEY}\":\"{}", FORMAT.trim_end_matches(|c: char| c.is_ascii_digit()));
    header.starts_with(b"{\"__metadata__\":{") && header.windows(format.len()).any(|part| part == format.as_bytes())
}

/// Running hashes of a store, the inputs of its fingerprint: train ids, validation ids, train masks, validation masks.
#[derive(Clone, Default)]
pub(super) struct Hashes(pub [Sha256; 4]);

impl Hashes {
    /// Fingerprint of a store. `lengths` are those of all samples, in file order.
    pub fn fingerprint(self, metadata: &BTreeMap<String, String>, lengths: impl Iterator<Item = u32>) -> String {
        let mut whole = Sha256::new();
        self.0.into_iter().for_each(|hash| whole.update(hash.finalize()));
        lengths.for_each(|length| whole.update(length.to_le_bytes()));
        for (key, value) in metadata.iter().filter(|(key, _)| *key != FINGERPRINT_KEY) {
            for text in [key, value] {
                // Each length is hashed too, so that the boundaries are unambiguous.
                whole.update((text.len() as u64).to_le_bytes());
                whole.update(text);
            }
        }
        hex(&whole.finalize())
    }
}
