//! Trainer: owns the optimizer step.

mod actor;
mod checkpointer;
mod messages;
pub(crate) mod replica_check;
pub mod state;
mod stats;

pub use actor::run;
pub use messages::{
    CheckpointReply, Contribution, Control, Handle, Inbox, LearningRate, Phase, Settings, Stats, Ticket, channel,
};
pub use stats::StepRecord;
