//! The trainer owns the optimizer step: it hands out tickets, waits until each is used, reduces, steps, and publishes the weights.
//!
//! In: requests for tickets, reports, gradients. Out: tickets and weights (as replies), outcomes and checkpoints (to the
//! planner), one record a step. A step has exactly `accumulation × drafters` micro-batches, or is the last of the run;
//! whoever is ready takes the next ticket. At a stop or close it takes no part of an unfinished step into the weights: those jobs
//! stay open. After a close it makes steps as long as drafters have batches. Changed settings shape whole steps: they are in force from the next step border on. Invariants: T1, T2. The decisions are in `State`; `trainer_state.rs` has them.

use crate::{
    ask::changed,
    engine::{MicroReport, Optimizer, StepRequest},
    fault::{Fault, Gone, Stops},
    job::{Job, Receipt},
    journal::journal,
    meter::{Cause, Meter, Totals},
    planner,
    replicas::{self, Comparisons},
    saver::Saver,
    trainer_figures::Series,
    trainer_state::{Action, State},
};
use std::{collections::BTreeMap, sync::Arc};
use tokio::{
    sync::{mpsc, oneshot, watch},
    time::Instant,
};

pub use crate::trainer_figures::StepRecord;

/// Requests wait here: a drafter has at most a ticket request, a report and a gradient on the way.
const INBOX: usize = 256;

/// Learning rate of a step by its place: 1 + the micro-batches trained before it over those of a step. Where every step had as many,
/// that is its number, the first being 1; where accumulation changed, what was done before counts for what it was.
pub type LearningRate = Arc<dyn Fn(f64) -> f64 + Send + Sync>;

/// Where the result of a checkpoint goes that somebody asked for: a sentence.
pub type Answer = oneshot::Sender<Result<String, String>>;

/// What shapes the trainer's work.
#[derive(Clone)]
pub struct Settings {
    pub drafters: usize,
    /// Micro-batches of a step for each drafter that is not paused, on average.
    pub accumulation: usize,
    /// Drafters that get nothing to train for now.
    pub paused: Vec<usize>,
    /// Blocks trained in each sample.
    pub anchors: usize,
    pub learning_rate: LearningRate,
    pub max_grad_norm: f64,
    pub weight_decay: f64,
    /// Steps that are in the weights already; the run goes on from here.
    pub start_step: u64,
    /// The micro-batches of those steps.
    pub start_micro_batches: u64,
    /// Stop after this step; 0 sets no limit.
    pub max_steps: u64,
    /// Steps between checkpoints; 0 leaves only the one at the end.
    pub checkpoint_every: u64,
    /// Steps between comparisons of the drafters' weights with those that they were given; 0 makes none.
    pub replica_check_every: u64,
}

/// The right to train one micro-batch of a step.
#[derive(Debug, PartialEq, Eq)]
pub struct Ticket {
    pub step: u64,
    pub drafter: usize,
    /// Blocks to train in each sample.
    pub anchors: usize,
}

/// What a drafter brings to a step.
pub struct Part<G> {
    /// `None` where it trained nothing that counts.
    pub gradient: Option<G>,
    /// Of the weights that it trained with, where it was asked.
    pub checksum: Option<u64>,
}

/// What drafters tell the trainer.
pub(crate) enum Msg<G, W> {
    /// Has a batch and wants to train it. Answered with `None` when no step will need it.
    Ticket {
        drafter: usize,
        reply: oneshot::Sender<Option<Ticket>>,
    },
    Report {
        ticket: Ticket,
        order: Option<u64>,
        job: Job,
        report: MicroReport,
    },
    /// The ticket could not be used; another batch will use it.
    GiveBack {
        ticket: Ticket,
        skipped: bool,
    },
    /// The drafter's part of the step, for its weights in return.
    Gradient {
        drafter: usize,
        step: u64,
        part: Part<G>,
        reply: oneshot::Sender<W>,
    },
    /// The drafter has no batch and will get none.
    Finished {
        drafter: usize,
    },
}

/// What the trainer tells all drafters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Tickets of this step are out. Where batches have an order, those at places below `below` may ask for one.
    Collect { step: u64, below: u64 },
    /// Every micro-batch of this step is in: hand in the gradients, where `compare` says so with checksums of the weights.
    Reduce { step: u64, compare: bool },
    /// There will be no further step.
    End,
}

/// Speaks to the trainer.
pub struct Handle<G, W> {
    inbox: mpsc::Sender<Msg<G, W>>,
    phase: watch::Receiver<Phase>,
}

impl<G, W> Clone for Handle<G, W> {
    fn clone(&self) -> Self {
        Self { inbox: self.inbox.clone(), phase: self.phase.clone() }
    }
}

impl<G, W> Handle<G, W> {
    /// Asks for a ticket. The receiver yields it, or `None` when no further step is wanted.
    pub async fn ticket(&self, drafter: usize) -> Result<oneshot::Receiver<Option<Ticket>>, Gone> {
        let (reply, ticket) = oneshot::channel();
        self.send(Msg::Ticket { drafter, reply }).await?;
        Ok(ticket)
    }

    /// Reports a trained micro-batch. `order` is its place in the order of all draws, where there is one.
    pub async fn report(&self, ticket: Ticket, order: Option<u64>, job: Job, report: MicroReport) -> Result<(), Gone> {
        self.send(Msg::Report { ticket, order, job, report }).await
    }

    /// Gives a ticket back unused. `skipped` says that its batch was given up for good.
    pub async fn give_back(&self, ticket: Ticket, skipped: bool) -> Result<(), Gone> {
        self.send(Msg::GiveBack { ticket, skipped }).await
    }

    /// Hands in the gradient of a step and waits for the new weights.
    pub async fn exchange(&self, drafter: usize, step: u64, part: Part<G>) -> Result<W, Gone> {
        let (reply, weights) = oneshot::channel();
        self.send(Msg::Gradient { drafter, step, part, reply }).await?;
        weights.await.map_err(|_| Gone("trainer"))
    }

    /// Says that this drafter will train nothing more.
    pub async fn finished(&self, drafter: usize) -> Result<(), Gone> {
        self.send(Msg::Finished { drafter }).await
    }

    /// The phase, and every change of it.
    pub fn phase(&self) -> watch::Receiver<Phase> {
        self.phase.clone()
    }

    async fn send(&self, msg: Msg<G, W>) -> Result<(), Gone> {
        self.inbox.send(msg).await.map_err(|_| Gone("trainer"))
    }
}

/// What the trainer did.
#[derive(Clone, Debug, Default)]
pub struct Work {
    pub totals: Totals,
    /// The last step that is in the weights.
    pub step: u64,
    /// Micro-batches of an unfinished step that a stop threw away; their jobs stay open.
    pub discarded: u64,
    /// The checkpoint of the last step, where one was written.
    pub checkpoint: Option<String>,
}

/// What the trainer listens to.
pub struct Inbox<G, W> {
    inbox: mpsc::Receiver<Msg<G, W>>,
    phase: watch::Sender<Phase>,
}

/// Starts the trainer's channels. `run` with the second value.
pub fn channel<G, W>(settings: &Settings) -> (Handle<G, W>, Inbox<G, W>) {
    let (tx, inbox) = mpsc::channel(INBOX);
    let below = (settings.drafters * settings.accumulation) as u64;
    let (phase, watching) = watch::channel(Phase::Collect { step: settings.start_step + 1, below });
    (Handle { inbox: tx, phase: watching }, Inbox { inbox, phase })
}

/// A drafter's gradient of the running step, and where its new weights go.
type HandedIn<O> = (Part<<O as Optimizer>::Gradient>, oneshot::Sender<<O as Optimizer>::Weights>);

struct Trainer<O: Optimizer> {
    /// In force for the running step.
    settings: Settings,
    /// In force from the next step on.
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
    comparisons: Comparisons,
    receipts: Vec<Receipt>,
    meter: Meter,
    series: Series,
    born: Instant,
    work: Work,
    saver: Saver,
}

/// What may be asked of a trainer from outside.
pub struct Wishes {
    /// In force from the next step border on.
    pub settings: watch::Receiver<Settings>,
    /// Whoever wants a checkpoint of the last step, now.
    pub saves: mpsc::Receiver<Answer>,
}

/// Runs until no step can follow. Every step's record goes to `records`.
pub async fn run<O: Optimizer>(
    mut wishes: Wishes,
    optimizer: O,
    inbox: Inbox<O::Gradient, O::Weights>,
    planner: planner::Handle,
    records: mpsc::Sender<StepRecord>,
    stops: Stops,
) -> Result<Work, Fault> {
    let Inbox { mut inbox, phase } = inbox;
    let settings = wishes.settings.borrow_and_update().clone();
    let start = settings.start_step;
    let mut t = Trainer {
        state: State::new(settings.drafters, settings.accumulation, start, settings.max_steps),
        trained: settings.start_micro_batches,
        optimizer,
        saver: Saver::new(planner.clone(), start),
        planner,
        records,
        phase,
        tickets: BTreeMap::new(),
        gradients: BTreeMap::new(),
        comparisons: Comparisons::new(),
        receipts: Vec::new(),
        meter: Meter::new("trainer", 0),
        series: Series::new(),
        born: Instant::now(),
        work: Work { step: start, ..Work::default() },
        next: settings.clone(),
        settings,
    };
    t.series.begin(&t.settings);
    let ended = stops.abort.run_until_cancelled(t.serve(&mut inbox, &mut wishes, &stops)).await;
    ended.unwrap_or_else(|| Err(Fault::aborted("trainer")))?;
    t.work.totals = t.meter.totals();
    Ok(t.work)
}

impl<O: Optimizer> Trainer<O> {
    async fn serve(
        &mut self,
        inbox: &mut mpsc::Receiver<Msg<O::Gradient, O::Weights>>,
        wishes: &mut Wishes,
        stops: &Stops,
    ) -> Result<(), Fault> {
        let mut actions = self.state.reconfigure(self.settings.accumulation, &self.settings.paused);
        let (mut closing, mut stopping) = (false, false);
        loop {
            if self.apply(actions).await? {
                return Ok(());
            }
            let Self { meter, saver, .. } = self;
            let next = async {
                tokio::select! {
                    biased;
                    () = stops.stop.cancelled(), if !stopping => Event::Stop,
                    () = stops.close.cancelled(), if !closing => Event::Close,
                    // Why it failed is logged; training goes on, and the next one comes at its time.
                    _ = saver.written() => Event::Written,
                    () = changed(&mut wishes.settings) => Event::Changed,
                    Some(answer) = wishes.saves.recv() => Event::Save(answer),
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
                    if self.saver.is_due() {
                        self.save().await;
                    }
                    Vec::new()
                }
                Event::Changed => self.reconfigure(wishes.settings.borrow_and_update().clone()),
                Event::Save(answer) => {
                    if self.saver.ask(self.work.step, answer) {
                        self.save().await;
                    }
                    Vec::new()
                }
                Event::Msg(None) => return Err(Fault::gone("trainer", Gone("last drafter"))),
                Event::Msg(Some(msg)) => self.on(msg),
            };
        }
    }

    /// What shapes a step holds from the next one on; at once where nothing of the running one has begun.
    fn reconfigure(&mut self, settings: Settings) -> Vec<Action> {
        self.next = settings;
        if self.state.at_border() {
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
            Msg::Report { ticket, order, job, report } => {
                let bucket = job.spec.bucket;
                journal!("reported", job = %job.id(), step = ticket.step);
                self.receipts.push(job.receipt);
                self.state.on_report(&ticket, order, bucket, &report)
            }
            Msg::GiveBack { ticket, skipped } => self.state.on_give_back(&ticket, skipped),
            Msg::Gradient { drafter, step, part, reply } => {
                self.gradients.insert(drafter, (part, reply));
                self.state.on_gradient(drafter, step)
            }
            Msg::Finished { drafter } => self.state.on_finished(drafter),
        }
    }

    /// Returns true at the end.
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
                        actions.extend(self.state.on_give_back(&ticket, false));
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
                    let compare = replicas::is_due(&self.settings, step);
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
        let place = 1.0 + self.trained as f64 / state.per_step() as f64;
        let learning_rate = (settings.learning_rate)(place);
        let mut record = StepRecord {
            step,
            loss: sum.loss(),
            accuracy: sum.accuracy(),
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
        let Self { optimizer, comparisons, .. } = self;
        let published = self.meter.busy(async {
            if !checksums.is_empty()
                && let Some(given) = replicas::known("optimizer", optimizer.checksum().await)
            {
                comparisons.compare(step, &checksums, given);
            }
            let report = optimizer.step(gradients, request).await?;
            for (drafter, reply) in replies {
                // A drafter that is gone is noticed by whoever runs it.
                let _ = reply.send(optimizer.weights(drafter).await?);
            }
            Ok::<_, crate::engine::EngineError>(report)
        });
        let report = published.await.map_err(|e| Fault::new("trainer", format!("step {step}: {e}")))?;
        record.grad_norm = report.grad_norm;
        record.seconds = self.born.elapsed().as_secs_f64();
        self.work.step = step;
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
        self.work.discarded = self.receipts.len() as u64;
        self.receipts.clear();
        if self.saver.is_busy() {
            // One that fails here is made up for below.
            let _ = self.saver.written().await;
        }
        if self.work.step > self.saver.saved() {
            self.save().await;
            self.saver.written().await.map_err(|reason| Fault::new("trainer", reason))?;
        }
        self.work.checkpoint = self.saver.name().cloned();
        self.phase.send_replace(Phase::End);
        Ok(())
    }

    /// Begins a checkpoint of the weights as they are, or notes that one is due.
    async fn save(&mut self) {
        if self.saver.may_begin() {
            let step = self.work.step;
            let copied = self.meter.busy(self.optimizer.save(step)).await;
            self.saver.begin(step, copied);
        }
    }
}

/// What the trainer waits for.
enum Event<M> {
    Stop,
    Close,
    Written,
    Changed,
    Save(Answer),
    Msg(Option<M>),
}
