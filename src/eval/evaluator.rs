//! The worker of the measures beside the steps: a whole target of its own, held-out samples and prompts, and one measure after
//! another on a blocking thread.

use super::{
    prompts,
    schedule::{Due, Evaluator, Last, Rhythm, Turn, Turns, What},
    stats::{self, Figures, Record},
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
        drafter::{Drafter, anchors::Anchors},
        libtorch::{open_device, use_all_cores},
        params::{Weights, init_params, load_params},
    },
    run_dir::checkpoint,
};
use crate::{
    inference::loaded_target::Bench,
    run_dir::eval_log::{Decoded, EvalLog, HeldOut, History, Measured},
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

/// Blocks of one held-out sample at most: enough for an accuracy, and a bound on its cost.
const ANCHORS: usize = 64;

/// Where copies of the weights go that are to be measured; the optimizer holds it.
pub struct Snapshots {
    turns: Turns,
    /// Where the copies are to lie.
    pub device: Device,
    jobs: mpsc::Sender<Snapshot>,
}

struct Snapshot {
    step: u64,
    what: What,
    weights: Weights,
    turn: Turn,
}

impl Snapshots {
    /// What is due after `step`; what has to be left out is counted.
    pub fn due(&self, step: u64) -> Option<(What, Turn)> {
        match self.turns.due(step) {
            Due::Now(what, turn) => Some((what, turn)),
            Due::Nothing => None,
            Due::Skipped => {
                counter!(m::EVALS, "result" => "skipped").increment(1);
                None
            }
        }
    }

    /// Hands a copy over. It never waits: there is one turn, and room for one copy.
    pub fn send(&self, step: u64, what: What, turn: Turn, weights: Result<Weights, String>) {
        match weights {
            Ok(weights) => {
                // An evaluator that is gone has said why in the log.
                let _ = self.jobs.try_send(Snapshot { step, what, weights, turn });
            }
            Err(error) => failed(step, &error),
        }
    }
}

/// What measures are made with.
pub struct Setup {
    /// Of the start: what is measured.
    pub eval: Eval,
    /// In force: when it is measured.
    pub in_force: watch::Receiver<Loaded>,
    pub target: PathBuf,
    /// Number type of the target.
    pub kind: Kind,
    pub draft: DraftConfig,
    pub gamma: Option<f64>,
    pub seed: u64,
    /// What the target says of each place, where that is what is learned.
    pub labels: Option<TopK>,
    pub store: Arc<Store>,
}

/// Starts the measures of a run, whose weights hold as many steps as `log` was opened with; `None` where there is nothing to
/// measure with. The first measure is of the weights that come first.
pub fn start(setup: Setup, log: EvalLog, history: History) -> Result<Option<(Snapshots, Evaluator)>, ModelError> {
    let eval = &setup.eval;
    let held_out = !setup.store.is_empty(Split::Validation);
    let can = What { held_out, decode: eval.can_decode(held_out) };
    if can == What::NOTHING {
        return Ok(None);
    }
    let in_force = setup.in_force.clone();
    let turns = Turns::new(can, move || Rhythm::of(&in_force.borrow().config.eval));
    let device = open_device(eval.device)?;
    let (jobs, due) = mpsc::channel(1);
    let (watched, watching) = watch::channel(history);
    let (last, end) = oneshot::channel();
    let worker = Worker { setup, device, ready: None };
    let task = tokio::spawn(run(worker, turns.clone(), due, end, watched, log));
    let evaluator = Evaluator { history: watching, last, task: AbortOnDropHandle::new(task) };
    Ok(Some((Snapshots { turns, device, jobs }, evaluator)))
}

async fn run(
    mut worker: Worker,
    turns: Turns,
    mut jobs: mpsc::Receiver<Snapshot>,
    mut end: oneshot::Receiver<Last>,
    history: watch::Sender<History>,
    mut log: EvalLog,
) {
    let mut last = None;
    while last.is_none() {
        let Snapshot { step, what, weights, turn } = tokio::select! {
            Some(snapshot) = jobs.recv() => snapshot,
            ended = &mut end => {
                last = Some(ended.ok());
                continue;
            }
        };
        let began = Instant::now();
        worker = match measure(worker, step, what, move |_| Ok(weights), &history, &mut log).await {
            Some(worker) => worker,
            None => return,
        };
        tokio::select! {
            () = sleep(turns.rest(began.elapsed())) => {}
            ended = &mut end => last = Some(ended.ok()),
        }
        drop(turn);
    }
    let Some(Last { step, checkpoint }) = last.flatten() else { return };
    let what = {
        let (wanted, history) = (turns.wanted(), history.borrow());
        let known = |of: fn(&Measured) -> bool| history.0.iter().any(|measured| measured.step == step && of(measured));
        What {
            held_out: wanted.held_out && !known(|measured| measured.held_out.is_some()),
            decode: wanted.decode && !known(|measured| measured.decoded.is_some()),
        }
    };
    if what != What::NOTHING {
        tracing::info!(step, "measuring the drafter that the run ends with");
        let read = move |draft: &DraftConfig| {
            // The measure runs on the thread that reads, and nothing else computes any more.
            use_all_cores();
            load_params(draft, &TensorFiles::open_file(&checkpoint.join(checkpoint::WEIGHTS))?)
        };
        measure(worker, step, what, read, &history, &mut log).await;
    }
}

/// One measure, told to everyone. Gives the worker back, unless it was lost.
async fn measure(
    mut worker: Worker,
    step: u64,
    what: What,
    weights: impl FnOnce(&DraftConfig) -> Result<Weights, ModelError> + Send + 'static,
    history: &watch::Sender<History>,
    log: &mut EvalLog,
) -> Option<Worker> {
    let began = Instant::now();
    let work = tokio::task::spawn_blocking(move || {
        let measured = weights(&worker.setup.draft).and_then(|weights| worker.measure(step, what, weights));
        (worker, measured)
    });
    let (worker, measured) = match work.await {
        Ok(done) => done,
        Err(error) => {
            let why = error.try_into_panic().map_or_else(|error| error.to_string(), |panic| panic_text(&*panic));
            failed(step, &format!("{why}; nothing more is measured in this run"));
            return None;
        }
    };
    match measured {
        Ok(measured) => {
            let measured = Measured { at: now(), seconds: began.elapsed().as_secs_f64(), ..measured };
            if let Err(error) = log.push(&measured) {
                tracing::warn!(%error, path = %log.path().display(), "a measure could not be written down");
            }
            history.send_modify(|history| history.push(measured.clone()));
            tell(&measured, history.borrow().best());
        }
        Err(error) => failed(step, &error.to_string()),
    }
    Some(worker)
}

fn failed(step: u64, why: &str) {
    counter!(m::EVALS, "result" => "failed").increment(1);
    tracing::warn!(step, why, "the drafter could not be measured; training goes on");
}

/// Metrics and a log line.
fn tell(measured: &Measured, best: Option<(u64, f64)>) {
    counter!(m::EVALS, "result" => "done").increment(1);
    histogram!(m::EVAL_SECONDS).record(measured.seconds);
    gauge!(m::EVAL_STEP).set(measured.step as f64);
    if let Some(held_out) = &measured.held_out {
        gauge!(m::EVAL_LOSS).set(held_out.loss);
        gauge!(m::EVAL_ACCURACY).set(held_out.accuracy);
        for (place, share) in held_out.accuracy_by_position.iter().enumerate() {
            gauge!(m::EVAL_POSITION_ACCURACY, "position" => (place + 1).to_string()).set(share.unwrap_or(0.0));
        }
        gauge!(m::EVAL_PREDICTED).set(held_out.predicted_acceptance.unwrap_or(0.0));
        tracing::info!(
            step = measured.step,
            loss = format!("{:.3}", held_out.loss),
            accuracy = format!("{:.3}", held_out.accuracy),
            predicted = format!("{:.2}", held_out.predicted_acceptance.unwrap_or(0.0)),
            "measured on held-out samples"
        );
    }
    if let Some(decoded) = &measured.decoded {
        gauge!(m::EVAL_ACCEPTANCE).set(decoded.acceptance);
        gauge!(m::EVAL_BEST_ACCEPTANCE).set(best.map_or(0.0, |(_, acceptance)| acceptance));
        tracing::info!(
            step = measured.step,
            acceptance = format!("{:.2}", decoded.acceptance),
            responses = decoded.responses,
            "measured in real decoding, in tokens per step"
        );
    }
}

/// What measures take; the models are loaded by the first one.
struct Worker {
    setup: Setup,
    device: Device,
    ready: Option<Ready>,
}

struct Ready {
    bench: Bench,
    drafter: Drafter,
    samples: Vec<usize>,
    prompts: Vec<Vec<u32>>,
}

impl Worker {
    fn measure(&mut self, step: u64, what: What, weights: Weights) -> Result<Measured, ModelError> {
        let mut ready = match self.ready.take() {
            Some(ready) => ready,
            None => self.load()?,
        };
        ready.drafter.load_weights(weights)?;
        let held_out = what.held_out.then(|| self.held_out(&ready)).transpose();
        let decoded = what.decode.then(|| self.decode(&ready)).transpose();
        self.ready = Some(ready);
        Ok(Measured { step, held_out: held_out?, decoded: decoded?.flatten(), ..Measured::default() })
    }

    fn load(&self) -> Result<Ready, ModelError> {
        let Setup { eval, target, kind, draft, seed, store, .. } = &self.setup;
        let bench = Bench::load(target, *kind, self.device)?;
        let drafter = bench.drafter(draft.clone(), init_params(draft, *seed)?, None)?;
        let count = store.len(Split::Validation);
        // Spread over the store, so that they are not all of its first file.
        let spread = |wanted: usize| (0..wanted.min(count)).map(move |i| i * count / wanted.min(count));
        let samples = spread(eval.samples as usize).collect();
        let wanted = eval.prompts as usize;
        let prompts = match &eval.prompt_file {
            Some(file) => asked(&bench, file, wanted)?,
            None => {
                let all = spread(count).map(|sample| beginning(store, sample));
                let fit = |prompt: &Vec<u32>| bench.settings(prompt.len(), 2, 0.0, 0).is_some();
                let all: Vec<_> = all.filter(fit).collect();
                let count = all.len();
                (0..wanted.min(count)).map(|i| all[i * count / wanted.min(count)].clone()).collect()
            }
        };
        Ok(Ready { bench, drafter, samples, prompts })
    }

    /// Loss and accuracy as training has them, sample after sample.
    fn held_out(&self, Ready { bench, drafter, samples, .. }: &Ready) -> Result<HeldOut, ModelError> {
        let (mut sum, mut slots) =
            (MicroReport::default(), vec![SlotCount::default(); drafter.config().block_size - 1]);
        for &sample in samples {
            let (ids, mask) = self.setup.store.sample(Split::Validation, sample);
            let lengths = [ids.len() as u32];
            let taps = &drafter.config().target_layer_ids;
            let rows = Rows::new(ids, &lengths, ids.len())?;
            let (hidden, teacher) = bench.target.taught(&rows, taps, bench.target.kind(), self.setup.labels)?;
            let seed = stream_seed(self.setup.seed, "held-out", &[sample as u64]);
            let anchors = Anchors::sample(mask, &lengths, ANCHORS, &mut ChaCha8Rng::from_seed(seed))?;
            let batch = Packed { hidden: &hidden, ids, teacher: teacher.as_ref(), loss_mask: mask, lengths: &lengths };
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
        })
    }

    /// Acceptance over all prompts; `None` where no response had a step.
    fn decode(&self, Ready { bench, drafter, prompts, .. }: &Ready) -> Result<Option<Decoded>, ModelError> {
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
        let all = Figures::of(&records.iter().collect::<Vec<_>>(), drafter.config().block_size);
        let figures = all.acceptance_pooled.zip(all.acceptance_mean);
        Ok(figures.map(|(acceptance, acceptance_mean)| Decoded {
            responses: all.responses,
            steps: all.steps,
            tokens: all.tokens,
            acceptance,
            acceptance_mean,
        }))
    }
}

/// A held-out sample up to where its first answer begins.
fn beginning(store: &Store, sample: usize) -> Vec<u32> {
    let (ids, mask) = store.sample(Split::Validation, sample);
    let answer = mask.iter().position(|&supervised| supervised > 0).unwrap_or(0);
    ids[..answer].iter().map(|&id| id as u32).collect()
}

/// Prompts of a file, spread over it, of each the first turn.
fn asked(bench: &Bench, file: &std::path::Path, wanted: usize) -> Result<Vec<Vec<u32>>, ModelError> {
    let unusable = |why: String| ModelError::Input(format!("eval.prompt_file: {why}"));
    let prompts = prompts::read(file, None).map_err(|error| unusable(error.to_string()))?;
    let chat = bench.chat.as_ref().map_err(|why| unusable(why.clone()))?;
    let count = prompts.len();
    let chosen = (0..wanted.min(count)).map(|i| &prompts[i * count / wanted.min(count)]);
    let ids = chosen.map(|prompt| chat.prompt(&prompt.conversation).map_err(unusable));
    ids.collect()
}
