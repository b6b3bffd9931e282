//! Loads target and drafter, and decodes every prompt with the drafter and without.

use super::{
    EvalOptions,
    figures::{Figures, Record, Report, Step},
    prompts::Prompt,
};
use crate::{
    data::encode::Chat,
    exit::{Exit, Failure},
    export::{self, Severity},
    hf::{config::TargetConfig, draft::DraftConfig, read_json, tensors::TensorFiles},
    model::{
        decode::{Drafting, Session, Settings, slot_accuracy},
        draft::{DraftOptions, Drafter, Shared},
        libtorch::parse_device,
        params::load_params,
        target::{Depth, Target},
    },
};
use serde_json::Value;
use std::path::Path;
use tch::Kind;
use tokio::time::Instant;

/// Measures all prompts, one response at a time, in f32. `tell` hears of each response as it is done.
pub fn measure(options: &EvalOptions, prompts: Vec<Prompt>, tell: &mut dyn FnMut(&Record)) -> Result<Report, Failure> {
    let bench = Bench::load(options)?;
    let (mut records, mut skipped, mut stream) = (Vec::new(), 0, 0);
    for prompt in prompts {
        let mut next = Some(prompt);
        while let Some(prompt) = next.take() {
            let line = prompt.line;
            let bad =
                |why: String| Failure::new(Exit::Data, format!("the prompt of line {line} cannot be used: {why}"));
            let ids = bench.chat.prompt(&prompt.conversation).map_err(bad)?;
            let Some(settings) = bench.settings(options, ids.len()) else {
                skipped += 1 + prompt.then.len();
                continue;
            };
            let (record, answer) = bench.respond(&ids, &settings, stream, prompt.category.clone())?;
            stream += 1;
            tell(&record);
            records.push(record);
            next = prompt.answered(bench.chat.answer(&answer).map_err(bad)?);
        }
    }
    if records.is_empty() {
        let most = bench.target.config().max_position_embeddings;
        return Err(Failure::new(
            Exit::Data,
            format!("every prompt is longer than the {most} positions of the target; give shorter ones"),
        ));
    }
    let block_size = bench.drafter.config().block_size;
    Ok(Report {
        target: options.target.display().to_string(),
        draft: options.draft.display().to_string(),
        block_size,
        max_new_tokens: options.max_new_tokens,
        temperature: options.temperature,
        seed: options.seed,
        skipped_too_long: skipped,
        all: Figures::of(&records.iter().collect::<Vec<_>>(), block_size),
        categories: Figures::by_category(&records, block_size),
    })
}

/// What a measurement needs, loaded.
struct Bench {
    chat: Chat,
    target: Target,
    drafter: Drafter,
    stop: Vec<u32>,
}

impl Bench {
    fn load(options: &EvalOptions) -> Result<Bench, Failure> {
        let device = parse_device(&options.device).map_err(Failure::of(Exit::Usage))?;
        let findings = export::check(&options.draft);
        if let Some(finding) = findings.into_iter().find(|finding| finding.severity == Severity::Error) {
            return Err(Failure::new(Exit::Model, format!("{}: {finding}", options.draft.display())));
        }
        let model = |error: &dyn std::fmt::Display| Failure::new(Exit::Model, error);
        let target = TargetConfig::load(&options.target).map_err(|e| model(&e))?;
        let draft = DraftConfig::load(&options.draft).map_err(|e| model(&e))?;
        fits(&target, &draft).map_err(|why| {
            let (draft, target) = (options.draft.display(), options.target.display());
            Failure::new(Exit::Model, format!("the drafter of {draft} was not made for the target of {target}: {why}"))
        })?;
        let chat = Chat::load(&options.target).map_err(|e| model(&e))?;
        let stop = stop_tokens(&options.target, &target).map_err(|e| model(&e))?;
        let files = TensorFiles::open(&options.target).map_err(|e| model(&e))?;
        let weights = TensorFiles::open(&options.draft).map_err(|e| model(&e))?;
        let shared = Shared::load(&target, &files, Kind::Float, device).map_err(|e| model(&e))?;
        let weights = load_params(&draft, &weights).map_err(|e| model(&e))?;
        let mut drafter = Drafter::new(draft, shared, DraftOptions::new(device)).map_err(|e| model(&e))?;
        drafter.load_weights(weights).map_err(|e| model(&e))?;
        let target = Target::load(target, &files, Depth::Whole, Kind::Float, device).map_err(|e| model(&e))?;
        Ok(Bench { chat, target, drafter, stop })
    }

    /// Settings of a response behind `prompt` tokens; `None` when not a single one fits.
    fn settings(&self, options: &EvalOptions, prompt: usize) -> Option<Settings> {
        let room = self.target.config().max_position_embeddings.saturating_sub(prompt);
        let max_new_tokens = options.max_new_tokens.min(room);
        let (temperature, seed) = (options.temperature, options.seed);
        (max_new_tokens > 0 && prompt > 0).then(|| Settings {
            max_new_tokens,
            temperature,
            stop: self.stop.clone(),
            seed,
        })
    }

    /// Decodes with the drafter and without; gives what both brought, and the answer of the target alone.
    fn respond(
        &self,
        prompt: &[u32],
        settings: &Settings,
        stream: u64,
        category: Option<String>,
    ) -> Result<(Record, Vec<u32>), Failure> {
        let failed = Failure::of(Exit::Internal);
        let run = || -> Result<_, crate::model::ModelError> {
            let (said, seconds) = timed(Session::begin(&self.target, Some(&self.drafter), prompt, settings, stream)?)?;
            let alone = Session::<Drafter>::begin(&self.target, None, prompt, settings, stream)?;
            let (plain, plain_seconds) = timed(alone)?;
            let slots = slot_accuracy(&self.target, &self.drafter, prompt, &plain.tokens)?;
            let steps = said.steps.iter().map(|step| Step {
                drafted: step.drafted,
                accepted: step.accepted,
                produced: step.produced,
            });
            let record = Record {
                category,
                steps: steps.collect(),
                tokens: said.tokens.len() as u64 - 1,
                seconds,
                plain_tokens: plain.tokens.len() as u64 - 1,
                plain_seconds,
                identical: (settings.temperature == 0.0).then_some(said.tokens == plain.tokens),
                slots: slots.iter().map(|slot| (slot.right, slot.tried)).collect(),
            };
            Ok((record, plain.tokens))
        };
        run().map_err(failed)
    }
}

/// Runs a response to its end, and measures the time behind its first token.
fn timed<D: Drafting>(
    mut session: Session<'_, D>,
) -> Result<(crate::model::decode::Response, f64), crate::model::ModelError> {
    let start = Instant::now();
    while session.step()? {}
    let seconds = start.elapsed().as_secs_f64();
    Ok((session.into_response(), seconds))
}

/// Whether a drafter belongs to a target, as far as their configurations tell.
fn fits(target: &TargetConfig, draft: &DraftConfig) -> Result<(), String> {
    for (name, of_draft, of_target) in [
        ("hidden_size", draft.hidden_size, target.hidden_size),
        // A head that is padded to another size cannot be shared, and acceptance is 0 (vllm#46435).
        ("vocab_size", draft.vocab_size, target.vocab_size),
        ("num_target_layers", draft.num_target_layers, target.num_hidden_layers),
    ] {
        if of_draft != of_target {
            let key = if name == "num_target_layers" { "num_hidden_layers" } else { name };
            return Err(format!(
                "its `{name}` is {of_draft}, but the target's `{key}` is {of_target}; give the folders that belong together"
            ));
        }
    }
    Ok(())
}

/// The tokens that end a response: those of config.json, and those of generation_config.json where there is one.
fn stop_tokens(folder: &Path, target: &TargetConfig) -> Result<Vec<u32>, crate::hf::HfError> {
    let mut stop = target.eos_token_ids.clone();
    let path = folder.join("generation_config.json");
    if path.exists() {
        let value = read_json(&path)?;
        let more = match &value["eos_token_id"] {
            Value::Array(ids) => ids.clone(),
            one => vec![one.clone()],
        };
        stop.extend(more.iter().filter_map(Value::as_u64).filter_map(|id| u32::try_from(id).ok()));
    }
    stop.sort_unstable();
    stop.dedup();
    Ok(stop)
}
