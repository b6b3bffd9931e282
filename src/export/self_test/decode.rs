//! The two drafters side by side: the one in memory, rounded to the export's number type, and the one on disk.

use super::{Proof, ProofError};
use crate::{
    config::Device,
    hf::{
        Dtype,
        draft::DraftConfig,
        layout::{DraftFolder, EMBEDDING, HEAD},
    },
    inference::{Drafting, Response, loaded_target::Bench, speculative},
    model::{
        ModelError,
        drafter::{Drafter, Shared},
        libtorch::{open_device, use_all_cores},
        load::{kind_of, weight},
        params::{ParamSet, folder_params},
        target::Target,
    },
    run_dir::checkpoint::NamedTensor,
};
use draftmill_actors::runtime::random::stream_seed;
use std::path::Path;
use tch::{Kind, Tensor};

/// What is asked where the target has a chat template.
const QUESTIONS: [&str; 3] = [
    "What is the capital of France?",
    "Write a Python function that adds two numbers.",
    "Tell me in two sentences why the sea is salty.",
];
/// Tokens of each answer: what bounds the cost.
const TOKENS: usize = 16;
/// Token ids of a prompt where there is no template.
const IDS: usize = 12;

/// Decodes the prompts with both and compares logits of their first blocks and acceptance over all.
pub fn prove(
    dir: &Path,
    draft: &DraftConfig,
    tensors: &[NamedTensor],
    target: &Path,
    device: Device,
) -> Result<Proof, ProofError> {
    use_all_cores();
    let unserved = |error: ModelError| ProofError::Unserved(error.to_string());
    let (bench, written, kept) = load(dir, draft, tensors, target, device).map_err(unserved)?;
    let prompts = prompts(&bench);
    let (mut proof, mut taught) =
        (Proof { prompts: prompts.len(), steps: 0, acceptance: 0.0, largest_difference: 0.0 }, Counts::default());
    let mut served = Counts::default();
    let (most_logit, most_acceptance) = match bench.target.kind() {
        Kind::Float => (1e-4, 0.01),
        // Kernels of narrow types add up in an order of their own.
        _ => (5e-2, 0.25),
    };
    for prompt in &prompts {
        let compared = compare(&bench.target, [&kept, &written], prompt).map_err(unserved)?;
        let difference = compared.ok_or_else(|| {
            let sizes = [&kept, &written].map(|drafter| drafter.config().block_size);
            ProofError::Differs(format!("its blocks have {} slots, and {} in training", sizes[1], sizes[0]))
        })?;
        proof.largest_difference = proof.largest_difference.max(difference);
        if difference.is_nan() {
            return Err(ProofError::Diverged);
        }
        if difference > most_logit {
            return Err(ProofError::Differs(format!(
                "the logits of the first block differ by {difference:.1e} of the largest one, and rounding explains {most_logit:.0e}"
            )));
        }
        let Some(settings) = bench.settings(prompt.len(), TOKENS, 0.0, 0) else { continue };
        let decode = |drafter: &Drafter| speculative(&bench.target, drafter, std::slice::from_ref(prompt), &settings);
        served.add(&decode(&written).map_err(unserved)?);
        taught.add(&decode(&kept).map_err(unserved)?);
    }
    (proof.steps, proof.acceptance) = (served.steps, served.acceptance());
    if (served.acceptance() - taught.acceptance()).abs() > most_acceptance {
        let (here, there) = (served.acceptance(), taught.acceptance());
        return Err(ProofError::Differs(format!(
            "{here:.2} tokens per step are accepted of it, and {there:.2} of the drafter in memory"
        )));
    }
    Ok(proof)
}

#[derive(Default)]
struct Counts {
    steps: usize,
    produced: usize,
}

impl Counts {
    fn add(&mut self, responses: &[Response]) {
        let steps = || responses.iter().flat_map(|response| &response.steps);
        self.steps += steps().count();
        self.produced += steps().map(|step| step.produced).sum::<usize>();
    }

    fn acceptance(&self) -> f64 {
        if self.steps > 0 { self.produced as f64 / self.steps as f64 } else { 0.0 }
    }
}

/// The target, the drafter on disk, and the one in memory.
fn load(
    dir: &Path,
    draft: &DraftConfig,
    tensors: &[NamedTensor],
    target: &Path,
    device: Device,
) -> Result<(Bench, Drafter, Drafter), ModelError> {
    let device = open_device(device)?;
    let kind = if device.is_cuda() { Kind::BFloat16 } else { Kind::Float };
    let bench = Bench::load(target, kind, device)?;
    let folder = DraftFolder::open(dir, Some(bench.target.config().num_hidden_layers))?;
    let own = match folder.files.names().any(|name| name == EMBEDDING) {
        false => None,
        true => {
            let shape = [folder.config.vocab_size, folder.config.hidden_size];
            let read = |name| weight(&folder.files, name, &shape, kind, device);
            Some(Shared { embedding: read(EMBEDDING)?, head: read(HEAD)? })
        }
    };
    let rounded = own.is_some().then(|| round_shared(&bench.target, draft.dtype)).transpose()?;
    let weights = folder_params(&folder)?;
    let written = bench.drafter(folder.config, weights, own)?;
    let shapes = draft.tensor_shapes();
    let pairs = tensors.iter().filter(|tensor| shapes.contains_key(&tensor.name)).map(|tensor| {
        let sizes: Vec<i64> = tensor.shape.iter().map(|&n| n as i64).collect();
        let exact = Tensor::f_from_slice(&tensor.data)?.f_reshape(sizes)?;
        Ok((tensor.name.clone(), exact.f_to_kind(kind_of(draft.dtype))?.f_to_kind(Kind::Float)?))
    });
    let pairs = pairs.collect::<Result<Vec<_>, ModelError>>()?;
    let kept = bench.drafter(draft.clone(), ParamSet::new(pairs), rounded)?;
    Ok((bench, written, kept))
}

/// The target's embedding and head as a file of this number type would hold them.
fn round_shared(target: &Target, dtype: Dtype) -> Result<Shared, ModelError> {
    let Shared { embedding, head } = target.shared()?;
    let round =
        |x: Tensor| -> Result<Tensor, ModelError> { Ok(x.f_to_kind(kind_of(dtype))?.f_to_kind(target.kind())?) };
    Ok(Shared { embedding: round(embedding)?, head: round(head)? })
}

/// Largest difference of the logits of the first block behind a prompt, over the largest logit; `None` where the two have
/// blocks of different sizes.
fn compare(target: &Target, drafters: [&Drafter; 2], prompt: &[u32]) -> Result<Option<f64>, ModelError> {
    let _no_grad = tch::no_grad_guard();
    let ids: Vec<i32> = prompt.iter().map(|&id| id as i32).collect();
    let mut logits = Vec::new();
    for drafter in drafters {
        let seen = target.extend(&mut target.cache(), &ids, drafter.taps())?;
        // Any token will do for an anchor.
        let mut memory = drafter.begin()?;
        logits.push(drafter.propose(&mut memory, &seen.taps, prompt[0])?.f_to_kind(Kind::Double)?);
    }
    if logits[0].size() != logits[1].size() {
        return Ok(None);
    }
    let most = |x: &Tensor| -> Result<f64, ModelError> { Ok(x.f_abs()?.f_max()?.f_double_value(&[])?) };
    Ok(Some(most(&logits[0].f_sub(&logits[1])?)? / most(&logits[0])?.max(f64::MIN_POSITIVE)))
}

/// The questions in the target's template, or fixed token ids.
fn prompts(bench: &Bench) -> Vec<Vec<u32>> {
    let vocab = bench.target.config().vocab_size as u64;
    let ids = |stream: u64| {
        let word = |place: u64| {
            let seed = stream_seed(0, "self-check", &[stream, place]);
            (u64::from_le_bytes([seed[0], seed[1], seed[2], seed[3], seed[4], seed[5], seed[6], seed[7]]) % vocab)
                as u32
        };
        (0..IDS as u64).map(word).collect::<Vec<u32>>()
    };
    let asked = |(stream, question): (u64, &&str)| bench.question(question).unwrap_or_else(|| ids(stream));
    (0..).zip(&QUESTIONS).map(asked).filter(|prompt: &Vec<u32>| !prompt.is_empty()).collect()
}
