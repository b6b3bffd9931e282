//! Trainer actor: owns the optimizer step. It issues tickets, waits until each is used, reduces, steps, and publishes
//! the weights.
//!
//! In: ticket requests, reports, gradients. Out: tickets and weights (as replies), outcomes and checkpoints (to the
//! planner), one record per step.
//!
//! A step has exactly `accumulation × drafters` micro-batches, or is the last of the run. The first waiting drafter
//! gets the next ticket. After `Shutdown::stop` or `Shutdown::drain` no part of an unfinished step enters the weights:
//! those jobs stay open. After `drain` steps continue while drafters have batches. Changed settings apply to whole
//! steps, from the next step boundary on.
//!
//! Invariants: T1, T2.

use super::messages::{CheckpointReply, Contribution, Control, Inbox, Msg, Phase, Settings, Stats, Ticket};
use super::{
    checkpointer::Checkpointer,
    replica_check::{self, ReplicaCheck},
    state::{Action, State},
    stats::{Series, StepRecord},
};
use crate::{
    messages::{
        engine::{Optimizer, StepRequest},
        job::Receipt,
    },
    planner,
    runtime::{
        causes::Cause,
        fault::{Fault, Gone, Shutdown},
        meter::Meter,
        trace::lifecycle,
        util::changed,
    },
};
use std::collections::BTreeMap;
use tokio::{
    sync::{mpsc, oneshot, watch},
    time::Instant,
};

/// Contribution of a drafter to the running step, and the reply for its new weights.
type HandedIn<O> = (Contribution<<O as Optimizer>::Gradient>, oneshot::Sender<<O as Optimizer>::Weights>);

struct Trainer<O: Optimizer> {
    /// Settings of the running step.
    settings: Settings,
    /// Settings of the next step.
    next: Settings,
    /// Micro-batches in the weights.
    trained: u64,
    state: State,
    optimizer: O,
    planner: planner::Handle,
    records: mpsc::Sender<StepRecord>,
    phase: watch::Sender<Phase>,
    tickets: BTreeMap<usize, oneshot::Sender<Option<Ticket>>>,
    gradients: BTreeMap<usize, HandedIn<O>>,
    replica_check: ReplicaCheck,
    receipts: Vec<Receipt>,
    meter: Meter,
    series: Series,
    born: Instant,
    stats: Stats,
    checkpointer: Checkpointer,
}

/// Runs until no step can follow. Each step's record goes to `records`.
///
/// # Errors
///
/// Fails if the optimizer fails, if the last checkpoint cannot be written, if the planner or all drafters are gone, or
/// if the run is aborted.
pub async fn run<O: Optimizer>(
    mut control: Control,
    optimizer: O,
    inbox: Inbox<O::Gradient, O::Weights>,
    planner: planner::Handle,
    records: mpsc::Sender<StepRecord>,
    shutdown: Shutdown,
) -> Result<Stats, Fault> {
    let Inbox { mut inbox, phase } = inbox;
    let settings = control.settings.borrow_and_update().clone();
    let start = settings.start_step;
    let mut t = Trainer {
        state: State::new(settings.drafters, settings.accumulation, start, settings.max_steps),
        trained: settings.start_micro_batches,
        optimizer,
        checkpointer: Checkpointer::new(planner.clone(), start),
        planner,
        records,
        phase,
        tickets: BTreeMap::new(),
        gradients: BTreeMap::new(),
        replica_check: ReplicaCheck::new(),
        receipts: Vec::new(),
        meter: Meter::new("trainer", 0),
        series: Series::new(),
        born: Instant::now(),
        stats: Stats { step: start, ..Stats::default() },
        next: settings.clone(),
        settings,
    };
    t.series.begin(&t.settings);
    let ended = shutdown.abort.run_until_cancelled(t.serve(&mut inbox, &mut control, &shutdown)).await;
    ended.unwrap_or_else(|| Err(Fault::aborted("trainer")))?;
    t.stats.totals = t.meter.totals();
    Ok(t.stats)
}

impl<O: Optimizer> Trainer<O> {
    async fn serve(
        &mut self,
        inbox: &mut mpsc::Receiver<Msg<O::Gradient, O::Weights>>,
        control: &mut Control,
        shutdown: &Shutdown,
    ) -> Result<(), Fault> {
        let mut actions = self.state.reconfigure(self.settings.accumulation, &self.settings.paused);
        let (mut closing, mut stopping) = (false, false);
        loop {
            if self.apply(actions).await? {
                return Ok(());
            }
            let Self { meter, checkpointer, .. } = self;
            let next = async {
                tokio::select! {
                    biased;
                    () = shutdown.stop.cancelled(), if !stopping => Event::Stop,
                    () = shutdown.drain.cancelled(), if !closing => Event::Close,
                    // The checkpointer logs a failure; training continues, and the next checkpoint is written when it
                    // is due.
                    _ = checkpointer.written() => Event::Written,
                    () = changed(&mut control.settings) => Event::Changed,
                    Some(reply) = control.checkpoints.recv() => Event::Checkpoint(reply),
                    msg = inbox.recv() => Event::Msg(msg),
                }
            };
            actions = match meter.wait(Cause::MicroBatches, next).await {
                Event::Stop => {
                    stopping = true;
                    self.state.on_stop()
                }
                Event::Close => {
                    closing = true;
                    self.state.on_close()
                }
                Event::Written => {
                    if self.checkpointer.is_due() {
                        self.save().await;
                    }
                    Vec::new()
                }
                Event::Changed => self.reconfigure(control.settings.borrow_and_update().clone()),
                Event::Checkpoint(reply) => {
                    if self.checkpointer.request(self.stats.step, reply) {
                        self.save().await;
                    }
                    Vec::new()
                }
                Event::Msg(None) => return Err(Fault::gone("trainer", Gone("last drafter"))),
                Event::Msg(Some(msg)) => self.on(msg),
            };
        }
    }

    /// Applies changed settings from the next step on; at once if the running step has not begun.
    fn reconfigure(&mut self, settings: Settings) -> Vec<Action> {
        self.next = settings;
        if self.state.at_boundary() {
            self.settings = self.next.clone();
        }
        self.state.reconfigure(self.next.accumulation, &self.next.paused)
    }

    fn on(&mut self, msg: Msg<O::Gradient, O::Weights>) -> Vec<Action> {
        match msg {
            Msg::Ticket { drafter, reply } => {
                self.tickets.insert(drafter, reply);
                self.state.on_ticket(drafter)
            }
            Msg::Report { ticket, position, job, report } => {
                let bucket = job.spec.bucket;
                lifecycle!("reported", job = %job.id(), step = ticket.step);
                self.receipts.push(job.receipt);
                self.state.on_report(&ticket, position, bucket, &report)
            }
            Msg::ReturnTicket { ticket, skipped } => self.state.on_ticket_returned(&ticket, skipped),
            Msg::Gradient { drafter, step, part, reply } => {
                self.gradients.insert(drafter, (part, reply));
                self.state.on_gradient(drafter, step)
            }
            Msg::Finished { drafter } => self.state.on_finished(drafter),
        }
    }

    /// Applies actions. Returns true at the end of the run.
    async fn apply(&mut self, actions: Vec<Action>) -> Result<bool, Fault> {
        let mut actions: std::collections::VecDeque<Action> = actions.into();
        while let Some(action) = actions.pop_front() {
            match action {
                Action::Issue { drafter, step } => {
                    let ticket = Ticket { step, drafter, anchors: self.settings.anchors };
                    let undelivered = match self.tickets.remove(&drafter) {
                        Some(reply) => reply.send(Some(ticket)).err().flatten(),
                        None => Some(ticket),
                    };
                    if let Some(ticket) = undelivered {
                        actions.extend(self.state.on_ticket_returned(&ticket, false));
                    }
                }
                Action::Refuse { drafter } => {
                    if let Some(reply) = self.tickets.remove(&drafter) {
                        // A drafter that is gone needs no answer.
                        let _ = reply.send(None);
                    }
                }
                Action::Collect { step, below } => drop(self.phase.send_replace(Phase::Collect { step, below })),
                Action::Reduce { step } => {
                    let compare = replica_check::is_due(&self.settings, step);
                    self.phase.send_replace(Phase::Reduce { step, compare });
                }
                Action::Step => actions.extend(self.step().await?),
                Action::End => {
                    self.end().await?;
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    async fn step(&mut self) -> Result<Vec<Action>, Fault> {
        let Self { state, settings, .. } = self;
        let (step, sum) = (state.step(), *state.sum());
        let position = 1.0 + self.trained as f64 / state.per_step() as f64;
        let learning_rate = (settings.learning_rate)(position);
        let mut record = StepRecord {
            step,
            loss: sum.loss(),
            accuracy: sum.accuracy(),
            leading_run: sum.leading_run(),
            candidate_recall: sum.candidate_recall(),
            selector_gain: sum.selector_gain(),
            learning_rate,
            micro_batches: state.micro_batches(),
            tokens: sum.tokens,
            supervised: sum.supervised as u64,
            anchors: sum.anchors,
            buckets: state.distinct_buckets(),
            ..StepRecord::default()
        };
        let request = StepRequest {
            step,
            denominator: sum.loss_denominator,
            learning_rate,
            max_grad_norm: settings.max_grad_norm,
            weight_decay: settings.weight_decay,
        };
        let (mut gradients, mut checksums, mut replies) = (Vec::new(), Vec::new(), Vec::new());
        for (drafter, (part, reply)) in std::mem::take(&mut self.gradients) {
            gradients.extend(part.gradient);
            checksums.extend(part.checksum.map(|checksum| (drafter, checksum)));
            replies.push((drafter, reply));
        }
        let Self { optimizer, replica_check, .. } = self;
        let published = self.meter.busy(async {
            if !checksums.is_empty()
                && let Some(given) = replica_check::available("optimizer", optimizer.checksum().await)
            {
                replica_check.compare(step, &checksums, given);
            }
            let report = optimizer.step(gradients, request).await?;
            for (drafter, reply) in replies {
                // The supervisor notices a drafter that is gone.
                let _ = reply.send(optimizer.weights(drafter).await?);
            }
            Ok::<_, crate::messages::engine::EngineError>(report)
        });
        let report = published.await.map_err(|e| Fault::new("trainer", format!("step {step}: {e}")))?;
        record.grad_norm = report.grad_norm;
        record.seconds = self.born.elapsed().as_secs_f64();
        self.stats.step = step;
        self.trained += record.micro_batches;
        self.planner.trained(step, std::mem::take(&mut self.receipts)).await.map_err(|g| Fault::gone("trainer", g))?;
        self.series.observe(&record, &self.settings);
        let _ = self.records.send(record).await;
        if self.settings.checkpoint_every > 0 && step.is_multiple_of(self.settings.checkpoint_every) {
            self.save().await;
        }
        self.settings = self.next.clone();
        Ok(self.state.on_stepped())
    }

    async fn end(&mut self) -> Result<(), Fault> {
        self.stats.discarded = self.receipts.len() as u64;
        self.receipts.clear();
        if self.checkpointer.is_busy() {
            // A failure here is retried below.
            let _ = self.checkpointer.written().await;
        }
        if self.stats.step > self.checkpointer.saved() {
            self.save().await;
            self.checkpointer.written().await.map_err(|reason| Fault::new("trainer", reason))?;
        }
        self.stats.checkpoint = self.checkpointer.name().cloned();
        self.phase.send_replace(Phase::End);
        Ok(())
    }

    /// Begins a checkpoint of the current weights, or marks one as due.
    async fn save(&mut self) {
        if self.checkpointer.may_begin() {
            let step = self.stats.step;
            let copied = self.meter.busy(self.optimizer.save(step)).await;
            self.checkpointer.begin(step, copied);
        }
    }
}

/// Event for the trainer.
enum Event<M> {
    Stop,
    Close,
    Written,
    Changed,
    Checkpoint(CheckpointReply),
    Msg(Option<M>),
}
