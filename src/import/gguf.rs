//! Reads a GGUF file: typed metadata, tensor shapes and dequantised values.

use super::ImportError;
use crate::common::fs::open_input;
use anamnesis::{
    AnamnesisError, F32Out, GgufMetadataArray as Array, GgufMetadataValue as Value, GgufTensorInfo, GgufType,
    dequantize_gguf_blocks, parse_gguf_front_matter_from_reader,
};
use half::{bf16, f16};
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// Tensor types that import dequantises.
#[rustfmt::skip]
const KNOWN_TYPES: [GgufType; 13] = [
    GgufType::F32, GgufType::F16, GgufType::BF16, GgufType::Q4_0, GgufType::Q4_1, GgufType::Q5_0, GgufType::Q5_1,
    GgufType::Q8_0, GgufType::Q2_K, GgufType::Q3_K, GgufType::Q4_K, GgufType::Q5_K, GgufType::Q6_K,
];

/// An open GGUF file with its metadata and tensor index.
pub(super) struct Gguf {
    path: PathBuf,
    file: File,
    metadata: HashMap<String, Value>,
    /// Tensors by name, with their shapes in Hugging Face order (rows first).
    tensors: BTreeMap<String, GgufTensorInfo>,
}

impl Gguf {
    /// Opens a file, reads its header and checks that every tensor is inside the file and of a known type.
    pub(super) fn open(path: &Path) -> Result<Self, ImportError> {
        let failed = |source| ImportError::Read { path: path.into(), source };
        let mut file = open_input(path).map_err(|error| match error.kind() {
            io::ErrorKind::InvalidInput | io::ErrorKind::IsADirectory => {
                ImportError::NotGguf { path: path.into(), found: error.to_string() }
            }
            _ => failed(error),
        })?;
        let mut head = Vec::with_capacity(8);
        file.by_ref().take(8).read_to_end(&mut head).map_err(failed)?;
        check_version(path, &head)?;
        let header = parse_gguf_front_matter_from_reader(&file).map_err(|e| header_error(path, e))?;
        for tensor in &header.tensor_infos {
            if !KNOWN_TYPES.contains(&tensor.dtype) {
                let what = format!("tensor {} of the type", tensor.name);
                return Err(unsupported(path, what, tensor.dtype.to_string(), &known_types()));
            }
        }
        let rows_first = |mut tensor: GgufTensorInfo| {
            tensor.shape.reverse();
            (tensor.name.clone(), tensor)
        };
        let tensors = header.tensor_infos.into_iter().map(rows_first).collect();
        Ok(Self { path: path.into(), file, metadata: header.metadata, tensors })
    }

    /// Value of a key as a count, or `None` if the key is absent.
    pub(super) fn count(&self, key: &str) -> Result<Option<usize>, ImportError> {
        let Some(value) = self.metadata.get(key) else { return Ok(None) };
        let count = match *value {
            Value::U8(v) => Some(v.into()),
            Value::U16(v) => Some(v.into()),
            Value::U32(v) => usize::try_from(v).ok(),
            Value::U64(v) => usize::try_from(v).ok(),
            Value::I8(v) => usize::try_from(v).ok(),
            Value::I16(v) => usize::try_from(v).ok(),
            Value::I32(v) => usize::try_from(v).ok(),
            Value::I64(v) => usize::try_from(v).ok(),
            _ => None,
        };
        // No field of a model exceeds u32. The limit keeps the product of two counts from overflowing.
        match count.filter(|&c| c <= u32::MAX as usize) {
            Some(count) => Ok(Some(count)),
            None => Err(self.inconsistent(format!("{key} should be one count, not {}", describe(value)))),
        }
    }

    /// Value of a required key as a count.
    pub(super) fn need_count(&self, key: &str) -> Result<usize, ImportError> {
        self.count(key)?.ok_or_else(|| self.missing_key(key))
    }

    /// Value of a key as a real number, or `None` if the key is absent.
    ///
    /// GGUF stores f32. The shortest decimal that gives the f32 is parsed as f64, so that 1e-5 stays 1e-5.
    pub(super) fn real(&self, key: &str) -> Result<Option<f64>, ImportError> {
        let value = match self.metadata.get(key) {
            None => return Ok(None),
            Some(Value::F32(v)) => v.to_string().parse().unwrap_or(f64::from(*v)),
            Some(Value::F64(v)) => *v,
            Some(other) => return Err(self.inconsistent(format!("{key} should be a number, not {}", describe(other)))),
        };
        if value.is_finite() { Ok(Some(value)) } else { Err(self.inconsistent(format!("{key} is {value}"))) }
    }

    /// Value of a key as text, or `None` if the key is absent. Some writers append NUL characters, which are removed.
    pub(super) fn text(&self, key: &str) -> Result<Option<&str>, ImportError> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(Value::String(v)) => Ok(Some(v.trim_end_matches('\0'))),
            Some(other) => Err(self.inconsistent(format!("{key} should be text, not {}", describe(other)))),
        }
    }

    /// Value of a key as a flag, or `None` if the key is absent.
    pub(super) fn flag(&self, key: &str) -> Result<Option<bool>, ImportError> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(Value::Bool(v)) => Ok(Some(*v)),
            Some(other) => Err(self.inconsistent(format!("{key} should be true or false, not {}", describe(other)))),
        }
    }

    /// Value of a required key as a list of texts.
    pub(super) fn texts(&self, key: &str) -> Result<&[String], ImportError> {
        match self.list(key)? {
            Array::String(texts) => Ok(texts),
            other => Err(self.inconsistent(format!("{key} should hold texts, not {}", describe_list(other)))),
        }
    }

    /// Value of a required key as a list of whole numbers of at most 32 bits.
    pub(super) fn numbers(&self, key: &str) -> Result<Vec<i64>, ImportError> {
        fn widen<T: Copy + Into<i64>>(numbers: &[T]) -> Vec<i64> {
            numbers.iter().map(|&n| n.into()).collect()
        }
        match self.list(key)? {
            Array::U8(v) => Ok(widen(v)),
            Array::I8(v) => Ok(widen(v)),
            Array::U16(v) => Ok(widen(v)),
            Array::I16(v) => Ok(widen(v)),
            Array::U32(v) => Ok(widen(v)),
            Array::I32(v) => Ok(widen(v)),
            other => Err(self.inconsistent(format!("{key} should hold whole numbers, not {}", describe_list(other)))),
        }
    }

    pub(super) fn has(&self, key: &str) -> bool {
        self.metadata.contains_key(key)
    }

    /// Shape of a tensor in Hugging Face order (rows first), or `None` if the file has no such tensor.
    pub(super) fn shape(&self, name: &str) -> Option<&[usize]> {
        self.tensors.get(name).map(|tensor| tensor.shape.as_slice())
    }

    /// Type in which the file stores a tensor, such as `Q4_1`.
    pub(super) fn stored_type(&self, name: &str) -> Option<String> {
        self.tensors.get(name).map(|tensor| tensor.dtype.to_string())
    }

    /// Names of all tensors, sorted.
    pub(super) fn tensor_names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Reads one tensor and dequantises it to f32 in row-major order.
    pub(super) fn dequantize(&self, name: &str) -> Result<Vec<f32>, ImportError> {
        let tensor = self.tensors.get(name).ok_or_else(|| self.missing_tensor(name))?;
        let elements = tensor.shape.iter().product();
        // The header's check has bounded the length by the size of the file.
        let mut bytes = vec![0; tensor.byte_len.unwrap_or_default() as usize];
        let mut file = &self.file;
        file.seek(SeekFrom::Start(tensor.data_offset))
            .and_then(|_| file.read_exact(&mut bytes))
            .map_err(|e| self.damaged(format!("tensor {name}: {e}")))?;
        let mut values = Vec::with_capacity(elements);
        match tensor.dtype {
            GgufType::F32 => values.extend(le_f32(&bytes)),
            GgufType::F16 => values.extend(bytes.as_chunks().0.iter().map(|&v| f16::from_le_bytes(v).to_f32())),
            GgufType::BF16 => values.extend(bytes.as_chunks().0.iter().map(|&v| bf16::from_le_bytes(v).to_f32())),
            quantised => dequantize_gguf_blocks::<F32Out, _>(&bytes, quantised, elements, |block| {
                values.extend(le_f32(block));
                Ok(())
            })
            .map_err(|e| self.damaged(format!("tensor {name}: {}", reason(&e))))?,
        }
        Ok(values)
    }

    pub(super) fn missing_key(&self, key: &str) -> ImportError {
        self.inconsistent(format!("the key {key} is missing"))
    }

    pub(super) fn missing_tensor(&self, name: &str) -> ImportError {
        self.inconsistent(format!("the tensor {name} is missing"))
    }

    pub(super) fn damaged(&self, why: impl Into<String>) -> ImportError {
        ImportError::Damaged { path: self.path.clone(), why: why.into() }
    }

    pub(super) fn inconsistent(&self, why: impl Into<String>) -> ImportError {
        ImportError::Inconsistent { path: self.path.clone(), why: why.into() }
    }

    pub(super) fn unsupported(&self, what: impl Into<String>, found: impl Into<String>, known: &str) -> ImportError {
        unsupported(&self.path, what, found, known)
    }

    pub(super) fn refused(&self, why: impl ToString) -> ImportError {
        ImportError::Unusable { path: self.path.clone(), why: why.to_string() }
    }

    fn list(&self, key: &str) -> Result<&Array, ImportError> {
        match self.metadata.get(key) {
            Some(Value::Array(v)) => Ok(v),
            Some(other) => Err(self.inconsistent(format!("{key} should be a list, not {}", describe(other)))),
            None => Err(self.missing_key(key)),
        }
    }
}

/// Checks the first 8 bytes of a file: the magic `GGUF` and a version that import reads.
fn check_version(path: &Path, head: &[u8]) -> Result<(), ImportError> {
    if head.get(..4) != Some(b"GGUF") {
        let found = match &head[..head.len().min(4)] {
            [] => "it is empty".into(),
            some => format!("it begins with \"{}\", not with \"GGUF\"", some.escape_ascii()),
        };
        return Err(ImportError::NotGguf { path: path.into(), found });
    }
    let Some(version) = head.last_chunk().filter(|_| head.len() == 8).map(|&v| u32::from_le_bytes(v)) else {
        return Ok(()); // cut short, which the header's reader reports
    };
    let found = match (version, version.swap_bytes()) {
        (2..=3, _) => return Ok(()),
        (_, swapped @ 1..=3) => format!("{swapped} in big-endian byte order"),
        _ => version.to_string(),
    };
    Err(unsupported(path, "GGUF version", found, "versions 2 and 3, little-endian"))
}

fn unsupported(path: &Path, what: impl Into<String>, found: impl Into<String>, known: &str) -> ImportError {
    ImportError::Unsupported { path: path.into(), what: what.into(), found: found.into(), known: known.into() }
}

fn header_error(path: &Path, error: AnamnesisError) -> ImportError {
    match error {
        AnamnesisError::Io(source) => ImportError::Read { path: path.into(), source },
        // After the version check, a tensor type without a name is the only unsupported part of a header.
        AnamnesisError::Unsupported { detail, .. } => unsupported(path, "a tensor of an", detail, &known_types()),
        other => {
            ImportError::Damaged { path: path.into(), why: format!("its header cannot be read ({})", reason(&other)) }
        }
    }
}

/// Text of a parse error without the crate's prefix.
fn reason(error: &AnamnesisError) -> String {
    let text = error.to_string();
    text.strip_prefix("parse error: ").unwrap_or(&text).into()
}

fn known_types() -> String {
    KNOWN_TYPES.map(|dtype| dtype.to_string()).join(", ")
}

fn le_f32(bytes: &[u8]) -> impl Iterator<Item = f32> {
    bytes.as_chunks().0.iter().map(|&v| f32::from_le_bytes(v))
}

/// Metadata value in a few words: a vocabulary or a chat template is too long for an error.
fn describe(value: &Value) -> String {
    match value {
        Value::Array(list) => describe_list(list),
        Value::String(text) => format!("the text {:?}", text.chars().take(40).collect::<String>()),
        other => format!("{other:?}"),
    }
}

fn describe_list(list: &Array) -> String {
    format!("a list of {} values", list.len())
}
