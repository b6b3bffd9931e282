//! A GGUF file opened for reading: candle's reader behind typed access and errors that are sentences.

use super::ImportError;
use candle_core::quantized::gguf_file::{Content, TensorInfo, Value};
use candle_core::{Device, Tensor};
use std::fs::File;
use std::io::{BufReader, Read, Seek};
use std::path::{Path, PathBuf};

/// Names of the tensor types by their number in the file, for those that candle does not read.
const OTHER_TYPES: [(u32, &str); 21] = [
    (4, "Q4_2"),
    (5, "Q4_3"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (20, "IQ4_NL"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (23, "IQ4_XS"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
    (29, "IQ1_M"),
    (31, "Q4_0_4_4"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (39, "MXFP4"),
    (40, "NVFP4"),
];
const KNOWN_TYPES: &str = "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K and Q6_K";

/// An open GGUF file with its metadata.
pub(super) struct Gguf {
    path: PathBuf,
    reader: BufReader<File>,
    content: Content,
    len: u64,
}

impl Gguf {
    pub(super) fn open(path: &Path) -> Result<Self, ImportError> {
        let failed = |source| ImportError::Read { path: path.into(), source };
        let file = File::open(path).map_err(failed)?;
        let meta = file.metadata().map_err(failed)?;
        if !meta.is_file() {
            return Err(ImportError::NotGguf { path: path.into(), found: "it is not a regular file".into() });
        }
        let mut reader = BufReader::with_capacity(1 << 20, file);
        let mut head = Vec::with_capacity(8);
        reader.by_ref().take(8).read_to_end(&mut head).map_err(failed)?;
        if head.get(..4) != Some(b"GGUF") {
            let found = match &head[..head.len().min(4)] {
                [] => "it is empty".into(),
                some => format!("it begins with \"{}\", not with \"GGUF\"", some.escape_ascii()),
            };
            return Err(ImportError::NotGguf { path: path.into(), found });
        }
        if let Some(Ok(version)) = head.get(4..8).map(|v| <[u8; 4]>::try_from(v).map(u32::from_le_bytes))
            && !(1..=3).contains(&version)
        {
            let found = match version.swap_bytes() {
                1..=3 => format!("{} in big-endian byte order", version.swap_bytes()),
                _ => version.to_string(),
            };
            return Err(unsupported(path, "GGUF version", found, "versions 1 to 3, little-endian"));
        }
        reader.rewind().map_err(failed)?;
        // candle checks lengths against the file's size, but divides by `general.alignment` unchecked.
        let content = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| Content::read(&mut reader)))
            .map_err(|_| ImportError::Damaged {
                path: path.into(),
                why: "the GGUF reader stumbled over its header".into(),
            })?
            .map_err(|e| header_error(path, &e))?;
        let gguf = Self { path: path.into(), reader, content, len: meta.len() };
        gguf.check_extents()?;
        Ok(gguf)
    }

    /// A key's value as a count. `Ok(None)` when the key is absent.
    pub(super) fn count(&self, key: &str) -> Result<Option<usize>, ImportError> {
        let Some(value) = self.content.metadata.get(key) else { return Ok(None) };
        let count = match value {
            Value::I8(v) => usize::try_from(*v).ok(),
            Value::I16(v) => usize::try_from(*v).ok(),
            Value::I32(v) => usize::try_from(*v).ok(),
            Value::I64(v) => usize::try_from(*v).ok(),
            Value::Bool(_) => None,
            other => other.to_u64().ok().and_then(|v| usize::try_from(v).ok()),
        };
        // The largest count that any field of a model has; it keeps products of two from overflowing.
        match count.filter(|&c| c <= u32::MAX as usize) {
            Some(count) => Ok(Some(count)),
            None => Err(self.inconsistent(format!("{key} should be one count, not {}", describe(value)))),
        }
    }

    /// Like `count`, for a key that the file must have.
    pub(super) fn need_count(&self, key: &str) -> Result<usize, ImportError> {
        self.count(key)?.ok_or_else(|| self.inconsistent(format!("the key {key} is missing")))
    }

    /// A real number. GGUF stores f32: the nearest short decimal is taken, so that 1e-5 stays 1e-5 in f64.
    pub(super) fn real(&self, key: &str) -> Result<Option<f64>, ImportError> {
        let value = match self.content.metadata.get(key) {
            None => return Ok(None),
            Some(Value::F32(v)) => v.to_string().parse().unwrap_or(f64::from(*v)),
            Some(Value::F64(v)) => *v,
            Some(other) => return Err(self.inconsistent(format!("{key} should be a number, not {}", describe(other)))),
        };
        if value.is_finite() { Ok(Some(value)) } else { Err(self.inconsistent(format!("{key} is {value}"))) }
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<&str>, ImportError> {
        match self.content.metadata.get(key) {
            None => Ok(None),
            Some(Value::String(v)) => Ok(Some(v)),
            Some(other) => Err(self.inconsistent(format!("{key} should be text, not {}", describe(other)))),
        }
    }

    pub(super) fn flag(&self, key: &str) -> Result<Option<bool>, ImportError> {
        match self.content.metadata.get(key) {
            None => Ok(None),
            Some(Value::Bool(v)) => Ok(Some(*v)),
            Some(other) => Err(self.inconsistent(format!("{key} should be true or false, not {}", describe(other)))),
        }
    }

    /// A list of texts, borrowed. The key must be there.
    pub(super) fn texts(&self, key: &str) -> Result<Vec<&str>, ImportError> {
        self.list(key)?
            .iter()
            .map(|v| match v {
                Value::String(v) => Ok(v.as_str()),
                other => Err(self.inconsistent(format!("{key} should hold texts, not {}", describe(other)))),
            })
            .collect()
    }

    /// A list of small numbers (token types). The key must be there.
    pub(super) fn numbers(&self, key: &str) -> Result<Vec<i64>, ImportError> {
        self.list(key)?
            .iter()
            .map(|v| match v {
                Value::I32(v) => Ok(i64::from(*v)),
                Value::I64(v) => Ok(*v),
                other => other.to_u64().ok().and_then(|v| i64::try_from(v).ok()).ok_or_else(|| {
                    self.inconsistent(format!("{key} should hold whole numbers, not {}", describe(other)))
                }),
            })
            .collect()
    }

    pub(super) fn has(&self, key: &str) -> bool {
        self.content.metadata.contains_key(key)
    }

    /// Shape of a tensor as Hugging Face writes it (rows first), or `None` when the file has no such tensor.
    pub(super) fn shape(&self, name: &str) -> Option<&[usize]> {
        self.content.tensor_infos.get(name).map(|info| info.shape.dims())
    }

    /// The type in which the file stores a tensor, such as `Q4_1`.
    pub(super) fn stored_as(&self, name: &str) -> Option<String> {
        self.content.tensor_infos.get(name).map(|info| format!("{:?}", info.ggml_dtype))
    }

    pub(super) fn tensor_names(&self) -> impl Iterator<Item = &str> {
        self.content.tensor_infos.keys().map(String::as_str)
    }

    /// Reads one tensor and dequantises it to f32 on the CPU.
    pub(super) fn dequantize(&mut self, name: &str) -> Result<Tensor, ImportError> {
        let device = Device::Cpu;
        let quantised = self.content.tensor(&mut self.reader, name, &device);
        quantised
            .and_then(|q| q.dequantize(&device))
            .map_err(|e| self.damaged(format!("tensor {name}: {}", first_line(&e))))
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

    fn list(&self, key: &str) -> Result<&[Value], ImportError> {
        match self.content.metadata.get(key) {
            Some(Value::Array(v)) => Ok(v),
            Some(other) => Err(self.inconsistent(format!("{key} should be a list, not {}", describe(other)))),
            None => Err(self.inconsistent(format!("the key {key} is missing"))),
        }
    }

    /// Every tensor lies inside the file and is of a type that candle dequantises: known before anything is written.
    fn check_extents(&self) -> Result<(), ImportError> {
        let mut tensors: Vec<_> = self.content.tensor_infos.iter().collect();
        tensors.sort_by_key(|(name, _)| name.as_str()); // the same fault is reported on every run
        for (name, info) in tensors {
            use candle_core::quantized::GgmlDType::{Q8_1, Q8K};
            if matches!(info.ggml_dtype, Q8_1 | Q8K) {
                let found = format!("{:?}", info.ggml_dtype);
                return Err(self.unsupported(format!("tensor {name} in the type"), found, KNOWN_TYPES));
            }
            let end =
                extent(info).and_then(|b| b.checked_add(info.offset)?.checked_add(self.content.tensor_data_offset));
            match end {
                Some(end) if end <= self.len => {}
                Some(end) => {
                    return Err(self.damaged(format!("tensor {name} ends at byte {end}, the file at {}", self.len)));
                }
                None => return Err(self.damaged(format!("tensor {name} has the impossible shape {:?}", info.shape))),
            }
        }
        Ok(())
    }
}

/// Bytes of a tensor in the file; `None` when its shape is not whole blocks or overflows.
fn extent(info: &TensorInfo) -> Option<u64> {
    let elements = info.shape.dims().iter().try_fold(1u64, |n, &d| n.checked_mul(d as u64))?;
    let block = info.ggml_dtype.block_size() as u64;
    (elements > 0 && elements.is_multiple_of(block)).then_some(())?;
    (elements / block).checked_mul(info.ggml_dtype.type_size() as u64)
}

fn unsupported(path: &Path, what: impl Into<String>, found: impl Into<String>, known: &str) -> ImportError {
    ImportError::Unsupported { path: path.into(), what: what.into(), found: found.into(), known: known.into() }
}

/// candle names an unknown tensor type by its number alone.
fn header_error(path: &Path, error: &candle_core::Error) -> ImportError {
    let why = first_line(error);
    if let Some(number) = why.strip_prefix("unknown dtype for tensor ").and_then(|n| n.trim().parse::<u32>().ok()) {
        let name = OTHER_TYPES.iter().find(|(n, _)| *n == number).map_or("without a name", |(_, name)| name);
        return unsupported(path, "tensors of the type", format!("{name} (number {number})"), KNOWN_TYPES);
    }
    ImportError::Damaged { path: path.into(), why: format!("its header cannot be read ({why})") }
}

/// candle appends a backtrace when RUST_BACKTRACE is set.
pub(super) fn first_line(error: &candle_core::Error) -> String {
    error.to_string().lines().next().unwrap_or("unknown error").to_string()
}

/// A metadata value in a few words: lists of a vocabulary's size do not belong in a sentence.
fn describe(value: &Value) -> String {
    match value {
        Value::Array(list) => format!("a list of {}", list.len()),
        Value::String(text) => format!("the text {:?}", text.chars().take(40).collect::<String>()),
        other => format!("{other:?}"),
    }
}
