//! Messages of the trainer: its settings, its handle, tickets and phases.

use crate::{
    messages::{engine::MicroReport, job::Job},
    runtime::{fault::Gone, meter::Totals},
};
use std::sync::Arc;
use tokio::sync::{mpsc, oneshot, watch};

/// Requests wait here: a drafter has at most a ticket request, a report and a gradient on the way.
const INBOX: usize = 256;

/// Learning rate of a step by its place: 1 + the micro-batches trained before it over those of a step. Where every step had as many,
/// that is its number, the first being 1; where accumulation changed, what was done before counts for what it was.
pub type LearningRate = Arc<dyn Fn(f64) -> f64 + Send + Sync>;

/// Where the result of a checkpoint goes that somebody asked for: a sentence.
pub type CheckpointReply = oneshot::Sender<Result<String, String>>;

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
    /// Steps between replica_check of the drafters' weights with those that they were given; 0 makes none.
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
pub struct Contribution<G> {
    /// `None` where it trained nothing that counts.
    pub gradient: Option<G>,
    /// Of the weights that it trained with, where it was asked.
    pub checksum: Option<u64>,
}

/// What drafters tell the trainer.
pub(super) enum Msg<G, W> {
    /// Has a batch and wants to train it. Answered with `None` when no step will need it.
    Ticket {
        drafter: usize,
        reply: oneshot::Sender<Option<Ticket>>,
    },
    Report {
        ticket: Ticket,
        position: Option<u64>,
        job: Job,
        report: MicroReport,
    },
    /// The ticket could not be used; another batch will use it.
    ReturnTicket {
        ticket: Ticket,
        skipped: bool,
    },
    /// The drafter's part of the step, for its weights in return.
    Gradient {
        drafter: usize,
        step: u64,
        part: Contribution<G>,
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
    pub async fn report(
        &self,
        ticket: Ticket,
        position: Option<u64>,
        job: Job,
        report: MicroReport,
    ) -> Result<(), Gone> {
        self.send(Msg::Report { ticket, position, job, report }).await
    }

    /// Gives a ticket back unused. `skipped` says that its batch was given up for good.
    pub async fn return_ticket(&self, ticket: Ticket, skipped: bool) -> Result<(), Gone> {
        self.send(Msg::ReturnTicket { ticket, skipped }).await
    }

    /// Hands in the gradient of a step and waits for the new weights.
    pub async fn exchange(&self, drafter: usize, step: u64, part: Contribution<G>) -> Result<W, Gone> {
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
pub struct Stats {
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
    pub(super) inbox: mpsc::Receiver<Msg<G, W>>,
    pub(super) phase: watch::Sender<Phase>,
}

/// Starts the trainer's channels. `run` with the second value.
pub fn channel<G, W>(settings: &Settings) -> (Handle<G, W>, Inbox<G, W>) {
    let (tx, inbox) = mpsc::channel(INBOX);
    let below = (settings.drafters * settings.accumulation) as u64;
    let (phase, watching) = watch::channel(Phase::Collect { step: settings.start_step + 1, below });
    (Handle { inbox: tx, phase: watching }, Inbox { inbox, phase })
}

/// What may be asked of a trainer from outside.
pub struct Control {
    /// In force from the next step border on.
    pub settings: watch::Receiver<Settings>,
    /// Whoever wants a checkpoint of the last step, now.
    pub checkpoints: mpsc::Receiver<CheckpointReply>,
}
