//! One drafted block with its inputs, as a file for a comparison with other implementations.

use draftmill::{
    hf::layout::DraftFolder,
    inference::{Proposer, loaded_target::LoadedTarget, most_likely},
    model::{ModelError, params::folder_params},
    run_dir::checkpoint::{self, NamedTensor},
};
use std::path::Path;
use tch::{Device, Kind, Tensor};

/// Drafts, in f32 on the CPU, the block behind `prompt` and the target's next token. Writes `ids`, `anchor`, the taps
/// `context [tokens, taps * hidden]`, the drafted `tokens`, the `logits [tokens, vocab]` that they were drawn from, and the
/// `confidence` of each, if the head has one. Returns the number of drafted tokens.
///
/// # Errors
/// A model that cannot be loaded, an empty prompt, or a file that cannot be written.
pub fn dump_block(target: &Path, draft: &Path, prompt: &[u32], out: &Path) -> Result<usize, ModelError> {
    let _no_grad = tch::no_grad_guard();
    let loaded = LoadedTarget::load(target, Kind::Float, Device::Cpu)?;
    let folder = DraftFolder::open(draft, Some(loaded.target.config().num_hidden_layers))?;
    folder.config.check_target(loaded.target.config()).map_err(ModelError::Input)?;
    let weights = folder_params(&folder)?;
    let drafter = loaded.drafter(folder.config, weights, None)?;
    if prompt.is_empty() {
        return Err(ModelError::Input("a block needs at least one token before it".into()));
    }
    let ids: Vec<i32> = prompt.iter().map(|&id| id as i32).collect();
    let seen = loaded.target.extend(&mut loaded.target.cache(), &ids, drafter.taps())?;
    let last = loaded.target.logits(&seen.normed.f_narrow(0, ids.len() as i64 - 1, 1)?)?;
    let anchor = last.f_argmax(-1, false)?.f_int64_value(&[0])?;
    let mut draw = |logits: &Tensor| most_likely(logits);
    let proposal = drafter.propose(&mut drafter.begin()?, &seen.taps, anchor as u32, usize::MAX, &mut draw)?;
    // Ids are exact in f32 up to 2^24, far above any vocabulary.
    let list =
        |name: &str, values: Vec<f32>| NamedTensor { name: name.into(), shape: vec![values.len()], data: values };
    let table = |name: &str, x: &Tensor| -> Result<NamedTensor, ModelError> {
        let shape = x.size().iter().map(|&n| n as usize).collect();
        Ok(NamedTensor { name: name.into(), shape, data: Vec::try_from(x.f_contiguous()?.f_view([-1])?)? })
    };
    let as_f32 = |ids: &[u32]| ids.iter().map(|&id| id as f32).collect();
    let mut tensors = vec![
        list("ids", as_f32(prompt)),
        list("tokens", as_f32(&proposal.tokens)),
        list("anchor", vec![anchor as f32]),
        table("context", &seen.taps)?,
        table("logits", &proposal.logits)?,
    ];
    if let Some(confidence) = proposal.confidence {
        tensors.push(list("confidence", confidence.into_iter().map(|value| value as f32).collect()));
    }
    let written = checkpoint::write_tensors(out, &tensors, f32::to_le_bytes, safetensors::Dtype::F32);
    written.map_err(|error| ModelError::Input(format!("{} cannot be written: {error}", out.display())))?;
    Ok(proposal.tokens.len())
}
