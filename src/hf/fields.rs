//! Typed access to the keys of a config.json. Errors name the file, the key and the value.

use super::{Dtype, HfError, dtype_from_name};
use serde_json::Value;

/// Limits above every model, and low enough that their products fit into 64 bits.
const MAX_COUNT: usize = 1 << 28;
pub(super) const MAX_WIDTH: usize = 1 << 22;
pub(super) const MAX_LAYERS: usize = 1 << 10;
pub(super) const MAX_HEADS: usize = 1 << 12;
pub(super) const MAX_HEAD_DIM: usize = 1 << 12;

/// JSON object with its file name and key path, for errors.
#[derive(Clone, Copy)]
pub(super) struct Fields<'a> {
    file: &'a str,
    prefix: &'a str,
    object: &'a Value,
}

impl<'a> Fields<'a> {
    pub fn new(file: &'a str, object: &'a Value) -> Result<Fields<'a>, HfError> {
        if object.is_object() {
            Ok(Fields { file, prefix: "", object })
        } else {
            Err(HfError::Json { file: file.into(), reason: "the top level is not an object".into() })
        }
    }

    /// Nested object under `key`; `None` if it is absent or null.
    pub fn nested(&self, key: &'a str) -> Result<Option<Fields<'a>>, HfError> {
        match self.get(key) {
            None => Ok(None),
            Some(object) if object.is_object() => Ok(Some(Fields { file: self.file, prefix: key, object })),
            Some(_) => Err(self.bad(key, "an object or null")),
        }
    }

    /// Value under `key`; null counts as absent.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.object.get(key).filter(|value| !value.is_null())
    }

    pub fn count(&self, key: &str) -> Result<Option<usize>, HfError> {
        self.count_to(key, MAX_COUNT)
    }

    /// Required integer of at least 1.
    pub fn size(&self, key: &str) -> Result<usize, HfError> {
        self.size_to(key, MAX_COUNT)
    }

    /// Integer of at most `limit`. The limit keeps products of sizes from overflowing and bounds loops over layers.
    pub fn count_to(&self, key: &str, limit: usize) -> Result<Option<usize>, HfError> {
        let number = |value: &Value| value.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|&n| n <= limit);
        self.get(key)
            .map(|value| number(value).ok_or_else(|| self.bad(key, &format!("an integer of at most {limit}"))))
            .transpose()
    }

    /// Required integer in 1..=`limit`.
    pub fn size_to(&self, key: &str, limit: usize) -> Result<usize, HfError> {
        match self.count_to(key, limit)? {
            Some(0) => Err(self.bad(key, "at least 1")),
            Some(n) => Ok(n),
            None => Err(self.missing(key, "an integer of at least 1")),
        }
    }

    pub fn positive(&self, key: &str) -> Result<Option<f64>, HfError> {
        let expected = "a finite number above 0";
        self.get(key)
            .map(|value| value.as_f64().filter(|x| x.is_finite() && *x > 0.0).ok_or_else(|| self.bad(key, expected)))
            .transpose()
    }

    pub fn flag(&self, key: &str) -> Result<Option<bool>, HfError> {
        self.get(key).map(|value| value.as_bool().ok_or_else(|| self.bad(key, "true or false"))).transpose()
    }

    pub fn text(&self, key: &str) -> Result<Option<&'a str>, HfError> {
        self.get(key).map(|value| value.as_str().ok_or_else(|| self.bad(key, "a string"))).transpose()
    }

    /// Token ids, given as a number or as a list.
    pub fn ids(&self, key: &str) -> Result<Vec<u32>, HfError> {
        let expected = "a token id or a list of token ids";
        let id =
            |value: &Value| value.as_u64().and_then(|n| u32::try_from(n).ok()).ok_or_else(|| self.bad(key, expected));
        match self.get(key) {
            None => Ok(Vec::new()),
            Some(Value::Array(list)) => list.iter().map(id).collect(),
            Some(one) => Ok(vec![id(one)?]),
        }
    }

    /// Padding token. Old Llama files have -1 for none.
    pub fn padding_id(&self) -> Result<Option<u32>, HfError> {
        let key = "pad_token_id";
        match self.get(key) {
            Some(value) if value.as_i64() == Some(-1) => Ok(None),
            _ => Ok(self.ids(key)?.first().copied()),
        }
    }

    /// Key of the first value that is an object.
    pub fn first_object(&self) -> Option<&'a str> {
        let mut values = self.object.as_object().into_iter().flatten();
        values.find(|(_, value)| value.is_object()).map(|(key, _)| key.as_str())
    }

    /// `dtype` (transformers 5) or `torch_dtype` (transformers 4).
    pub fn dtype(&self) -> Result<Option<Dtype>, HfError> {
        for key in ["dtype", "torch_dtype"] {
            if let Some(name) = self.text(key)? {
                let dtype = dtype_from_name(name.trim_start_matches("torch."));
                return dtype.map(Some).ok_or_else(|| self.unsupported(key, "float32, float16 and bfloat16 are"));
            }
        }
        Ok(None)
    }

    pub fn missing(&self, key: &str, expected: &str) -> HfError {
        HfError::MissingKey { file: self.file.into(), key: self.path(key), expected: expected.into() }
    }

    pub fn bad(&self, key: &str, expected: &str) -> HfError {
        HfError::BadValue {
            file: self.file.into(),
            key: self.path(key),
            value: self.shown(key),
            expected: expected.into(),
        }
    }

    pub fn unsupported(&self, key: &str, supported: &str) -> HfError {
        HfError::Unsupported {
            file: self.file.into(),
            key: self.path(key),
            value: self.shown(key),
            supported: supported.into(),
        }
    }

    fn path(&self, key: &str) -> String {
        if self.prefix.is_empty() { key.into() } else { format!("{}.{key}", self.prefix) }
    }

    fn shown(&self, key: &str) -> String {
        self.object.get(key).unwrap_or(&Value::Null).to_string()
    }
}
