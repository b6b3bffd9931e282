//! The workers: threads with a batch each, over one copy of the weights.
//!
//! On CPU cores each worker computes on one core by itself. Two threads that share every operation wait for each other some
//! hundred times in a forward, which costs a lot as soon as anything else wants a core.

use crate::{
    inference::{Answer, Batch, Settings},
    model::{ModelError, libtorch::set_threads, target::Target},
};
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel},
    thread::Scope,
};

/// A prompt for one of the workers, as [`Batch::push`] takes it.
struct Ask {
    ids: Vec<u32>,
    most: usize,
    stream: u64,
}

/// What one forward brought.
struct Stepped {
    worker: usize,
    answers: Vec<Answer>,
    rows: usize,
}

/// Who answers. Dropped, it sends the workers home after the forward in hand.
pub struct Crew {
    workers: Vec<Worker>,
    steps: Receiver<Result<Stepped, String>>,
}

struct Worker {
    asks: SyncSender<Ask>,
    places: usize,
    busy: usize,
}

impl Crew {
    /// Starts `workers` threads with `rows` places in all, each with so many threads in an operation.
    pub fn start<'scope>(
        scope: &'scope Scope<'scope, '_>,
        target: &Target,
        settings: &'scope Settings,
        rows: usize,
        workers: usize,
        threads: usize,
    ) -> Crew {
        let count = workers.clamp(1, rows.max(1));
        // A forward's end for each worker. Whoever asks never waits: no worker is asked for more than it has places.
        let (sender, steps) = sync_channel(count);
        let workers = (0..count).map(|worker| {
            let places = (rows / count + usize::from(worker < rows % count)).max(1);
            let (asks, asked) = sync_channel(places);
            let (target, sender) = (target.share(), sender.clone());
            scope.spawn(move || {
                set_threads(threads);
                let work = || serve(&target, settings, places, worker, &asked, &sender);
                let ended = catch_unwind(AssertUnwindSafe(work));
                let why = match ended {
                    Ok(Ok(())) => return,
                    Ok(Err(error)) => error.to_string(),
                    Err(_) => "a worker panicked".into(),
                };
                // Nobody listens any more where the work was broken off.
                let _ = sender.send(Err(why));
            });
            Worker { asks, places, busy: 0 }
        });
        Crew { workers: workers.collect(), steps }
    }

    /// Whether somebody has a free place.
    pub fn free(&self) -> bool {
        self.workers.iter().any(|worker| worker.busy < worker.places)
    }

    /// Prompts that are not answered yet.
    pub fn busy(&self) -> usize {
        self.workers.iter().map(|worker| worker.busy).sum()
    }

    /// Gives a prompt to the worker with the most free places.
    pub fn ask(&mut self, ids: &[u32], most: usize, stream: u64) -> Result<(), String> {
        let idlest = self.workers.iter_mut().max_by_key(|worker| worker.places - worker.busy.min(worker.places));
        let Some(worker) = idlest else { return Err("there is no worker".into()) };
        worker.busy += 1;
        let sent = worker.asks.send(Ask { ids: ids.to_vec(), most, stream });
        let why = |_| self.steps.try_iter().find_map(Result::err).unwrap_or_else(|| "a worker is gone".into());
        sent.map_err(why)
    }

    /// Waits for a forward to end: its answers, and the rows that had a part in it.
    pub fn step(&mut self) -> Result<(Vec<Answer>, usize), String> {
        let Stepped { worker, answers, rows } = self.steps.recv().map_err(|_| "every worker is gone")??;
        self.workers[worker].busy -= answers.len();
        Ok((answers, rows))
    }
}

/// Answers what is asked until nobody asks any more.
fn serve(
    target: &Target,
    settings: &Settings,
    places: usize,
    worker: usize,
    asked: &Receiver<Ask>,
    steps: &SyncSender<Result<Stepped, String>>,
) -> Result<(), ModelError> {
    let mut batch = Batch::new(target, settings, places);
    loop {
        if batch.is_empty() {
            let Ok(Ask { ids, most, stream }) = asked.recv() else { return Ok(()) };
            batch.push(&ids, most, stream)?;
        }
        loop {
            match asked.try_recv() {
                Ok(Ask { ids, most, stream }) => batch.push(&ids, most, stream)?,
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => return Ok(()),
            }
        }
        let (answers, rows) = batch.step()?;
        if steps.send(Ok(Stepped { worker, answers, rows })).is_err() {
            return Ok(());
        }
    }
}
