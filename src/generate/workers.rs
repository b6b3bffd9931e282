//! Worker pool of `generate`: threads with a batch each, over one copy of the weights.
//!
//! On CPU each worker computes on one core. Two threads that share every operation synchronise some hundred times in a
//! forward, which is slow as soon as another process needs a core.

use crate::{
    inference::{Answer, Batch, Settings},
    model::{ModelError, libtorch::set_threads, target::Target},
};
use draftmill_actors::runtime::fault::panic_text;
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel},
    thread::Scope,
};

/// A prompt for a worker: the arguments of [`Batch::push`].
struct Prompt {
    ids: Vec<u32>,
    limit: usize,
    stream: u64,
}

/// Answers of one forward, and its number of rows.
struct ForwardOutput {
    worker: usize,
    answers: Vec<Answer>,
    rows: usize,
}

/// Worker pool. On drop, workers exit after their current forward.
pub struct WorkerPool {
    workers: Vec<Worker>,
    outputs: Receiver<Result<ForwardOutput, String>>,
}

struct Worker {
    prompts: SyncSender<Prompt>,
    slots: usize,
    in_flight: usize,
}

impl WorkerPool {
    /// Starts `workers` threads with `rows` slots in total; each computes with `threads` threads.
    pub fn start<'scope>(
        scope: &'scope Scope<'scope, '_>,
        target: &Target,
        settings: &'scope Settings,
        rows: usize,
        workers: usize,
        threads: usize,
    ) -> WorkerPool {
        let count = workers.clamp(1, rows.max(1));
        // One output per worker. `submit` never blocks: a worker gets at most as many prompts as it has slots.
        let (sender, outputs) = sync_channel(count);
        let workers = (0..count).map(|worker| {
            let slots = (rows / count + usize::from(worker < rows % count)).max(1);
            let (prompts, inbox) = sync_channel(slots);
            let (target, sender) = (target.shallow_clone(), sender.clone());
            scope.spawn(move || {
                set_threads(threads);
                let work = || run_worker(&target, settings, slots, worker, &inbox, &sender);
                let ended = catch_unwind(AssertUnwindSafe(work));
                let why = match ended {
                    Ok(Ok(())) => return,
                    Ok(Err(error)) => error.to_string(),
                    Err(panic) => format!("a worker panicked: {}", panic_text(&*panic)),
                };
                // The pool may be dropped already.
                let _ = sender.send(Err(why));
            });
            Worker { prompts, slots, in_flight: 0 }
        });
        WorkerPool { workers: workers.collect(), outputs }
    }

    /// True if a worker has a free slot.
    pub fn has_free_slot(&self) -> bool {
        self.workers.iter().any(|worker| worker.in_flight < worker.slots)
    }

    /// Number of prompts without an answer.
    pub fn in_flight(&self) -> usize {
        self.workers.iter().map(|worker| worker.in_flight).sum()
    }

    /// Sends a prompt to the worker with the most free slots. `limit` bounds the tokens of the answer.
    ///
    /// # Errors
    /// The failure of a worker that ended.
    pub fn submit(&mut self, ids: &[u32], limit: usize, stream: u64) -> Result<(), String> {
        let idlest = self.workers.iter_mut().max_by_key(|worker| worker.slots - worker.in_flight.min(worker.slots));
        let Some(worker) = idlest else { return Err("there is no worker".into()) };
        worker.in_flight += 1;
        let sent = worker.prompts.send(Prompt { ids: ids.to_vec(), limit, stream });
        let why = |_| self.outputs.try_iter().find_map(Result::err).unwrap_or_else(|| "a worker ended".into());
        sent.map_err(why)
    }

    /// Waits for the end of a forward. Returns its finished answers and its number of rows.
    ///
    /// # Errors
    /// The failure of a worker.
    pub fn step(&mut self) -> Result<(Vec<Answer>, usize), String> {
        let ForwardOutput { worker, answers, rows } = self.outputs.recv().map_err(|_| "every worker ended")??;
        self.workers[worker].in_flight -= answers.len();
        Ok((answers, rows))
    }
}

/// Answers prompts until the pool is dropped.
fn run_worker(
    target: &Target,
    settings: &Settings,
    slots: usize,
    worker: usize,
    inbox: &Receiver<Prompt>,
    outputs: &SyncSender<Result<ForwardOutput, String>>,
) -> Result<(), ModelError> {
    let mut batch = Batch::new(target, settings, slots);
    loop {
        if batch.is_empty() {
            let Ok(Prompt { ids, limit, stream }) = inbox.recv() else { return Ok(()) };
            batch.push(&ids, limit, stream)?;
        }
        loop {
            match inbox.try_recv() {
                Ok(Prompt { ids, limit, stream }) => batch.push(&ids, limit, stream)?,
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => return Ok(()),
            }
        }
        let (answers, rows) = batch.step()?;
        if outputs.send(Ok(ForwardOutput { worker, answers, rows })).is_err() {
            return Ok(());
        }
    }
}
