//! Drafter actor: draws a batch, takes a ticket, runs forward and backward, and reports. When a step is complete it
//! exchanges its gradient for the new weights.
//!
//! In: batches from the pool, tickets, the trainer's phase. Out: reports and gradients.
//!
//! The drafter draws `prefetch` batches ahead and starts their copy to the device at once, also while another batch is
//! in work. A batch that it could not train returns to the pool, and its ticket to the trainer. After `max_attempts`,
//! or if the features are lost, the job is skipped. The drafter ends when the trainer ends the run. A paused drafter
//! draws nothing, trains the batches that it holds, and takes part in every step.
//!
//! Invariants: T1, T2.

use super::state::{Recovery, Request, Settings, State, Training};
use crate::{
    messages::{
        engine::{DraftEngine, MicroFailure, Staging},
        job::Job,
    },
    pool::{self, Batch, BytePermit, CheckedOutBatch},
    runtime::{
        causes::Cause,
        fault::{Fault, Gone, Shutdown},
        meter::{Meter, Totals},
        metrics as m,
        trace::lifecycle,
        util::{changed, reply},
    },
    trainer::{self, Contribution, Phase, Ticket, replica_check::available},
};
use metrics::{Counter, counter};
use std::pin::pin;
use tokio::sync::{oneshot, watch};

/// Statistics of a drafter.
#[derive(Clone, Debug, Default)]
pub struct Stats {
    pub totals: Totals,
    pub micro_batches: u64,
    pub tokens: u64,
    pub anchors: u64,
}

struct Drafter<E: DraftEngine> {
    index: usize,
    settings: watch::Receiver<Settings>,
    name: String,
    engine: E,
    pool: pool::Handle<E::Features>,
    trainer: trainer::Handle<E::Gradient, E::Weights>,
    prefetch: PrefetchBuffer<E::Features>,
    ticket: Option<oneshot::Receiver<Option<Ticket>>>,
    meter: Meter,
    series: Series,
    stats: Stats,
}

/// Prefetch buffer: the state with the checked-out batches, the pending draw, and the copy to the device.
struct PrefetchBuffer<F> {
    state: State<CheckedOutBatch<F>>,
    draw: Option<oneshot::Receiver<Option<CheckedOutBatch<F>>>>,
    staging: Staging<F>,
}

/// Metrics of the drafter, looked up once.
struct Series {
    micro_batches: Counter,
    tokens: Counter,
    anchors: Counter,
}

impl Series {
    fn new(index: usize) -> Self {
        let index = index.to_string();
        Self {
            micro_batches: counter!(m::DRAFTER_MICRO_BATCHES, "index" => index.clone()),
            tokens: counter!(m::DRAFTER_TOKENS, "index" => index.clone()),
            anchors: counter!(m::DRAFTER_ANCHORS, "index" => index),
        }
    }
}

/// Runs until the trainer has no further step.
///
/// # Errors
///
/// Fails if a loss is not finite, if the drafter's device is broken, if the pool or the trainer is gone, or if the run
/// is aborted.
pub async fn run<E: DraftEngine>(
    index: usize,
    mut settings: watch::Receiver<Settings>,
    mut engine: E,
    pool: pool::Handle<E::Features>,
    trainer: trainer::Handle<E::Gradient, E::Weights>,
    shutdown: Shutdown,
) -> Result<Stats, Fault> {
    let state = State::new(index, settings.borrow_and_update().clone());
    let staging = engine.staging();
    let mut drafter = Drafter {
        index,
        name: format!("drafter {index}"),
        engine,
        pool,
        trainer,
        prefetch: PrefetchBuffer { state, draw: None, staging },
        ticket: None,
        meter: Meter::new("drafter", index),
        series: Series::new(index),
        stats: Stats::default(),
        settings,
    };
    let ended = shutdown.abort.run_until_cancelled(drafter.serve()).await;
    ended.unwrap_or_else(|| Err(Fault::aborted(drafter.name.clone())))?;
    Ok(Stats { totals: drafter.meter.totals(), ..drafter.stats })
}

enum Event<F> {
    Phase(Result<(), watch::error::RecvError>),
    Ticket(Result<Option<Ticket>, oneshot::error::RecvError>),
    CheckedOutBatch(Result<Option<CheckedOutBatch<F>>, oneshot::error::RecvError>),
    Changed,
}

impl<E: DraftEngine> Drafter<E> {
    async fn serve(&mut self) -> Result<(), Fault> {
        let mut phase = self.trainer.phase();
        let mut reduced = 0;
        loop {
            let now = *phase.borrow_and_update();
            match now {
                Phase::End => return Ok(()),
                Phase::Reduce { step, compare } if step > reduced => {
                    self.reduce(step, compare).await?;
                    reduced = step;
                    continue;
                }
                Phase::Reduce { .. } => {}
                Phase::Collect { below, .. } => self.prefetch.state.on_collect(below),
            }
            self.refresh();
            for request in self.prefetch.state.requests() {
                self.send(request).await?;
            }
            let cause = if self.prefetch.state.needs_batch() { Cause::Batch } else { Cause::Step };
            let next = async {
                // A finished step comes first: the other drafters wait for this gradient.
                tokio::select! {
                    biased;
                    changed = phase.changed() => Event::Phase(changed),
                    ticket = reply(&mut self.ticket), if self.ticket.is_some() => Event::Ticket(ticket),
                    batch = self.prefetch.drawn() => Event::CheckedOutBatch(batch),
                    () = changed(&mut self.settings) => Event::Changed,
                }
            };
            match self.meter.wait(cause, next).await {
                Event::Phase(changed) => changed.map_err(|_| self.gone(Gone("trainer")))?,
                Event::Ticket(ticket) => {
                    self.ticket = None;
                    match ticket.map_err(|_| self.gone(Gone("trainer")))? {
                        Some(ticket) => self.on_ticket(ticket).await?,
                        None => self.prefetch.state.on_refused(),
                    }
                }
                Event::CheckedOutBatch(batch) => self.prefetch.on_drawn(batch.map_err(|_| self.gone(Gone("pool")))?),
                Event::Changed => self.reconfigure(),
            }
        }
    }

    /// Applies settings that changed since the last call.
    fn refresh(&mut self) {
        if self.settings.has_changed().unwrap_or(false) {
            self.reconfigure();
        }
    }

    fn reconfigure(&mut self) {
        if self.prefetch.state.reconfigure(self.settings.borrow_and_update().clone()) {
            self.prefetch.withdraw();
        }
    }

    async fn send(&mut self, request: Request) -> Result<(), Fault> {
        let sent = match request {
            Request::Batch => self.pool.draw().await.map(|draw| self.prefetch.draw = Some(draw)),
            Request::Ticket => self.trainer.ticket(self.index).await.map(|ticket| self.ticket = Some(ticket)),
            Request::Finished => self.trainer.finished(self.index).await,
        };
        sent.map_err(|g| self.gone(g))
    }

    async fn on_ticket(&mut self, ticket: Ticket) -> Result<(), Fault> {
        self.refresh();
        let Some(Training { batch, draw }) = self.prefetch.state.on_ticket() else {
            return self.trainer.return_ticket(ticket, false).await.map_err(|g| self.gone(g));
        };
        if draw {
            // The copy of the next batch runs while this one is in work.
            self.send(Request::Batch).await?;
        }
        self.train(ticket, batch).await
    }

    async fn train(&mut self, ticket: Ticket, batch: CheckedOutBatch<E::Features>) -> Result<(), Fault> {
        let CheckedOutBatch { batch: Batch { job, features }, position, permit } = batch;
        self.engine.set_anchors(ticket.anchors);
        let work = self.engine.micro_batch(job.id(), features);
        let result = self.meter.busy(self.prefetch.filled_during(work)).await;
        match result {
            Ok(report) => {
                if let Err(message) = self.prefetch.state.on_report(job.id(), &report) {
                    counter!(m::NON_FINITE_LOSSES).increment(1);
                    return Err(Fault::new(&self.name, message));
                }
                drop(permit);
                self.stats.micro_batches += 1;
                self.stats.tokens += report.tokens;
                self.stats.anchors += report.anchors;
                self.series.micro_batches.increment(1);
                self.series.tokens.increment(report.tokens);
                self.series.anchors.increment(report.anchors);
                self.trainer.report(ticket, position, job, report).await.map_err(|g| self.gone(g))
            }
            Err(failure) => {
                let skipped = self.on_failure(job, failure, permit)?;
                self.trainer.return_ticket(ticket, skipped).await.map_err(|g| self.gone(g))
            }
        }
    }

    /// Returns the batch to the pool, or skips its job. Returns true if the job was skipped.
    fn on_failure(
        &mut self,
        mut job: Job,
        failure: MicroFailure<E::Features>,
        permit: BytePermit<E::Features>,
    ) -> Result<bool, Fault> {
        self.refresh();
        let MicroFailure { error, features } = failure;
        let id = job.id();
        job.attempts += 1;
        tracing::warn!(drafter = self.index, job = %id, attempts = job.attempts, %error, "micro-batch failed");
        counter!(m::JOBS_RETURNED, "cause" => "drafter_failed").increment(1);
        match self.prefetch.state.on_failure(id, job.attempts, &error, features) {
            Recovery::Fault(message) => Err(Fault::new(&self.name, message)),
            Recovery::ReturnBatch(features) => {
                permit.return_batch(Batch { job, features });
                Ok(false)
            }
            Recovery::SkipJob { cause, reason } => {
                counter!(m::JOBS_SKIPPED, "cause" => cause).increment(1);
                let attempts = job.attempts;
                lifecycle!("skip_decided", job = %id);
                job.receipt.skip(reason, attempts);
                Ok(true)
            }
        }
    }

    async fn reduce(&mut self, step: u64, compare: bool) -> Result<(), Fault> {
        let gradient = self.meter.busy(self.engine.take_gradient()).await;
        let gradient =
            gradient.map_err(|e| Fault::new(&self.name, format!("the gradient of step {step} is lost: {e}")))?;
        // Checksum of the weights that produced this gradient.
        let checksum = match compare {
            true => available(&self.name, self.meter.busy(self.engine.checksum()).await),
            false => None,
        };
        let traded = self.trainer.exchange(self.index, step, Contribution { gradient, checksum });
        let weights = self.meter.wait(Cause::Step, traded).await.map_err(|g| self.gone(g))?;
        let loaded = self.meter.busy(self.engine.load_weights(weights)).await;
        loaded.map_err(|e| Fault::new(&self.name, format!("loading the weights of step {step} failed: {e}")))
    }

    fn gone(&self, gone: Gone) -> Fault {
        Fault::gone(self.name.clone(), gone)
    }
}

impl<F> PrefetchBuffer<F> {
    /// Runs work, and takes in the pool's replies meanwhile.
    async fn filled_during<T>(&mut self, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        loop {
            let batch = tokio::select! {
                biased;
                done = &mut work => return done,
                batch = self.drawn() => batch,
            };
            // The next draw reports that the pool is gone.
            if let Ok(batch) = batch {
                self.on_drawn(batch);
            }
        }
    }

    /// Waits for the pool's reply to the pending draw; pends forever without one.
    async fn drawn(&mut self) -> Result<Option<CheckedOutBatch<F>>, oneshot::error::RecvError> {
        let batch = reply(&mut self.draw).await;
        self.draw = None;
        batch
    }

    fn on_drawn(&mut self, batch: Option<CheckedOutBatch<F>>) {
        match batch {
            Some(mut batch) => {
                (self.staging)(&mut batch.batch.features);
                self.state.on_batch(batch.position, batch);
            }
            None => self.state.on_exhausted(),
        }
    }

    /// Withdraws the pending draw. If the pool has already replied, the batch is kept.
    fn withdraw(&mut self) {
        let Some(mut draw) = self.draw.take() else { return };
        draw.close();
        match draw.try_recv() {
            Ok(batch) => self.on_drawn(batch),
            Err(_) => self.state.on_withdrawn(),
        }
    }
}
