//! A drafter draws a batch, takes a ticket, runs forward and backward, and reports; when a step is complete it trades its
//! gradient for the new weights.
//!
//! In: loans from the pool, tickets, the trainer's phase. Out: reports and gradients. It draws `prefetch` batches ahead, so
//! that the next one is there when a ticket is, and has the engine bring it closer at once, also while another one is in work.
//! A batch that it could not train goes back to the pool, and its ticket to the trainer; after `max_attempts`, or where the
//! features are lost, the job is skipped. It ends when the trainer says so, after handing in what it has. While it is paused it
//! draws nothing, trains what it has in hand, and takes part in every step.
//! Invariants: T1, T2.

use super::state::{Recovery, Request, Settings, State, Training};
use crate::{
    messages::{
        engine::{DraftEngine, MicroFailure, Staging},
        job::Job,
    },
    pool::{self, Batch, Loan, Room},
    runtime::{
        causes::Cause,
        fault::{Fault, Gone, Stops},
        meter::{Meter, Totals},
        metrics as m,
        trace::lifecycle,
        util::{answer, changed},
    },
    trainer::{self, Part, Phase, Ticket, replica_check::known},
};
use metrics::{Counter, counter};
use std::pin::pin;
use tokio::sync::{oneshot, watch};

/// What a drafter did.
#[derive(Clone, Debug, Default)]
pub struct Work {
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
    work: Work,
}

/// The drafter's state with the batches that it holds, and its pending draw.
struct PrefetchBuffer<F> {
    state: State<Loan<F>>,
    draw: Option<oneshot::Receiver<Option<Loan<F>>>>,
    staging: Staging<F>,
}

/// The drafter's own series, looked up once.
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

/// Runs until the trainer says that there is no further step.
pub async fn run<E: DraftEngine>(
    index: usize,
    mut settings: watch::Receiver<Settings>,
    mut engine: E,
    pool: pool::Handle<E::Features>,
    trainer: trainer::Handle<E::Gradient, E::Weights>,
    stops: Stops,
) -> Result<Work, Fault> {
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
        work: Work::default(),
        settings,
    };
    let ended = stops.abort.run_until_cancelled(drafter.serve()).await;
    ended.unwrap_or_else(|| Err(Fault::aborted(drafter.name.clone())))?;
    Ok(Work { totals: drafter.meter.totals(), ..drafter.work })
}

enum Event<F> {
    Phase(Result<(), watch::error::RecvError>),
    Ticket(Result<Option<Ticket>, oneshot::error::RecvError>),
    Loan(Result<Option<Loan<F>>, oneshot::error::RecvError>),
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
                // A finished step comes first: the others wait for this drafter's gradient.
                tokio::select! {
                    biased;
                    changed = phase.changed() => Event::Phase(changed),
                    ticket = answer(&mut self.ticket), if self.ticket.is_some() => Event::Ticket(ticket),
                    loan = self.prefetch.drawn() => Event::Loan(loan),
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
                Event::Loan(loan) => self.prefetch.on_drawn(loan.map_err(|_| self.gone(Gone("pool")))?),
                Event::Changed => self.reconfigure(),
            }
        }
    }

    /// Applies settings that changed since the last look.
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
        let Some(Training { batch: loan, draw }) = self.prefetch.state.on_ticket() else {
            return self.trainer.give_back(ticket, false).await.map_err(|g| self.gone(g));
        };
        if draw {
            // The next batch is on its way while this one is in work.
            self.send(Request::Batch).await?;
        }
        self.train(ticket, loan).await
    }

    async fn train(&mut self, ticket: Ticket, loan: Loan<E::Features>) -> Result<(), Fault> {
        let Loan { batch: Batch { job, features }, order, room } = loan;
        self.engine.set_anchors(ticket.anchors);
        let work = self.engine.micro_batch(job.id(), features);
        let result = self.meter.busy(self.prefetch.filled_during(work)).await;
        match result {
            Ok(report) => {
                if let Err(message) = self.prefetch.state.on_report(job.id(), &report) {
                    counter!(m::NON_FINITE_LOSSES).increment(1);
                    return Err(Fault::new(&self.name, message));
                }
                drop(room);
                self.work.micro_batches += 1;
                self.work.tokens += report.tokens;
                self.work.anchors += report.anchors;
                self.series.micro_batches.increment(1);
                self.series.tokens.increment(report.tokens);
                self.series.anchors.increment(report.anchors);
                self.trainer.report(ticket, order, job, report).await.map_err(|g| self.gone(g))
            }
            Err(failure) => {
                let skipped = self.on_failure(job, failure, room)?;
                self.trainer.give_back(ticket, skipped).await.map_err(|g| self.gone(g))
            }
        }
    }

    /// Gives the batch back to the pool, or skips its job: then true.
    fn on_failure(
        &mut self,
        mut job: Job,
        failure: MicroFailure<E::Features>,
        room: Room<E::Features>,
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
                room.give_back(Batch { job, features });
                Ok(false)
            }
            Recovery::SkipJob { cause, reason } => {
                counter!(m::JOBS_SKIPPED, "cause" => cause).increment(1);
                let attempts = job.attempts;
                lifecycle!("given_up", job = %id);
                job.receipt.skip(reason, attempts);
                Ok(true)
            }
        }
    }

    async fn reduce(&mut self, step: u64, compare: bool) -> Result<(), Fault> {
        let gradient = self.meter.busy(self.engine.take_gradient()).await;
        let gradient =
            gradient.map_err(|e| Fault::new(&self.name, format!("its gradient of step {step} is lost: {e}")))?;
        // Of the weights that this gradient was made with.
        let checksum = match compare {
            true => known(&self.name, self.meter.busy(self.engine.checksum()).await),
            false => None,
        };
        let traded = self.trainer.exchange(self.index, step, Part { gradient, checksum });
        let weights = self.meter.wait(Cause::Step, traded).await.map_err(|g| self.gone(g))?;
        let loaded = self.meter.busy(self.engine.load_weights(weights)).await;
        loaded.map_err(|e| Fault::new(&self.name, format!("it could not load the weights of step {step}: {e}")))
    }

    fn gone(&self, gone: Gone) -> Fault {
        Fault::gone(self.name.clone(), gone)
    }
}

impl<F> PrefetchBuffer<F> {
    /// Does the work, and takes in the pool's replies meanwhile.
    async fn filled_during<T>(&mut self, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        loop {
            let loan = tokio::select! {
                biased;
                done = &mut work => return done,
                loan = self.drawn() => loan,
            };
            // The next draw reports that the pool is gone.
            if let Ok(loan) = loan {
                self.on_drawn(loan);
            }
        }
    }

    /// The pool's reply to the pending draw; never ready without one.
    async fn drawn(&mut self) -> Result<Option<Loan<F>>, oneshot::error::RecvError> {
        let loan = answer(&mut self.draw).await;
        self.draw = None;
        loan
    }

    fn on_drawn(&mut self, loan: Option<Loan<F>>) {
        match loan {
            Some(mut loan) => {
                (self.staging)(&mut loan.batch.features);
                self.state.on_batch(loan.order, loan);
            }
            None => self.state.on_exhausted(),
        }
    }

    /// Withdraws the pending draw. If the pool has replied already, the batch is kept like any other.
    fn withdraw(&mut self) {
        let Some(mut draw) = self.draw.take() else { return };
        draw.close();
        match draw.try_recv() {
            Ok(loan) => self.on_drawn(loan),
            Err(_) => self.state.on_withdrawn(),
        }
    }
}
