//! Writer of a store. Samples go to spill files next to it; `finish` concatenates them, since sizes are unknown before.

use super::store::{
    FINGERPRINT_KEY, FORMAT, FORMAT_KEY, Hashes, IDS, LOSS_MASK, OFFSETS, Split, TRAIN_KEY, VALIDATION_KEY,
};
use crate::common::fs::{AtomicFile, with_suffix};
use serde_json::{Value, json};
use sha2::Digest;
use std::{
    collections::BTreeMap,
    fs::{self, File, OpenOptions},
    io::{self, BufWriter, Seek, Write},
    path::Path,
};

/// Store being written. Dropping it before [`StoreWriter::finish`] leaves no file.
pub struct StoreWriter {
    part: AtomicFile,
    /// Spill files of the ids: train, validation. The same order holds below.
    ids: [Spill; 2],
    masks: [Spill; 2],
    lengths: [Spill; 2],
    hashes: Hashes,
    samples: [u64; 2],
    tokens: u64,
}

impl StoreWriter {
    /// Starts a store at `path` and creates its folder.
    ///
    /// # Errors
    /// `ResourceBusy` if another process writes the store, or an I/O error.
    pub fn create(path: &Path) -> io::Result<StoreWriter> {
        let part = AtomicFile::create(path)?;
        let spill = |name: &str| Ok::<_, io::Error>([Spill::create(path, name)?, Spill::create(path, name)?]);
        Ok(StoreWriter {
            part,
            ids: spill("ids")?,
            masks: spill("masks")?,
            lengths: spill("lengths")?,
            hashes: Hashes::default(),
            samples: [0; 2],
            tokens: 0,
        })
    }

    /// Adds a sample to a split. `ids` and `mask` are of equal length and not empty.
    ///
    /// # Errors
    /// An I/O error.
    pub fn push(&mut self, split: Split, ids: &[i32], mask: &[u8]) -> io::Result<()> {
        let index = split as usize;
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        self.hashes.0[index].update(&bytes);
        self.hashes.0[2 + index].update(mask);
        self.ids[index].file.write_all(&bytes)?;
        self.masks[index].file.write_all(mask)?;
        self.lengths[index].file.write_all(&(ids.len() as u32).to_le_bytes())?;
        self.samples[index] += 1;
        self.tokens += ids.len() as u64;
        Ok(())
    }

    /// Assembles the store, syncs it and renames it to its path. Returns its fingerprint.
    ///
    /// # Errors
    /// An I/O error, or more samples than a `u32` can number. The path is unchanged then.
    pub fn finish(self, mut metadata: BTreeMap<String, String>) -> io::Result<String> {
        let [train, validation] = self.samples;
        if train + validation >= u64::from(u32::MAX) {
            return Err(io::Error::other(format!(
                "{} samples exceed the limit of a store, 2^32 - 2",
                train + validation
            )));
        }
        metadata.insert(FORMAT_KEY.into(), FORMAT.into());
        metadata.insert(TRAIN_KEY.into(), train.to_string());
        metadata.insert(VALIDATION_KEY.into(), validation.to_string());
        let mut lengths = Vec::with_capacity((train + validation) as usize);
        for spill in self.lengths {
            let bytes = spill.read()?;
            lengths.extend(bytes.as_chunks::<4>().0.iter().map(|chunk| u32::from_le_bytes(*chunk)));
        }
        let fingerprint = self.hashes.fingerprint(&metadata, lengths.iter().copied());
        metadata.insert(FINGERPRINT_KEY.into(), fingerprint.clone());

        let mut out = BufWriter::with_capacity(1 << 20, self.part.file());
        out.write_all(&header(&metadata, train + validation, self.tokens)?)?;
        let mut offset = 0i64;
        out.write_all(&offset.to_le_bytes())?;
        for length in lengths {
            offset += i64::from(length);
            out.write_all(&offset.to_le_bytes())?;
        }
        for spill in self.ids.into_iter().chain(self.masks) {
            io::copy(&mut spill.rewound()?, &mut out)?;
        }
        out.flush()?;
        drop(out);
        self.part.publish()?;
        Ok(fingerprint)
    }
}

/// Length and JSON of a safetensors header. The crate's order of metadata is random, but the same samples must give the same
/// bytes. Offsets come first, so that the data starts at a multiple of 8.
fn header(metadata: &BTreeMap<String, String>, samples: u64, tokens: u64) -> io::Result<Vec<u8>> {
    let mut start = 0;
    let mut tensor = |dtype: &str, length: u64, width: u64| -> Value {
        let end = start + length * width;
        let value = json!({ "dtype": dtype, "shape": [length], "data_offsets": [start, end] });
        start = end;
        value
    };
    let (offsets, ids, masks) = (tensor("I64", samples + 1, 8), tensor("I32", tokens, 4), tensor("U8", tokens, 1));
    let header = json!({ "__metadata__": metadata, OFFSETS: offsets, IDS: ids, LOSS_MASK: masks });
    let mut text = serde_json::to_vec(&header)?;
    text.resize(text.len().next_multiple_of(8), b' ');
    Ok([&(text.len() as u64).to_le_bytes()[..], &text].concat())
}

/// Unlinked temporary file: the operating system removes it when the process ends.
struct Spill {
    file: BufWriter<File>,
}

impl Spill {
    fn create(store: &Path, name: &str) -> io::Result<Spill> {
        let path = with_suffix(store, &format!(".{}.{name}", std::process::id()));
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path)?;
        fs::remove_file(&path)?;
        Ok(Spill { file: BufWriter::with_capacity(1 << 18, file) })
    }

    fn rewound(self) -> io::Result<File> {
        let mut file = self.file.into_inner()?;
        file.rewind()?;
        Ok(file)
    }

    fn read(self) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        io::Read::read_to_end(&mut self.rewound()?, &mut bytes)?;
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{Store, StoreSource};
    use draftmill_actors::messages::types::{BatchSource, JobId, JobSpec};
    use proptest::prelude::*;
    use std::sync::Arc;

    type Sample = (Split, Vec<i32>, Vec<u8>);

    fn write(path: &Path, samples: &[Sample]) -> String {
        let mut writer = StoreWriter::create(path).unwrap();
        for (split, ids, mask) in samples {
            writer.push(*split, ids, mask).unwrap();
        }
        writer.finish(BTreeMap::from([("vocab_size".into(), "1000".into())])).unwrap()
    }

    fn some_samples() -> Vec<Sample> {
        vec![
            (Split::Train, vec![1, 2, 3], vec![0, 1, 1]),
            (Split::Validation, vec![7], vec![0]),
            (Split::Train, vec![999; 5], vec![1; 5]),
        ]
    }

    fn files_in(folder: &Path) -> Vec<String> {
        let mut names: Vec<_> =
            fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    fn sample() -> impl Strategy<Value = Sample> {
        let tokens = prop::collection::vec((0..1000i32, 0..2u8), 1..20);
        (any::<bool>(), tokens).prop_map(|(train, tokens)| {
            let (ids, mask) = tokens.into_iter().unzip();
            (if train { Split::Train } else { Split::Validation }, ids, mask)
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn what_is_written_is_read(samples in prop::collection::vec(sample(), 0..20)) {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("data.safetensors");
            let fingerprint = write(&path, &samples);
            let store = Store::open(&path).unwrap();
            store.verify().unwrap();
            prop_assert_eq!(store.fingerprint(), fingerprint);
            for split in [Split::Train, Split::Validation] {
                let expected: Vec<_> = samples.iter().filter(|sample| sample.0 == split).collect();
                prop_assert_eq!(store.len(split), expected.len());
                prop_assert_eq!(store.lengths(split).len(), expected.len());
                for (i, (_, ids, mask)) in expected.into_iter().enumerate() {
                    prop_assert_eq!(store.sample(split, i), (&ids[..], &mask[..]));
                    prop_assert_eq!(store.lengths(split)[i] as usize, ids.len());
                }
            }
            let bytes = fs::read(&path).unwrap();
            write(&path, &samples);
            prop_assert_eq!(bytes, fs::read(&path).unwrap());
            prop_assert_eq!(files_in(folder.path()), ["data.safetensors"]);
        }
    }

    #[test]
    fn every_truncation_is_reported() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data.safetensors");
        write(&path, &some_samples());
        let whole = fs::read(&path).unwrap();
        for length in 0..whole.len() {
            fs::write(&path, &whole[..length]).unwrap();
            let text = Store::open(&path).unwrap_err().to_string();
            assert!(text.contains("data.safetensors") && text.contains("draftmill prepare"), "{length}: {text}");
        }
        fs::write(&path, [&whole[..], &[0]].concat()).unwrap();
        assert!(Store::open(&path).is_err());
    }

    #[test]
    fn every_flipped_byte_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data.safetensors");
        write(&path, &some_samples());
        let whole = fs::read(&path).unwrap();
        let header = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
        for at in (0..whole.len()).filter(|&at| at >= header || whole[at] != b' ') {
            let mut bytes = whole.clone();
            bytes[at] ^= 1;
            fs::write(&path, bytes).unwrap();
            let seen = Store::open(&path).and_then(|store| store.verify());
            assert!(seen.is_err(), "byte {at} of {}", whole.len());
        }
    }

    #[test]
    fn a_foreign_safetensors_file_is_not_a_store() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        let none: [(&str, safetensors::tensor::TensorView<'_>); 0] = [];
        fs::write(&path, safetensors::serialize(none, None).unwrap()).unwrap();
        let text = Store::open(&path).unwrap_err().to_string();
        assert!(text.contains("lacks `format`"), "{text}");
    }

    #[test]
    fn a_dropped_writer_leaves_nothing_and_a_second_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sub/data.safetensors");
        let mut writer = StoreWriter::create(&path).unwrap();
        writer.push(Split::Train, &[1], &[1]).unwrap();
        let error = StoreWriter::create(&path).err().unwrap().to_string();
        assert!(error.contains("another process"), "{error}");
        drop(writer);
        assert!(files_in(path.parent().unwrap()).is_empty());
        write(&path, &some_samples());
        drop(StoreWriter::create(&path).unwrap());
        assert_eq!(files_in(path.parent().unwrap()), ["data.safetensors"]);
        Store::open(&path).unwrap().verify().unwrap();
    }

    #[test]
    fn jobs_are_padded_and_damaged_samples_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data.safetensors");
        let mut samples = some_samples();
        samples.push((Split::Train, vec![1000], vec![1]));
        samples.push((Split::Train, vec![1], vec![2]));
        write(&path, &samples);
        let source = StoreSource::new(Arc::new(Store::open(&path).unwrap()), Split::Train);
        let job = |samples: &[u32], width| JobSpec {
            id: JobId { epoch: 0, index: 0 },
            bucket: 0,
            samples: samples.to_vec(),
            tokens: 8,
            width,
        };
        let batch = source.pad(&job(&[1, 0], 5)).unwrap();
        assert_eq!((batch.rows, batch.width, &batch.lengths[..]), (2, 5, &[5, 3][..]));
        assert_eq!(batch.ids, [999, 999, 999, 999, 999, 1, 2, 3, 0, 0]);
        assert_eq!(batch.loss_mask, [1, 1, 1, 1, 1, 0, 1, 1, 0, 0]);
        for (job, word) in [
            (job(&[4], 1), "sample 4"),
            (job(&[1], 4), "4 wide"),
            (job(&[2], 5), "id 1000"),
            (job(&[3], 5), "loss mask"),
        ] {
            assert!(source.pad(&job).is_err_and(|text| text.contains(word)), "{word}");
        }
    }
}
