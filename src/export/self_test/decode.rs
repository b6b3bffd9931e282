//! Self-test by decoding: compares the export with the drafter in memory, rounded to the export's dtype.

use super::{SelfTestError, SelfTestReport};
use crate::{
    config::Device,
    hf::{
        Dtype,
        draft::DraftConfig,
        layout::{DraftFolder, EMBEDDING, HEAD},
    },
    inference::{Proposer, Response, loaded_target::LoadedTarget, speculative},
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

/// Prompts for targets with a chat template.
const QUESTIONS: [&str; 3] = [
    "What is the capital of France?",
    "Write a Python function that adds two numbers.",
    "Tell me in two sentences why the sea is salty.",
];
/// Tokens of each answer, which bound the cost.
const TOKENS: usize = 16;
/// Token ids of a prompt for targets without a template.
const IDS: usize = 12;

/// Decodes the prompts with both drafters and compares the logits of their first blocks and the acceptance.
///
/// # Errors
/// A difference beyond rounding, NaN logits, or a self-test that cannot run.
pub fn run_self_test(
    dir: &Path,
    draft: &DraftConfig,
    tensors: &[NamedTensor],
    target: &Path,
    device: Device,
) -> Result<SelfTestReport, SelfTestError> {
    use_all_cores();
    let not_run = |error: ModelError| SelfTestError::NotRun(error.to_string());
    let (bench, exported, trained) = load(dir, draft, tensors, target, device).map_err(not_run)?;
    let prompts = prompts(&bench);
    let mut report = SelfTestReport { prompts: prompts.len(), steps: 0, acceptance: 0.0, largest_difference: 0.0 };
    let (mut trained_counts, mut exported_counts) = (Counts::default(), Counts::default());
    let (logit_limit, acceptance_limit) = match bench.target.kind() {
        Kind::Float => (1e-4, 0.01),
        // Kernels of narrow dtypes sum in another order.
        _ => (5e-2, 0.25),
    };
    for prompt in &prompts {
        let compared = compare(&bench.target, [&trained, &exported], prompt).map_err(not_run)?;
        let difference = compared.ok_or_else(|| {
            let sizes = [&trained, &exported].map(|drafter| drafter.config().block_size);
            SelfTestError::Differs(format!("its blocks have {} slots, but {} in training", sizes[1], sizes[0]))
        })?;
        report.largest_difference = report.largest_difference.max(difference);
        if difference.is_nan() {
            return Err(SelfTestError::Diverged);
        }
        if difference > logit_limit {
            return Err(SelfTestError::Differs(format!(
                "the logits of the first block differ by {difference:.1e} of the largest one, limit {logit_limit:.0e}"
            )));
        }
        let Some(settings) = bench.settings(prompt.len(), TOKENS, 0.0, 0) else { continue };
        let decode = |drafter: &Drafter| speculative(&bench.target, drafter, std::slice::from_ref(prompt), &settings);
        exported_counts.add(&decode(&exported).map_err(not_run)?);
        trained_counts.add(&decode(&trained).map_err(not_run)?);
    }
    (report.steps, report.acceptance) = (exported_counts.steps, exported_counts.acceptance());
    let (exported, trained) = (exported_counts.acceptance(), trained_counts.acceptance());
    if (exported - trained).abs() > acceptance_limit {
        return Err(SelfTestError::Differs(format!(
            "its acceptance is {exported:.2} tokens per step, and {trained:.2} of the drafter in memory"
        )));
    }
    Ok(report)
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

/// Loads the target, the drafter on disk and the drafter in memory.
fn load(
    dir: &Path,
    draft: &DraftConfig,
    tensors: &[NamedTensor],
    target: &Path,
    device: Device,
) -> Result<(LoadedTarget, Drafter, Drafter), ModelError> {
    let device = open_device(device)?;
    let kind = if device.is_cuda() { Kind::BFloat16 } else { Kind::Float };
    let bench = LoadedTarget::load(target, kind, device)?;
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
    let exported = bench.drafter(folder.config, weights, own)?;
    let shapes = draft.tensor_shapes();
    let pairs = tensors.iter().filter(|tensor| shapes.contains_key(&tensor.name)).map(|tensor| {
        let sizes: Vec<i64> = tensor.shape.iter().map(|&n| n as i64).collect();
        let exact = Tensor::f_from_slice(&tensor.data)?.f_reshape(sizes)?;
        Ok((tensor.name.clone(), exact.f_to_kind(kind_of(draft.dtype))?.f_to_kind(Kind::Float)?))
    });
    let pairs = pairs.collect::<Result<Vec<_>, ModelError>>()?;
    let trained = bench.drafter(draft.clone(), ParamSet::new(pairs), rounded)?;
    Ok((bench, exported, trained))
}

/// Target's embedding and head, rounded to `dtype`.
fn round_shared(target: &Target, dtype: Dtype) -> Result<Shared, ModelError> {
    let Shared { embedding, head } = target.shared()?;
    let round =
        |x: Tensor| -> Result<Tensor, ModelError> { Ok(x.f_to_kind(kind_of(dtype))?.f_to_kind(target.kind())?) };
    Ok(Shared { embedding: round(embedding)?, head: round(head)? })
}

/// Largest logit difference in the first block after a prompt, divided by the largest logit; `None` if the block sizes
/// differ.
fn compare(target: &Target, drafters: [&Drafter; 2], prompt: &[u32]) -> Result<Option<f64>, ModelError> {
    let _no_grad = tch::no_grad_guard();
    let ids: Vec<i32> = prompt.iter().map(|&id| id as i32).collect();
    let mut logits = Vec::new();
    for drafter in drafters {
        let seen = target.extend(&mut target.cache(), &ids, drafter.taps())?;
        // Any token can be the anchor.
        let mut memory = drafter.begin()?;
        // Both drafters go from the same tokens to the same slots, whatever they would draw.
        let mut next = prompt.iter().copied().cycle();
        let mut draw = |logits: &Tensor| Ok(next.by_ref().take(logits.size()[0] as usize).collect());
        let proposal = drafter.propose(&mut memory, &seen.taps, prompt[0], usize::MAX, &mut draw)?;
        // A selector's logits are minus infinity outside its candidates.
        logits.push(proposal.logits.f_to_kind(Kind::Double)?.f_nan_to_num(0.0, 0.0, 0.0)?);
    }
    if logits[0].size() != logits[1].size() {
        return Ok(None);
    }
    let largest = |x: &Tensor| -> Result<f64, ModelError> { Ok(x.f_abs()?.f_max()?.f_double_value(&[])?) };
    Ok(Some(largest(&logits[0].f_sub(&logits[1])?)? / largest(&logits[0])?.max(f64::MIN_POSITIVE)))
}

/// Prompts in the target's chat template, or fixed token ids.
fn prompts(bench: &LoadedTarget) -> Vec<Vec<u32>> {
    let vocab = bench.target.config().vocab_size as u64;
    let ids = |stream: u64| {
        let word = |index: u64| {
            let seed = stream_seed(0, "self-check", &[stream, index]);
            (u64::from_le_bytes([seed[0], seed[1], seed[2], seed[3], seed[4], seed[5], seed[6], seed[7]]) % vocab)
                as u32
        };
        (0..IDS as u64).map(word).collect::<Vec<u32>>()
    };
    let prompt = |(stream, question): (u64, &&str)| bench.question(question).unwrap_or_else(|| ids(stream));
    (0..).zip(&QUESTIONS).map(prompt).filter(|prompt: &Vec<u32>| !prompt.is_empty()).collect()
}
