//! Messages of the planner: its settings and its handle.

use super::plan::PlanSettings;
use crate::{
    messages::job::{Receipt, Settled},
    runtime::fault::Gone,
};
use std::sync::Arc;
use tokio::sync::{mpsc, oneshot};

/// Requests wait here: the trainer's, one a step.
const INBOX: usize = 16;

/// One slot for each job between planner and outcome. What really bounds these is the queue and the pool.
pub const IN_FLIGHT: usize = 1 << 16;

/// What shapes the planner's work.
#[derive(Clone, Debug)]
pub struct Settings {
    pub plan: PlanSettings,
    /// Tokens of each sample; the index is the sample's id.
    pub lengths: Arc<[u32]>,
    /// Epochs to train; the first is 0.
    pub epochs: u32,
    /// Wait between epochs until the pool is empty.
    pub epoch_barrier: bool,
    /// Skipped jobs above this share of an epoch stop the run.
    pub max_skip_fraction: f64,
}

/// What the planner is asked to do.
pub enum Msg {
    /// These jobs are part of the update of `step`.
    Trained { step: u64, receipts: Vec<Receipt> },
    /// A checkpoint of `step` lies complete under `name`; answered when the ledger has it.
    Checkpoint { step: u64, name: String, reply: oneshot::Sender<()> },
}

/// Speaks to the planner.
#[derive(Clone)]
pub struct Handle {
    inbox: mpsc::Sender<Msg>,
}

impl Handle {
    /// Reports that the jobs of these receipts were trained by `step` (the first step is 1).
    pub async fn trained(&self, step: u64, receipts: Vec<Receipt>) -> Result<(), Gone> {
        self.inbox.send(Msg::Trained { step, receipts }).await.map_err(|_| Gone("planner"))
    }

    /// Makes a checkpoint exist in the ledger, after the outcomes that were reported before it.
    pub async fn checkpoint(&self, step: u64, name: String) -> Result<(), Gone> {
        let (reply, done) = oneshot::channel();
        self.inbox.send(Msg::Checkpoint { step, name, reply }).await.map_err(|_| Gone("planner"))?;
        done.await.map_err(|_| Gone("planner"))
    }
}

/// Starts the planner's channels. `run` with the second value.
pub fn channel() -> (Handle, Inbox) {
    let (tx, inbox) = mpsc::channel(INBOX);
    let (receipts, returns) = mpsc::channel(IN_FLIGHT);
    (Handle { inbox: tx }, Inbox { inbox, receipts: Some(receipts), returns })
}

/// What the planner listens to.
pub struct Inbox {
    pub(super) inbox: mpsc::Receiver<Msg>,
    pub(super) receipts: Option<mpsc::Sender<Settled>>,
    pub(super) returns: mpsc::Receiver<Settled>,
}
