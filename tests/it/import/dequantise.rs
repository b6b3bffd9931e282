//! Dequantised values of every supported GGUF type, compared bit by bit with llama.cpp's reference.

use super::gguf_file::Stored;
use super::tiny::{HIDDEN, INTERMEDIATE, Tiny, weights};
use super::*;
use draftmill::common::hash::sha256;

/// Block type of ggml: name, number in `enum ggml_type`, values and bytes of a block, offsets of its f16 fields, and the
/// first 16 digits of the SHA-256 of the dequantised f32 values in little-endian bytes.
type BlockType = (&'static str, u32, usize, usize, &'static [usize], &'static str);

/// Supported block types. The sums come from `gguf.quants.dequantize` of llama.cpp's Python package gguf 0.19.0, applied
/// to `blocks`. candle-core 0.11.1 gives the same sums.
const TYPES: [BlockType; 10] = [
    ("Q4_0", 2, 32, 18, &[0], "2314e57f7904e3bf"),
    ("Q4_1", 3, 32, 20, &[0, 2], "695bed71846e8989"),
    ("Q5_0", 6, 32, 22, &[0], "334c0e4434fb8c31"),
    ("Q5_1", 7, 32, 24, &[0, 2], "8c295d84079d8fa1"),
    ("Q8_0", 8, 32, 34, &[0], "4ce0809c9b4ca8f8"),
    ("Q2_K", 10, 256, 84, &[80, 82], "224f3dd0027505f0"),
    ("Q3_K", 11, 256, 110, &[108], "fc114664a5b00302"),
    ("Q4_K", 12, 256, 144, &[0, 2], "72ad2f729f3b677a"),
    ("Q5_K", 13, 256, 176, &[0, 2], "84f537fbc1095593"),
    ("Q6_K", 14, 256, 210, &[208], "d7ad7835083f9679"),
];

/// Pseudo-random blocks (Knuth's MMIX generator). Each f16 field is finite: its magnitude is in `[2^-7, 2^-3)`.
fn blocks(count: usize, size: usize, f16_fields: &[usize]) -> Vec<u8> {
    let mut state = size as u64;
    let mut bytes: Vec<u8> = std::iter::repeat_with(|| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    })
    .take(count * size)
    .collect();
    for block in bytes.chunks_mut(size) {
        for &at in f16_fields {
            block[at + 1] = block[at + 1] & 0x8f | 0x20;
        }
    }
    bytes
}

/// Imports a model whose tensor `blk.0.ffn_up.weight` is stored as `stored`, and returns the values of that tensor.
fn imported(name: &str, stored: Stored) -> Vec<f32> {
    let mut tiny = Tiny::new("llama", "smollm");
    tiny.tensors.get_mut("blk.0.ffn_up.weight").unwrap().2 = stored;
    let (_folder, out, report) = tiny.import(WeightType::F32);
    let report = report.unwrap();
    assert!(report.stored_types.contains(&(name.into(), 1)), "{:?}", report.stored_types);
    weights(&out).remove("model.layers.0.mlp.up_proj.weight").unwrap().1
}

#[test]
fn block_types_have_the_values_of_llama_cpp() {
    for (name, number, elements, size, f16_fields, expected) in TYPES {
        let bytes = blocks(INTERMEDIATE * HIDDEN / elements, size, f16_fields);
        let values = imported(name, Stored::Raw(number, bytes));
        let sum = sha256(values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>());
        assert_eq!(&sum[..16], expected, "{name}");
    }
}

#[test]
fn half_types_are_widened_exactly() {
    let values: Vec<f32> = (0..INTERMEDIATE * HIDDEN).map(|i| (i as f32 - 1000.0) / 128.0).collect();
    let f16 = values.iter().flat_map(|&v| half::f16::from_f32(v).to_le_bytes()).collect();
    assert_eq!(imported("F16", Stored::Raw(1, f16)), values);
    let values: Vec<f32> = values.iter().map(|&v| half::bf16::from_f32(v).to_f32()).collect();
    let bf16 = values.iter().flat_map(|&v| half::bf16::from_f32(v).to_le_bytes()).collect();
    assert_eq!(imported("BF16", Stored::Raw(30, bf16)), values);
}
