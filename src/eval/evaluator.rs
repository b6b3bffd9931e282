//! Evaluator during training: a separate target, held-out samples and prompts, and one evaluation at a time on a blocking
//! thread.

use super::{
    prompts,
    record::Record,
    schedule::{DueEval, EvalIntervals, EvalKinds, EvalSchedule, EvalSlot, Evaluator, FinalWeights},
    stats::{self, Stats},
};
use crate::{
    common::clock::now,
    config::{Eval, Loaded, TopK},
    data::{Split, Store},
    hf::{draft::DraftConfig, tensors::TensorFiles},
    inference::{self, speculative},
    model::{
        ModelError, SlotCount,
        batch::{Packed, Rows},
        drafter::{Drafter, anchors::Anchors, head::LossOptions},
        libtorch::{open_device, use_all_cores},
        params::{Weights, init_params, load_params},
    },
    run_dir::checkpoint,
};
use crate::{
    inference::loaded_target::LoadedTarget,
    run_dir::eval_log::{Decoded, EvalHistory, EvalLog, Evaluation, HeldOut},
};
use draftmill_actors::{
    messages::engine::MicroReport,
    runtime::{fault::panic_text, metrics as m, random::stream_seed},
};
use metrics::{counter, gauge, histogram};
use rand_chacha::{ChaCha8Rng, rand_core::SeedableRng};
use std::{path::PathBuf, sync::Arc};
use tch::{Device, Kind};
use tokio::{
    sync::{mpsc, oneshot, watch},
    time::{Instant, sleep},
};
use tokio_util::task::AbortOnDropHandle;

/// Limit on the blocks of a held-out sample, which bounds its cost.
const ANCHORS: usize = 64;

/// Sender of weight snapshots to the evaluator, held by the optimizer.
pub struct Snapshots {
    schedule: EvalSchedule,
    /// Device of the snapshots.
    pub device: Device,
    jobs: mpsc::Sender<Snapshot>,
}

struct Snapshot {
    step: u64,
    kinds: EvalKinds,
    weights: Weights,
    slot: EvalSlot,
}

impl Snapshots {
    /// Evaluation due after `step`. Counts a skipped one.
    pub fn due(&self, step: u64) -> Option<(EvalKinds, EvalSlot)> {
        match self.schedule.due(step) {
            DueEval::Now(kinds, slot) => Some((kinds, slot)),
            DueEval::Nothing => None,
            DueEval::Skipped => {
                counter!(m::EVALS, "result" => "skipped").increment(1);
                None
            }
        }
    }

    /// Sends a snapshot. It never blocks: the channel has capacity for the one slot.
    pub fn send(&self, step: u64, kinds: EvalKinds, slot: EvalSlot, weights: Result<Weights, String>) {
        match weights {
            Ok(weights) => {
                // An evaluator that ended early has logged the reason.
                let _ = self.jobs.try_send(Snapshot { step, kinds, weights, slot });
            }
            Err(error) => failed(step, &error),
        }
    }
}

/// Inputs of the evaluator.
pub struct Setup {
    /// Settings of this start: samples, prompts and device.
    pub eval: Eval,
    /// Settings in force: intervals.
    pub in_force: watch::Receiver<Loaded>,
    pub target: PathBuf,
    /// Dtype of the target.
    pub kind: Kind,
    pub draft: DraftConfig,
    pub gamma: Option<f64>,
    /// Loss of training.
    pub loss: LossOptions,
    pub seed: u64,
    /// Label probabilities of the loss; `None` for hard labels.
    pub labels: Option<TopK>,
    pub store: Arc<Store>,
}

/// Starts the evaluator of a run. Returns `None` if there is neither a held-out sample nor a prompt.
///
/// # Errors
/// An unavailable device.
pub fn start(setup: Setup, log: EvalLog, history: EvalHistory) -> Result<Option<(Snapshots, Evaluator)>, ModelError> {
    let eval = &setup.eval;
    let held_out = !setup.store.is_empty(Split::Validation);
    let supported = EvalKinds { held_out, decode: eval.can_decode(held_out) };
    if supported == EvalKinds::NOTHING {
        return Ok(None);
    }
    let in_force = setup.in_force.clone();
    let schedule = EvalSchedule::new(supported, move || EvalIntervals::new(&in_force.borrow().config.eval));
    let device = open_device(eval.device)?;
    let (jobs, inbox) = mpsc::channel(1);
    let (history, evaluations) = watch::channel(history);
    let (last, end) = oneshot::channel();
    let worker = Worker { setup, device, models: None };
    let task = tokio::spawn(run(worker, schedule.clone(), inbox, end, history, log));
    let evaluator = Evaluator { history: evaluations, last, task: AbortOnDropHandle::new(task) };
    Ok(Some((Snapshots { schedule, device, jobs }, evaluator)))
}

async fn run(
    mut worker: Worker,
    schedule: EvalSchedule,
    mut jobs: mpsc::Receiver<Snapshot>,
    mut end: oneshot::Receiver<FinalWeights>,
    history: watch::Sender<EvalHistory>,
    mut log: EvalLog,
) {
    let mut last = None;
    while last.is_none() {
        let Snapshot { step, kinds, weights, slot } = tokio::select! {
            Some(snapshot) = jobs.recv() => snapshot,
            ended = &mut end => {
                last = Some(ended.ok());
                continue;
            }
        };
        let started = Instant::now();
        worker = match evaluate(worker, step, kinds, move |_| Ok(weights), &history, &mut log).await {
            Some(worker) => worker,
            None => return,
        };
        tokio::select! {
            () = sleep(schedule.pause(started.elapsed())) => {}
            ended = &mut end => last = Some(ended.ok()),
        }
        drop(slot);
    }
    let Some(FinalWeights { step, checkpoint }) = last.flatten() else { return };
    let kinds = {
        let (enabled, history) = (schedule.enabled(), history.borrow());
        let known = |has: fn(&Evaluation) -> bool| history.0.iter().any(|eval| eval.step == step && has(eval));
        EvalKinds {
            held_out: enabled.held_out && !known(|eval| eval.held_out.is_some()),
            decode: enabled.decode && !known(|eval| eval.decoded.is_some()),
        }
    };
    if kinds != EvalKinds::NOTHING {
        tracing::info!(step, "evaluating the final weights");
        let read = move |draft: &DraftConfig| {
            // The evaluation runs on this thread, and training has ended.
            use_all_cores();
            load_params(draft, &TensorFiles::open_file(&checkpoint.join(checkpoint::WEIGHTS))?)
        };
        evaluate(worker, step, kinds, read, &history, &mut log).await;
    }
}

/// Runs one evaluation and publishes it to the log, the history and the metrics. Returns the worker unless it panicked.
async fn evaluate(
    mut worker: Worker,
    step: u64,
    kinds: EvalKinds,
    weights: impl FnOnce(&DraftConfig) -> Result<Weights, ModelError> + Send + 'static,
    history: &watch::Sender<EvalHistory>,
    log: &mut EvalLog,
) -> Option<Worker> {
    let started = Instant::now();
    let work = tokio::task::spawn_blocking(move || {
        let evaluated = weights(&worker.setup.draft).and_then(|weights| worker.evaluate(step, kinds, weights));
        (worker, evaluated)
    });
    let (worker, evaluated) = match work.await {
        Ok(done) => done,
        Err(error) => {
            let why = error.try_into_panic().map_or_else(|error| error.to_string(), |panic| panic_text(&*panic));
            failed(step, &format!("{why}; this run has no further evaluation"));
            return None;
        }
    };
    match evaluated {
        Ok(evaluation) => {
            let evaluation = Evaluation { at: now(), seconds: started.elapsed().as_secs_f64(), ..evaluation };
            if let Err(error) = log.push(&evaluation) {
                tracing::warn!(%error, path = %log.path().display(), "evaluation not logged");
            }
            history.send_modify(|history| history.push(evaluation.clone()));
            report(&evaluation, history.borrow().best());
        }
        Err(error) => failed(step, &error.to_string()),
    }
    Some(worker)
}

fn failed(step: u64, why: &str) {
    counter!(m::EVALS, "result" => "failed").increment(1);
    tracing::warn!(step, why, "evaluation failed; training continues");
}

/// Updates the metrics and logs the evaluation.
fn report(evaluation: &Evaluation, best: Option<(u64, f64)>) {
    counter!(m::EVALS, "result" => "done").increment(1);
    histogram!(m::EVAL_SECONDS).record(evaluation.seconds);
    gauge!(m::EVAL_STEP).set(evaluation.step as f64);
    if let Some(held_out) = &evaluation.held_out {
        gauge!(m::EVAL_LOSS).set(held_out.loss);
        gauge!(m::EVAL_ACCURACY).set(held_out.accuracy);
        gauge!(m::EVAL_LEADING_RUN).set(held_out.leading_run.unwrap_or(0.0));
        for (index, accuracy) in held_out.accuracy_by_position.iter().enumerate() {
            gauge!(m::EVAL_POSITION_ACCURACY, "position" => (index + 1).to_string()).set(accuracy.unwrap_or(0.0));
        }
        gauge!(m::EVAL_PREDICTED).set(held_out.predicted_acceptance.unwrap_or(0.0));
        tracing::info!(
            step = evaluation.step,
            loss = format!("{:.3}", held_out.loss),
            accuracy = format!("{:.3}", held_out.accuracy),
            predicted = format!("{:.2}", held_out.predicted_acceptance.unwrap_or(0.0)),
            leading_run = format!("{:.2}", held_out.leading_run.unwrap_or(0.0)),
            "evaluated on held-out samples"
        );
    }
    if let Some(decoded) = &evaluation.decoded {
        gauge!(m::EVAL_ACCEPTANCE).set(decoded.acceptance);
        gauge!(m::EVAL_BEST_ACCEPTANCE).set(best.map_or(0.0, |(_, acceptance)| acceptance));
        tracing::info!(
            step = evaluation.step,
            acceptance = format!("{:.2}", decoded.acceptance),
            responses = decoded.responses,
            "evaluated by decoding, in tokens per step"
        );
    }
}

/// State of the evaluator. The first evaluation loads the models.
struct Worker {
    setup: Setup,
    device: Device,
    models: Option<Models>,
}

struct Models {
    bench: LoadedTarget,
    drafter: Drafter,
    samples: Vec<usize>,
    prompts: Vec<Vec<u32>>,
}

impl Worker {
    fn evaluate(&mut self, step: u64, kinds: EvalKinds, weights: Weights) -> Result<Evaluation, ModelError> {
        let mut models = match self.models.take() {
            Some(models) => models,
            None => self.load()?,
        };
        models.drafter.load_weights(weights)?;
        let held_out = kinds.held_out.then(|| self.held_out(&models)).transpose();
        let decoded = kinds.decode.then(|| self.decode(&models)).transpose();
        self.models = Some(models);
        Ok(Evaluation { step, held_out: held_out?, decoded: decoded?.flatten(), ..Evaluation::default() })
    }

    fn load(&self) -> Result<Models, ModelError> {
        let Setup { eval, target, kind, draft, seed, store, loss, .. } = &self.setup;
        let bench = LoadedTarget::load(target, *kind, self.device)?;
        let mut drafter = bench.drafter(draft.clone(), init_params(draft, *seed)?, None)?;
        drafter.set_loss(*loss);
        let count = store.len(Split::Validation);
        // Evenly spaced, since a store has its input files in order.
        let spread = |wanted: usize| (0..wanted.min(count)).map(move |i| i * count / wanted.min(count));
        let samples = spread(eval.samples as usize).collect();
        let wanted = eval.prompts as usize;
        let prompts = match &eval.prompt_file {
            Some(file) => read_prompts(&bench, file, wanted)?,
            None => {
                let all = spread(count).map(|sample| prompt_of_sample(store, sample));
                let fit = |prompt: &Vec<u32>| bench.settings(prompt.len(), 2, 0.0, 0).is_some();
                let all: Vec<_> = all.filter(fit).collect();
                let count = all.len();
                (0..wanted.min(count)).map(|i| all[i * count / wanted.min(count)].clone()).collect()
            }
        };
        Ok(Models { bench, drafter, samples, prompts })
    }

    /// Loss and accuracy as in training, sample by sample.
    fn held_out(&self, Models { bench, drafter, samples, .. }: &Models) -> Result<HeldOut, ModelError> {
        let (mut sum, mut slots) =
            (MicroReport::default(), vec![SlotCount::default(); drafter.config().proposed_tokens()]);
        for &sample in samples {
            let (ids, mask) = self.setup.store.sample(Split::Validation, sample);
            let lengths = [ids.len() as u32];
            let taps = &drafter.config().target_layer_ids;
            let rows = Rows::new(ids, &lengths, ids.len())?;
            let (hidden, target_labels) =
                bench.target.forward_with_labels(&rows, taps, bench.target.kind(), self.setup.labels)?;
            let seed = stream_seed(self.setup.seed, "held-out", &[sample as u64]);
            let anchors = Anchors::sample(mask, &lengths, ANCHORS, &mut ChaCha8Rng::from_seed(seed))?;
            let batch = Packed {
                hidden: &hidden,
                ids,
                target_labels: target_labels.as_ref(),
                loss_mask: mask,
                lengths: &lengths,
            };
            let (report, counts) = drafter.held_out(&batch, &anchors, self.setup.gamma)?;
            sum.add(&report);
            for (all, count) in slots.iter_mut().zip(counts) {
                (all.right, all.tried) = (all.right + count.right, all.tried + count.tried);
            }
        }
        let by_position = slots.iter().map(|slot| (slot.tried > 0).then(|| slot.right as f64 / slot.tried as f64));
        let accuracy_by_position: Vec<_> = by_position.collect();
        Ok(HeldOut {
            samples: samples.len(),
            loss: sum.loss(),
            accuracy: sum.accuracy(),
            predicted_acceptance: stats::predicted(&accuracy_by_position),
            accuracy_by_position,
            leading_run: Some(sum.leading_run()),
            candidate_recall: sum.candidate_recall(),
            selector_gain: sum.selector_gain(),
        })
    }

    /// Acceptance over all prompts; `None` if no response has a step.
    fn decode(&self, Models { bench, drafter, prompts, .. }: &Models) -> Result<Option<Decoded>, ModelError> {
        let mut records = Vec::new();
        for prompt in prompts {
            let most = self.setup.eval.max_new_tokens as usize;
            let Some(settings) = bench.settings(prompt.len(), most, 0.0, 0) else { continue };
            let responses = speculative(&bench.target, drafter, std::slice::from_ref(prompt), &settings)?;
            let record = |response: &inference::Response| Record {
                steps: response.steps.iter().map(Into::into).collect(),
                tokens: response.tokens.len() as u64 - 1,
                ..Record::default()
            };
            records.extend(responses.iter().map(record));
        }
        let all = Stats::new(&records.iter().collect::<Vec<_>>(), drafter.config().proposed_tokens());
        let acceptance = all.acceptance_pooled.zip(all.acceptance_mean);
        Ok(acceptance.map(|(acceptance, acceptance_mean)| Decoded {
            responses: all.responses,
            steps: all.steps,
            tokens: all.tokens,
            acceptance,
            acceptance_mean,
        }))
    }
}

/// Token ids of a held-out sample before its first answer.
fn prompt_of_sample(store: &Store, sample: usize) -> Vec<u32> {
    let (ids, mask) = store.sample(Split::Validation, sample);
    let answer = mask.iter().position(|&supervised| supervised > 0).unwrap_or(0);
    ids[..answer].iter().map(|&id| id as u32).collect()
}

/// First turns of evenly spaced prompts of a file.
fn read_prompts(bench: &LoadedTarget, file: &std::path::Path, wanted: usize) -> Result<Vec<Vec<u32>>, ModelError> {
    let unusable = |why: String| ModelError::Input(format!("eval.prompt_file: {why}"));
    let prompts = prompts::read(file, None).map_err(|error| unusable(error.to_string()))?;
    let chat = bench.chat.as_ref().map_err(|why| unusable(why.clone()))?;
    let count = prompts.len();
    let chosen = (0..wanted.min(count)).map(|i| &prompts[i * count / wanted.min(count)]);
    let ids = chosen.map(|prompt| chat.prompt(&prompt.conversation).map_err(unusable));
    ids.collect()
}
