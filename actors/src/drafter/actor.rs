//! A drafter draws a batch, takes a ticket, runs forward and backward, and reports; when a step is complete it trades its
//! gradient for the new weights.
//!
//! In: loans from the pool, tickets, the trainer's phase. Out: reports and gradients. It draws `prefetch` batches ahead, so
//! that the next one is there when a ticket is, and has the engine bring it closer at once, also while another one is in work.
//! A batch that it could not train goes back to the pool, and its ticket to the trainer; after `max_attempts`, or where the
//! features are lost, the job is skipped. It ends when the trainer says so, after handing in what it has. While it is paused it
//! draws nothing, trains what it has in hand, and takes part in every step.
//! Invariants: T1, T2.

use crate::{
    messages::{
        engine::{DraftEngine, EngineError, MicroFailure, Staging},
        job::Job,
        types::JobId,
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
use std::{
    collections::{BTreeSet, VecDeque},
    pin::pin,
};
use tokio::sync::{oneshot, watch};

/// What shapes the drafters' work.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Batches that it holds beside the one in work, at least 1.
    pub prefetch: usize,
    /// Failures of a job, in targets and drafters together, after which it is skipped.
    pub max_attempts: u32,
    /// Different batches that failed in a row after which the drafter stops the run: its device is broken, not its batches.
    pub max_failures_in_a_row: u32,
    /// Drafters that draw nothing for now.
    pub paused: Vec<usize>,
}

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
    hand: Hand<E::Features>,
    ticket: Option<oneshot::Receiver<Option<Ticket>>>,
    /// The trainer needs nothing more from this drafter, and knows that nothing comes.
    finished: bool,
    /// Where batches have an order: those below this place may be trained now.
    below: u64,
    /// A batch went back to the pool. This drafter draws once more than usual: the others may have their hands full of
    /// batches that come after it in the order, and then nobody else would.
    owes_draw: bool,
    /// Jobs that failed since the last success. The same job again says nothing new of this drafter.
    failed: BTreeSet<JobId>,
    meter: Meter,
    series: Series,
    work: Work,
}

/// What the pool gave, and what it was asked for.
struct Hand<F> {
    /// In their order, where they have one.
    loans: VecDeque<Loan<F>>,
    draw: Option<oneshot::Receiver<Option<Loan<F>>>>,
    /// The pool has nothing more to give.
    exhausted: bool,
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
    settings: watch::Receiver<Settings>,
    mut engine: E,
    pool: pool::Handle<E::Features>,
    trainer: trainer::Handle<E::Gradient, E::Weights>,
    stops: Stops,
) -> Result<Work, Fault> {
    let staging = engine.staging();
    let mut drafter = Drafter {
        index,
        name: format!("drafter {index}"),
        engine,
        pool,
        trainer,
        hand: Hand { loans: VecDeque::new(), draw: None, exhausted: false, staging },
        ticket: None,
        finished: false,
        below: 0,
        owes_draw: false,
        failed: BTreeSet::new(),
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
                Phase::Collect { below, .. } => self.below = below,
            }
            self.ask().await?;
            let cause = if self.hand.loans.is_empty() && !self.hand.exhausted { Cause::Batch } else { Cause::Step };
            let next = async {
                // A finished step comes first: the others wait for this drafter's gradient.
                tokio::select! {
                    biased;
                    changed = phase.changed() => Event::Phase(changed),
                    ticket = answer(&mut self.ticket), if self.ticket.is_some() => Event::Ticket(ticket),
                    loan = self.hand.drawn() => Event::Loan(loan),
                    () = changed(&mut self.settings) => Event::Changed,
                }
            };
            match self.meter.wait(cause, next).await {
                Event::Phase(changed) => changed.map_err(|_| self.gone(Gone("trainer")))?,
                Event::Ticket(ticket) => {
                    self.ticket = None;
                    match ticket.map_err(|_| self.gone(Gone("trainer")))? {
                        Some(ticket) => self.train(ticket).await?,
                        None => self.finished = true,
                    }
                }
                Event::Loan(loan) => self.hand.answered(loan.map_err(|_| self.gone(Gone("pool")))?),
                Event::Changed => {
                    if self.is_paused() {
                        self.hand.withdraw();
                    }
                }
            }
        }
    }

    /// Asks for whatever is wanted next.
    async fn ask(&mut self) -> Result<(), Fault> {
        self.ask_for_batch().await?;
        if self.finished || self.ticket.is_some() {
            return Ok(());
        }
        let index = self.index;
        if self.hand.loans.front().is_some_and(|next| next.order.is_none_or(|order| order < self.below)) {
            self.ticket = Some(self.trainer.ticket(index).await.map_err(|g| self.gone(g))?);
        } else if self.hand.exhausted && self.hand.loans.is_empty() {
            self.trainer.finished(index).await.map_err(|g| self.gone(g))?;
            self.finished = true;
        }
        Ok(())
    }

    async fn ask_for_batch(&mut self) -> Result<(), Fault> {
        if !self.hand.exhausted
            && !self.finished
            && !self.is_paused()
            && self.hand.draw.is_none()
            && (self.hand.loans.len() < self.settings.borrow().prefetch.max(1) || self.owes_draw)
        {
            self.owes_draw = false;
            self.hand.draw = Some(self.pool.draw().await.map_err(|g| self.gone(g))?);
        }
        Ok(())
    }

    fn is_paused(&self) -> bool {
        self.settings.borrow().paused.contains(&self.index)
    }

    async fn train(&mut self, ticket: Ticket) -> Result<(), Fault> {
        let Some(Loan { batch, order, room }) = self.hand.loans.pop_front() else {
            return self.trainer.give_back(ticket, false).await.map_err(|g| self.gone(g));
        };
        // The next batch is on its way while this one is in work.
        self.ask_for_batch().await?;
        let job = batch.job;
        self.engine.set_anchors(ticket.anchors);
        let work = self.engine.micro_batch(job.id(), batch.features);
        let result = self.meter.busy(self.hand.filled_during(work)).await;
        match result {
            Ok(report) if !report.loss_numerator.is_finite() => {
                counter!(m::NON_FINITE_LOSSES).increment(1);
                let (id, loss) = (job.id(), report.loss_numerator);
                let advice = "lower optimizer.learning_rate or train in f32; where a run goes on and ends so again, delete its newest folder in checkpoints";
                Err(Fault::new(&self.name, format!("the loss of job {id} is {loss}; {advice}")))
            }
            Ok(report) => {
                drop(room);
                self.failed.clear();
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

    /// Gives the batch back to the pool, or its job up: then true. `Err` where this drafter must not go on.
    fn on_failure(
        &mut self,
        mut job: Job,
        failure: MicroFailure<E::Features>,
        room: Room<E::Features>,
    ) -> Result<bool, Fault> {
        let MicroFailure { error, features } = failure;
        let id = job.id();
        job.attempts += 1;
        let Settings { max_attempts, max_failures_in_a_row, .. } = *self.settings.borrow();
        tracing::warn!(drafter = self.index, job = %id, attempts = job.attempts, %error, "micro-batch failed");
        counter!(m::JOBS_RETURNED, "cause" => "drafter_failed").increment(1);
        self.failed.insert(id);
        let failed = self.failed.len();
        if matches!(error, EngineError::Lost(_)) || failed >= max_failures_in_a_row as usize {
            // The drafter's fault, not the job's: it stays open.
            return Err(Fault::new(
                &self.name,
                format!("{failed} batches failed in a row, the last one because: {error}"),
            ));
        }
        match features {
            Some(features) if job.attempts < max_attempts => {
                room.give_back(Batch { job, features });
                self.owes_draw = true;
                Ok(false)
            }
            features => {
                let (cause, lost) = match features {
                    Some(_) => ("drafter_failed", ""),
                    None => ("features_lost", ", and its hidden states are lost"),
                };
                counter!(m::JOBS_SKIPPED, "cause" => cause).increment(1);
                let attempts = job.attempts;
                lifecycle!("given_up", job = %id);
                job.receipt.skip(format!("the drafter could not train it{lost}: {error}"), attempts);
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

impl<F> Hand<F> {
    /// Does the work, and takes what the pool answers meanwhile.
    async fn filled_during<T>(&mut self, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        loop {
            let loan = tokio::select! {
                biased;
                done = &mut work => return done,
                loan = self.drawn() => loan,
            };
            // That the pool is gone is told by the next draw.
            if let Ok(loan) = loan {
                self.answered(loan);
            }
        }
    }

    /// The pool's answer to the draw; never ready without one.
    async fn drawn(&mut self) -> Result<Option<Loan<F>>, oneshot::error::RecvError> {
        let loan = answer(&mut self.draw).await;
        self.draw = None;
        loan
    }

    fn answered(&mut self, loan: Option<Loan<F>>) {
        match loan {
            Some(mut loan) => {
                (self.staging)(&mut loan.batch.features);
                let at = self.loans.partition_point(|other| other.order <= loan.order);
                self.loans.insert(at, loan);
            }
            None => self.exhausted = true,
        }
    }

    /// Takes back its draw. Where the pool has answered already, the batch is in hand like any other.
    fn withdraw(&mut self) {
        if let Some(mut draw) = self.draw.take() {
            draw.close();
            if let Ok(loan) = draw.try_recv() {
                self.answered(loan);
            }
        }
    }
}
