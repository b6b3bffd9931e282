//! The lines by which a running mill is inbox: other settings for every actor, a checkpoint now, a note for the ledger.
//!
//! One end stays with the service, the other goes to the actors. Nobody waits for an actor here: settings are a `watch`, so of
//! several changes the newest counts, and each actor takes it when its work allows.

use crate::{
    dispatcher, drafter, pipeline,
    planner::{self, ledger::Note},
    pool, target,
    trainer::{self, CheckpointReply, Control},
};
use std::time::Duration;
use tokio::sync::{mpsc, watch};

/// Notes on their way to the ledger: a few a second at most, while the disk may hang for seconds.
const NOTES: usize = 64;
/// Checkpoints that were requested for and not begun.
const CHECKPOINTS: usize = 8;

/// Steers a running mill.
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

/// The actors' ends.
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
    /// What the dispatcher is told, for whoever looks on.
    pub fn dispatcher_settings(&self) -> watch::Receiver<dispatcher::Settings> {
        self.dispatcher.clone()
    }
}

impl ControlHandle {
    /// The lines of a mill that begins with these settings.
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

    /// Puts other settings in force: what shapes a step from the next step border on, the rest at once. What must not change
    /// while a run goes on (the plan, the seed, a fixed order of draws) is not looked at.
    pub fn change(&self, settings: &pipeline::Settings) {
        self.planner.send_replace(settings.planner.clone());
        self.dispatcher.send_replace(settings.dispatcher.clone());
        self.targets.send_replace(settings.of_targets());
        self.pool.send_replace(settings.pool);
        self.drafters.send_replace(settings.of_drafters());
        self.trainer.send_replace(settings.trainer.clone());
        self.grace.send_replace(settings.grace);
    }

    /// Asks for a checkpoint of the last step that is complete. The reply is given back where nobody can take it.
    pub fn checkpoint(&self, reply: CheckpointReply) -> Result<(), CheckpointReply> {
        self.checkpoints.try_send(reply).map_err(|refused| match refused {
            mpsc::error::TrySendError::Full(reply) | mpsc::error::TrySendError::Closed(reply) => reply,
        })
    }

    /// Notes something in the ledger, after the outcomes that are recorded by then. The note is given back where the planner is
    /// gone, or far behind.
    pub fn note(&self, note: Note) -> Result<(), Note> {
        self.notes.try_send(note).map_err(|refused| match refused {
            mpsc::error::TrySendError::Full(note) | mpsc::error::TrySendError::Closed(note) => note,
        })
    }
}
