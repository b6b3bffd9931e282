//! Messages of the planner: its settings and its handle.

use super::plan::PlanSettings;
use crate::{
    messages::job::{Receipt, Settled},
    runtime::fault::Gone,
};
use std::sync::Arc;
use tokio::sync::{mpsc, oneshot};

/// Limit on waiting requests: the trainer's, one per step.
const INBOX: usize = 16;

/// Slots of jobs between planner and outcome. The queue and the pool limit these jobs further.
pub const IN_FLIGHT: usize = 1 << 16;

/// Settings of the planner.
#[derive(Clone, Debug)]
pub struct Settings {
    pub plan: PlanSettings,
    /// Tokens of each sample; the index is the sample's id.
    pub lengths: Arc<[u32]>,
    /// Epochs to train; the first is 0.
    pub epochs: u32,
    /// Waits between epochs until the pool is empty.
    pub epoch_barrier: bool,
    /// Limit on the fraction of an epoch that may be skipped; above it the run stops.
    pub max_skip_fraction: f64,
}

/// Request to the planner.
pub enum Msg {
    /// The jobs of these receipts are part of the update of `step`.
    Trained { step: u64, receipts: Vec<Receipt> },
    /// A checkpoint of `step` is complete under `name`. The reply comes when the ledger has it.
    Checkpoint { step: u64, name: String, reply: oneshot::Sender<()> },
}

/// Sender of requests to the planner.
#[derive(Clone)]
pub struct Handle {
    inbox: mpsc::Sender<Msg>,
}

impl Handle {
    /// Reports that the jobs of these receipts were trained by `step`; the first step is 1.
    ///
    /// # Errors
    ///
    /// Fails if the planner is gone.
    pub async fn trained(&self, step: u64, receipts: Vec<Receipt>) -> Result<(), Gone> {
        self.inbox.send(Msg::Trained { step, receipts }).await.map_err(|_| Gone("planner"))
    }

    /// Makes a checkpoint exist in the ledger, after the outcomes that were reported before it.
    ///
    /// # Errors
    ///
    /// Fails if the planner is gone.
    pub async fn checkpoint(&self, step: u64, name: String) -> Result<(), Gone> {
        let (reply, done) = oneshot::channel();
        self.inbox.send(Msg::Checkpoint { step, name, reply }).await.map_err(|_| Gone("planner"))?;
        done.await.map_err(|_| Gone("planner"))
    }
}

/// Creates the planner's channels; the second value is for [`run`](super::run).
pub fn channel() -> (Handle, Inbox) {
    let (tx, inbox) = mpsc::channel(INBOX);
    let (receipts, returns) = mpsc::channel(IN_FLIGHT);
    (Handle { inbox: tx }, Inbox { inbox, receipts: Some(receipts), returns })
}

/// Receivers of the planner.
pub struct Inbox {
    pub(super) inbox: mpsc::Receiver<Msg>,
    pub(super) receipts: Option<mpsc::Sender<Settled>>,
    pub(super) returns: mpsc::Receiver<Settled>,
}
