//! Messages of the trainer: its settings, its handle, tickets and phases.

use crate::{
    messages::{engine::MicroReport, job::Job},
    runtime::{fault::Gone, meter::Totals},
};
use std::sync::Arc;
use tokio::sync::{mpsc, oneshot, watch};

/// Limit on waiting requests: a ticket request, a report and a gradient of each drafter.
const INBOX: usize = 256;

/// Learning rate by position: 1 + the micro-batches trained before the step, divided by the micro-batches of a step.
/// With a constant accumulation this is the step number, starting at 1. After a change of accumulation, earlier
/// micro-batches count as such.
pub type LearningRate = Arc<dyn Fn(f64) -> f64 + Send + Sync>;

/// Reply to a requested checkpoint, with the result as a sentence.
pub type CheckpointReply = oneshot::Sender<Result<String, String>>;

/// Settings of the trainer.
#[derive(Clone)]
pub struct Settings {
    pub drafters: usize,
    /// Mean number of micro-batches per step for each drafter that is not paused.
    pub accumulation: usize,
    /// Drafters that get nothing to train for now.
    pub paused: Vec<usize>,
    /// Blocks trained in each sample.
    pub anchors: usize,
    pub learning_rate: LearningRate,
    pub max_grad_norm: f64,
    pub weight_decay: f64,
    /// Steps already in the weights; the run resumes from here.
    pub start_step: u64,
    /// Micro-batches of those steps.
    pub start_micro_batches: u64,
    /// Limit on the steps; 0 sets none.
    pub max_steps: u64,
    /// Steps between checkpoints; 0 writes only the one at the end.
    pub checkpoint_every: u64,
    /// Steps between comparisons of the drafters' weights with the published ones; 0 disables them.
    pub replica_check_every: u64,
}

/// Right to train one micro-batch of a step.
#[derive(Debug, PartialEq, Eq)]
pub struct Ticket {
    pub step: u64,
    pub drafter: usize,
    /// Blocks to train in each sample.
    pub anchors: usize,
}

/// Contribution of a drafter to a step.
pub struct Contribution<G> {
    /// Accumulated gradient; `None` if the drafter trained nothing.
    pub gradient: Option<G>,
    /// Checksum of the weights that produced the gradient, if it was requested.
    pub checksum: Option<u64>,
}

/// Message of a drafter.
pub(super) enum Msg<G, W> {
    /// Requests a ticket for a batch. The reply is `None` if no step needs it.
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
    /// Returns an unused ticket; another batch will use it.
    ReturnTicket {
        ticket: Ticket,
        skipped: bool,
    },
    /// Hands in the drafter's contribution; the reply carries the new weights.
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

/// Phase of the step, as all drafters see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Tickets of this step are available. With a draw order, batches at positions below `below` may request one.
    Collect { step: u64, below: u64 },
    /// Every micro-batch of this step is reported: drafters hand in their gradients, with checksums if `compare`.
    Reduce { step: u64, compare: bool },
    /// No further step follows.
    End,
}

/// Sender of messages to the trainer.
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
    /// Requests a ticket. The receiver yields it, or `None` if no further step is needed.
    ///
    /// # Errors
    ///
    /// Fails if the trainer is gone.
    pub async fn ticket(&self, drafter: usize) -> Result<oneshot::Receiver<Option<Ticket>>, Gone> {
        let (reply, ticket) = oneshot::channel();
        self.send(Msg::Ticket { drafter, reply }).await?;
        Ok(ticket)
    }

    /// Reports a trained micro-batch. `position` is its position in the draw order, if there is one.
    ///
    /// # Errors
    ///
    /// Fails if the trainer is gone.
    pub async fn report(
        &self,
        ticket: Ticket,
        position: Option<u64>,
        job: Job,
        report: MicroReport,
    ) -> Result<(), Gone> {
        self.send(Msg::Report { ticket, position, job, report }).await
    }

    /// Returns an unused ticket. `skipped` is true if the job of its batch was skipped.
    ///
    /// # Errors
    ///
    /// Fails if the trainer is gone.
    pub async fn return_ticket(&self, ticket: Ticket, skipped: bool) -> Result<(), Gone> {
        self.send(Msg::ReturnTicket { ticket, skipped }).await
    }

    /// Hands in the contribution to a step and waits for the new weights.
    ///
    /// # Errors
    ///
    /// Fails if the trainer is gone.
    pub async fn exchange(&self, drafter: usize, step: u64, part: Contribution<G>) -> Result<W, Gone> {
        let (reply, weights) = oneshot::channel();
        self.send(Msg::Gradient { drafter, step, part, reply }).await?;
        weights.await.map_err(|_| Gone("trainer"))
    }

    /// Reports that this drafter trains nothing more.
    ///
    /// # Errors
    ///
    /// Fails if the trainer is gone.
    pub async fn finished(&self, drafter: usize) -> Result<(), Gone> {
        self.send(Msg::Finished { drafter }).await
    }

    /// Returns a receiver of the phase.
    pub fn phase(&self) -> watch::Receiver<Phase> {
        self.phase.clone()
    }

    async fn send(&self, msg: Msg<G, W>) -> Result<(), Gone> {
        self.inbox.send(msg).await.map_err(|_| Gone("trainer"))
    }
}

/// Statistics of the trainer.
#[derive(Clone, Debug, Default)]
pub struct Stats {
    pub totals: Totals,
    /// Last step in the weights.
    pub step: u64,
    /// Micro-batches of an unfinished step that a stop discarded; their jobs stay open.
    pub discarded: u64,
    /// Checkpoint of the last step, if one was written.
    pub checkpoint: Option<String>,
}

/// Receivers of the trainer.
pub struct Inbox<G, W> {
    pub(super) inbox: mpsc::Receiver<Msg<G, W>>,
    pub(super) phase: watch::Sender<Phase>,
}

/// Creates the trainer's channels; the second value is for [`run`](super::run).
pub fn channel<G, W>(settings: &Settings) -> (Handle<G, W>, Inbox<G, W>) {
    let (tx, inbox) = mpsc::channel(INBOX);
    let below = (settings.drafters * settings.accumulation) as u64;
    let (phase, watching) = watch::channel(Phase::Collect { step: settings.start_step + 1, below });
    (Handle { inbox: tx, phase: watching }, Inbox { inbox, phase })
}

/// External control of a trainer: changed settings and requested checkpoints.
pub struct Control {
    /// Settings, in force from the next step boundary on.
    pub settings: watch::Receiver<Settings>,
    /// Requests for a checkpoint of the last step.
    pub checkpoints: mpsc::Receiver<CheckpointReply>,
}
