//! Loading of weights from mapped files to a device.

use super::ModelError;
use crate::hf::tensors::{RawDtype, RawTensor, TensorFiles};
use crate::hf::{Dtype, HfError};
use tch::{Device, Kind, Tensor};

/// libtorch dtype of a feature or weight dtype.
pub fn kind_of(dtype: Dtype) -> Kind {
    match dtype {
        Dtype::F32 => Kind::Float,
        Dtype::F16 => Kind::Half,
        Dtype::Bf16 => Kind::BFloat16,
    }
}

/// Reads one weight of `shape`, converts it to `kind` and copies it to `device`. The result shares no memory with the
/// file.
///
/// # Errors
/// Returns an error if the tensor is absent, has another shape or dtype, has a value that is not finite, or libtorch fails.
pub fn weight(
    files: &TensorFiles,
    name: &str,
    shape: &[usize],
    kind: Kind,
    device: Device,
) -> Result<Tensor, ModelError> {
    let raw = files.weight(name, shape)?;
    let stored = match raw.dtype {
        RawDtype::F16 => Kind::Half,
        RawDtype::BF16 => Kind::BFloat16,
        _ => Kind::Float,
    };
    // The bytes are read for the copy anyway; a NaN of a target would appear as a diverging loss much later.
    if !raw.all_finite() {
        return Err(HfError::NotFinite { file: files.label().into(), name: name.into() }.into());
    }
    let loaded = from_bytes(&raw, stored)?.f_to_device_(device, kind, false, false)?;
    // f16 has a smaller range than the other two.
    if kind == Kind::Half && stored != Kind::Half && loaded.f_isfinite()?.f_all()?.f_int64_value(&[])? == 0 {
        let dtype = "f16".into();
        return Err(HfError::OutOfRange { file: files.label().into(), name: name.into(), dtype }.into());
    }
    Ok(loaded)
}

/// Reads any tensor of a file as it is, on the CPU: also token ids and masks.
///
/// # Errors
/// Returns an error if the tensor is absent or its dtype is not supported.
pub fn tensor(files: &TensorFiles, name: &str) -> Result<Tensor, ModelError> {
    let raw = files.get(name)?;
    let kind = match raw.dtype {
        RawDtype::F32 => Kind::Float,
        RawDtype::F64 => Kind::Double,
        RawDtype::F16 => Kind::Half,
        RawDtype::BF16 => Kind::BFloat16,
        RawDtype::I64 => Kind::Int64,
        RawDtype::I32 => Kind::Int,
        RawDtype::U8 => Kind::Uint8,
        RawDtype::BOOL => Kind::Bool,
        other => {
            let (file, found) = (files.label().to_string(), format!("{other:?}"));
            return Err(HfError::BadDtype { file, name: name.into(), found }.into());
        }
    };
    from_bytes(&raw, kind)
}

/// Goes through bytes, because tch mistakes a slice of bf16 for f16.
fn from_bytes(raw: &RawTensor<'_>, kind: Kind) -> Result<Tensor, ModelError> {
    let size: Vec<i64> = raw.shape.iter().map(|&n| n as i64).collect();
    Ok(Tensor::f_from_data_size(raw.bytes, &size, kind)?)
}
