//! Trainer: owns the optimizer step.

mod actor;
mod checkpointer;
mod messages;
pub(crate) mod replica_check;
pub mod state;
mod stats;

pub use actor::run;
pub use messages::{Answer, Handle, Inbox, LearningRate, Part, Phase, Settings, Ticket, Wishes, Work, channel};
pub use stats::StepRecord;
