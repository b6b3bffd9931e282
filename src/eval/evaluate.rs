//! `draftmill eval`: decodes each prompt speculatively and plainly, and computes statistics.

use super::{
    EvalOptions,
    confidence::Confidence,
    prompts::Prompt,
    record::{Record, Shown, Step},
    show,
    stats::{Report, Stats},
};
use crate::inference::loaded_target::LoadedTarget;
use crate::{
    common::exit::{Exit, Failure},
    export,
    hf::{config::TargetConfig, layout::DraftFolder, validate::Severity},
    inference::{self, Proposer, Response, Session, Settings, SlotAccuracy, slot_accuracy},
    model::{ModelError, drafter::Drafter, libtorch::open_device, params::folder_params},
};
use tch::Kind;
use tokio::time::Instant;

/// Evaluates all prompts, one response at a time, in f32. Calls `done` after each response.
///
/// # Errors
/// A [`Failure`] with its exit code: an unusable model or prompt, or prompts that are all too long.
pub fn evaluate(options: &EvalOptions, prompts: Vec<Prompt>, done: &mut dyn FnMut(&Record)) -> Result<Report, Failure> {
    let (bench, drafter) = load(options)?;
    let chat = bench.chat.as_ref().map_err(|why| Failure::new(Exit::Model, why))?;
    let (mut records, mut skipped, mut stream) = (Vec::new(), 0, 0);
    for prompt in prompts {
        let mut next = Some(prompt);
        while let Some(prompt) = next.take() {
            let line = prompt.line;
            let bad =
                |why: String| Failure::new(Exit::Data, format!("the prompt of line {line} cannot be used: {why}"));
            let ids = chat.prompt(&prompt.conversation).map_err(bad)?;
            let EvalOptions { max_new_tokens, temperature, seed, min_survival, .. } = *options;
            let Some(settings) = bench.settings(ids.len(), max_new_tokens, temperature, seed) else {
                skipped += 1 + prompt.then.len();
                continue;
            };
            let settings = Settings { min_survival, ..settings };
            let (mut record, drafted, answer) =
                respond(&bench, &drafter, &ids, &settings, stream).map_err(Failure::of(Exit::Internal))?;
            record.category = prompt.category.clone();
            if records.len() < options.show {
                let pieces = show::pieces(&drafted, &record.steps, |ids| chat.decode(ids)).map_err(bad)?;
                let last = prompt.conversation.turns.last().map(|turn| turn.content.clone()).unwrap_or_default();
                record.shown = Some(Shown { prompt: last, pieces });
            }
            stream += 1;
            done(&record);
            records.push(record);
            next = prompt.answered(chat.decode(&answer).map_err(bad)?);
        }
    }
    if records.is_empty() {
        let most = bench.target.config().max_position_embeddings;
        return Err(Failure::new(
            Exit::Data,
            format!("every prompt exceeds the {most} positions of the target; give shorter prompts"),
        ));
    }
    let config = drafter.config();
    let (block_size, proposed) = (config.block_size, config.proposed_tokens());
    Ok(Report {
        target: options.target.display().to_string(),
        draft: options.draft.display().to_string(),
        block_size,
        max_new_tokens: options.max_new_tokens,
        temperature: options.temperature,
        seed: options.seed,
        min_survival: options.min_survival,
        skipped_too_long: skipped,
        all: Stats::new(&records.iter().collect::<Vec<_>>(), proposed),
        confidence: Confidence::new(&records),
        categories: Stats::by_category(&records, proposed),
    })
}

/// Loads target and drafter, and refuses a drafter of another target.
fn load(options: &EvalOptions) -> Result<(LoadedTarget, Drafter), Failure> {
    let device = open_device(options.device).map_err(Failure::of(Exit::Usage))?;
    let findings = export::check(&options.draft);
    if let Some(finding) = findings.into_iter().find(|finding| finding.severity == Severity::Error) {
        return Err(Failure::new(Exit::Model, format!("{}: {finding}", options.draft.display())));
    }
    let model = |error: &dyn std::fmt::Display| Failure::new(Exit::Model, error);
    let target = TargetConfig::load(&options.target).map_err(|e| model(&e))?;
    let folder = DraftFolder::open_for(&options.draft, &options.target, &target).map_err(|e| model(&e))?;
    let bench = LoadedTarget::load(&options.target, Kind::Float, device).map_err(|e| model(&e))?;
    if let Err(why) = &bench.chat {
        return Err(model(why));
    }
    let weights = folder_params(&folder).map_err(|e| model(&e))?;
    let drafter = bench.drafter(folder.config, weights, None).map_err(|e| model(&e))?;
    Ok((bench, drafter))
}

/// Decodes with and without the drafter. Returns the record of both, the response with the drafter, and the target's own.
fn respond(
    bench: &LoadedTarget,
    drafter: &Drafter,
    prompt: &[u32],
    settings: &Settings,
    stream: u64,
) -> Result<(Record, Vec<u32>, Vec<u32>), ModelError> {
    let target = &bench.target;
    let (drafted, seconds) = timed(Session::begin(target, Some(drafter), prompt, settings, stream)?)?;
    let (plain, plain_seconds) = timed(Session::<Drafter>::begin(target, None, prompt, settings, stream)?)?;
    let SlotAccuracy { slots, runs } = slot_accuracy(target, drafter, prompt, &plain.tokens)?;
    let record = Record {
        steps: drafted.steps.iter().map(Step::from).collect(),
        survivals: drafted.survivals,
        tokens: drafted.tokens.len() as u64 - 1,
        seconds,
        plain_tokens: plain.tokens.len() as u64 - 1,
        plain_seconds,
        identical: (settings.temperature == 0.0).then_some(drafted.tokens == plain.tokens),
        slots: slots.iter().map(|slot| (slot.right, slot.tried)).collect(),
        runs: (runs.tokens, runs.blocks),
        ..Record::default()
    };
    Ok((record, drafted.tokens, plain.tokens))
}

impl From<&inference::Step> for Step {
    fn from(step: &inference::Step) -> Step {
        Step { drafted: step.drafted, accepted: step.accepted, produced: step.produced }
    }
}

/// Runs a response to its end. Returns it with the seconds after its first token.
fn timed<D: Proposer>(mut session: Session<'_, D>) -> Result<(Response, f64), ModelError> {
    let start = Instant::now();
    while session.step()? {}
    let seconds = start.elapsed().as_secs_f64();
    Ok((session.into_response(), seconds))
}
