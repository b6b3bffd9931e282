//! Control channels of a running pipeline: changed settings for every actor, requested checkpoints, and notes for the
//! ledger.
//!
//! The service holds one end, the actors the other. No call waits for an actor. Settings are a `watch`, so the newest
//! of several changes counts, and each actor applies it when its work allows.

use crate::{
    dispatcher, drafter, pipeline,
    planner::{self, ledger::Note},
    pool, target,
    trainer::{self, CheckpointReply, Control},
};
use std::time::Duration;
use tokio::sync::{mpsc, watch};

/// Limit on waiting notes: a few per second at most, while the disk may hang for seconds.
const NOTES: usize = 64;
/// Limit on requested checkpoints that have not begun.
const CHECKPOINTS: usize = 8;

/// Control handle of a running pipeline.
pub struct ControlHandle {
    planner: watch::Sender<planner::Settings>,
    dispatcher: watch::Sender<dispatcher::Settings>,
    targets: watch::Sender<target::Settings>,
    pool: watch::Sender<pool::Settings>,
    drafters: watch::Sender<drafter::Settings>,
    trainer: watch::Sender<trainer::Settings>,
    grace: watch::Sender<Duration>,
    checkpoints: mpsc::Sender<CheckpointReply>,
    notes: mpsc::Sender<Note>,
}

/// Receivers of the actors.
pub struct ControlInbox {
    pub(crate) planner: watch::Receiver<planner::Settings>,
    pub(crate) dispatcher: watch::Receiver<dispatcher::Settings>,
    pub(crate) targets: watch::Receiver<target::Settings>,
    pub(crate) pool: watch::Receiver<pool::Settings>,
    pub(crate) drafters: watch::Receiver<drafter::Settings>,
    pub(crate) trainer: Control,
    pub(crate) grace: watch::Receiver<Duration>,
    pub(crate) notes: mpsc::Receiver<Note>,
}

impl ControlInbox {
    /// Returns a receiver of the dispatcher's settings, for observers.
    pub fn dispatcher_settings(&self) -> watch::Receiver<dispatcher::Settings> {
        self.dispatcher.clone()
    }
}

impl ControlHandle {
    /// Creates the channels of a pipeline with these initial settings.
    pub fn new(settings: &pipeline::Settings) -> (ControlHandle, ControlInbox) {
        let (planner, to_planner) = watch::channel(settings.planner.clone());
        let (dispatcher, to_dispatcher) = watch::channel(settings.dispatcher.clone());
        let (targets, to_targets) = watch::channel(settings.of_targets());
        let (pool, to_pool) = watch::channel(settings.pool);
        let (drafters, to_drafters) = watch::channel(settings.of_drafters());
        let (trainer, to_trainer) = watch::channel(settings.trainer.clone());
        let (grace, to_supervisor) = watch::channel(settings.grace);
        let (checkpoints, requested) = mpsc::channel(CHECKPOINTS);
        let (notes, noted) = mpsc::channel(NOTES);
        let handle = ControlHandle { planner, dispatcher, targets, pool, drafters, trainer, grace, checkpoints, notes };
        let inbox = ControlInbox {
            planner: to_planner,
            dispatcher: to_dispatcher,
            targets: to_targets,
            pool: to_pool,
            drafters: to_drafters,
            trainer: Control { settings: to_trainer, checkpoints: requested },
            grace: to_supervisor,
            notes: noted,
        };
        (handle, inbox)
    }

    /// Applies changed settings: those of a step from the next step boundary on, the others at once. Settings that are
    /// fixed during a run (the plan, the seed, a fixed draw order) are ignored.
    pub fn change(&self, settings: &pipeline::Settings) {
        self.planner.send_replace(settings.planner.clone());
        self.dispatcher.send_replace(settings.dispatcher.clone());
        self.targets.send_replace(settings.of_targets());
        self.pool.send_replace(settings.pool);
        self.drafters.send_replace(settings.of_drafters());
        self.trainer.send_replace(settings.trainer.clone());
        self.grace.send_replace(settings.grace);
    }

    /// Requests a checkpoint of the last complete step.
    ///
    /// # Errors
    ///
    /// Returns the reply channel if the trainer is gone or too many requests are waiting.
    pub fn checkpoint(&self, reply: CheckpointReply) -> Result<(), CheckpointReply> {
        self.checkpoints.try_send(reply).map_err(|refused| match refused {
            mpsc::error::TrySendError::Full(reply) | mpsc::error::TrySendError::Closed(reply) => reply,
        })
    }

    /// Writes a note to the ledger, after the outcomes that are recorded by then.
    ///
    /// # Errors
    ///
    /// Returns the note if the planner is gone or too many notes are waiting.
    pub fn note(&self, note: Note) -> Result<(), Note> {
        self.notes.try_send(note).map_err(|refused| match refused {
            mpsc::error::TrySendError::Full(note) | mpsc::error::TrySendError::Closed(note) => note,
        })
    }
}
