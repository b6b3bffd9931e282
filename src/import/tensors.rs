//! Writes `model.safetensors`: checks the tensors of a GGUF file, renames them and dequantises one at a time.

use super::ImportError;
use super::config::Architecture;
use super::folder::NewFolder;
use super::gguf::Gguf;
use crate::hf::{Dtype as WeightType, config::Family, dtype_name};
use half::slice::HalfFloatSliceExt;
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Tensor to write: its name in both formats and its shape (rows first).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Planned {
    gguf: String,
    hugging_face: String,
    pub shape: Vec<usize>,
    /// Number of heads, if llama.cpp interleaved the rows of each head.
    interleaved_heads: Option<usize>,
}

/// Lists the tensors of the model and checks that the file has exactly these.
///
/// # Errors
///
/// Names the first tensor that is missing, has another shape, or does not belong to the family.
pub(super) fn plan(gguf: &Gguf, model: &Architecture) -> Result<Vec<Planned>, ImportError> {
    // A layer has more than one tensor, so this limits the plan if the layer count in the header is wrong.
    if model.layers > gguf.tensor_names().count() {
        return Err(gguf.inconsistent(format!("its metadata gives {} layers, but it has fewer tensors", model.layers)));
    }
    let plan = expected(model);
    for tensor in &plan {
        match gguf.shape(&tensor.gguf) {
            Some(shape) if shape == tensor.shape => {}
            Some(shape) => {
                let why =
                    format!("tensor {} has the shape {shape:?}, its metadata gives {:?}", tensor.gguf, tensor.shape);
                return Err(gguf.inconsistent(why));
            }
            None => return Err(gguf.missing_tensor(&tensor.gguf)),
        }
    }
    // `rope_freqs.weight` is part of the configuration.
    let known: BTreeSet<&str> = plan.iter().map(|t| t.gguf.as_str()).chain(["rope_freqs.weight"]).collect();
    let unknown: BTreeSet<&str> = gguf.tensor_names().filter(|name| !known.contains(name)).collect();
    if let Some(first) = unknown.first() {
        let family = model.family.name();
        let found =
            if unknown.len() == 1 { (*first).into() } else { format!("{first} and {} more", unknown.len() - 1) };
        return Err(gguf.unsupported("the tensor", found, &format!("the tensors of a plain {family} model")));
    }
    Ok(plan)
}

/// Writes `model.safetensors`: the header first, then the tensors in the order of the plan. Returns its size in bytes.
pub(super) fn write(gguf: &Gguf, plan: &[Planned], dtype: WeightType, folder: &NewFolder) -> Result<u64, ImportError> {
    let mut file = folder.new_file("model.safetensors")?;
    let header = header(plan, dtype)
        .map_err(|e| gguf.inconsistent(format!("its tensors do not fit a safetensors file ({e})")))?;
    file.write(&header)?;
    for (n, tensor) in plan.iter().enumerate() {
        tracing::debug!(tensor = tensor.hugging_face, number = n + 1, of = plan.len(), "write tensor");
        let values = values(gguf, tensor)?;
        let mut bytes = Vec::new();
        for chunk in values.chunks(1 << 18) {
            if !encode(chunk, dtype, &mut bytes) {
                let name = &tensor.gguf;
                return Err(match chunk.iter().all(|v| v.is_finite()) {
                    true => gguf.unsupported(
                        format!("values in tensor {name} beyond"),
                        format!("the range of {}", dtype_name(dtype)),
                        "--dtype f32 for such models",
                    ),
                    false => gguf.damaged(format!("tensor {name} has values that are not finite")),
                });
            }
            file.write(&bytes)?;
        }
    }
    file.finish()
}

/// Number of planned tensors by their type in the GGUF file, most frequent first.
pub(super) fn stored_types(gguf: &Gguf, plan: &[Planned]) -> Vec<(String, usize)> {
    let mut counts = BTreeMap::new();
    for stored in plan.iter().filter_map(|t| gguf.stored_type(&t.gguf)) {
        *counts.entry(stored).or_insert(0) += 1;
    }
    let mut counts: Vec<_> = counts.into_iter().collect();
    counts.sort_by_key(|&(_, n)| std::cmp::Reverse(n));
    counts
}

fn expected(model: &Architecture) -> Vec<Planned> {
    let mut plan = Vec::new();
    let mut add = |gguf: String, hugging_face: String, shape: &[usize], interleaved_heads| {
        plan.push(Planned { gguf, hugging_face, shape: shape.to_vec(), interleaved_heads });
    };
    let (hidden, intermediate) = (model.hidden, model.intermediate);
    let (q, kv) = (model.heads * model.head_dim, model.kv_heads * model.head_dim);
    // llama.cpp interleaves q and k of the llama family only; the Qwen families keep Hugging Face's row order.
    let interleaved = |heads| (model.family == Family::Llama).then_some(heads);

    add("token_embd.weight".into(), "model.embed_tokens.weight".into(), &[model.vocab, hidden], None);
    for n in 0..model.layers {
        let mut layer = |gguf: &str, hugging_face: &str, shape: &[usize], interleaved_heads| {
            add(format!("blk.{n}.{gguf}"), format!("model.layers.{n}.{hugging_face}"), shape, interleaved_heads);
        };
        layer("attn_norm.weight", "input_layernorm.weight", &[hidden], None);
        layer("attn_q.weight", "self_attn.q_proj.weight", &[q, hidden], interleaved(model.heads));
        layer("attn_k.weight", "self_attn.k_proj.weight", &[kv, hidden], interleaved(model.kv_heads));
        layer("attn_v.weight", "self_attn.v_proj.weight", &[kv, hidden], None);
        layer("attn_output.weight", "self_attn.o_proj.weight", &[hidden, q], None);
        if model.attention_bias {
            layer("attn_q.bias", "self_attn.q_proj.bias", &[q], interleaved(model.heads));
            layer("attn_k.bias", "self_attn.k_proj.bias", &[kv], interleaved(model.kv_heads));
            layer("attn_v.bias", "self_attn.v_proj.bias", &[kv], None);
            if model.family != Family::Qwen2 {
                layer("attn_output.bias", "self_attn.o_proj.bias", &[hidden], None);
            }
        }
        if model.family == Family::Qwen3 {
            layer("attn_q_norm.weight", "self_attn.q_norm.weight", &[model.head_dim], None);
            layer("attn_k_norm.weight", "self_attn.k_norm.weight", &[model.head_dim], None);
        }
        layer("ffn_norm.weight", "post_attention_layernorm.weight", &[hidden], None);
        layer("ffn_gate.weight", "mlp.gate_proj.weight", &[intermediate, hidden], None);
        layer("ffn_up.weight", "mlp.up_proj.weight", &[intermediate, hidden], None);
        layer("ffn_down.weight", "mlp.down_proj.weight", &[hidden, intermediate], None);
    }
    add("output_norm.weight".into(), "model.norm.weight".into(), &[hidden], None);
    if !model.tied {
        add("output.weight".into(), "lm_head.weight".into(), &[model.vocab, hidden], None);
    }
    plan
}

/// Header of `model.safetensors`: its length, then JSON padded to 8 bytes.
fn header(plan: &[Planned], dtype: WeightType) -> Result<Vec<u8>, Box<dyn std::error::Error>> {
    let dtype = match dtype {
        WeightType::F32 => Dtype::F32,
        WeightType::Bf16 => Dtype::BF16,
        WeightType::F16 => Dtype::F16,
    };
    let mut start = 0;
    let infos = plan.iter().map(|tensor| {
        let end = start + tensor.shape.iter().product::<usize>() * dtype.bitsize() / 8;
        let info = TensorInfo { dtype, shape: tensor.shape.clone(), data_offsets: (start, end) };
        start = end;
        (tensor.hugging_face.clone(), info)
    });
    // transformers refuses a file whose metadata does not name the framework.
    let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
    let mut json = serde_json::to_vec(&Metadata::new(Some(metadata), infos.collect())?)?;
    json.resize(json.len().next_multiple_of(8), b' ');
    Ok([&(json.len() as u64).to_le_bytes()[..], &json].concat())
}

/// Values of a tensor, row-major, with the rows in Hugging Face order.
fn values(gguf: &Gguf, tensor: &Planned) -> Result<Vec<f32>, ImportError> {
    let values = gguf.dequantize(&tensor.gguf)?;
    Ok(match tensor.interleaved_heads {
        Some(heads) => deinterleave(&values, tensor.shape[0], heads),
        None => values,
    })
}

/// Returns the rows of q or k (`[rows, columns]`) in Hugging Face order.
///
/// Rotary embedding rotates pairs of rows of a head. Hugging Face pairs row `i` with row `i + head_dim / 2`.
/// llama.cpp pairs neighbours: its row `2 i + j` is row `j · head_dim / 2 + i` in Hugging Face order.
fn deinterleave(values: &[f32], rows: usize, heads: usize) -> Vec<f32> {
    let (head_dim, columns) = (rows / heads, values.len() / rows);
    let mut ordered = Vec::with_capacity(values.len());
    for head in values.chunks_exact(head_dim * columns) {
        for half in 0..2 {
            for pair in head.chunks_exact(2 * columns) {
                ordered.extend_from_slice(&pair[half * columns..][..columns]);
            }
        }
    }
    ordered
}

/// Encodes values as little-endian bytes. Returns `false` if a value is not finite in `dtype`.
fn encode(values: &[f32], dtype: WeightType, bytes: &mut Vec<u8>) -> bool {
    bytes.clear();
    match dtype {
        WeightType::F32 => {
            bytes.extend(values.iter().flat_map(|v| v.to_le_bytes()));
            values.iter().all(|v| v.is_finite())
        }
        WeightType::Bf16 => {
            let mut narrow = vec![half::bf16::ZERO; values.len()];
            narrow.convert_from_f32_slice(values);
            bytes.extend(narrow.iter().flat_map(|v| v.to_le_bytes()));
            narrow.iter().all(|v| v.is_finite())
        }
        WeightType::F16 => {
            let mut narrow = vec![half::f16::ZERO; values.len()];
            narrow.convert_from_f32_slice(values);
            bytes.extend(narrow.iter().flat_map(|v| v.to_le_bytes()));
            narrow.iter().all(|v| v.is_finite())
        }
    }
}
