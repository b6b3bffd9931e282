//! Names, checks and writes the weights: one tensor at a time from the GGUF file into `model.safetensors`.

use super::ImportError;
use super::config::Architecture;
use super::folder::NewFolder;
use super::gguf::{Gguf, first_line};
use crate::hf::{Dtype as WeightType, config::Family, dtype_name};
use candle_core::{DType, Tensor};
use half::slice::HalfFloatSliceExt;
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// One tensor to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Planned {
    gguf: String,
    hugging_face: String,
    pub shape: Vec<usize>,
    /// The rows of this many heads stand in llama.cpp's order.
    interleaved: Option<usize>,
}

/// Every tensor of the model in Hugging Face's names and shapes. The file must have exactly these: one that is missing,
/// left over or of another shape is an error that names it.
pub(super) fn plan(gguf: &Gguf, model: &Architecture) -> Result<Vec<Planned>, ImportError> {
    // A layer has more than one tensor, so this bounds the plan of a file whose header lies about its layers.
    if model.layers > gguf.tensor_names().count() {
        return Err(gguf.inconsistent(format!("it announces {} layers and has fewer tensors", model.layers)));
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
            None => return Err(gguf.inconsistent(format!("the tensor {} is missing", tensor.gguf))),
        }
    }
    // The rotary divisors have become part of the configuration.
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

/// Writes `model.safetensors`: the header first, then each tensor as it is dequantised. Returns its size in bytes.
pub(super) fn write(
    gguf: &mut Gguf,
    plan: &[Planned],
    dtype: WeightType,
    folder: &NewFolder,
) -> Result<u64, ImportError> {
    let mut file = folder.new_file("model.safetensors")?;
    let header = header(plan, dtype)
        .map_err(|e| gguf.inconsistent(format!("its tensors do not fit a safetensors file ({e})")))?;
    file.write(&header)?;
    for (n, tensor) in plan.iter().enumerate() {
        tracing::debug!(tensor = tensor.hugging_face, "{} of {}", n + 1, plan.len());
        let values = values(gguf, tensor)?;
        let mut bytes = Vec::new();
        for part in values.chunks(1 << 18) {
            if !encode(part, dtype, &mut bytes) {
                let name = &tensor.gguf;
                return Err(match part.iter().all(|v| v.is_finite()) {
                    true => gguf.unsupported(
                        format!("values in tensor {name} beyond"),
                        format!("the range of {}", dtype_name(dtype)),
                        "--dtype f32 for such models",
                    ),
                    false => gguf.damaged(format!("tensor {name} holds values that are not finite")),
                });
            }
            file.write(&bytes)?;
        }
    }
    file.finish()
}

/// How many tensors the file stores in each type, most frequent first.
pub(super) fn stored_as(gguf: &Gguf, plan: &[Planned]) -> Vec<(String, usize)> {
    let mut kinds = BTreeMap::new();
    for kind in plan.iter().filter_map(|t| gguf.stored_as(&t.gguf)) {
        *kinds.entry(kind).or_insert(0) += 1;
    }
    let mut kinds: Vec<_> = kinds.into_iter().collect();
    kinds.sort_by_key(|&(_, n)| std::cmp::Reverse(n));
    kinds
}

fn expected(model: &Architecture) -> Vec<Planned> {
    let mut plan = Vec::new();
    let mut add = |gguf: String, hugging_face: String, shape: &[usize], interleaved| {
        plan.push(Planned { gguf, hugging_face, shape: shape.to_vec(), interleaved });
    };
    let (hidden, wide) = (model.hidden, model.intermediate);
    let (q, kv) = (model.heads * model.head_dim, model.kv_heads * model.head_dim);
    // llama.cpp rotates neighbours in the llama family; the Qwen families keep Hugging Face's order.
    let order = |heads| (model.family == Family::Llama).then_some(heads);

    add("token_embd.weight".into(), "model.embed_tokens.weight".into(), &[model.vocab, hidden], None);
    for n in 0..model.layers {
        let mut layer = |gguf: &str, hugging_face: &str, shape: &[usize], interleaved| {
            add(format!("blk.{n}.{gguf}"), format!("model.layers.{n}.{hugging_face}"), shape, interleaved);
        };
        layer("attn_norm.weight", "input_layernorm.weight", &[hidden], None);
        layer("attn_q.weight", "self_attn.q_proj.weight", &[q, hidden], order(model.heads));
        layer("attn_k.weight", "self_attn.k_proj.weight", &[kv, hidden], order(model.kv_heads));
        layer("attn_v.weight", "self_attn.v_proj.weight", &[kv, hidden], None);
        layer("attn_output.weight", "self_attn.o_proj.weight", &[hidden, q], None);
        if model.attention_bias {
            layer("attn_q.bias", "self_attn.q_proj.bias", &[q], order(model.heads));
            layer("attn_k.bias", "self_attn.k_proj.bias", &[kv], order(model.kv_heads));
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
        layer("ffn_gate.weight", "mlp.gate_proj.weight", &[wide, hidden], None);
        layer("ffn_up.weight", "mlp.up_proj.weight", &[wide, hidden], None);
        layer("ffn_down.weight", "mlp.down_proj.weight", &[hidden, wide], None);
    }
    add("output_norm.weight".into(), "model.norm.weight".into(), &[hidden], None);
    if !model.tied {
        add("output.weight".into(), "lm_head.weight".into(), &[model.vocab, hidden], None);
    }
    plan
}

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
    // transformers refuses a file that does not say which framework its layout is for.
    let origin = HashMap::from([("format".to_string(), "pt".to_string())]);
    let mut json = serde_json::to_vec(&Metadata::new(Some(origin), infos.collect())?)?;
    json.resize(json.len().next_multiple_of(8), b' ');
    Ok([&(json.len() as u64).to_le_bytes()[..], &json].concat())
}

/// A tensor's values in Hugging Face's order.
fn values(gguf: &mut Gguf, tensor: &Planned) -> Result<Vec<f32>, ImportError> {
    let read = gguf.dequantize(&tensor.gguf)?;
    let ordered = match tensor.interleaved {
        Some(heads) => halves_apart(&read, heads),
        None => Ok(read),
    };
    ordered
        .and_then(|t| t.to_dtype(DType::F32)?.flatten_all()?.to_vec1())
        .map_err(|e| gguf.damaged(format!("tensor {}: {}", tensor.gguf, first_line(&e))))
}

/// Undoes llama.cpp's row order of q and k.
///
/// Rotary positions turn pairs of rows of a head. Hugging Face pairs row i with row i + width / 2; llama.cpp pairs
/// neighbours, so its converter interleaved the two halves: row 2 i + j there is row j · width / 2 + i here.
fn halves_apart(rows: &Tensor, heads: usize) -> candle_core::Result<Tensor> {
    let shape = rows.dims();
    let width = shape[0] / heads;
    let rest: usize = shape[1..].iter().product();
    rows.reshape((heads, width / 2, 2, rest))?.transpose(1, 2)?.contiguous()?.reshape(shape)
}

/// Encodes values in little-endian bytes; `false` when one is not finite in `dtype`.
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
