//! Writes small GGUF v3 files byte by byte, so that the tests do not depend on the crate that reads them.

use half::f16;
use std::collections::BTreeMap;

/// Metadata value.
pub enum Meta {
    U16(u16),
    U32(u32),
    F32(f32),
    Text(String),
    Texts(Vec<String>),
    U32s(Vec<u32>),
    I32s(Vec<i32>),
}

/// Type of a stored tensor.
#[derive(Clone)]
pub enum Stored {
    F32,
    Q4_1,
    Q8_0,
    /// Any other type: its number in ggml's `enum ggml_type` and the stored bytes.
    Raw(u32, Vec<u8>),
}

/// Tensor: shape (rows first), values and stored type.
pub type Tensor = (Vec<usize>, Vec<f32>, Stored);

/// Bytes of a GGUF file with the default alignment of 32 bytes.
pub fn bytes(meta: &BTreeMap<String, Meta>, tensors: &BTreeMap<String, Tensor>) -> Vec<u8> {
    let mut header = b"GGUF\x03\0\0\0".to_vec();
    header.extend((tensors.len() as u64).to_le_bytes());
    header.extend((meta.len() as u64).to_le_bytes());
    for (key, value) in meta {
        put_text(&mut header, key);
        put_value(&mut header, value);
    }
    let mut data = Vec::new();
    for (name, (shape, values, stored)) in tensors {
        let (number, bytes) = encode(values, stored);
        put_text(&mut header, name);
        header.extend((shape.len() as u32).to_le_bytes());
        header.extend(shape.iter().rev().flat_map(|&d| (d as u64).to_le_bytes()));
        header.extend(number.to_le_bytes());
        header.extend((data.len() as u64).to_le_bytes());
        data.extend(bytes);
        data.resize(data.len().next_multiple_of(32), 0);
    }
    header.resize(header.len().next_multiple_of(32), 0);
    [header, data].concat()
}

fn put_text(to: &mut Vec<u8>, text: &str) {
    to.extend((text.len() as u64).to_le_bytes());
    to.extend(text.as_bytes());
}

fn put_value(to: &mut Vec<u8>, value: &Meta) {
    const ARRAY: u32 = 9;
    let number = match value {
        Meta::U16(_) => 2,
        Meta::U32(_) | Meta::U32s(_) => 4,
        Meta::I32s(_) => 5,
        Meta::F32(_) => 6,
        Meta::Text(_) | Meta::Texts(_) => 8u32,
    };
    let array = match value {
        Meta::Texts(v) => Some(v.len()),
        Meta::U32s(v) => Some(v.len()),
        Meta::I32s(v) => Some(v.len()),
        _ => None,
    };
    if let Some(len) = array {
        to.extend(ARRAY.to_le_bytes());
        to.extend(number.to_le_bytes());
        to.extend((len as u64).to_le_bytes());
    } else {
        to.extend(number.to_le_bytes());
    }
    match value {
        Meta::U16(v) => to.extend(v.to_le_bytes()),
        Meta::U32(v) => to.extend(v.to_le_bytes()),
        Meta::F32(v) => to.extend(v.to_le_bytes()),
        Meta::Text(v) => put_text(to, v),
        Meta::Texts(v) => v.iter().for_each(|text| put_text(to, text)),
        Meta::U32s(v) => to.extend(v.iter().flat_map(|v| v.to_le_bytes())),
        Meta::I32s(v) => to.extend(v.iter().flat_map(|v| v.to_le_bytes())),
    }
}

/// Number of the type in ggml's `enum ggml_type`, and the bytes of the values in that type.
fn encode(values: &[f32], stored: &Stored) -> (u32, Vec<u8>) {
    match stored {
        Stored::F32 => (0, values.iter().flat_map(|v| v.to_le_bytes()).collect()),
        Stored::Q4_1 => (3, values.chunks(32).flat_map(q4_1).collect()),
        Stored::Q8_0 => (8, values.chunks(32).flat_map(q8_0).collect()),
        Stored::Raw(number, bytes) => (*number, bytes.clone()),
    }
}

/// Block of 32 values as ggml's `block_q4_1`: step, minimum, and two values in each byte.
fn q4_1(block: &[f32]) -> Vec<u8> {
    let min = block.iter().copied().fold(f32::INFINITY, f32::min);
    let max = block.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let step = (max - min) / 15.0;
    let level = |v: f32| ((v - min) / step).round() as u8;
    let mut bytes = [f16::from_f32(step).to_le_bytes(), f16::from_f32(min).to_le_bytes()].concat();
    bytes.extend((0..16).map(|i| level(block[i]) | level(block[i + 16]) << 4));
    bytes
}

/// Block of 32 values as ggml's `block_q8_0`: step, then one signed byte for each value.
fn q8_0(block: &[f32]) -> Vec<u8> {
    let step = block.iter().fold(0.0_f32, |max, v| max.max(v.abs())) / 127.0;
    let mut bytes = f16::from_f32(step).to_le_bytes().to_vec();
    bytes.extend(block.iter().map(|v| (v / step).round() as i8 as u8));
    bytes
}
