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

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::tensor::TensorView;

    /// Issue 17, C4: an infinite head was reported as a diverging loss.
    #[test]
    fn values_that_are_not_finite_are_found_at_load_by_tensor() {
        let folder = tempfile::tempdir().unwrap();
        let load = |value: f32, kind: Kind| {
            let bytes: Vec<u8> = [1.0, value, -2.0].iter().flat_map(|v: &f32| v.to_le_bytes()).collect();
            let view = TensorView::new(RawDtype::F32, vec![3], &bytes).unwrap();
            let path = folder.path().join("model.safetensors");
            std::fs::write(&path, safetensors::serialize([("lm_head.weight", view)], None).unwrap()).unwrap();
            let files = TensorFiles::open(folder.path()).unwrap();
            weight(&files, "lm_head.weight", &[3], kind, Device::Cpu).map(drop).map_err(|error| error.to_string())
        };
        for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
            assert_eq!(load(6e4, kind), Ok(()));
            for value in [f32::NAN, f32::INFINITY] {
                let text = load(value, kind).unwrap_err();
                assert!(text.contains("`lm_head.weight`") && text.contains("NaN or an infinite"), "{text}");
            }
        }
        assert_eq!(load(7e4, Kind::BFloat16), Ok(()));
        let text = load(7e4, Kind::Half).unwrap_err();
        assert!(text.contains("`lm_head.weight`") && text.contains("target.dtype"), "{text}");
    }
}
