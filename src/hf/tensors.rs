//! Memory-mapped safetensors files of a folder, sharded or not, with access by tensor name.

use super::{HfError, read_json};
use crate::common::fs::open_input;
use memmap2::Mmap;
use rayon::{iter::ParallelIterator, slice::ParallelSlice};
use safetensors::tensor::{Metadata, SafeTensors};
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

pub use safetensors::tensor::Dtype as RawDtype;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// Bytes that one thread checks for values that are not finite, a multiple of every width.
const CHECKED_BYTES: usize = 1 << 20;
/// Values of two tensors that are compared at a time.
const COMPARED: usize = 1 << 20;
/// Bytes before a file's header: its length.
const LENGTH_BYTES: usize = 8;

/// Tensors of one folder or file. The files stay mapped for the lifetime of this value; pages are read on access.
pub struct TensorFiles {
    /// Folder or file name for errors.
    label: String,
    files: Vec<MappedFile>,
    /// Index in `files` by tensor name.
    names: BTreeMap<String, usize>,
}

/// Tensor on disk: little endian, row-major.
#[derive(Clone, Copy, Debug)]
pub struct RawTensor<'a> {
    pub dtype: RawDtype,
    pub shape: &'a [usize],
    pub bytes: &'a [u8],
}

impl RawTensor<'_> {
    /// False if a value is NaN or infinite; true for dtypes without such values. Reads the tensor once, in parallel.
    pub fn all_finite(&self) -> bool {
        // NaN and infinity have all bits of the exponent. Without an exit inside a chunk, the loop is one vector instruction
        // for many values.
        fn any<const N: usize>(bytes: &[u8], is_bad: impl Fn([u8; N]) -> bool + Sync) -> bool {
            let bad = |chunk: &[u8]| chunk.as_chunks().0.iter().fold(false, |bad, value| bad | is_bad(*value));
            bytes.par_chunks(CHECKED_BYTES).any(bad)
        }
        !match self.dtype {
            RawDtype::F32 => any(self.bytes, |b: [u8; 4]| u32::from_le_bytes(b) & 0x7f80_0000 == 0x7f80_0000),
            RawDtype::F16 => any(self.bytes, |b: [u8; 2]| u16::from_le_bytes(b) & 0x7c00 == 0x7c00),
            RawDtype::BF16 => any(self.bytes, |b: [u8; 2]| u16::from_le_bytes(b) & 0x7f80 == 0x7f80),
            _ => false,
        }
    }

    /// True if both tensors have the same shape and the same values. If one is F32 and the other F16 or BF16, the former is
    /// rounded first, since the other may be its copy.
    pub fn equals(&self, other: &RawTensor<'_>) -> bool {
        if self.shape != other.shape {
            return false;
        }
        if self.dtype == other.dtype {
            return self.bytes == other.bytes;
        }
        // Part by part, since a whole head as f32 may take gigabytes.
        let count: usize = self.shape.iter().product();
        let part = |tensor: &RawTensor<'_>, as_in: RawDtype, from: usize| -> Vec<f32> {
            let (width, to) = (tensor.dtype.bitsize() / 8, (from + COMPARED).min(count));
            let values = RawTensor { bytes: &tensor.bytes[from * width..to * width], ..*tensor }.to_f32();
            match (tensor.dtype, as_in) {
                (RawDtype::F32, RawDtype::F16) => values.iter().map(|v| half::f16::from_f32(*v).to_f32()).collect(),
                (RawDtype::F32, RawDtype::BF16) => values.iter().map(|v| half::bf16::from_f32(*v).to_f32()).collect(),
                _ => values,
            }
        };
        (0..count).step_by(COMPARED).all(|from| part(self, other.dtype, from) == part(other, self.dtype, from))
    }

    /// Values of an F32, F16 or BF16 tensor as f32, without rounding.
    pub fn to_f32(&self) -> Vec<f32> {
        let pairs = || self.bytes.chunks_exact(2).map(|b| [b[0], b[1]]);
        match self.dtype {
            RawDtype::F16 => pairs().map(|b| half::f16::from_le_bytes(b).to_f32()).collect(),
            RawDtype::BF16 => pairs().map(|b| half::bf16::from_le_bytes(b).to_f32()).collect(),
            _ => self.bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
        }
    }
}

struct MappedFile {
    path: PathBuf,
    map: Mmap,
    metadata: Metadata,
    /// Offset of the first tensor byte.
    start: usize,
}

impl TensorFiles {
    /// Opens `model.safetensors`, or every shard of `model.safetensors.index.json`.
    ///
    /// # Errors
    /// A missing, unreadable or damaged file, or an invalid index.
    pub fn open(folder: &Path) -> Result<TensorFiles, HfError> {
        let (index, single) = (folder.join(INDEX), folder.join(SINGLE));
        if !index.exists() {
            let mut files = TensorFiles::open_file(&single)?;
            files.label = folder.display().to_string();
            return Ok(files);
        }
        let label = index.display().to_string();
        let bad = |reason: String| HfError::Json { file: label.clone(), reason };
        let value = read_json(&index)?;
        let map = value["weight_map"].as_object().ok_or_else(|| bad("`weight_map` is not an object".into()))?;
        let mut files: Vec<MappedFile> = Vec::new();
        let mut indices: HashMap<&str, usize> = HashMap::new();
        let mut names = BTreeMap::new();
        for (name, shard) in map {
            let shard = shard.as_str().ok_or_else(|| bad(format!("the shard of `{name}` is not a string")))?;
            let index = match indices.get(shard) {
                Some(&index) => index,
                None => {
                    if Path::new(shard).file_name() != Some(shard.as_ref()) {
                        return Err(bad(format!("the shard `{shard}` is not a plain file name")));
                    }
                    files.push(MappedFile::open(&folder.join(shard))?);
                    indices.insert(shard, files.len() - 1);
                    files.len() - 1
                }
            };
            if files[index].metadata.info(name).is_none() {
                return Err(HfError::MissingTensor { file: files[index].label(), name: name.clone() });
            }
            names.insert(name.clone(), index);
        }
        if single.exists() && !map.values().any(|shard| shard == SINGLE) {
            // transformers reads the single file, vLLM the shards.
            return Err(HfError::TwoModels { folder: folder.display().to_string() });
        }
        let files = TensorFiles { label: folder.display().to_string(), files, names };
        files.check_duplicates()?;
        Ok(files)
    }

    /// Refuses a tensor that a second shard has with other values: engines differ in the one that they use.
    fn check_duplicates(&self) -> Result<(), HfError> {
        for (index, file) in self.files.iter().enumerate() {
            let names = file.metadata.tensors().into_keys();
            for name in names.filter(|name| self.names.get(name).is_some_and(|used| *used != index)) {
                let (copy, used) = (file.get(&name)?, self.get(&name)?);
                if copy.dtype != used.dtype || !copy.equals(&used) {
                    return Err(HfError::OtherValues {
                        file: file.label(),
                        instead: format!("the same tensor of {}", self.files[self.names[&name]].label()),
                        name,
                        remedy: "download or write the shards again".into(),
                    });
                }
            }
        }
        Ok(())
    }

    /// Opens one safetensors file.
    ///
    /// # Errors
    /// An unreadable or damaged file.
    pub fn open_file(path: &Path) -> Result<TensorFiles, HfError> {
        let file = MappedFile::open(path)?;
        let names = file.metadata.tensors().into_keys().map(|name| (name, 0)).collect();
        Ok(TensorFiles { label: path.display().to_string(), files: vec![file], names })
    }

    /// Folder or file name for errors.
    pub fn label(&self) -> &str {
        &self.label
    }

    /// Tensor names in alphabetical order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.names.keys().map(String::as_str)
    }

    /// Free-form metadata of the first file, for example `format`.
    pub fn metadata(&self) -> Option<&HashMap<String, String>> {
        self.files.first().and_then(|file| file.metadata.metadata().as_ref())
    }

    /// Tensor of any dtype by name.
    ///
    /// # Errors
    /// A missing tensor.
    pub fn get(&self, name: &str) -> Result<RawTensor<'_>, HfError> {
        match self.names.get(name) {
            Some(&file) => self.files[file].get(name),
            None => Err(HfError::MissingTensor { file: self.label.clone(), name: name.into() }),
        }
    }

    /// Weight of the given shape, as F32, F16 or BF16.
    ///
    /// # Errors
    /// A missing tensor, or another shape or dtype.
    pub fn weight(&self, name: &str, shape: &[usize]) -> Result<RawTensor<'_>, HfError> {
        let raw = self.get(name)?;
        if raw.shape != shape {
            let (found, expected) = (raw.shape.to_vec(), shape.to_vec());
            return Err(HfError::BadShape { file: self.label.clone(), name: name.into(), found, expected });
        }
        match raw.dtype {
            RawDtype::F32 | RawDtype::F16 | RawDtype::BF16 => Ok(raw),
            other => {
                let found = format!("{other:?}");
                Err(HfError::BadDtype { file: self.label.clone(), name: name.into(), found })
            }
        }
    }

    /// Checks the tensors of `shapes` and returns all errors. Other tensors are ignored.
    pub fn check(&self, shapes: &BTreeMap<String, Vec<usize>>) -> Vec<HfError> {
        shapes.iter().filter_map(|(name, shape)| self.weight(name, shape).err()).collect()
    }
}

impl MappedFile {
    fn open(path: &Path) -> Result<MappedFile, HfError> {
        let read = |source| HfError::Read { path: path.into(), source };
        let file = open_input(path).map_err(read)?;
        // SAFETY: the map is only read. Weight files are written once and renamed. A file that another process truncates ends
        // this process with SIGBUS, as it would any reader of maps.
        let map = unsafe { Mmap::map(&file) }.map_err(read)?;
        let (header, metadata) = SafeTensors::read_metadata(&map)
            .map_err(|error| HfError::Safetensors { file: path.display().to_string(), reason: error.to_string() })?;
        Ok(MappedFile { path: path.into(), map, metadata, start: LENGTH_BYTES + header })
    }

    fn get(&self, name: &str) -> Result<RawTensor<'_>, HfError> {
        let missing = || HfError::MissingTensor { file: self.label(), name: name.into() };
        let info = self.metadata.info(name).ok_or_else(missing)?;
        let (begin, end) = info.data_offsets;
        // The metadata was checked against the length of the file when it was opened.
        let bytes = &self.map[self.start + begin..self.start + end];
        Ok(RawTensor { dtype: info.dtype, shape: &info.shape, bytes })
    }

    fn label(&self) -> String {
        self.path.display().to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::tensor::TensorView;

    fn write(path: &Path, tensors: &[(&str, &[usize], f32)]) {
        let bytes: Vec<Vec<u8>> = tensors
            .iter()
            .map(|(_, shape, value)| value.to_le_bytes().repeat(shape.iter().product::<usize>()))
            .collect();
        let views = tensors.iter().zip(&bytes).map(|((name, shape, _), data)| {
            (name.to_string(), TensorView::new(RawDtype::F32, shape.to_vec(), data).unwrap())
        });
        std::fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
    }

    #[test]
    fn a_single_file_and_shards_read_the_same() {
        let folder = tempfile::tempdir().unwrap();
        write(&folder.path().join(SINGLE), &[("a", &[2, 3], 1.5), ("b", &[4], -2.0)]);
        let single = TensorFiles::open(folder.path()).unwrap();
        let shards = tempfile::tempdir().unwrap();
        write(&shards.path().join("one.safetensors"), &[("a", &[2, 3], 1.5)]);
        write(&shards.path().join("two.safetensors"), &[("b", &[4], -2.0), ("unlisted", &[1], 0.0)]);
        let index = r#"{"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}"#;
        std::fs::write(shards.path().join(INDEX), index).unwrap();
        let sharded = TensorFiles::open(shards.path()).unwrap();
        assert_eq!(single.names().collect::<Vec<_>>(), sharded.names().collect::<Vec<_>>());
        for (name, shape) in [("a", vec![2, 3]), ("b", vec![4])] {
            let (left, right) = (single.weight(name, &shape).unwrap(), sharded.weight(name, &shape).unwrap());
            assert_eq!(left.bytes, right.bytes);
            assert!(!left.bytes.is_empty());
        }
    }

    #[test]
    fn errors_name_the_file_the_tensor_and_the_shapes() {
        let folder = tempfile::tempdir().unwrap();
        let text = TensorFiles::open(folder.path()).err().unwrap().to_string();
        assert!(text.contains(SINGLE), "{text}");
        write(&folder.path().join(SINGLE), &[("a", &[2, 3], 0.0)]);
        let files = TensorFiles::open(folder.path()).unwrap();
        let text = files.weight("a", &[3, 2]).unwrap_err().to_string();
        assert!(text.contains("[2, 3]") && text.contains("[3, 2]") && text.contains("`a`"), "{text}");
        let text = files.weight("c", &[1]).unwrap_err().to_string();
        assert!(text.contains("`c`"), "{text}");
        assert_eq!(files.check(&BTreeMap::from([("a".into(), vec![2, 3]), ("d".into(), vec![1])])).len(), 1);
    }

    #[test]
    fn a_truncated_file_and_a_false_index_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(SINGLE);
        write(&path, &[("a", &[8], 0.0)]);
        let whole = std::fs::read(&path).unwrap();
        std::fs::write(&path, &whole[..whole.len() - 1]).unwrap();
        assert!(matches!(TensorFiles::open(folder.path()), Err(HfError::Safetensors { .. })));
        std::fs::write(&path, &whole).unwrap();
        for (index, word) in [
            (r#"{"weight_map": {"b": "model.safetensors"}}"#, "`b`"),
            (r#"{"weight_map": {"a": "../model.safetensors"}}"#, "plain file name"),
            (r#"{"weight_map": {"a": "gone.safetensors"}}"#, "gone.safetensors"),
            (r#"{}"#, "weight_map"),
        ] {
            std::fs::write(folder.path().join(INDEX), index).unwrap();
            let text = TensorFiles::open(folder.path()).err().unwrap().to_string();
            assert!(text.contains(word), "{text}");
        }
    }
}
